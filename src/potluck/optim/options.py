"""What a person can choose about `potluck.Optimizer`; validated on creation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from potluck.errors import ConfigurationError
from potluck.hub.subjects import MAIN, check_group_name
from potluck.optim.driver import DriverConfig
from potluck.round.codecs import CodecChoice
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.round.coordinator.gathering import GatherConfig
from potluck.round.coordinator.trigger import Quorum
from potluck.state.config import StateConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Options of `potluck.Optimizer`. Those marked *run* must be the same for all peers of a run."""

    target_batch_size: int
    """*run* So many samples of all peers together make an epoch."""

    group: str = MAIN
    """*run* Whose epochs these are: a run may have several groups, each with a model and an optimizer of its own."""

    batch_size_per_step: int | None = None
    """Samples per call of `step`, where that does not say."""

    matchmaking_seconds: float = 3.0
    """*run* How long a round waits for trainers that are not ready when the batch is full."""

    averaging_timeout_seconds: float = 120.0
    """A round that takes longer has failed; its work counts again in the next."""

    load_state_timeout_seconds: float = 600.0
    """How long to look for somebody who has the run's state."""

    reuse_grad_buffers: bool = False
    """Add gradients up where autograd leaves them, without buffers of our own; batches must be of equal size."""

    offload_optimizer: bool = False
    """The optimizer and its float32 copy of the parameters live on the CPU."""

    delay_grad_averaging: bool = False
    """Average in the background, and step one batch or more later, on gradients that are as much older."""

    delay_optimizer_step: bool = False
    """Step in the background; needs offload_optimizer."""

    delay_state_averaging: bool = False
    """With local updates: average states in the background. Otherwise states travel with the gradients."""

    average_state_every: int = 0
    """*run* Every so many epochs the state is averaged too, in the same round; 0: never."""

    use_local_updates: bool = False
    """*run* Step on local gradients at once, and average states instead of gradients."""

    average_opt_statistics: tuple[str, ...] = ()
    """*run* The optimizer's tensors that are part of an averaged state, as in ("exp_avg_sq",)."""

    auxiliary: bool = False
    """Help others to average, and train nothing; the peer must have joined as aux."""

    max_grad_norm: float | None = None
    """*run* The averaged gradient is clipped to this norm."""

    codecs: CodecChoice = field(default_factory=CodecChoice)
    """*run* How gradients and state travel."""

    performance_ema_alpha: float = 0.1
    """Weight of the newest step in the estimate of this peer's speed."""

    keep_last_good: bool = True
    """Keep a copy of the last finite state, to go back to."""

    state: StateConfig = field(default_factory=StateConfig)
    """Whether this peer keeps states for others, and where and how often it writes backups."""

    num_threads: int | None = None
    """For averaging; None: one for each core, up to 4."""

    gather: GatherConfig = field(default_factory=GatherConfig)
    """*run* How rounds are planned where this peer coordinates: aggregator, who may reduce, audits. A host that
    coordinates plans by its manifest, or by what is usual: trust is not for trainers to decide."""

    def __post_init__(self) -> None:
        check_group_name(self.group)
        check_target(self.target_batch_size)
        if self.batch_size_per_step is not None and self.batch_size_per_step < 1:
            raise ConfigurationError(f"batch_size_per_step={self.batch_size_per_step}: it must be 1 or more")
        if self.delay_optimizer_step and not self.offload_optimizer:
            raise ConfigurationError(
                "delay_optimizer_step changes parameters while the model computes: set offload_optimizer=True too"
            )
        if self.reuse_grad_buffers and (self.delay_grad_averaging or self.use_local_updates):
            raise ConfigurationError(
                "reuse_grad_buffers leaves the sums where the next batch writes: it cannot be used with "
                "delay_grad_averaging or use_local_updates"
            )
        if self.use_local_updates and (self.delay_grad_averaging or self.delay_optimizer_step):
            raise ConfigurationError("local updates average states: use delay_state_averaging instead")
        if self.use_local_updates and self.delay_state_averaging and self.offload_optimizer:
            raise ConfigurationError("local updates with delay_state_averaging cannot offload the optimizer")
        if self.average_state_every < 0 or self.matchmaking_seconds < 0:
            raise ConfigurationError("average_state_every and matchmaking_seconds must be 0 or more")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigurationError(f"max_grad_norm={self.max_grad_norm}: it must be above 0, or None")
        self.driver()

    @property
    def is_round_delayed(self) -> bool:
        """Whether rounds run in the background."""
        return self.delay_state_averaging if self.use_local_updates else self.delay_grad_averaging

    def driver(self) -> DriverConfig:
        """What the driver needs of this."""
        return DriverConfig(
            averaging_timeout_seconds=self.averaging_timeout_seconds,
            load_state_timeout_seconds=self.load_state_timeout_seconds,
            keep_last_good=self.keep_last_good,
        )

    def coordinator(self) -> CoordinatorConfig:
        """How rounds are started where this peer coordinates."""
        gather = replace(self.gather, batch_weight=self.gather.batch_weight or float(self.target_batch_size))
        return CoordinatorConfig(gather=gather, trigger=Quorum(grace_seconds=self.matchmaking_seconds))


def check_target(samples: int) -> int:
    """The number; ConfigurationError where an epoch cannot have so few samples."""
    if samples < 1:
        raise ConfigurationError(f"target_batch_size={samples}: an epoch needs at least 1 sample")
    return samples
