"""People in a roster who are ready for a round, and the plan that comes of them."""

from __future__ import annotations

from typing import Any

from potluck.hub.presence import Card, Presence
from potluck.round.codecs import CodecSpec
from potluck.round.coordinator.gathering import Candidate, GatherConfig, Gathering, Proposal
from potluck.round.plan.chunks import CodecSpan
from potluck.round.plan.messages import Commit, CommittedMember, Plan, Ready, RoundKey

KEY = RoundKey(epoch=1, token=7, attempt=0)
RUNS = (CodecSpan(codec=CodecSpec(name="float16"), elements=1_000_000),)


def presence(peer: str, **changes: Any) -> Presence:
    card = {"session": f"{peer}1", "role": "trainer", "addresses": ("tcp://127.0.0.1:1",)}
    card.update({name: changes.pop(name) for name in list(changes) if name in Card.__struct_fields__})
    values = {"peer": peer, "card": Card(**card), "state": "alive", "host": "h", "person": "p"}  # type: ignore[arg-type]
    return Presence(**{**values, **changes})  # type: ignore[arg-type]


def ready(peer: str, **changes: Any) -> Ready:
    values = {"session": f"{peer}1", "epoch": 1, "weight": 1.0, "layout": "l", "runs": RUNS, "token": 7}
    return Ready(**{**values, **changes})  # type: ignore[arg-type]


def commit_of(epoch: int, **weights: float) -> Commit:
    """An epoch to which these have given so much."""
    return Commit(
        epoch=epoch,
        key=RoundKey(epoch=epoch, token=7, attempt=0),
        term=7,
        coordinator="A",
        members=tuple(CommittedMember(peer=peer, weight=weight, holds=True) for peer, weight in weights.items()),
        digest="",
        parent="",
        layout="l",
    )


class Room:
    """A gathering with a roster."""

    def __init__(self, **config: Any) -> None:
        self.gathering = Gathering(GatherConfig(**config))
        self.roster: dict[str, Presence] = {}

    def add(self, peer: str, *, now: float = 0.0, card: dict[str, Any] | None = None, **changes: Any) -> None:
        self.roster[peer] = presence(peer, **(card or {}))
        self.gathering.take(peer, ready(peer, **changes), now)

    def candidates(self, *, now: float = 0.0, hub_now: float = 0.0, epoch: int = 1, token: int = 7) -> list[Candidate]:
        return self.gathering.candidates(self.roster.values(), epoch=epoch, token=token, now=now, hub_now=hub_now)

    def names(self, **when: Any) -> list[str]:
        return [candidate.peer for candidate in self.candidates(**when) if not candidate.stands_by]

    def propose(self, now: float = 0.0, *, attempt: int = 0) -> Proposal:
        key = RoundKey(epoch=KEY.epoch, token=KEY.token, attempt=attempt)
        return self.gathering.propose(self.candidates(now=now), key, hub_now=1000.0)

    def plan(self, *, attempt: int = 0) -> Plan:
        return self.propose(attempt=attempt).plan
