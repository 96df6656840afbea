"""What conductor, feeders and servers say to each other.

anybody ─ Enlist ─▶ conductor       offers itself; again when the conductor changes
conductor ─ Assignment ─▶ anybody   which blocks to hold, and to serve; answered by Accepted, later by Ready
anybody ─ FetchUnit ─▶ a holder     a unit's state, piece by piece
conductor ─ Begin ─▶ servers        the fence: a step's attempt; answered by Held
          ─ Feed ─▶ feeders         micro-batches to send; each is reported by Fed
feeder ─ Forward ─▶ stage 0 ─ Forward ─▶ … last stage      answered by Pushed: done, busy or stale
feeder ◀ Returned ─ stage 0 ◀ Backward ─ … last stage      along the same servers
conductor ─ AverageOrder ─▶ servers; Part between them; answered by Averages
          ─ CommitNotice ─▶ servers; answered by Applied
anybody ─ Lost ─▶ conductor         something could not be handed over
conductor ─ Evaluate ─▶ evaluator ─ Forward ─▶ stage 0 … last stage; Backward, and Looked ─▶ evaluator

Spot checks: neighbours ─ Testimony ─▶ verifier; conductor ─ CheckOrder ─▶ verifier ─ AskStatement ─▶ the one checked
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from potluck.messages import Message
from potluck.pipeline.wire import NamedSpec, TensorSpec

MAX_STAGES = 1024
MAX_UNITS = 4096
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
Blocks = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_UNITS)]
ByUnit = Annotated[tuple[Names, ...], msgspec.Meta(max_length=MAX_UNITS)]
ByStage = Annotated[tuple[Names, ...], msgspec.Meta(max_length=MAX_STAGES)]


class Place(Message, frozen=True, kw_only=True):
    """Where a step's data begin: so many samples into a pass over a shard. Passes are numbered without end."""

    number: Count = 0
    skip: Count = 0


class Cut(Message, frozen=True, kw_only=True):
    """A state of the whole model on somebody's disk."""

    step: Count
    place: Place
    loss_scale: float = 1.0


class Sent(Message, frozen=True, kw_only=True):
    """How many micro-batches a peer has handed to a server of a stage so far."""

    server: Name
    stage: Stage
    count: Count


class Enlist(Message, frozen=True, kw_only=True, tag="pipeline.enlist"):
    """A peer says what it would do, and what it holds already."""

    serves: bool = False
    stages: Stages = ()
    """It insists on these; empty: where the run needs it."""
    feeds: bool = False
    may_feed: bool = False
    """It has the data, and feeds where nobody does who offers to."""
    listens: bool = False
    """It would hold a stage without computing."""
    saves: bool = False
    """It has a disk for cuts."""
    room_bytes: Count = 0
    """For blocks with all that training adds; 0: as much as it takes."""
    rate: float = 0.0
    """Samples per second of computing, in the stages that it serves; 0: not measured yet."""
    life: Count = 0
    at_step: Count = 0
    standing: Blocks = ()
    """Blocks that it holds, at that step of that life."""
    cuts: Annotated[tuple[Cut, ...], msgspec.Meta(max_length=64)] = ()
    saves_every: Count = 0
    """Steps between cuts, where it saves."""
    evaluates_every: Count = 0
    """Steps between evaluations of its held-out data; 0: it has none."""
    is_leaving: bool = False
    """It is about to be gone: others take over, then it leaves."""
    arithmetic: Name = ""
    """How it rounds (arithmetic.py)."""
    waiting: Count = 0
    """Micro-batches in its queue."""
    sent: Annotated[tuple[Sent, ...], msgspec.Meta(max_length=MAX_SERVERS)] = ()


class Enlisted(Message, frozen=True, kw_only=True, tag="pipeline.enlisted"):
    """It counts from the next step on."""

    step: Count


