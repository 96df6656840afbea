"""What a peer wants of the next round: told to coordinators, and held against their plans."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from potluck.errors import ProtocolError
from potluck.round.plan.layout import FlatTensors
from potluck.round.plan.messages import Commit, Plan, Ready


@dataclass(frozen=True, slots=True, kw_only=True)
class StandBy:
    """To be there for a round that is expected, so that it can start the moment it is due."""

    awaits: float
    """It is due when all who are ready have so much weight together."""

    seconds: float
    """How long to stand by."""

    word_seconds: float = 0.0
    """How long a plan may be on its way that was made in the last moment."""

    stays: bool = False
    """Afterwards to be ready like everybody else, and not to go away."""


@dataclass(slots=True)
class Intent:
    """To take part in making one epoch."""

    ready: Ready
    tensors: FlatTensors | None
    since: float
    committed: asyncio.Future[Commit]
    wanted: asyncio.Future[None]
    """Done as soon as this peer does not only stand by."""

    @property
    def epoch(self) -> int:
        """Which one."""
        return self.ready.epoch

    def confirm(self) -> None:
        """The epoch is due, or this peer is in a plan: from now on it is ready, for as long as it takes."""
        self.ready = msgspec.structs.replace(self.ready, awaits=0.0, until=0.0)
        if not self.wanted.done():
            self.wanted.set_result(None)

    def check(self, plan: Plan, me: int) -> None:
        """ProtocolError unless the plan is for what this peer, its member of that number, has."""
        if self.tensors is None:
            if plan.members[me].sends:
                raise ProtocolError("it wants values of a peer that has none")
        elif plan.layout != self.tensors.layout.digest or plan.runs != self.tensors.layout.runs:
            raise ProtocolError("it is for other tensors than this peer holds")


def ready_message(
    session: str, tensors: FlatTensors | None, weight: float, epoch: int, reduces: bool, phases: float = 0.0
) -> Ready:
    """What coordinators are told, but for their lease's token."""
    ready = Ready(session=session, epoch=epoch, weight=weight, sends=False, reduces=reduces, phases=phases)
    if tensors is None:
        return ready
    layout = tensors.layout
    return msgspec.structs.replace(ready, sends=weight > 0, layout=layout.digest, runs=layout.runs)
