"""What conductor, feeders and servers say to each other.

conductor ─ Begin ─▶ servers        the fence: a step's attempt; answered by Held
          ─ Feed ─▶ feeders         micro-batches to send; each is reported by Fed
feeder ─ Forward ─▶ stage 0 ─ Forward ─▶ … last stage      answered by Pushed: done, busy or stale
feeder ◀ Returned ─ stage 0 ◀ Backward ─ … last stage      along the same servers
conductor ─ AverageOrder ─▶ servers; Part between them; answered by Averages
          ─ CommitNotice ─▶ servers; answered by Applied
anybody ─ Lost ─▶ conductor         something could not be handed over
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from potluck.messages import Message
from potluck.pipeline.wire import TensorSpec

MAX_STAGES = 1024
MAX_MICRO_BATCHES = 1 << 16
MAX_SERVERS = 4096

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Stage = Annotated[int, msgspec.Meta(ge=0, lt=MAX_STAGES)]
Micro = Annotated[int, msgspec.Meta(ge=0, lt=MAX_MICRO_BATCHES)]
Name = Annotated[str, msgspec.Meta(max_length=128)]
Words = Annotated[str, msgspec.Meta(max_length=500)]
Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_SERVERS)]
Micros = Annotated[tuple[Micro, ...], msgspec.Meta(max_length=MAX_MICRO_BATCHES)]
Stages = Annotated[tuple[Stage, ...], msgspec.Meta(max_length=MAX_STAGES)]
ByStage = Annotated[tuple[Names, ...], msgspec.Meta(max_length=MAX_STAGES)]


class Enlist(Message, frozen=True, kw_only=True, tag="pipeline.enlist"):
    """A peer offers to serve these stages, or to feed."""

    stages: Stages = ()
    listens: bool = False
    feeds: bool = False


class Enlisted(Message, frozen=True, kw_only=True, tag="pipeline.enlisted"):
    """It counts from the next step on."""

    step: Count


class CommitNotice(Message, frozen=True, kw_only=True, tag="pipeline.commit-notice"):
    """A step that is committed: apply these averages, times the factor."""

    step: Count
    attempt: Count
    digests: Annotated[tuple[Name, ...], msgspec.Meta(max_length=2 * MAX_STAGES)]
    factor: float
    is_applied: bool


class Applied(Message, frozen=True, kw_only=True, tag="pipeline.applied"):
    """The server stands at this step now."""

    step: Count


class Begin(Message, frozen=True, kw_only=True, tag="pipeline.begin"):
    """An attempt of a step begins; earlier ones are over."""

    step: Count
    attempt: Count
    total_samples: Count
    loss_scale: float
    servers: ByStage
    last: CommitNotice | None = None


class StageIds(Message, frozen=True, kw_only=True):
    """What a server has added in a stage."""

    stage: Stage
    ids: Micros
    losses: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_MICRO_BATCHES)] = ()
    """Of the same micro-batches, where this is the last stage."""


class Held(Message, frozen=True, kw_only=True, tag="pipeline.held"):
    """The answer to Begin."""

    at_step: Count
    held: Annotated[tuple[StageIds, ...], msgspec.Meta(max_length=MAX_STAGES)]


class FeedItem(Message, frozen=True, kw_only=True):
    """A micro-batch to send."""

    id: Micro
    samples: Count
    held_by: Stages = ()


class Feed(Message, frozen=True, kw_only=True, tag="pipeline.feed"):
    """Send these into the pipeline."""

    step: Count
    attempt: Count
    items: Annotated[tuple[FeedItem, ...], msgspec.Meta(max_length=MAX_MICRO_BATCHES)]
    servers: Names


class Fed(Message, frozen=True, kw_only=True, tag="pipeline.fed"):
    """A micro-batch is through."""

    step: Count
    attempt: Count
    id: Micro
    loss: float


class Lost(Message, frozen=True, kw_only=True, tag="pipeline.lost"):
    """A micro-batch could not be handed to a peer."""

    step: Count
    attempt: Count
    peer: Name
    reason: Words


class Forward(Message, frozen=True, kw_only=True, tag="pipeline.forward"):
    """A micro-batch for a stage; its tensors are the frames."""

    step: Count
    attempt: Count
    id: Micro
    stage: Stage
    samples: Count
    held_by: Stages
    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=64)]


class Pushed(Message, frozen=True, kw_only=True, tag="pipeline.pushed"):
    """What became of a Forward: computed, refused for now, or no longer of interest."""

    answer: Literal["done", "busy", "stale"]


class Backward(Message, frozen=True, kw_only=True, tag="pipeline.backward"):
    """Gradients of what a stage gave; `stage` is the one that they are for."""

    step: Count
    attempt: Count
    id: Micro
    stage: Stage
    loss: float
    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=64)]


class Returned(Message, frozen=True, kw_only=True, tag="pipeline.returned"):
    """The first stage tells the feeder that a micro-batch is through."""

    step: Count
    attempt: Count
    id: Micro
    loss: float


class Contributor(Message, frozen=True, kw_only=True):
    """One stage of one server, in a unit."""

    server: Name
    stage: Stage


class AverageOrder(Message, frozen=True, kw_only=True, tag="pipeline.average-order"):
    """Average each unit that you hold a part of, out of these contributions."""

    step: Count
    attempt: Count
    units: Annotated[
        tuple[Annotated[tuple[Contributor, ...], msgspec.Meta(max_length=MAX_SERVERS)], ...],
        msgspec.Meta(max_length=2 * MAX_STAGES),
    ]


class Part(Message, frozen=True, kw_only=True, tag="pipeline.part"):
    """A piece of a contribution; its values are the frame, float32."""

    step: Count
    attempt: Count
    unit: Count
    stage: Stage
    ids: Micros
    num_values: Count
    offset: Count


class Contribution(Message, frozen=True, kw_only=True):
    """Whose ids are in an average."""

    server: Name
    stage: Stage
    ids: Micros


class UnitAverage(Message, frozen=True, kw_only=True):
    """What a member has as the average of a unit."""

    unit: Count
    digest: Name
    squared_norm: float
    contributions: Annotated[tuple[Contribution, ...], msgspec.Meta(max_length=MAX_SERVERS)]


class Averages(Message, frozen=True, kw_only=True, tag="pipeline.averages"):
    """The answer to an AverageOrder."""

    units: Annotated[tuple[UnitAverage, ...], msgspec.Meta(max_length=2 * MAX_STAGES)]
