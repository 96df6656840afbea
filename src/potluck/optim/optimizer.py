"""`potluck.Optimizer`: a torch optimizer that steps when the whole run has done its batch.

    with potluck.join("potluck://…") as run:
        optimizer = potluck.Optimizer(run, torch.optim.AdamW(model.parameters()), target_batch_size=4096)
        for batch in loader:
            loss(model, batch).backward()
            optimizer.step(batch_size=len(batch))
            optimizer.zero_grad()

A step adds this peer's gradients up. When the run has `target_batch_size` samples, the peers average their gradients
in a round, and all take the same step. A lone peer trains as plain PyTorch would, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.utils.hooks import RemovableHandle

from potluck.errors import ConfigurationError
from potluck.optim.auxiliary import AuxiliaryOptimizer
from potluck.optim.collaboration import has_other_trainers
from potluck.optim.keptstates import Source
from potluck.optim.localupdates import LocalUpdates
from potluck.optim.method import Hyperparameters
from potluck.optim.methods.transform import Transform
from potluck.optim.modelstate import ModelState, SchedulerFactory
from potluck.optim.options import OptimizerConfig, check_target
from potluck.optim.parameters import are_finite
from potluck.optim.progress.pace import Pace, is_worth_another_step, patience_seconds
from potluck.optim.sharedoptimizer import SharedOptimizer
from potluck.optim.targetbatch import TargetBatch
from potluck.round.member.intent import StandBy
from potluck.run.joined import Joined

logger = logging.getLogger(__name__)

OUTDATED_IN_A_ROW = 3  # batches that came too late, after which that is said
LEAST_ROUND_SECONDS = 0.5  # for a round that is due when somebody leaves
HEARD_SECONDS = 3.0  # until everybody has heard who else is about to leave
CONFIRM_SECONDS = 1.5  # how long to wait for the coordinator's message when the run should have its batch
LEAST_WORD_SECONDS = 0.2  # that may take this long on a busy machine

Factory = Callable[[Any], torch.optim.Optimizer]


class Optimizer(SharedOptimizer, torch.optim.Optimizer):  # type: ignore[override]
    """Large batches over many peers, around any torch optimizer."""

    method: TargetBatch | LocalUpdates

    def __new__(cls, run: Joined, *args: Any, config: OptimizerConfig | None = None, **options: Any) -> Any:
        """A peer with `auxiliary` trains nothing: it is an AuxiliaryOptimizer."""
        if config.auxiliary if config is not None else options.get("auxiliary"):
            return AuxiliaryOptimizer(run, config or OptimizerConfig(**_known(options)))
        return super().__new__(cls)

    def __init__(
        self,
        run: Joined,
        optimizer: torch.optim.Optimizer | Factory | None,
        *,
        params: Iterable[Any] | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | SchedulerFactory | None = None,
        extra_tensors: Mapping[str, Tensor] | Iterable[Tensor] = (),
        transform: Transform | None = None,
        source: Source = "keepers",
        hyperparameters: Hyperparameters = lambda _epoch: None,
        config: OptimizerConfig | None = None,
        **options: Any,
    ) -> None:
        """`optimizer` is one, or a function that makes one of `params`; `options` are those of OptimizerConfig.

        `hyperparameters` is called before each step of the run with the epoch that it starts from, also before those
        that a newcomer repeats: learning rates that depend on the epoch belong there, or into a scheduler.
        """
        # torch's own __init__ is left out on purpose: groups and state are those of the optimizer that we wrap.
        self.config = config = config or OptimizerConfig(**options)
        if optimizer is None:
            raise ConfigurationError("an optimizer is missing: only an auxiliary peer (auxiliary=True) needs none")
        self._pace = Pace(config.performance_ema_alpha)
        self._outdated_in_a_row = 0
        self._unconfirmed: object = None  # the coordinator's message that we waited for in vain
        self._vain_epoch = -1  # whose predicted end did not come
        inner = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(_given(params))
        state = ModelState(inner, scheduler=scheduler, extra_tensors=extra_tensors, offload=config.offload_optimizer)
        self._join(
            run,
            config,
            state,
            _make_method(state, config, transform),
            codec=transform.codec if transform is not None else None,
            source=source,
            hyperparameters=hyperparameters,
        )
        self._begin(listens_on=isinstance(self.method, TargetBatch))

    # torch's interface

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the wrapped optimizer."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the wrapped optimizer."""
        return self.inner.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: all peers have to train the same parameters, from the first epoch on."""
        raise ConfigurationError(
            "parameters cannot be added to a potluck.Optimizer, since all peers have to train the same: give the "
            "optimizer that is wrapped all its groups first, and set their learning rate to 0 as long as they rest"
        )

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Called before the wrapped optimizer steps, which is once an epoch, or with each local step."""
        return self.inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Called after the wrapped optimizer has stepped."""
        return self.inner.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        """Called before the wrapped optimizer's state is saved, as a part of this one's."""
        return self.inner.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        """Called after the wrapped optimizer's state was saved."""
        return self.inner.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        """Called before the wrapped optimizer's state is loaded."""
        return self.inner.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        """Called after the wrapped optimizer's state was loaded."""
        return self.inner.register_load_state_dict_post_hook(hook, prepend)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that were not handed in. Those that were are kept until the run has its batch."""
        if not self.config.reuse_grad_buffers:
            super().zero_grad(set_to_none)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        grad_scaler: GradScaler | None = None,
    ) -> Any:
        """Hand in the gradients of one batch; take part in a round and step when the run has its batch.

        Returns what the closure returned.
        """
        loss = self._evaluate(closure)
        if self._settle():
            self._outdated_in_a_row = 0
            self._add(self._batch_size(batch_size), grad_scaler)
            self._meet()
        self.go_on()
        return loss

    def hand_in(self, timeout_seconds: float) -> int:
        """Bring the samples so far into the run's next epoch, before leaving; how many did count.

        With others, that epoch is waited for, as long as it comes in time: starting it early would cost them theirs.
        A lone peer makes it at once, of fewer samples than usual; and so do those who all leave at the same time.
        HubUnavailableError where there is no hub.
        """
        return super().hand_in(timeout_seconds)

    def _until_last_round(self, timeout_seconds: float) -> float | None:
        epoch, deadline = self.epoch, self._clock.monotonic() + timeout_seconds
        has_others = self.run.call(has_other_trainers(self.collaboration.peer.session))
        if has_others and (not self._comes_before(epoch, deadline) or self.driver.is_behind):
            return None
        return max(deadline - self._clock.monotonic(), LEAST_ROUND_SECONDS)

    def forget_pace(self) -> None:
        """Batches are of another size from here on: how long the earlier ones took says little of them."""
        self._pace = Pace(self.config.performance_ema_alpha)
        self.go_on()

    def _comes_before(self, epoch: int, deadline: float) -> bool:
        """Wait for the epoch after `epoch`, without computing; not at all if it is too far off."""
        self._report(leaving=True)

        def wait(seconds: float) -> bool:
            return self.run.call(self.collaboration.progress.until_due(epoch, max(seconds, 0.0)))

        left = deadline - self._clock.monotonic()
        if wait(min(left, HEARD_SECONDS)):
            return True
        due_in_seconds = self.collaboration.progress.due_in_seconds(epoch)
        left = deadline - self._clock.monotonic()
        return (due_in_seconds is None or due_in_seconds <= left) and wait(left)

    # Where we are

    @property
    def pace(self) -> Pace:
        """How fast this peer computes."""
        return self._pace

    @property
    def target_batch_size(self) -> int:
        """How many samples of all peers together make an epoch. Set it on all of them, for the same epoch."""
        return self.collaboration.progress.target or self.config.target_batch_size

    @target_batch_size.setter
    def target_batch_size(self, samples: int) -> None:
        self.collaboration.progress.target = check_target(samples)

    @property
    def samples(self) -> int:
        """This peer's samples towards the next epoch."""
        method = self.method
        return method.samples if isinstance(method, LocalUpdates) else method.gradients.samples

    def __repr__(self) -> str:
        return f"potluck.Optimizer({self.inner!r}, epoch={self.epoch}, samples={self.samples})"

    # How it goes on

    def _batch_size(self, given: int | None) -> int:
        size = given if given is not None else self.config.batch_size_per_step
        if size is None:
            raise ConfigurationError(
                "how many samples was that? Call step(batch_size=…), or give batch_size_per_step once"
            )
        return size

    def _settle(self) -> bool:
        """Bring in what the background has done; False if these gradients are of an outdated state, and are lost."""
        driver = self.driver
        num_loaded = driver.num_loaded
        driver.land(wait=False)
        if driver.is_behind:
            driver.catch_up()
        else:
            driver.mend()
        if driver.num_loaded == num_loaded:
            return True
        driver.counts["outdated_batches"] += 1
        self._outdated_in_a_row += 1
        if self._outdated_in_a_row % OUTDATED_IN_A_ROW == 0:
            logger.warning(
                "the last %d batches came too late for their epochs, and do not count: a step takes longer here than "
                "the others take for an epoch. Take smaller batches (batch_size, --batch-size); a run with DiLoCo "
                "counts slow peers too",
                self._outdated_in_a_row,
            )
        self.zero_grad()
        self._report()
        return False

    def _add(self, batch_size: int, scaler: GradScaler | None) -> None:
        if scaler is not None and self.config.reuse_grad_buffers:
            raise ConfigurationError("a gradient scaler cannot be used with reuse_grad_buffers: turn that off")
        is_finite, before = scaler is None or self._unscaler.unscale(scaler), self.samples
        is_checked = scaler is not None and scaler.is_enabled()
        if isinstance(self.method, LocalUpdates):
            parameters = self.state_of_model.model.values()
            is_finite = is_finite and (is_checked or are_finite(p.grad for p in parameters if p.grad is not None))
            self.driver.before_change()
            self.method.local_step(batch_size, is_finite)
        elif is_finite:
            is_finite = self.method.gradients.add(batch_size, is_checked=is_checked)
        else:
            self.zero_grad()
        if not is_finite:
            self.driver.counts["bad_batches"] += 1
            also = f", and so are the {before} samples before it, since they were added up in the same buffers"
            logger.warning(
                "a batch of %d samples has gradients that are not finite: it is left out%s",
                batch_size,
                also if self.samples < before else "",
            )
        self._pace.step_done(batch_size, self._clock.monotonic())
        self._report()

    def _report(self, *, leaving: bool = False, is_resting: bool = False) -> None:
        """Tell how far this peer is; who leaves computes no more."""
        progress, samples = self.collaboration.progress, self.samples
        epoch, rate = self._counted_epoch(), 0.0 if leaving or is_resting else self._pace.samples_per_second
        eager = leaving or progress.seems_due(epoch, samples)
        told = {"epoch": epoch, "samples": samples, "samples_per_second": rate, "eager": eager, "leaving": leaving}
        self.run.soon(lambda: progress.report(**told))  # type: ignore[arg-type]

    def _counted_epoch(self) -> int:
        """The epoch after which samples count now: that of the round in the background, if there is one."""
        return self.epoch + 1 if self.driver.is_busy else self.epoch

    def _meet(self) -> None:
        """Take part in a round if one is due, or about to be."""
        progress, epoch = self.collaboration.progress, self._counted_epoch()
        if progress.is_due(epoch):
            self._round()
        elif progress.seems_due(epoch, self.samples):
            is_news = progress.latest is None or progress.latest is not self._unconfirmed
            if is_news and not self._meet_soon(epoch, CONFIRM_SECONDS):
                self._unconfirmed = progress.latest
        elif epoch != self._vain_epoch:
            due_in_seconds, step_seconds = progress.due_in_seconds(epoch), self._pace.seconds_per_step
            if due_in_seconds is None or is_worth_another_step(due_in_seconds, step_seconds):
                return
            wait_seconds = patience_seconds(due_in_seconds, step_seconds, self.config.matchmaking_seconds)
            if not self._meet_soon(epoch, wait_seconds):
                self._vain_epoch = epoch

    def _meet_soon(self, epoch: int, seconds: float) -> bool:
        """Take part in the round after `epoch` if it is due within so long; whether it was.

        Far from the coordinator this peer stands by, and the round starts when the last one does. In the background
        nothing can be offered ahead: all samples after it count for the next epoch. And a peer that stands by in vain
        has to wait for a plan that may be on its way: too long for one whose steps are shorter than that.
        """
        progress = self.collaboration.progress
        there_and_back = 2 * progress.way_seconds
        word_seconds = max(there_and_back, LEAST_WORD_SECONDS)
        if self.config.is_round_delayed or not progress.is_far or seconds < word_seconds:
            is_due = self.run.call(self.collaboration.progress.until_due(epoch, seconds + there_and_back))
            if is_due:
                self._round()
            return is_due
        awaits = float(self.target_batch_size)
        self._round(StandBy(awaits=awaits, seconds=seconds, word_seconds=word_seconds))
        return self._counted_epoch() > epoch

    def _round(self, stand_by: StandBy | None = None) -> None:
        """The run has its batch, or is about to: average, and step, as far as the delays say."""
        config, driver = self.config, self.driver
        if driver.is_busy:
            driver.land()  # we are ahead of our own averaging: wait for it
            if driver.is_behind or self.collaboration.averager.epoch != driver.epoch or driver.mend():
                return  # seen to with the next step
        if driver.is_behind:
            driver.catch_up()
        elif config.is_round_delayed:
            driver.begin_round(delay_step=config.delay_optimizer_step)
        else:
            driver.round(stand_by=stand_by, delay_step=config.delay_optimizer_step)
        self._report()


def _make_method(state: ModelState, config: OptimizerConfig, transform: Transform | None) -> TargetBatch | LocalUpdates:
    if config.use_local_updates:
        if transform is not None:
            raise ConfigurationError("local updates average states, not gradients: leave out the transform")
        return LocalUpdates(state, max_grad_norm=config.max_grad_norm, average_statistics=config.average_opt_statistics)
    return TargetBatch(
        state,
        reuse_grad_buffers=config.reuse_grad_buffers,
        max_grad_norm=config.max_grad_norm,
        average_state_every=config.average_state_every,
        average_statistics=config.average_opt_statistics,
        transform=transform,
    )


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """The options of OptimizerConfig; an auxiliary peer needs nothing else that an optimizer is given."""
    beside = ("params", "scheduler", "extra_tensors", "transform", "source", "hyperparameters")
    return {name: value for name, value in options.items() if name not in beside}


def _given(params: Iterable[Any] | None) -> Iterable[Any]:
    if params is None:
        raise ConfigurationError("params are missing: a function that makes an optimizer needs them")
    return params
