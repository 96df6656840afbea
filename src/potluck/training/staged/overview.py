"""What a conductor tells all who look: Conductor.overview(), as news."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from potluck.messages import Message

OVERVIEW_TOPIC = "pipeline"
MAX_LISTED = 1024

Name = Annotated[str, msgspec.Meta(max_length=128)]
Words = Annotated[str, msgspec.Meta(max_length=600)]
Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_LISTED)]
Numbers = Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)]


class PeerShown(Message, frozen=True, kw_only=True):
    """One peer."""

    serves: Numbers = ()
    listens: Numbers = ()
    feeds: bool = False
    saves: bool = False
    standing: Numbers = ()
    loading: Numbers = ()
    rate: float = 0.0
    waiting: int = 0
    why: Words = ""


class StageShown(Message, frozen=True, kw_only=True):
    """One stage."""

    first_block: int
    last_block: int
    servers: Names = ()
    listeners: Names = ()
    samples_per_second: float = 0.0
    """Of its servers together, while they compute; 0: not measured yet."""
    waiting: int = 0
    is_bottleneck: bool = False


class FlowShown(Message, frozen=True, kw_only=True):
    """Micro-batches from a peer to a server of a stage."""

    source: Name
    target: Name
    stage: int
    per_second: float


class MoveShown(Message, frozen=True, kw_only=True):
    """A server that went to another stage."""

    peer: Name
    source: int = msgspec.field(name="from", default=0)
    to: int = 0
    reason: Words = ""


class ToleranceShown(Message, frozen=True, kw_only=True):
    """What counts as rounding between two arithmetics."""

    one: Name
    other: Name
    of: Name
    limit: float


class ChecksShown(Message, frozen=True, kw_only=True):
    """Spot checks so far, by this conductor."""

    rate: float = 0.0
    made: int = 0
    failed: int = 0
    not_possible: int = 0
    excluded: Annotated[dict[Name, Words], msgspec.Meta(max_length=MAX_LISTED)] = {}
    tolerances: Annotated[tuple[ToleranceShown, ...], msgspec.Meta(max_length=MAX_LISTED)] = ()


class Overview(Message, frozen=True, kw_only=True, tag="pipeline.overview"):
    """The whole pipeline."""

    step: int
    life: int = 0
    loss: float = 0.0
    step_seconds: float = 0.0
    phase: Name = ""
    waits: Words = ""
    first_blocks: Numbers = ()
    target_first_blocks: Numbers = ()
    peers: Annotated[dict[Name, PeerShown], msgspec.Meta(max_length=MAX_LISTED)] = {}
    stages: int = 0
    rows: Annotated[tuple[StageShown, ...], msgspec.Meta(max_length=MAX_LISTED)] = ()
    flows: Annotated[tuple[FlowShown, ...], msgspec.Meta(max_length=MAX_LISTED)] = ()
    cut_step: int = -1
    losses: Annotated[tuple[tuple[int, float], ...], msgspec.Meta(max_length=MAX_LISTED)] = ()
    morphs: Annotated[tuple[Words, ...], msgspec.Meta(max_length=64)] = ()
    moves: Annotated[tuple[MoveShown, ...], msgspec.Meta(max_length=64)] = ()
    checks: ChecksShown = ChecksShown()

    @classmethod
    def of(cls, found: dict[str, Any]) -> Overview:
        """What the conductor says."""
        return msgspec.convert(found, cls)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        shown: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in shown.items() if name != "type"}
