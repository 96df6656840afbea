"""Learning rates by epochs of the run.

A framework steps a scheduler with each batch, or each pass over its own data. In a run neither means anything: peers
have batches and data of their own, and all of them must take an epoch's step with the same learning rate. So the
run's optimizer steps the schedulers, once an epoch of the run (`RunSchedule`), and they are part of the state that all
peers hold; the framework gets a `Mirror`, which can be looked at and saved, and whose `step` does nothing.

ReduceLROnPlateau follows a metric, and each peer measures its own. So what peers have measured since the last time is
averaged with each epoch, weighted as their gradients are; as soon as those who did half of an epoch's samples have
measured, all peers step it with the same mean (`_Plateau`). Its patience counts such means.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from potluck.errors import ConfigurationError

logger = logging.getLogger(__name__)

SEPARATOR = "/"
ENOUGH = 0.5  # of an epoch's samples are those of peers that have measured


class RunSchedule:
    """Schedulers of one optimizer, each stepped every so many epochs of the run, or with what all have measured."""

    def __init__(self, schedulers: Sequence[tuple[LRScheduler, int]]) -> None:
        self._schedulers = [scheduler for scheduler, _ in schedulers]
        self._every = {
            number: every
            for number, (scheduler, every) in enumerate(schedulers)
            if not isinstance(scheduler, ReduceLROnPlateau)
        }
        self._plateaus = {
            number: _Plateau(scheduler)
            for number, (scheduler, _) in enumerate(schedulers)
            if isinstance(scheduler, ReduceLROnPlateau)
        }
        for every in self._every.values():
            if every < 1:
                raise ConfigurationError(f"a scheduler's frequency is {every}: it must be 1 or more")
        # Those that come out of a checkpoint have been stepped before.
        self.epochs = max((self._schedulers[n].last_epoch * every for n, every in self._every.items()), default=0)

    @property
    def optimizer(self) -> Optimizer:
        """Whose learning rates they set."""
        return self._schedulers[0].optimizer

    @property
    def follows_metric(self) -> bool:
        """Whether one of them needs to be told a metric."""
        return bool(self._plateaus)

    def mirrors(self) -> list[LRScheduler]:
        """What the framework gets in their place."""
        return [
            PlateauMirror(self._plateaus[number]) if number in self._plateaus else Mirror(scheduler)
            for number, scheduler in enumerate(self._schedulers)
        ]

    def step(self) -> None:
        """An epoch of the run is done."""
        self.epochs += 1
        for number, every in self._every.items():
            if self.epochs % every == 0:
                self._schedulers[number].step()

    def measures(self) -> dict[str, Tensor]:
        """What this peer has measured and not heard the mean of."""
        return {str(number): plateau.measure() for number, plateau in self._plateaus.items()}

    def hear(self, averages: Mapping[str, Tensor]) -> None:
        """What all have measured: the same for all peers, and so are the learning rates that come of it."""
        for number, average in averages.items():
            self._plateaus[int(number)].hear(average)

    def state_dict(self) -> dict[str, Any]:
        """All numbers in it, nested ones by PATH/TO/NUMBER: what peers compare and send holds no nested values."""
        return _flat(self._nested())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what there is; what is not a number, a function say, stays this peer's own."""
        nested = self._nested()
        for path, value in state.items():
            _put(nested, path.split(SEPARATOR), value)
        self.epochs = int(nested["epochs"])
        for scheduler, own in zip(self._schedulers, nested["schedulers"], strict=True):
            scheduler.load_state_dict(own)

    def _nested(self) -> dict[str, Any]:
        return {"epochs": self.epochs, "schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}


class _Plateau:
    """A ReduceLROnPlateau, and what this peer has measured for it."""

    def __init__(self, scheduler: ReduceLROnPlateau) -> None:
        self.scheduler = scheduler
        self._measured: Tensor | None = None  # since the last mean
        self._travelling: Tensor | None = None

    def told(self, metric: SupportsFloat) -> None:
        """This peer has measured; the newest counts."""
        value = float(metric)
        if math.isfinite(value):
            self._measured = torch.tensor([value, 1.0])
        else:
            logger.warning("a metric of %s says nothing to ReduceLROnPlateau: it is left out", value)

    def measure(self) -> Tensor:
        """The metric and how much it counts; both are averaged, so their ratio is the mean over those who measured."""
        self._travelling = self._measured
        return self._measured.clone() if self._measured is not None else torch.zeros(2)

    def hear(self, average: Tensor) -> None:
        """Step, if enough have measured; what came meanwhile counts for the next time."""
        total, share = average.tolist()
        if share >= ENOUGH:
            self.scheduler.step(total / share)
            if self._measured is self._travelling:
                self._measured = None


class Mirror(LRScheduler):
    """A scheduler for the framework to look at. The run steps the one behind it."""

    def __init__(self, scheduler: LRScheduler) -> None:
        # torch's own __init__ is left out on purpose: it would take a first step.
        self._mirrored = scheduler

    def __getattr__(self, name: str) -> Any:
        if name == "_mirrored":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self._mirrored, name)

    def step(self, *_: Any, **__: Any) -> None:
        """Nothing: epochs of the run do it."""

    def get_last_lr(self) -> list[Any]:
        """The learning rates as they are now."""
        return [group["lr"] for group in self._mirrored.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """That of the scheduler, so that a checkpoint is one like any other."""
        return self._mirrored.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the scheduler."""
        self._mirrored.load_state_dict(state_dict)


class PlateauMirror(Mirror, ReduceLROnPlateau):
    """The same for ReduceLROnPlateau, which frameworks know by its type: a step hands this peer's metric in."""

    def __init__(self, plateau: _Plateau) -> None:
        super().__init__(plateau.scheduler)
        self._plateau = plateau

    def step(self, metrics: SupportsFloat | None = None, *_: Any, **__: Any) -> None:  # type: ignore[override]
        """This peer has measured."""
        if metrics is None:
            raise ConfigurationError("ReduceLROnPlateau follows a metric, and was stepped without one: step(metric)")
        self._plateau.told(metrics)


class Constant(LRScheduler):
    """The learning rate stays what it is: for frameworks that insist on a scheduler."""

    def get_lr(self) -> list[Any]:
        """As they are."""
        return [group["lr"] for group in self.optimizer.param_groups]


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """The plain leaves of nested dicts and lists, by their paths; a list of plain values is a leaf."""
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        items = enumerate(value)
    else:
        return {path: value}
    found: dict[str, Any] = {}
    for key, item in items:
        found |= _flat(item, f"{path}{SEPARATOR}{key}" if path else str(key))
    return found


def _put(nested: Any, path: list[str], value: Any) -> None:
    """Set one leaf, if there is such a place here."""
    for position, key in enumerate(path):
        place: Any = int(key) if isinstance(nested, list) else _key(nested, key)
        if position == len(path) - 1:
            nested[place] = value
        elif place in nested if isinstance(nested, dict) else place < len(nested):
            nested = nested[place]
        else:
            return


def _key(nested: Any, text: str) -> Any:
    """The key that reads so: not all are strings (milestones are counted by number)."""
    if not isinstance(nested, dict):
        return text
    return next((key for key in nested if str(key) == text), text)