class Assignment(Message, frozen=True, kw_only=True, tag="pipeline.assignment"):
    """What a peer is to hold. What it has beyond that it may forget."""

    life: Count
    step: Count
    """The first step whose averages it will hear: a state as old as this, or newer, is what it needs."""
    stages: Stages
    """It serves them once it has their blocks."""
    blocks: Blocks
    holders: ByUnit
    """Who has the state of each unit; nobody: it comes from the seed."""
    cut: bool = False
    """The state is that of a cut, on the disks of these holders."""
    starts: Blocks = ()
    """Of the layout that this is for."""
    why: Words = ""
    last: CommitNotice | None = None
    """The newest commit: one that has its averages, and has not heard of it yet, stands at the next step by it."""


class Accepted(Message, frozen=True, kw_only=True, tag="pipeline.accepted"):
    """It holds, or loads, what it was assigned."""

    standing: Blocks


class Ready(Message, frozen=True, kw_only=True, tag="pipeline.ready"):
    """These blocks stand at the run's step here."""

    life: Count
    step: Count
    standing: Blocks


class FetchUnit(Message, frozen=True, kw_only=True, tag="pipeline.fetch-unit"):
    """A piece of a unit's state, please."""

    unit: Count
    life: Count
    step: Count
    """At least this step; with `is_exact` this one."""
    is_exact: bool = False
    is_cut: bool = False
    offset: Count = 0


class UnitPiece(Message, frozen=True, kw_only=True, tag="pipeline.unit-piece"):
    """Bytes of a unit's state from an offset on; the frame has them."""

    step: Count
    num_bytes: Count
    """Of the whole."""
    digest: Name
    """Of the whole: SHA-256."""
    specs: Annotated[tuple[NamedSpec, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """With the first piece: what is in it."""


class SaveCut(Message, frozen=True, kw_only=True, tag="pipeline.save-cut"):
    """Write this step's state to disk, from these holders of each unit."""

    life: Count
    cut: Cut
    holders: ByUnit


class Saved(Message, frozen=True, kw_only=True, tag="pipeline.saved"):
    """The cut is on disk."""

    step: Count
    num_bytes: Count


class Locate(Message, frozen=True, kw_only=True, tag="pipeline.locate"):
    """Where do the data of the next step begin?"""

    step: Count
    place: Place
    samples: Count


class Located(Message, frozen=True, kw_only=True, tag="pipeline.located"):
    """There."""

    place: Place


class CommitNotice(Message, frozen=True, kw_only=True, tag="pipeline.commit-notice"):
    """A step that is committed: apply these averages, times the factor."""

    step: Count
    attempt: Count
    digests: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_UNITS)]
    factor: float
    is_applied: bool


class Applied(Message, frozen=True, kw_only=True, tag="pipeline.applied"):
    """The server stands at this step now."""

    step: Count


class SpotCheck(Message, frozen=True, kw_only=True):
    """What passes in and out of a server in this step, its neighbours tell the verifier."""

    server: Name
    verifier: Name


SpotChecks = Annotated[tuple[SpotCheck, ...], msgspec.Meta(max_length=MAX_SERVERS)]


class Begin(Message, frozen=True, kw_only=True, tag="pipeline.begin"):
    """An attempt of a step begins; earlier ones are over."""

    step: Count
    attempt: Count
    total_samples: Count
    loss_scale: float
    servers: ByStage
    starts: Blocks
    """The first block of each stage."""
    life: Count = 0
    """Counts how often the run went back to a cut."""
    loss: float = 0.0
    """Of the step before."""
    last: CommitNotice | None = None
    pins: Blocks = ()
    """Units whose state of this step is to be kept until it is fetched: a cut is made of them."""
    valid_from: Count = 0
    """What was added in attempts before this one is to be forgotten: a server lied."""
    are_checked: bool = False
    """Servers keep short digests of what passes, in case they are checked."""
    checks: SpotChecks = ()
    """Of others than the one who hears this."""


class StageIds(Message, frozen=True, kw_only=True):
    """What a server has added in a stage."""

    stage: Stage
    ids: Micros
    losses: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_MICRO_BATCHES)] = ()
    """Of the same micro-batches, where this is the last stage."""


