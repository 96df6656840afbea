"""`potluck.DiLoCo`: many local steps, then one exchange. For slow lines, and for peers that come and go.

    with potluck.join("potluck://…") as run:
        optimizer = potluck.DiLoCo(run, torch.optim.AdamW(model.parameters(), lr=4e-4), inner_steps=500)
        for batch in loader:
            loss(model, batch).backward()
            optimizer.step(batch_size=len(batch))

Relatives are options of the same loop (outerloop.py):

    streaming        num_fragments, overlap_steps, mixing or keep_overlap_work
    quantised        codecs=CodecChoice.everything("e3m0"), transform=Quantised(…)
    SparseLoCo       transform=SparseLoCo(), outer=OuterSGD(1.0), inner_steps=10
    asynchronous     asynchronous=True, outer=DelayedNesterov(delay=number of peers)
    DyLU             steps_by_speed, on unless told otherwise (methods/dylu.py)
    decoupled        min_peers=K, weighting="tokens"
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from potluck.errors import ConfigurationError
from potluck.hub.subjects import MAIN, check_group_name
from potluck.optim.driver import DriverConfig
from potluck.optim.keptstates import Source
from potluck.optim.method import Hyperparameters
from potluck.optim.methods.outer import Nesterov, OuterOptimizer
from potluck.optim.methods.quorum import AdaptiveGrace, AdaptiveQuorum
from potluck.optim.methods.streaming import FragmentSchedule
from potluck.optim.methods.transform import Transform
from potluck.optim.modelstate import ModelState, SchedulerFactory
from potluck.optim.outerloop import OuterLoop, Weighting
from potluck.optim.progress.pace import Pace
from potluck.optim.sharedoptimizer import SharedOptimizer
from potluck.optim.stride import Stride
from potluck.round.codecs import CodecChoice
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.round.coordinator.gathering import GatherConfig
from potluck.round.coordinator.trigger import Quorum
from potluck.round.member.intent import StandBy
from potluck.run.joined import Joined
from potluck.state.config import StateConfig

logger = logging.getLogger(__name__)

ASYNCHRONOUS_ATTEMPTS = 20  # to contribute before going on with local steps: others keep coming first


@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCoConfig:
    """Options of `potluck.DiLoCo`. Those marked *run* must be the same for all peers of a run."""

    group: str = MAIN
    """*run* Whose epochs these are: a run may have several groups, each with a model and an optimizer of its own."""

    inner_steps: int = 500
    """*run* Local steps between two exchanges of the same parameters."""

    num_fragments: int = 1
    """*run* Parts of the model that are exchanged in turn."""

    overlap_steps: int = 0
    """*run* Local steps that go on while an exchange is under way; then it is waited for."""

    mixing: float = 0.0
    """*run* How much of the local values stays when the result comes."""

    keep_overlap_work: bool = False
    """*run* Put the steps of an overlap on top of the result, as soon as it comes, rather than mix them with it."""

    asynchronous: bool = False
    """*run* Nobody waits for anybody: each peer's change is an epoch of its own."""

    steps_by_speed: bool = True
    """Slow peers take fewer local steps, so that all are done at the same time (DyLU). Not with a scheduler: it counts
    local steps, and would have another learning rate on each peer."""

    min_peers: int = 1
    """*run* An exchange starts when so many are ready, and the others have had their grace."""

    grace_seconds: float = 30.0
    """*run* The longest that an exchange waits for stragglers; less, as soon as it is seen how late they are."""

    weighting: Weighting = "samples"
    """*run* What a peer's change weighs: its samples, one as much as the other, or tokens² per step."""

    max_grad_norm: float | None = None
    """Local gradients are clipped to this norm."""

    offload_optimizer: bool = False
    """The inner optimizer and its float32 copy of the parameters live on the CPU."""

    averaging_timeout_seconds: float = 300.0
    """An exchange that takes longer has failed; its work counts in the next."""

    load_state_timeout_seconds: float = 600.0
    """How long to look for somebody who has the run's state."""

    codecs: CodecChoice = field(default_factory=CodecChoice)
    """*run* How changes travel."""

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
        self.schedule()
        self.driver()
        if self.min_peers < 1 or self.grace_seconds < 0:
            raise ConfigurationError("min_peers must be 1 or more, and grace_seconds 0 or more")
        if self.asynchronous and (self.num_fragments > 1 or self.overlap_steps or self.min_peers > 1):
            raise ConfigurationError("asynchronous peers exchange everything, at once, on their own: no fragments")

    @property
    def target_batch_size(self) -> None:
        """Epochs do not depend on samples."""
        return None

    def schedule(self) -> FragmentSchedule:
        """Which fragment when."""
        return FragmentSchedule(
            inner_steps=self.inner_steps,
            num_fragments=self.num_fragments,
            overlap_steps=self.overlap_steps,
            mixing=self.mixing,
            keeps_overlap=self.keep_overlap_work,
        )

    def driver(self) -> DriverConfig:
        """What the driver needs of this."""
        return DriverConfig(
            averaging_timeout_seconds=self.averaging_timeout_seconds,
            load_state_timeout_seconds=self.load_state_timeout_seconds,
            keep_last_good=self.keep_last_good,
        )

    def coordinator(self) -> CoordinatorConfig:
        """How rounds are started where this peer coordinates."""
        if self.asynchronous:
            return CoordinatorConfig(gather=self.gather, trigger=Quorum(grace_seconds=0.0))
        grace = AdaptiveGrace(least_seconds=min(0.5, self.grace_seconds), most_seconds=self.grace_seconds)
        trigger = AdaptiveQuorum(min_senders=self.min_peers, grace=grace)
        return CoordinatorConfig(gather=self.gather, trigger=trigger)


