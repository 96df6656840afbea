"""What a peer wants of the next round: told to coordinators, and held against their plans."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from potluck.errors import ProtocolError
from potluck.round.layout import FlatTensors
from potluck.round.plan import Commit, Plan, Ready


@dataclass(slots=True)
class Wish:
    """To take part in making one epoch."""

    ready: Ready
    tensors: FlatTensors | None
    since: float
    committed: asyncio.Future[Commit]

    @property
    def epoch(self) -> int:
        """Which one."""
        return self.ready.epoch

    def check(self, plan: Plan, me: int) -> None:
        """ProtocolError unless the plan is for what this peer, its member of that number, has."""
        if self.tensors is None:
            if plan.members[me].sends:
                raise ProtocolError("it wants values of a peer that has none")
        elif plan.layout != self.tensors.layout.digest or plan.runs != self.tensors.layout.runs:
            raise ProtocolError("it is for other tensors than this peer holds")


def ready_message(session: str, tensors: FlatTensors | None, weight: float, epoch: int, reduces: bool) -> Ready:
    """What coordinators are told, but for their lease's token."""
    ready = Ready(session=session, epoch=epoch, weight=weight, sends=False, reduces=reduces)
    if tensors is None:
        return ready
    layout = tensors.layout
    return msgspec.structs.replace(ready, sends=weight > 0, layout=layout.digest, runs=layout.runs)