class Held(Message, frozen=True, kw_only=True, tag="pipeline.held"):
    """The answer to Begin."""

    at_step: Count
    standing: Blocks
    """Blocks that it holds at that step."""
    held: Annotated[tuple[StageIds, ...], msgspec.Meta(max_length=MAX_STAGES)]


class FeedItem(Message, frozen=True, kw_only=True):
    """A micro-batch to send."""

    id: Micro
    first: Count
    """Of the step's samples, where this one begins."""
    samples: Count
    held_by: Stages = ()


class Feed(Message, frozen=True, kw_only=True, tag="pipeline.feed"):
    """Send these into the pipeline."""

    step: Count
    attempt: Count
    items: Annotated[tuple[FeedItem, ...], msgspec.Meta(max_length=MAX_MICRO_BATCHES)]
    servers: Names
    place: Place
    total_samples: Count
    life: Count = 0
    checks: SpotChecks = ()


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
    evaluates: bool = False
    """Held-out data: it has a loss and no gradient, and belongs to no step."""


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


class Evaluate(Message, frozen=True, kw_only=True, tag="pipeline.evaluate"):
    """Send your held-out data through the pipeline, in this attempt."""

    step: Count
    attempt: Count
    servers: Names
    """Of the first stage."""
    micro_batch: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    seconds: float
    """That the commit waits for it."""


class Evaluated(Message, frozen=True, kw_only=True, tag="pipeline.evaluated"):
    """It is done; or why there are no figures."""

    trouble: Words = ""


class Looked(Message, frozen=True, kw_only=True, tag="pipeline.looked"):
    """The first stage tells who evaluates the loss of a held-out micro-batch."""

    step: Count
    attempt: Count
    id: Micro
    loss: float


class Contributor(Message, frozen=True, kw_only=True):
    """One stage of one server, in a unit."""

    server: Name
    stage: Stage


class UnitOrder(Message, frozen=True, kw_only=True):
    """Who averages one unit."""

    unit: Count
    contributors: Annotated[tuple[Contributor, ...], msgspec.Meta(max_length=MAX_SERVERS)]
    listeners: Names = ()
    """They hear all contributions and have none."""


class AverageOrder(Message, frozen=True, kw_only=True, tag="pipeline.average-order"):
    """Average each of these units."""

    step: Count
    attempt: Count
    units: Annotated[tuple[UnitOrder, ...], msgspec.Meta(max_length=MAX_UNITS)]


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

    units: Annotated[tuple[UnitAverage, ...], msgspec.Meta(max_length=MAX_UNITS)]


Passing = Literal["input", "output", "output gradient", "input gradient"]


class Testimony(Message, frozen=True, kw_only=True, tag="pipeline.testimony"):
    """A neighbour tells a verifier what it sent to a server, or got from it: the frames as they were."""

    server: Name
    step: Count
    attempt: Count
    id: Micro
    stage: Stage
    """Of the server."""
    kind: Passing
    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=64)] = ()
    samples: Count = 0
    loss: float = 0.0


class CheckOrder(Message, frozen=True, kw_only=True, tag="pipeline.check-order"):
    """Compare what this server did in this step with what you compute yourself."""

    step: Count
    attempt: Count
    server: Name
    stages: Stages
    arithmetic: Name = ""
    """The server's."""


class Checked(Message, frozen=True, kw_only=True, tag="pipeline.checked"):
    """The answer: judging.CheckResult."""

    compared: Count
    missing: Count = 0
    output_error: float = 0.0
    gradient_error: float = 0.0
    sum_error: float | None = None
    contradicted_by: Names = ()
    note: Words = ""


class AskStatement(Message, frozen=True, kw_only=True, tag="pipeline.ask-statement"):
    """What passed in and out of you in this step?"""

    step: Count


class Passed(Message, frozen=True, kw_only=True):
    """One thing that passed, by its digest."""

    attempt: Count
    id: Micro
    stage: Stage
    kind: Passing
    digest: Name


class Statement(Message, frozen=True, kw_only=True, tag="pipeline.statement"):
    """All that passed."""

    passed: Annotated[tuple[Passed, ...], msgspec.Meta(max_length=MAX_MICRO_BATCHES * 8)]
