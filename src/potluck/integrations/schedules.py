"""Learning rates by epochs of the run.

A framework steps a scheduler with each batch, or each pass over its own data. In a run neither means anything: peers
have batches and data of their own, and all of them must take an epoch's step with the same learning rate. So the
run's optimizer steps the schedulers, once an epoch of the run (`RunSchedule`), and they are part of the state that all
peers hold; the framework gets a `Mirror`, which can be looked at and saved, and whose `step` does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from potluck.errors import ConfigurationError

SEPARATOR = "/"


class RunSchedule:
    """Schedulers of one optimizer, each stepped every so many epochs of the run."""

    def __init__(self, schedulers: Sequence[tuple[LRScheduler, int]]) -> None:
        self._schedulers = list(schedulers)
        for scheduler, every in self._schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                raise ConfigurationError(
                    "ReduceLROnPlateau follows one peer's own metric, and would give each peer another learning rate: "
                    "take a scheduler that depends on the epoch alone"
                )
            if every < 1:
                raise ConfigurationError(f"a scheduler's frequency is {every}: it must be 1 or more")
        # Those that come out of a checkpoint have been stepped before.
        self.epochs = max((scheduler.last_epoch * every for scheduler, every in self._schedulers), default=0)

    @property
    def optimizer(self) -> Optimizer:
        """Whose learning rates they set."""
        return self._schedulers[0][0].optimizer

    def step(self) -> None:
        """An epoch of the run is done."""
        self.epochs += 1
        for scheduler, every in self._schedulers:
            if self.epochs % every == 0:
                scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """All numbers in it, nested ones by PATH/TO/NUMBER: what peers compare and send holds no nested values."""
        return _flat(self._nested())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what there is; what is not a number, a function say, stays this peer's own."""
        nested = self._nested()
        for path, value in state.items():
            _put(nested, path.split(SEPARATOR), value)
        self.epochs = int(nested["epochs"])
        for (scheduler, _), own in zip(self._schedulers, nested["schedulers"], strict=True):
            scheduler.load_state_dict(own)

    def _nested(self) -> dict[str, Any]:
        return {"epochs": self.epochs, "schedulers": [scheduler.state_dict() for scheduler, _ in self._schedulers]}


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
