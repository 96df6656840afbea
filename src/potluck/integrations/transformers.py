"""The Trainer of Hugging Face's transformers in a run: a callback, and an optimizer that it makes.

    from potluck.integrations.transformers import PotluckCallback

    together = PotluckCallback(target_batch_size=4096)       # the run's link: initial_peers=…, or POTLUCK_LINK
    trainer = Trainer(
        model, args, train_dataset=data,
        callbacks=[together],
        optimizers=together.optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3)),
    )
    trainer.train()

The run is joined when training begins, with whatever a checkpoint brought, and left when it ends, after samples that
wait for their epoch were handed in. The Trainer goes on
counting its own steps; epochs of the run are told in its log, together with everybody's progress. Gradients are clipped
to `max_grad_norm` where the step is made, so that it is the run's average that is clipped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from potluck.errors import ConfigurationError
from potluck.integrations.algorithms import Algorithm
from potluck.integrations.embeddedrun import EmbeddedConfig
from potluck.integrations.extras import require
from potluck.integrations.runoptimizer import RunOptimizer
from potluck.integrations.samples import SampleCounter, unknown_size
from potluck.integrations.schedules import Constant, RunSchedule
from potluck.integrations.trainerpart import InRun, TrainerPart
from potluck.run.joined import Joined

require("transformers", "transformers")

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402

logger = logging.getLogger(__name__)

__all__ = ["PotluckCallback"]


class PotluckCallback(InRun, TrainerCallback):
    """One Trainer's part in a run. Also a context manager, so that the run is left when training fails."""

    def __init__(
        self,
        target_batch_size: int | None = None,
        *,
        algorithm: Algorithm = "sync",
        initial_peers: str | list[str] | None = None,
        run_id: str = "",
        batch_size: int | None = None,
        embedded: EmbeddedConfig | None = None,
        run: Joined | None = None,
        verbose: bool = False,
        **options: Any,
    ) -> None:
        """The arguments are those of PotluckStrategy: see docs/integrations.md."""
        self._part = TrainerPart(
            SampleCounter(batch_size, _size_of),
            target_batch_size=target_batch_size,
            algorithm=algorithm,
            initial_peers=initial_peers,
            run_id=run_id,
            embedded=embedded,
            run=run,
            verbose=verbose,
            options=options,
        )
        if self._part.training.reuses_gradients:
            raise ConfigurationError(
                "the Trainer clears the model's gradients after each step, where reuse_grad_buffers would keep sums: "
                "leave reuse_grad_buffers out"
            )
        self._schedule: RunSchedule | None = None
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._max_grad_norm: float | None = None
        self._told_epoch = 0

    def optimizers(
        self, optimizer: Optimizer, scheduler: Callable[[Optimizer], LRScheduler] | LRScheduler | None = None
    ) -> tuple[RunOptimizer, LRScheduler]:
        """What `Trainer(optimizers=…)` takes. The scheduler counts epochs of the run; without one, nothing changes."""
        made = scheduler if isinstance(scheduler, LRScheduler) else (scheduler or Constant)(optimizer)
        if made.optimizer is not optimizer:
            raise ConfigurationError("the scheduler belongs to another optimizer: give a function that makes one")
        self._schedule = RunSchedule([(made, 1)])
        [mirror] = self._schedule.mirrors()
        return self._part.wrap(optimizer), mirror

    # What the Trainer calls

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Join the run, and take over its state; whatever a checkpoint brought is in place by now."""
        model: nn.Module = kwargs["model"]
        self._check(args)
        self._max_grad_norm, args.max_grad_norm = args.max_grad_norm, 0.0  # ours to do, on the average
        try:
            self._part.begin(model, self._schedule, self._clip)
            self._hook = model.register_forward_pre_hook(self._saw, with_kwargs=True)
        except BaseException:
            self._leave(args)
            raise
        self._told_epoch = self.epoch

    def _saw(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Samples are counted by what goes into the model while it trains."""
        if model.training and torch.is_grad_enabled():
            self._part.counter.saw((*args, *kwargs.values()))

    def _check(self, args: TrainingArguments) -> None:
        if self._part.optimizer is None or self._schedule is None:
            raise ConfigurationError(
                "the Trainer made its own optimizer, which is not in the run: give it ours, by "
                "Trainer(optimizers=callback.optimizers(torch.optim.AdamW(…)))"
            )
        if args.n_gpu > 1 or args.world_size > 1:
            raise ConfigurationError(
                f"{max(args.n_gpu, args.world_size)} devices: a peer computes on one. Start a program for each, with "
                "CUDA_VISIBLE_DEVICES naming its own"
            )
        if args.fp16 and self._part.training.offloads:
            raise ConfigurationError(
                "fp16=True scales the model's gradients, and offload_optimizer hides them: bf16=True"
            )
        if self._schedule.follows_metric and (args.eval_strategy == "no" or args.metric_for_best_model is None):
            raise ConfigurationError(
                "ReduceLROnPlateau has no metric to follow: TrainingArguments(eval_strategy='steps', "
                "metric_for_best_model='loss'), and peers share what they measure"
            )

    def _clip(self, inner: Optimizer) -> None:
        if self._max_grad_norm:
            parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self._max_grad_norm)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell how far everybody is, once an epoch of the run; end with the run."""
        if self.is_over:
            control.should_training_stop = True
        self._part.counter.reset()  # a step that the gradient scaler left out has not taken them
        if self.epoch > self._told_epoch:
            self._told_epoch = self.epoch
            logger.info("%s", ", ".join(f"{name} {value}" for name, value in self.progress().items()))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Put own and global progress beside what the Trainer logs."""
        if logs is None or self.shared is None:
            return
        if "loss" in logs:
            self._part.tell_loss(logs["loss"])
        logs.update(self.progress())
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(self.progress())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Bring in what is under way and what waits, and leave the run."""
        self._part.finish()
        self._leave(args)

    def _leave(self, args: TrainingArguments) -> None:
        if self._max_grad_norm is not None:
            args.max_grad_norm, self._max_grad_norm = self._max_grad_norm, None
        self.close()

    def close(self) -> None:
        """Leave the run, if training has not ended in an orderly way. Idempotent."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._part.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _size_of(values: Iterable[Any]) -> int:
    for value in values:
        if isinstance(value, Tensor) and value.ndim > 0:
            return len(value)
    raise unknown_size("the size of a batch cannot be inferred: no tensor goes into the model")
