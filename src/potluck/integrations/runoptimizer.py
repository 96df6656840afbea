"""A torch optimizer that becomes the run's when training begins.

Frameworks make an optimizer early, wrap it, move it and load checkpoints into it, and train much later. Until `begin`
this is the inner optimizer and nothing else; from then on a step hands a batch in to the run. So whatever a checkpoint
brings is there before the run is joined: who is the first brings it along, and who comes later takes the run's state.

Checkpoints are those of the inner optimizer, which any other program can load; what only a run needs (gradients that
wait for their epoch, the outer optimizer's memory) is in them too, under a name of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Parameter

from potluck.errors import ConfigurationError
from potluck.training.trainer.ownloop import ProgramOptimizer

logger = logging.getLogger(__name__)

OURS = "potluck"  # in a checkpoint of the optimizer
CAME_LATER = ("resumed", "caught_up")  # counters of who found the run's state


class RunOptimizer(torch.optim.Optimizer):
    """Around any torch optimizer."""

    def __init__(self, inner: torch.optim.Optimizer, count: Callable[[], int]) -> None:
        """`count` tells how many samples a step is of, where the step itself does not."""
        # torch's own __init__ is left out on purpose: groups and state are those of the optimizer that we wrap.
        self.inner = inner
        self._count = count
        self.shared: ProgramOptimizer | None = None
        self._saved: dict[str, Any] | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    # Before, and after

    def begin(
        self,
        make: Callable[[torch.optim.Optimizer], ProgramOptimizer],
        clip: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> ProgramOptimizer:
        """Have steps made by the run from now on. `clip` sees the gradients that are stepped on: the run's average."""
        if self.shared is not None:
            raise ConfigurationError("this optimizer trains in a run already: make another for another run")
        shared = make(self.inner)
        self.shared = shared
        if clip is not None and shared.hosted is None:  # a hosted run's own clipping counts, for all alike
            self._hooks.append(self.inner.register_step_pre_hook(lambda inner, _args, _kwargs: clip(inner)))
        counts = shared.statistics()
        if any(counts.get(name) for name in CAME_LATER):
            logger.info("the run has a state, of epoch %d, and this peer goes on from that", shared.epoch)
        elif self._saved is not None:
            method = {**self._saved["method"], "state": shared.state_dict()["method"]["state"]}
            shared.load_state_dict({**self._saved, "method": method})
        self._saved = None
        return shared

    def finish(self, hand_in_seconds: float = 0.0) -> int:
        """Bring in what a round in the background came to, and samples that wait, if their epoch comes in time.

        Returns how many of those did count.
        """
        if self.shared is None:
            return 0
        self.shared.driver.land()
        return self.shared.hand_in(hand_in_seconds) if hand_in_seconds > 0 else 0

    def end(self) -> None:
        """Be the inner optimizer again. The run itself is left by the code that joined it."""
        shared, self.shared = self.shared, None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if shared is not None:
            shared.shutdown()

    @property
    def parameters(self) -> list[Parameter]:
        """The model's own, also where the optimizer works on copies."""
        if self.shared is None:
            return [parameter for group in self.inner.param_groups for parameter in group["params"]]
        return list(self.shared.state_of_model.model.values())

    # torch's interface

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the wrapped optimizer."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the wrapped optimizer."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the wrapped optimizer."""
        return self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that were not handed in."""
        if self.shared is None:
            self.inner.zero_grad(set_to_none)
        else:
            self.shared.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None, batch_size: int | None = None) -> Any:
        """Hand in the gradients of a batch. One without gradients (its loss was left out) counts for nothing."""
        if self.shared is None:
            return self.inner.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        num_samples = batch_size if batch_size is not None else self._count()
        if _have_gradients(self.parameters):
            self.shared.step(batch_size=num_samples)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and what only a run needs."""
        if self.shared is None:
            return self.inner.state_dict()
        ours = self.shared.state_dict()  # lands what is under way, so it comes first
        ours["method"] = {name: value for name, value in ours["method"].items() if name != "state"}
        return {**self.inner.state_dict(), OURS: ours}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint. In a run that goes on already, its state is the one that counts."""
        if self.shared is not None:
            raise ConfigurationError("a checkpoint is loaded before training begins: the run's state counts by now")
        self._saved = state_dict.get(OURS)
        self.inner.load_state_dict({name: value for name, value in state_dict.items() if name != OURS})

    def __repr__(self) -> str:
        return f"RunOptimizer({self.shared if self.shared is not None else self.inner!r})"


def _have_gradients(parameters: Iterable[Parameter]) -> bool:
    return any(parameter.grad is not None for parameter in parameters)