class DiLoCo(SharedOptimizer):
    """Local steps of any torch optimizer, and an outer optimizer over all peers."""

    method: OuterLoop

    def __init__(
        self,
        run: Joined,
        optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
        *,
        params: Iterable[Any] | None = None,
        outer: OuterOptimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | SchedulerFactory | None = None,
        extra_tensors: Mapping[str, Tensor] | Iterable[Tensor] = (),
        transform: Transform | None = None,
        source: Source = "keepers",
        hyperparameters: Hyperparameters = lambda _epoch: None,
        config: DiLoCoConfig | None = None,
        **options: Any,
    ) -> None:
        """`optimizer` is the inner one, or a function that makes it of `params`; `options`: see DiLoCoConfig.

        `hyperparameters` is called with the epoch before each outer step, also before those that a newcomer repeats.
        """
        self.config = config = config or DiLoCoConfig(**options)
        inner = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(params)
        state = ModelState(inner, scheduler=scheduler, extra_tensors=extra_tensors, offload=config.offload_optimizer)
        method = OuterLoop(
            state, outer or Nesterov(), config.schedule(), transform=transform, weighting=config.weighting
        )
        self._join(
            run,
            config,
            state,
            method,
            codec=method.transform.codec,
            source=source,
            hyperparameters=hyperparameters,
        )
        self._stride = Stride(method.schedule, by_speed=config.steps_by_speed and scheduler is None)
        self.collaboration.averager.listen(self._stride.cadence.committed)
        self._num_loaded = 0
        self._begin()
        self._num_loaded = self.driver.num_loaded

    @property
    def pace(self) -> Pace:
        """How fast this peer computes."""
        return self._stride.pace

    @property
    def samples(self) -> int:
        """This peer's samples since its last exchange."""
        return self.method.samples

    @property
    def steps_per_round(self) -> int:
        """Local steps until this peer's next exchange, counted from its last."""
        return self._stride.steps_per_round(self._fast_steps_per_second)

    @property
    def _fast_steps_per_second(self) -> float:
        latest = self.collaboration.progress.latest
        return latest.fast_steps_per_second if latest is not None else 0.0

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        batch_size: int = 1,
        grad_scaler: GradScaler | None = None,
    ) -> Any:
        """One local step on the gradients of a batch; now and then an exchange. Returns what the closure returned."""
        loss = self._evaluate(closure)
        is_finite = None  # looked at below, unless the scaler does so
        if grad_scaler is not None and grad_scaler.is_enabled():
            is_finite = self._unscaler.unscale(grad_scaler)
        if not self.method.local_step(batch_size, self.config.max_grad_norm, is_finite):
            self.driver.counts["bad_batches"] += 1
            logger.warning("a batch of %d samples has gradients that are not finite: it is left out", batch_size)
        stride, fast = self._stride, self._fast_steps_per_second
        stride.steps += 1
        stride.pace.step_done(batch_size, self._clock.monotonic())
        self._report()
        if self.driver.is_busy:
            is_over = stride.steps >= stride.overlap_steps(fast)
            if is_over or self.config.keep_overlap_work:  # where no work is lost, a result counts as soon as it comes
                self.driver.land(wait=is_over)
        self.driver.mend()
        self._keep_in_step()
        if stride.is_done(fast):
            self._exchange()
        self.go_on()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Everything that this peer needs to go on with the same bits. An exchange in the background is landed first.

        In another run epochs count from where that run is; the turn of the fragments goes on as it was.
        """
        return {**super().state_dict(), "steps_since_offer": self._stride.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._stride.steps = state["steps_since_offer"]
        super().load_state_dict(state)

    def hand_in(self, timeout_seconds: float) -> int:
        """Exchange what was done since the last exchange, before leaving; how many samples that were.

        It is averaged with those who are ready. The others are a little late then, and late work is kept.
        """
        return super().hand_in(timeout_seconds)

    def _until_last_round(self, timeout_seconds: float) -> float:
        self._stride.offered()
        return timeout_seconds

    def _exchange(self) -> None:
        """Take part in the next epoch; who is late takes over the newest state first, and goes on with the others."""
        self.driver.land()
        if self.config.asynchronous:
            self._exchange_alone()
            return
        if self.driver.is_behind:
            self.run.call(self.collaboration.averager.tell_late(self.epoch + 1, self.method.weight))
            self.driver.catch_up()
        if self.driver.num_loaded != self._num_loaded:
            self._stride.offered()
            self._keep_in_step()
            if not self.method.samples:
                return  # its work was dropped, by a rollback: however little time is left, there is nothing to offer
        if not self._stride.is_done(self._fast_steps_per_second):
            return
        stand_by = self._stand_by()
        self._stride.offered()
        if self.config.overlap_steps:
            # The outer optimizer's step is delayed: nothing that local steps touch.
            self.driver.begin_round(delay_step=True, stand_by=stand_by)
        else:
            self.driver.round(stand_by=stand_by)
            self._keep_in_step()

    def _exchange_alone(self) -> None:
        """Where nobody waits for anybody, everybody is late."""
        self._stride.offered()
        for _ in range(ASYNCHRONOUS_ATTEMPTS):
            self.driver.catch_up()
            if self.driver.round():
                return

    def _keep_in_step(self) -> None:
        """If another state was taken over, take no more steps than the others have left."""
        num_loaded, self._num_loaded = self._num_loaded, self.driver.num_loaded
        if num_loaded != self._num_loaded and not self.config.asynchronous:
            self._stride.took_over(self.run.peer.session.now())

    def _stand_by(self) -> StandBy | None:
        head, own = self.collaboration.averager.lineage.head, self.run.peer_id
        others = sum(member.weight for member in head.members if member.peer != own) if head is not None else 0.0
        return self._stride.stand_by(
            own_weight=self.method.weight,
            others_weight=others,
            fast_steps_per_second=self._fast_steps_per_second,
            hub_now=self.run.peer.session.now(),
            most_seconds=self.config.grace_seconds,
        )

    def _report(self, *, leaving: bool = False, is_resting: bool = False) -> None:
        progress, samples, epoch = self.collaboration.progress, self.method.samples, self.epoch
        pace = Pace() if is_resting else self._stride.pace
        rate, steps_rate = pace.samples_per_second, pace.steps_per_second
        self.run.soon(
            lambda: progress.report(epoch=epoch, samples=samples, samples_per_second=rate, steps_per_second=steps_rate)
        )
