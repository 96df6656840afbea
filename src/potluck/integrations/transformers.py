"""The Trainer of Hugging Face's transformers in a run: a callback, and an optimizer that it makes.

    from potluck.integrations.transformers import PotluckCallback

    together = PotluckCallback(target_batch_size=4096)       # the run's link: initial_peers=…, or POTLUCK_LINK
    trainer = Trainer(
        model, args, train_dataset=data,
        callbacks=[together],
        optimizers=together.optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3)),
    )
    trainer.train()

The run is joined when training begins, with whatever a checkpoint brought, and left when it ends. The Trainer goes on
counting its own steps; epochs of the run are told in its log, together with everybody's progress. Gradients are clipped
to `max_grad_norm` where the step is made, so that it is the run's average that is clipped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from potluck.errors import ConfigurationError
from potluck.integrations.algorithms import Algorithm, SharedOptimizer, TrainingConfig, buffers_of
from potluck.integrations.embedded import EmbeddedConfig
from potluck.integrations.extras import require
from potluck.integrations.joining import PEER_OPTIONS, JoinConfig, Participation, take_part
from potluck.integrations.naming import translated
from potluck.integrations.runoptimizer import RunOptimizer
from potluck.integrations.schedules import Constant, Mirror, RunSchedule
from potluck.peer import environment
from potluck.run.joined import Joined

require("transformers", "transformers")

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402

logger = logging.getLogger(__name__)

__all__ = ["PotluckCallback"]


class PotluckCallback(TrainerCallback):
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
        chosen = translated(options)
        about_peer = {name: chosen.pop(name) for name in PEER_OPTIONS if name in chosen}
        self._training = TrainingConfig(
            algorithm=algorithm,
            target_batch_size=target_batch_size or environment.target_batch_size(),
            options=chosen,
        )
        if self._training.reuses_gradients:
            raise ConfigurationError(
                "the Trainer clears the model's gradients after each step, where reuse_grad_buffers would keep sums: "
                "leave reuse_grad_buffers out"
            )
        self._join = JoinConfig(
            initial_peers=initial_peers,
            run_id=run_id,
            embedded=embedded or EmbeddedConfig(),
            verbose=verbose,
            **about_peer,
        )
        self._given_run = run
        self._counter = _SampleCounter(batch_size)
        self._optimizer: RunOptimizer | None = None
        self._schedule: RunSchedule | None = None
        self._participation: Participation | None = None
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
        self._optimizer = RunOptimizer(optimizer, self._counter.take)
        return self._optimizer, Mirror(made)

    # Where we are

    @property
    def link(self) -> str:
        """By which others join a run that was started here; empty where it was not, and before training."""
        return self._participation.link if self._participation is not None else ""

    @property
    def shared(self) -> SharedOptimizer | None:
        """The run's optimizer, while training."""
        return self._optimizer.shared if self._optimizer is not None else None

    @property
    def epoch(self) -> int:
        """How many updates of the run this peer's parameters hold; 0 when not in a run."""
        return self.shared.epoch if self.shared is not None else 0

    @property
    def num_peers(self) -> int:
        """How many trainers are in the run now; 1 when not in a run."""
        return self._participation.num_peers if self._participation is not None else 1

    def progress(self) -> dict[str, float]:
        """This peer's own progress, and the run's, by the names under which they are logged."""
        if self.shared is None:
            return {}
        own: dict[str, float] = {
            "potluck_epoch": self.shared.epoch,
            "potluck_own_samples": self._counter.total,
            "potluck_peers": self.num_peers,
        }
        latest = self.shared.collaboration.latest
        if latest is None:
            return own
        return own | {
            "potluck_run_samples": latest.samples,
            "potluck_run_samples_per_second": round(latest.samples_per_second, 1),
        }

    # What the Trainer calls

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Join the run, and take over its state; whatever a checkpoint brought is in place by now."""
        model: nn.Module = kwargs["model"]
        optimizer = self._check(args)
        self._participation = take_part(self._join, self._given_run)
        run, buffers = self._participation.run, buffers_of(model)
        self._max_grad_norm, args.max_grad_norm = args.max_grad_norm, 0.0  # ours to do, on the average
        try:
            optimizer.begin(
                lambda inner: self._training.make(run, inner, schedule=self._schedule, buffers=buffers),
                clip=self._clip,
            )
            self._counter.watch(model)
        except BaseException:
            self._leave(args)
            raise
        self._told_epoch = self.epoch
        logger.info("training in the run %s as %s", run.peer.session.subjects.run, run.peer_id)

    def _check(self, args: TrainingArguments) -> RunOptimizer:
        if self._optimizer is None:
            raise ConfigurationError(
                "the Trainer has an optimizer of its own, which does not take part in the run: give it ours, by "
                "Trainer(optimizers=callback.optimizers(torch.optim.AdamW(…)))"
            )
        if args.n_gpu > 1 or args.world_size > 1:
            raise ConfigurationError(
                f"{max(args.n_gpu, args.world_size)} devices: a peer computes on one. Start a program for each, with "
                "CUDA_VISIBLE_DEVICES naming its own"
            )
        if args.fp16 and self._training.offloads:
            raise ConfigurationError(
                "fp16=True scales the model's gradients, and offload_optimizer hides them: bf16=True"
            )
        return self._optimizer

    def _clip(self, inner: Optimizer) -> None:
        if self._max_grad_norm:
            parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self._max_grad_norm)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell how far everybody is, once an epoch of the run."""
        self._counter.reset()  # a step that the gradient scaler left out has not taken them
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
        if logs is None or self._participation is None:
            return
        if "loss" in logs:
            self._participation.tell_loss(logs["loss"])
        logs.update(self.progress())
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(self.progress())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Bring in what is under way, and leave the run."""
        if self._optimizer is not None:
            self._optimizer.finish()
        self._leave(args)

    def _leave(self, args: TrainingArguments) -> None:
        if self._max_grad_norm is not None:
            args.max_grad_norm, self._max_grad_norm = self._max_grad_norm, None
        self.close()

    def close(self) -> None:
        """Leave the run, if training has not ended in an orderly way. Calling it twice does no harm."""
        participation, self._participation = self._participation, None
        self._counter.stop()
        try:
            if self._optimizer is not None:
                self._optimizer.end()
        finally:
            if participation is not None:
                participation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _SampleCounter:
    """Counts the samples that a model computes with between two steps, by looking at what goes into it."""

    def __init__(self, batch_size: int | None) -> None:
        """`batch_size` is that of every batch; None: each is looked at."""
        if batch_size is not None and batch_size < 1:
            raise ConfigurationError(f"batch_size={batch_size}: it must be 1 or more")
        self.total = 0
        self._batch_size = batch_size
        self._samples = 0
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    def watch(self, model: nn.Module) -> None:
        """Look at whatever goes into the model while it trains."""
        self._hook = model.register_forward_pre_hook(self._saw, with_kwargs=True)

    def stop(self) -> None:
        """Look no more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def take(self) -> int:
        """The samples since the last step."""
        samples = self._samples
        self.reset()
        self.total += samples
        return samples

    def reset(self) -> None:
        """Forget what came in vain."""
        self._samples = 0

    def _saw(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training and torch.is_grad_enabled():
            self._samples += self._batch_size if self._batch_size is not None else _size_of(args, kwargs)


def _size_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.ndim > 0:
            return len(value)
    raise ConfigurationError(
        "the size of a batch cannot be inferred: no tensor goes into the model. Say it: PotluckCallback(batch_size=…)"
    )
