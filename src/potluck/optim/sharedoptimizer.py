"""What `potluck.Optimizer` and `potluck.DiLoCo` have in common: a model that steps with the others.

Each of the two says when this peer takes part in a round, and what it reports. Everything else is the same: they join
the rounds of a group, drive a method through its epochs, measure this peer's pace, and hand in the last samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from potluck.optim.collaboration import Collaboration, CollaborationConfig, join_collaboration, require_hub
from potluck.optim.driver import Driver, DriverConfig
from potluck.optim.gradscaler import Unscaler
from potluck.optim.keptstates import Source, source_of_states
from potluck.optim.method import Hyperparameters, Method
from potluck.optim.modelstate import ModelState
from potluck.optim.progress.pace import Pace
from potluck.round.codecs import CodecSpec
from potluck.run.joined import Joined
from potluck.state.config import StateConfig


class SharedConfig(CollaborationConfig, Protocol):
    """What the options of both have in common."""

    @property
    def state(self) -> StateConfig:
        """Whether this peer keeps states for others, and where and how often it writes backups."""
        ...

    def driver(self) -> DriverConfig:
        """How patient the driver is."""
        ...


class SharedOptimizer(ABC):
    """One peer's optimizer in a run. For one thread, the user's."""

    run: Joined
    collaboration: Collaboration
    driver: Driver
    method: Method
    state_of_model: ModelState

    def _join(
        self,
        run: Joined,
        config: SharedConfig,
        state: ModelState,
        method: Method,
        *,
        codec: CodecSpec | None,
        source: Source,
        hyperparameters: Hyperparameters,
    ) -> None:
        """Join the group's rounds; `codec` is for gradients, if not None. `_begin` then takes over the run's state."""
        self.run = run
        self.method = method
        self.state_of_model = state
        self._clock = run.clock
        self.collaboration = join_collaboration(run, config, codec)
        states = source_of_states(run, self.collaboration, source, config.state)
        self.driver = Driver(run, method, self.collaboration, config.driver(), states, hyperparameters)
        self._unscaler = Unscaler(state.model.values(), cast(torch.optim.Optimizer, self))

    def _begin(self, *, listens_on: bool = False) -> None:
        self.driver.begin(listens_on=listens_on)
        self._report()
        self.go_on()

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that is wrapped."""
        return self.state_of_model.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the wrapped optimizer."""
        return self.inner.param_groups

    @property
    def epoch(self) -> int:
        """How many updates of the run this peer's parameters hold."""
        return self.driver.epoch

    @property
    @abstractmethod
    def pace(self) -> Pace:
        """How fast this peer computes."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """This peer's samples towards the next epoch."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that were not handed in."""
        for parameter in self.state_of_model.model.values():
            parameter.grad = None

    def statistics(self) -> dict[str, int | float]:
        """Counters of this optimizer and of its rounds."""
        return {**self.driver.statistics(), **self.collaboration.averager.statistics()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that this peer needs to go on with the same bits: load it with `load_state_dict`."""
        return self.driver.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.driver.load_state_dict(state)
        self._report()

    def hand_in(self, timeout_seconds: float) -> int:
        """Bring this peer's samples into the run's next epoch, before leaving; how many samples counted.

        HubUnavailableError where there is no hub.
        """
        self.run.call(require_hub(self.run.peer.session))
        self.driver.land()
        samples = self.samples
        if not samples or self.driver.is_behind:
            return 0
        left = self._until_last_round(timeout_seconds)
        return samples if left is not None and self.driver.round(timeout_seconds=left) else 0

    def rest(self) -> None:
        """Nothing is computed for a while: report a speed of zero until the next step."""
        self._report(is_resting=True)

    def go_on(self) -> None:
        """The next step begins now. The pause before it does not count in this peer's speed."""
        self.pace.resume(self._clock.monotonic())

    def shutdown(self) -> None:
        """Bring in the round in the background, or leave it if it takes long; the run goes on until it is left."""
        self.driver.close()

    def _evaluate(self, closure: Callable[[], Any] | None) -> Any:
        """The loss, where the user gives a function for it."""
        self.run.check()
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    @abstractmethod
    def step(self, closure: Callable[[], Any] | None = None, batch_size: Any = None, grad_scaler: Any = None) -> Any:
        """Take the gradients of one batch. Returns what the closure returned."""

    @abstractmethod
    def _until_last_round(self, timeout_seconds: float) -> float | None:
        """Wait until this peer's last round may begin; how long it may take, or None if it does not come in time."""

    @abstractmethod
    def _report(self, *, leaving: bool = False, is_resting: bool = False) -> None:
        """Tell the coordinator how far this peer is, and how fast."""
