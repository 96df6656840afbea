"""`potluck.Optimizer`: a torch optimizer that steps when the whole run has done its batch.

    with potluck.join("potluck://…") as run:
        optimizer = potluck.Optimizer(run, torch.optim.AdamW(model.parameters()), target_batch_size=4096)
        for batch in loader:
            loss(model, batch).backward()
            optimizer.step(batch_size=len(batch))
            optimizer.zero_grad()

A step adds this peer's gradients up. When the run has `target_batch_size` samples, the peers average their gradients
in a round, and all take the same step. Who is alone trains as plain PyTorch would, bit for bit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.utils.hooks import RemovableHandle

from potluck.errors import ConfigurationError
from potluck.optim.collaboration import has_other_trainers, join_collaboration, require_hub
from potluck.optim.driver import Driver
from potluck.optim.gradscaler import Unscaler
from potluck.optim.helper import Helper
from potluck.optim.keptstates import Source, source_of_states
from potluck.optim.localupdates import LocalUpdates
from potluck.optim.method import Hyperparameters
from potluck.optim.methods.transform import Transform
from potluck.optim.modelstate import ModelState, SchedulerFactory
from potluck.optim.options import OptimizerConfig
from potluck.optim.parameters import are_finite
from potluck.optim.progress.pace import Pace, is_worth_another_step, patience_seconds
from potluck.optim.targetbatch import TargetBatch
from potluck.round.member.wish import StandBy
from potluck.run.joined import Joined

logger = logging.getLogger(__name__)

OUTDATED_IN_A_ROW = 3  # batches that came too late, after which that is said
LEAST_ROUND_SECONDS = 0.5  # for a round that is due when somebody leaves
HEARD_SECONDS = 3.0  # until everybody has heard who else is about to leave
CONFIRM_SECONDS = 1.5  # how long to wait for the coordinator's word when the run should have its batch
LEAST_WORD_SECONDS = 0.2  # that may take this long on a busy machine

Factory = Callable[[Any], torch.optim.Optimizer]


class Optimizer(torch.optim.Optimizer):
    """Large batches over many peers, around any torch optimizer."""

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
        self.run = run
        self._pace = Pace(config.performance_ema_alpha)
        self._outdated_in_a_row = 0
        self._unconfirmed: object = None  # the word of the coordinator that we waited for in vain
        self._vain_epoch = -1  # whose predicted end did not come
        self._helper: Helper | None = None
        if config.auxiliary:
            self.collaboration = join_collaboration(run, config)
            self._helper = run.call(Helper.start(self.collaboration, config.state))
            run.attach(self._helper.close)
            return
        if optimizer is None:
            raise ConfigurationError("an optimizer is missing: only an auxiliary peer (auxiliary=True) needs none")
        inner = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(_given(params))
        self.state_of_model = ModelState(
            inner, scheduler=scheduler, extra_tensors=extra_tensors, offload=config.offload_optimizer
        )
        self.method = self._make_method(transform)
        self.collaboration = join_collaboration(run, config, transform.codec if transform is not None else None)
        states = source_of_states(run, self.collaboration, source, config.state)
        self.driver = Driver(run, self.method, self.collaboration, config.driver(), states, hyperparameters)
        self._unscaler = Unscaler(self.state_of_model.model.values(), self)
        self.driver.begin(listens_on=isinstance(self.method, TargetBatch))
        self._report()
        self._pace.resume(time.monotonic())

    # torch's interface

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that is wrapped."""
        return self.state_of_model.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the wrapped optimizer; an auxiliary peer has none."""
        return self.inner.param_groups if self._helper is None else []

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the wrapped optimizer."""
        return self.inner.state if self._helper is None else {}

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the wrapped optimizer."""
        return self.inner.defaults if self._helper is None else {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: all peers have to train the same parameters, from the first epoch on."""
        raise ConfigurationError(
            "parameters cannot be added to a potluck.Optimizer, since all peers have to train the same: give the "
            "optimizer that is wrapped all its groups first, and set their learning rate to 0 as long as they rest"
        )

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Called before the wrapped optimizer steps, which is once an epoch, or with each local step."""
        return self._hooked.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Called after the wrapped optimizer has stepped."""
        return self._hooked.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        """Called before the wrapped optimizer's state is saved, as a part of this one's."""
        return self._hooked.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        """Called after the wrapped optimizer's state was saved."""
        return self._hooked.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        """Called before the wrapped optimizer's state is loaded."""
        return self._hooked.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        """Called after the wrapped optimizer's state was loaded."""
        return self._hooked.register_load_state_dict_post_hook(hook, prepend)

    @property
    def _hooked(self) -> torch.optim.Optimizer:
        if self._helper is not None:
            raise ConfigurationError("an auxiliary peer takes no steps: hooks would never be called")
        return self.inner

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that were not handed in. Those that were are kept until the run has its batch."""
        if self._helper is None and not self.config.reuse_grad_buffers:
            for parameter in self.state_of_model.model.values():
                parameter.grad = None

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        grad_scaler: GradScaler | None = None,
    ) -> Any:
        """Hand in the gradients of one batch; take part in a round and step when the run has its batch.

        Returns what the closure returned. An auxiliary peer waits for the next epoch instead.
        """
        self.run.check()
        if self._helper is not None:
            self.run.call(self._helper.until_after(self.collaboration.epoch))
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._settle():
            self._outdated_in_a_row = 0
            self._add(self._batch_size(batch_size), grad_scaler)
            self._meet()
        self._pace.resume(time.monotonic())
        return loss

    def hand_in(self, timeout_seconds: float) -> int:
        """Bring the samples so far into the run's next epoch, before leaving; how many did count.

        With others, that epoch is waited for, as long as it comes in time: starting it early would cost them theirs.
        Who is alone makes it at once, of fewer samples than usual; and so do those who all leave at the same time.
        HubUnavailableError where there is no hub.
        """
        if self._helper is not None:
            return 0
        self.run.call(require_hub(self.run.peer.session))
        self.driver.land()
        samples, epoch = self.samples, self.epoch
        if not samples or self.driver.is_behind:
            return 0
        deadline = time.monotonic() + timeout_seconds
        has_others = self.run.call(has_other_trainers(self.collaboration.peer.session))
        if has_others and (not self._comes_before(epoch, deadline) or self.driver.is_behind):
            return 0
        left = max(deadline - time.monotonic(), LEAST_ROUND_SECONDS)
        return samples if self.driver.round(timeout_seconds=left) else 0

    def forget_pace(self) -> None:
        """Batches are of another size from here on: how long the earlier ones took says little of them."""
        self._pace = Pace(self.config.performance_ema_alpha)
        self._pace.resume(time.monotonic())

    def rest(self) -> None:
        """Nothing is computed for a while: say that this peer makes no samples, until its next step."""
        if self._helper is None:
            self._report(is_resting=True)

    def go_on(self) -> None:
        """The next step begins now: the rest before it says nothing about this peer's speed."""
        self._pace.resume(time.monotonic())

    def _comes_before(self, epoch: int, deadline: float) -> bool:
        """Wait for the epoch after `epoch`, without computing; not at all if it is too far off."""
        self._report(leaving=True)

        def wait(seconds: float) -> bool:
            return self.run.call(self.collaboration.until_due(epoch, max(seconds, 0.0)))

        left = deadline - time.monotonic()
        if wait(min(left, HEARD_SECONDS)):
            return True
        due_in_seconds = self.collaboration.progress.due_in_seconds(epoch)
        left = deadline - time.monotonic()
        return (due_in_seconds is None or due_in_seconds <= left) and wait(left)

    # Where we are

    @property
    def epoch(self) -> int:
        """How many updates of the run this peer's parameters hold; of an auxiliary peer, how many the run has."""
        return self.driver.epoch if self._helper is None else self.collaboration.epoch

    @property
    def target_batch_size(self) -> int:
        """How many samples of all peers together make an epoch. Set it on all of them, for the same epoch."""
        return self.collaboration.progress.target or self.config.target_batch_size

    @target_batch_size.setter
    def target_batch_size(self, samples: int) -> None:
        if samples < 1:
            raise ConfigurationError(f"target_batch_size={samples}: an epoch needs at least 1 sample")
        self.collaboration.progress.target = samples

    @property
    def samples(self) -> int:
        """This peer's samples towards the next epoch."""
        if self._helper is not None:
            return 0
        method = self.method
        return method.samples if isinstance(method, LocalUpdates) else method.gradients.samples

    def statistics(self) -> dict[str, int | float]:
        """Counters of this optimizer and of its rounds."""
        of_states = self.driver.statistics() if self._helper is None else {}
        return {**of_states, **self.collaboration.averager.statistics()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that this peer needs to go on with the same bits: load it with `load_state_dict`."""
        return self.driver.state_dict() if self._helper is None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; an auxiliary peer has none of its own."""
        if self._helper is not None:
            return
        self.driver.load_state_dict(state)
        self._report()

    def __repr__(self) -> str:
        if self._helper is not None:
            return "potluck.Optimizer(auxiliary)"
        return f"potluck.Optimizer({self.inner!r}, epoch={self.epoch}, samples={self.samples})"

    # How it goes on

    def _make_method(self, transform: Transform | None) -> TargetBatch | LocalUpdates:
        config = self.config
        if config.use_local_updates:
            if transform is not None:
                raise ConfigurationError("local updates average states, not gradients: leave out the transform")
            return LocalUpdates(
                self.state_of_model,
                max_grad_norm=config.max_grad_norm,
                average_statistics=config.average_opt_statistics,
            )
        return TargetBatch(
            self.state_of_model,
            reuse_grad_buffers=config.reuse_grad_buffers,
            max_grad_norm=config.max_grad_norm,
            average_state_every=config.average_state_every,
            average_statistics=config.average_opt_statistics,
            transform=transform,
        )

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
        self._pace.step_done(batch_size, time.monotonic())
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
        nothing can be offered ahead: all samples after it count for the next epoch. And whoever stands by in vain has
        to wait for a plan that may be on its way: too long for one whose steps are shorter than that.
        """
        progress = self.collaboration.progress
        there_and_back = 2 * progress.way_seconds
        word_seconds = max(there_and_back, LEAST_WORD_SECONDS)
        if self.config.is_round_delayed or not progress.is_far or seconds < word_seconds:
            is_due = self.run.call(self.collaboration.until_due(epoch, seconds + there_and_back))
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
            if driver.is_behind or self.collaboration.epoch != driver.epoch or driver.mend():
                return  # seen to with the next step
        if driver.is_behind:
            driver.catch_up()
        elif config.is_round_delayed:
            driver.begin_round(delay_step=config.delay_optimizer_step)
        else:
            driver.round(stand_by=stand_by, delay_step=config.delay_optimizer_step)
        self._report()

    def shutdown(self) -> None:
        """Bring in the round in the background, or leave it if it takes long; the run goes on until it is left."""
        if self._helper is None:
            self.driver.close()


def _given(params: Iterable[Any] | None) -> Iterable[Any]:
    if params is None:
        raise ConfigurationError("params are missing: a function that makes an optimizer needs them")
    return params
