"""`PotluckStrategy`: Lightning's Trainer as a peer of a run.

    from lightning import Trainer
    from potluck.integrations.lightning import PotluckStrategy

    trainer = Trainer(strategy=PotluckStrategy(target_batch_size=8192), accelerator="gpu", devices=1)

The life of a fit, and where the run comes in:

    setup           optimizer and schedulers as configure_optimizers makes them; what cannot be done is refused
    (checkpoint)    Lightning loads model, optimizer and schedulers, if asked to
    on_train_start  the run is joined, and its state taken over; the first peer brings its own
    optimizer_step  a batch is handed in; the run steps when it has `target_batch_size` samples
    on_train_end    what is under way in the background is brought in, samples that wait are handed in
    teardown        the run is left

Gradients are clipped where the step is made, so that `gradient_clip_val` is for the run's average and not for each
peer's share of it. A schedule counts epochs of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from potluck.errors import ConfigurationError
from potluck.integrations.algorithms import Algorithm
from potluck.integrations.embeddedrun import EmbeddedConfig
from potluck.integrations.lightning import batches, checks
from potluck.integrations.samples import SampleCounter
from potluck.integrations.schedules import RunSchedule
from potluck.integrations.trainerpart import InRun, TrainerPart
from potluck.optim.gradscaler import Unscaler
from potluck.run.joined import Joined

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PotluckStrategy(InRun, Strategy):
    """Train in a run, together with all peers that are there. The arguments are those of lightning-hivemind, and ours.

    See docs/integrations.md for each of them.
    """

    strategy_name = "potluck"
    optimizers: list[Optimizer]

    def __init__(
        self,
        target_batch_size: int | None = None,
        run_id: str = "",
        batch_size: int | None = None,
        *,
        algorithm: Algorithm = "sync",
        initial_peers: str | list[str] | None = None,
        scheduler_fn: Callable[[Optimizer], LRScheduler] | LRScheduler | None = None,
        embedded: EmbeddedConfig | None = None,
        run: Joined | None = None,
        verbose: bool = False,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **options: Any,
    ) -> None:
        """`target_batch_size` samples of all peers make a step; `batch_size` is that of a batch, if it must be said.

        `initial_peers` is the run's join link (else POTLUCK_LINK); without one a run is started here, as `embedded`
        says, and its link is printed. `run` is one that is joined already. `options` are those of JoinConfig
        (identity_path, client_mode, listen, …), OptimizerConfig or DiLoCoConfig, or hivemind's names for them.
        """
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self._part = TrainerPart(
            SampleCounter(batch_size, batches.size_of),
            target_batch_size=target_batch_size,
            algorithm=algorithm,
            initial_peers=initial_peers,
            run_id=run_id,
            embedded=embedded,
            run=run,
            verbose=verbose,
            options=options,
        )
        self._scheduler_fn = scheduler_fn
        self._unscaler: Unscaler | None = None
        self.parallel_devices: list[torch.device] | None = None  # Lightning puts those of the Trainer here

    # The life of a fit

    def setup(self, trainer: Trainer) -> None:
        """Make optimizer and schedulers, and refuse what cannot be done."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        inner = checks.the_optimizer(self.optimizers)
        self._take_scheduler_fn(inner)
        module = self.lightning_module
        assert module is not None
        checks.check_schedulers(self.lr_scheduler_configs, is_manual=not module.automatic_optimization)
        if self._scaler is not None and self._part.training.reuses_gradients:
            raise ConfigurationError(
                "precision='16-mixed' scales each batch's gradients anew, and reuse_grad_buffers adds them up where "
                "they are: leave reuse_grad_buffers out"
            )
        self.optimizers = [self._part.wrap(inner)]

    def _take_scheduler_fn(self, inner: Optimizer) -> None:
        """The strategy's scheduler takes the place of those that configure_optimizers made."""
        if self._scheduler_fn is None:
            return
        if self.lr_scheduler_configs:
            logger.warning("scheduler_fn takes the place of the scheduler that configure_optimizers returns")
            for group in inner.param_groups:
                group["lr"] = group.get("initial_lr", group["lr"])
        given = self._scheduler_fn
        scheduler = given if isinstance(given, LRScheduler) else given(inner)
        if scheduler.optimizer is not inner:
            raise ConfigurationError("scheduler_fn's scheduler belongs to another optimizer: give a function of one")
        self.lr_scheduler_configs = [LRSchedulerConfig(scheduler, interval="step")]

    def on_train_start(self) -> None:
        """Join the run, and take over its state; whatever a checkpoint brought is in place by now."""
        module, optimizer = self.lightning_module, self._part.optimizer
        assert module is not None
        assert optimizer is not None
        self._part.begin(module, self._schedule(), self._clip)
        self._unscaler = Unscaler(optimizer.parameters, optimizer)

    def _schedule(self) -> RunSchedule | None:
        """The schedulers, to be stepped by the run; Lightning gets mirrors of them."""
        configs = self.lr_scheduler_configs
        if not configs:
            return None
        schedule = RunSchedule([(config.scheduler, config.frequency) for config in configs])
        for config, mirror in zip(configs, schedule.mirrors(), strict=True):
            config.scheduler = mirror
        return schedule

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Count the samples."""
        self._part.counter.saw(batch)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute a batch's gradients and hand them in."""
        loss = closure()
        module = self.lightning_module
        assert module is not None
        if loss is None and module.automatic_optimization:  # training_step left this batch out
            self._part.counter.reset()
            return None
        scaler = self._scaler
        if scaler is not None and self._unscaler is not None:
            self._unscaler.unscale(scaler)
        call._call_callback_hooks(module.trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(module.trainer, "on_before_optimizer_step", optimizer)
        optimizer.step(**kwargs)
        if self.is_over:
            module.trainer.should_stop = True
        if scaler is not None:
            scaler.update()
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._part.tell_loss(loss)
        return loss

    @property
    def _scaler(self) -> Any:
        """Of mixed precision in 16 bits; None elsewhere."""
        return getattr(self.precision_plugin, "scaler", None)

    def _clip(self, inner: Optimizer) -> None:
        """Clip what is stepped on, as the module says."""
        module = self.lightning_module
        assert module is not None
        if module.automatic_optimization:
            module.configure_gradient_clipping(
                inner,
                gradient_clip_val=module.trainer.gradient_clip_val,
                gradient_clip_algorithm=module.trainer.gradient_clip_algorithm,
            )

    def on_train_end(self) -> None:
        """Bring in what is under way, and what waits."""
        self._part.finish()

    def teardown(self) -> None:
        """Leave the run."""
        try:
            self._part.leave()
        finally:
            super().teardown()

    # One process, one device

    @property
    def root_device(self) -> torch.device:
        """Where this peer computes."""
        return checks.device_of(self.accelerator, self.parallel_devices)

    def model_to_device(self) -> None:
        """Put the model where this peer computes."""
        assert self.model is not None
        self.model.to(self.root_device)

    @property
    def is_global_zero(self) -> bool:
        """Every peer logs and saves for itself."""
        return True

    @property
    def global_rank(self) -> int:
        """Peers are not numbered."""
        return 0

    def reduce(self, tensor: T, *_: Any, **__: Any) -> T:
        """Metrics are each peer's own."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Metrics are each peer's own."""
        return tensor

    def barrier(self, name: str | None = None) -> None:
        """Nobody waits for anybody outside of rounds."""

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Each peer's own."""
        return obj

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Under the names that `Trainer(strategy=…)` takes."""
        for name, algorithm in (("potluck", "sync"), ("potluck_diloco", "diloco")):
            if name not in strategy_registry:
                strategy_registry.register(
                    name, cls, description="Train together with others, by Potluck", algorithm=algorithm
                )


def register() -> None:
    """Make the strategy's names known to Lightning."""
    PotluckStrategy.register_strategies(StrategyRegistry)
