"""One way of training together: what is averaged, and what becomes of the average. No I/O, no time, no threads.

    local work ──▶ offer() ──▶ [a round] ──▶ accept() ──▶ land()
                      ▲            │ failed
                      └─ withdraw()┘          fell behind: left_behind(), load(the state of others)

The driver (driver.py) does everything else: it asks for an offer when a round is due, has its tensors averaged in
place, and tells the method how that ended. A new method is one file with one subclass of `Method`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from potluck.optim.staging import Moment

Metadata = dict[str, Any]
"""What belongs to a state beside tensors: numbers, texts, lists and dicts of them, as JSON can hold.

What stands under "own" is each peer's own, and the rest is the same for all."""


class Offer:
    """What a peer brings to a round. The averages are written into the tensors."""

    def __init__(
        self,
        tensors: dict[str, Tensor] | Callable[[], dict[str, Tensor]],
        weight: float,
        detail: Any = None,
        made_of: Iterable[Tensor] = (),
        phases: float = 0.0,
    ) -> None:
        """`detail` is whatever the method wants to find again when the round is over.

        Where it takes long to make the tensors, give a function that does so out of copies: for a round in the
        background it is called in a worker. `made_of` are those copies: where they are on a GPU, the worker's stream
        waits for this thread's. `phases` are those of paths that it stands for (paths/).
        """
        self._given_at = Moment(made_of)
        self.weight = weight
        self.phases = phases
        self.detail = detail
        self._tensors = tensors

    @property
    def is_made(self) -> bool:
        """Whether the tensors are there."""
        return not callable(self._tensors)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By the names by which they travel; made when they are first asked for."""
        if callable(self._tensors):
            self._given_at.wait_on_device()
            self._tensors = self._tensors()
        return self._tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run after an epoch: the same, to the last bit, for all who hold it, but for what is their own."""

    epoch: int
    tensors: Mapping[str, Tensor]
    metadata: Metadata = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    """Tensors that are each peer's own, as local statistics are."""

    steady: frozenset[str] = frozenset()
    """Of a state that is published: tensors that do not change until they are copied (see StateSource.publish)."""

    is_held: bool = False
    """Of a state that is published: whether this peer itself may want it back."""

    num_chunks: int = 0
    num_moved_chunks: int = 0
    """Of a state that was fetched: the pieces it is kept in, and how many of them were not at hand."""

    is_as_base: bool = False
    """Whether a fetched state has the same tensors as before, except for its own ones."""


class Published(Protocol):
    """A state that was published, and may be copied while training goes on."""

    def wait_until_copied(self) -> None:
        """Called before the state's steady tensors are changed, in whichever thread does so."""
        ...

    def tensors(self) -> Mapping[str, Tensor] | None:
        """Of a state that is held: the tensors as they were; None where they could not be copied."""
        ...

    def release(self) -> None:
        """Of a state that is held: it is not wanted back any more. Called once."""
        ...


class StateSource(Protocol):
    """Where states are kept and fetched from, by those who fell behind, came late, or deviate."""

    def publish(self, snapshot: RunState) -> Published | None:
        """A new epoch stands. Called in the training thread; the tensors are live, and change after it returns.

        Those that the snapshot calls steady may be read until `wait_until_copied` of what is returned has come back;
        None: everything was copied here and now.
        """
        ...

    async def resume(self, *, base: Mapping[str, Tensor], timeout_seconds: float) -> RunState | None:
        """The state to begin with, of any peer; None: nobody has one. Called on the event loop, once."""
        ...

    async def fetch(self, *, at_least_epoch: int, base: Mapping[str, Tensor], timeout_seconds: float) -> RunState:
        """A state of that epoch or a later one; RetryableError when nobody has one now. Called on the event loop.

        `base` is what this peer has; it does not change meanwhile. Nor do, from then on, the tensors that are returned.
        """
        ...

    def deviates(self) -> bool:
        """Whether what was published is not what others published of the same epoch. Cheap; called in any thread."""
        ...

    async def repair(self, *, epoch: int, base: Mapping[str, Tensor], timeout_seconds: float) -> RunState | None:
        """What most others hold, of that epoch or a later one; None: after all, this peer holds it."""
        ...

    def statistics(self) -> dict[str, int]:
        """Counters."""
        ...


Hyperparameters = Callable[[int], None]
"""Sets learning rates and the like for the step that takes this epoch to the next: the same on all peers."""


class Method(ABC):
    """A way of training together. All calls but `accept` come from the user's thread, and never two at once."""

    @abstractmethod
    def offer(self, epoch: int) -> Offer:
        """What to average for this epoch. What it holds is not touched until the round is over."""

    @abstractmethod
    def blank(self, epoch: int) -> Offer:
        """Room for the averages of this epoch, without weight: for a peer that only listens, or hears them later.

        Local work is left where it is; `accept` of it keeps that work on top of the new state, where work is kept.
        """

    @abstractmethod
    def accept(self, offer: Offer, *, epoch: int, alone: bool) -> None:
        """The epoch is committed and the offer's tensors hold the averages (`alone`: just our own values, untouched).

        With a delayed step this is called in another thread, while the user's thread computes: only what `land` hands
        over may be shared with the model then.
        """

    @abstractmethod
    def withdraw(self, offer: Offer) -> None:
        """The round failed, or went on without us: the offer's tensors are as we gave them."""

    def left_behind(self, offer: Offer, *, contributed: float) -> None:
        """The epoch stands without us, and this share of the offer is in it all the same: a state will be loaded."""
        self.withdraw(offer)

    @abstractmethod
    def discard(self) -> None:
        """Local work since the last epoch is worthless: another state is about to be loaded."""

    def forget(self) -> None:
        """The run has gone back on purpose: nothing of this peer's own work since then may stay."""
        self.discard()

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All that a newcomer needs, by the names by which it travels; live tensors."""

    @abstractmethod
    def metadata(self) -> Metadata:
        """What a newcomer needs beside tensors."""

    @abstractmethod
    def load(self, tensors: Mapping[str, Tensor], metadata: Metadata) -> None:
        """Take over somebody's state."""

    def load_numbers(self, metadata: Metadata) -> None:
        """Take over what somebody has beside tensors that are the same here: no work is lost."""
        self.load(self.tensors(), metadata)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that this peer needs to go on with the same bits, local work included."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""

    def renumber(self, by: int) -> None:  # noqa: B027 - most methods do the same in each epoch
        """What was epoch e is e + `by` from now on: the state was saved in another run. Whose turn it is stays."""

    @property
    def is_spoilt(self) -> bool:
        """Whether local steps have made something that is not finite, so that only going back helps."""
        return False

    def statistics(self) -> dict[str, int]:
        """Counters."""
        return {}

    def is_own(self, name: str) -> bool:
        """Whether one of `tensors` is each peer's own: in all others, who holds an epoch should hold the same bits."""
        return False

    def is_steady(self, name: str) -> bool:
        """Whether one of `tensors` changes nowhere but in `accept`, `load`, `load_numbers` and `load_state_dict`.

        Such a tensor is copied by a worker when an epoch stands, all others in the user's thread. Where local steps
        change it too, who takes them calls `Driver.before_change` first.
        """
        return False

    def land(self) -> None:  # noqa: B027 - most methods have nothing to bring over
        """Bring what `accept` made into the user's model. Called in the user's thread."""
