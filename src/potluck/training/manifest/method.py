"""How a run trains: optimizer, schedule, algorithm, and how values travel. Checked here, made in trainer/optimizers.py.

Everything that the Python API offers has its words here, so that a run.toml can say it. Torch is not imported.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import msgspec

from potluck.errors import ConfigurationError
from potluck.messages import Message
from potluck.round.plan.specs import TOPK_BLOCK, AggregatorSpec, CodecSpec
from potluck.round.plan.weights import check_cap

Positive = Annotated[float, msgspec.Meta(gt=0.0, le=sys.float_info.max)]  # so neither is infinity
NotNegative = Annotated[float, msgspec.Meta(ge=0.0, le=sys.float_info.max)]
Share = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]
Part = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]

ERROR_FEEDBACK_CODECS = ("float32", "float16", "bfloat16", "blockwise8", "e3m0")  # as methods/quantised.py has them


class OptimizerSpec(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A torch optimizer."""

    name: Literal["adamw", "adam", "sgd", "lamb", "larc", "muon"] = "adamw"
    learning_rate: Positive = 3e-4
    weight_decay: NotNegative = 0.01
    decay_vectors: bool = True  # false: norms and biases do not decay, nor anything else of one dimension
    beta1: Share = 0.9  # the momentum of sgd, larc and muon
    beta2: Share = 0.99
    max_grad_norm: NotNegative = 1.0  # 0: not clipped
    eps: NotNegative = 0.0  # of adam, adamw and lamb; 0: the optimizer's own
    clamp: Positive = 10.0  # lamb: no tensor counts as longer than this
    trust: Positive = 0.02  # larc: a step is at most such a share of the tensor's length
    trust_clips: bool = True  # larc: only holds the rate down; false: sets it, times learning_rate, as SwAV does
    vector_rate: Positive = 1.0  # muon: of embeddings and vectors, which AdamW steps; times learning_rate


class ScheduleSpec(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the learning rate goes, by epochs of the run."""

    kind: Literal["constant", "linear", "cosine", "inverse_sqrt", "warmup_stable_decay"] = "constant"
    warmup_epochs: Count = 0
    first_share: Part = 0.0  # of the learning rate, where the warm-up begins
    total_epochs: Count = 0  # where it has fallen to `final_share`; linear, cosine and warmup_stable_decay need it
    decay_epochs: Count = 0  # warmup_stable_decay: so many epochs before the end it begins to fall
    final_share: Part = 0.1

    def __post_init__(self) -> None:
        if self.kind in ("constant", "inverse_sqrt"):
            return
        if self.total_epochs <= self.warmup_epochs:
            raise ConfigurationError(
                f"a {self.kind} schedule needs total_epochs above warmup_epochs={self.warmup_epochs}, "
                f"not {self.total_epochs}"
            )
        if self.kind == "warmup_stable_decay" and not 0 < self.decay_epochs <= self.total_epochs - self.warmup_epochs:
            raise ConfigurationError(
                f"a {self.kind} schedule needs decay_epochs between 1 and {self.total_epochs - self.warmup_epochs}, "
                f"the epochs between warm-up and end, not {self.decay_epochs}"
            )


class SyncSettings(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="algorithm", tag="sync"):
    """Everybody's gradients together make one large batch, and one step."""

    target_batch_size: AtLeastOne = 256
    matchmaking_seconds: NotNegative = 3.0
    delay_averaging: bool = False  # average in the background, on gradients that are one batch older
    delay_optimizer_step: bool = False  # step in the background too; needs offload_optimizer
    local_updates: bool = False  # step on one's own gradients at once, and average parameters instead
    average_state_every: Count = 0  # epochs; 0: parameters are not averaged beside gradients
    average_statistics: str = ""  # the optimizer's tensors that are averaged with them, as in "exp_avg_sq,exp_avg"
    offload_optimizer: bool = False  # the optimizer and its float32 copy of the parameters live on the CPU
    reuse_grad_buffers: bool = False  # add gradients up where autograd leaves them; batches are of equal size then

    def __post_init__(self) -> None:
        if self.delay_optimizer_step and not self.offload_optimizer:
            raise ConfigurationError("delay_optimizer_step needs offload_optimizer = true")
        if self.local_updates and self.delay_optimizer_step:
            raise ConfigurationError("local_updates steps at once: leave out delay_optimizer_step")
        if self.local_updates and self.delay_averaging and self.offload_optimizer:
            raise ConfigurationError("local_updates with delay_averaging cannot offload the optimizer")
        if self.reuse_grad_buffers and (self.delay_averaging or self.local_updates):
            raise ConfigurationError(
                "reuse_grad_buffers leaves sums where the next batch writes: not with delay_averaging or local_updates"
            )

    @property
    def statistics(self) -> tuple[str, ...]:
        """What `average_statistics` names."""
        return tuple(name.strip() for name in self.average_statistics.split(",") if name.strip())


class DiLoCoSettings(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="algorithm", tag="diloco"
):
    """Many local steps, then one exchange: for slow lines."""

    inner_steps: AtLeastOne = 100
    inner_batch_size: Count = 0  # samples of a local step, in as many batches as a machine needs; 0: one batch
    steps_by_speed: bool = True  # slow peers take fewer of them, so that all are done at the same time
    outer: Literal["nesterov", "sgd", "delayed_nesterov"] = "nesterov"
    outer_learning_rate: Positive = 0.7
    outer_momentum: Share = 0.9
    outer_delay: AtLeastOne = 4  # delayed_nesterov: how many changes, about as many as peers, share one momentum
    min_peers: AtLeastOne = 1
    grace_seconds: NotNegative = 30.0
    num_fragments: AtLeastOne = 1
    overlap_steps: Count = 0
    mixing: Part = 0.0
    keep_overlap_work: bool = False  # put the steps of an overlap on top of the result, rather than mix them with it
    asynchronous: bool = False  # nobody waits: each peer's change is an epoch of its own
    weighting: Literal["samples", "equal", "tokens"] = "samples"  # what a peer's change weighs
    offload_optimizer: bool = False  # the inner optimizer and its float32 copy of the parameters live on the CPU

    def __post_init__(self) -> None:
        if self.asynchronous and (self.num_fragments > 1 or self.overlap_steps or self.min_peers > 1):
            raise ConfigurationError(
                "asynchronous peers exchange everything at once, on their own: leave out num_fragments, "
                "overlap_steps and min_peers"
            )
        if self.overlap_steps >= self.inner_steps:
            raise ConfigurationError(
                f"overlap_steps={self.overlap_steps} must be below inner_steps={self.inner_steps}: an exchange ends "
                "before the next begins"
            )
        if self.keep_overlap_work and self.mixing:
            raise ConfigurationError("keep_overlap_work and mixing are two ways to do the same: choose one")


class ExchangeSettings(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How values travel, and what becomes of them."""

    codec: str = "float16"
    codec_block: Count = 0  # values that share a scale, for codecs with blocks; 0: the codec's own
    compression: Literal["none", "error_feedback", "sparseloco", "demo", "powersgd"] = "none"
    keep: Annotated[int, msgspec.Meta(ge=0, le=TOPK_BLOCK)] = 0  # of 4,096 values; 0: 64 by sparseloco, 32 by demo
    memory_decay: Part | None = None  # of what was not sent; sparseloco: 0.95, demo: 0.999 unless given
    rank: AtLeastOne = 2  # powersgd
    aggregator: str = "mean"
    trim: float = 1 / 3  # trimmed_mean: the share cut off at each end
    radius: float = 1.5  # centered_clipping: how far one may pull, in median distances
    iterations: int = 3  # centered_clipping
    reducers: Literal["everybody", "trusted"] = "everybody"
    audit_chunks: Count = 2  # of each reducer that is not trusted, recomputed in each round; 0: no audit
    weight_cap: NotNegative = 16.0  # nobody counts for more than so many times what others give; 0: as they say

    def __post_init__(self) -> None:
        CodecSpec(name=self.codec, block=self.codec_block)  # they say what is wrong with a name
        self.aggregating()
        check_cap(self.weight_cap or None)
        if self.compression == "error_feedback" and self.codec not in ERROR_FEEDBACK_CODECS:
            raise ConfigurationError(
                f"error_feedback cannot account for {self.codec}: take one of {', '.join(ERROR_FEEDBACK_CODECS)}"
            )

    def aggregating(self) -> AggregatorSpec:
        """How contributions become one."""
        return AggregatorSpec(name=self.aggregator, trim=self.trim, radius=self.radius, iterations=self.iterations)


class Evaluation(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often trusted peers look at the model with data that nobody trains on, and what comes of it."""

    every_epochs: Count = 0  # 0: never
    gate: bool = False  # an epoch whose held-out loss leaves the band of those before is rolled back
    band: Positive = 4.0  # half its width, in usual differences between one evaluation and the next
    band_at_least: Share = 0.02  # … and at least such a share of the loss

    def __post_init__(self) -> None:
        if self.gate and not self.every_epochs:
            raise ConfigurationError(
                "gate = true needs the held-out loss: set every_epochs, for example every_epochs = 10"
            )


def check_together(
    training: SyncSettings | DiLoCoSettings, optimizer: OptimizerSpec, exchange: ExchangeSettings
) -> None:
    """ConfigurationError where parts of a run do not fit each other."""
    if exchange.compression == "demo" and not (isinstance(training, SyncSettings) and optimizer.name == "sgd"):
        raise ConfigurationError(
            'compression = "demo" sends a sign to step by: it needs algorithm = "sync" and the optimizer sgd, with '
            "beta1 = 0"
        )
    if exchange.compression == "demo" and optimizer.beta1:
        raise ConfigurationError('compression = "demo" has a momentum of its own: set beta1 = 0 under [optimizer]')
    if isinstance(training, SyncSettings) and training.local_updates and exchange.compression != "none":
        raise ConfigurationError('local_updates averages parameters, not gradients: compression must be "none"')


class Patience(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long is waited where nothing moves. A line on which bytes move is never too slow, but for the last two."""

    round_seconds: NotNegative = 0.0  # a round in which nothing moves has failed; 0: 120, with DiLoCo 300
    load_seconds: Positive = 600.0  # while the run's state is loaded, and nothing comes
    slowest_line: Annotated[float, msgspec.Meta(ge=1024.0)] = 32 * 1024.0  # bytes per second: deadlines have room for
    most_round_minutes: Positive = 60.0  # a round that takes longer is given up, whatever moves


class PipelineSpec(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model that no machine holds is cut."""

    stages: Literal["auto"] | Annotated[int, msgspec.Meta(ge=1, le=1024)] = "auto"
    micro_batch: Literal["auto"] | Annotated[int, msgspec.Meta(ge=1)] = "auto"
    recompute: Literal["auto", "always", "never"] = "auto"
    codec: Literal["raw", "float16", "bfloat16", "blockwise8"] = "raw"
    check_rate: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.02  # of a server's steps, computed again by another


def check_staged(training: SyncSettings | DiLoCoSettings, exchange: ExchangeSettings, evaluation: Evaluation) -> None:
    """ConfigurationError where a pipeline cannot do what the rest of the run asks for."""
    if not isinstance(training, SyncSettings):
        raise ConfigurationError(
            'a pipeline trains with algorithm = "sync": its step is one large batch. DiLoCo between whole pipelines is '
            "not there yet: leave out [pipeline], or set the algorithm"
        )
    if training.local_updates or training.delay_averaging or training.average_state_every:
        raise ConfigurationError(
            "a pipeline's step is exactly the large batch: leave out local_updates, delay_averaging and "
            "average_state_every"
        )
    if exchange.compression != "none" or exchange.aggregator != "mean":
        raise ConfigurationError(
            'a pipeline averages whole sums: set compression = "none" and aggregator = "mean" under [exchange]. How '
            "activations travel is the codec under [pipeline]"
        )
    if evaluation.every_epochs:
        raise ConfigurationError("every_epochs under [evaluation] does not work with [pipeline] yet: leave it out")
