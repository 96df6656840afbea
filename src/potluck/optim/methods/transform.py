"""What is done to values before they are averaged, and to the averages afterwards: codecs with a memory.

    encode: values ──▶ what travels ──▶ [averaged over the peers] ──▶ decode: what the step uses

The codecs of a round forget; a transform remembers: what it left out of one epoch (error feedback), or what it has
learnt about the values. The memory moves on in `decode`, when the epoch stands: after a failed round the same values
are encoded again, from the memory as it was. What all peers must hold alike is *shared*, and part of the run's state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

Tensors = dict[str, Tensor]


class Transform(ABC):
    """A way to encode. One instance per model; not for several threads at once."""

    @abstractmethod
    def encode(self, values: Mapping[str, Tensor]) -> Tensors:
        """What travels instead of the values: tensors that may be written over. `values` may be spoilt or returned."""

    @abstractmethod
    def decode(self, averages: Mapping[str, Tensor]) -> Tensors:
        """What the step uses, from the averages of what travelled. The epoch stands: the memory moves on."""

    def abandon(self) -> None:  # noqa: B027 - without a memory there is nothing to undo
        """What was encoded last was not used."""

    def shared(self) -> Tensors:
        """Tensors of the memory that all peers hold alike."""
        return {}

    def shared_numbers(self) -> dict[str, Any]:
        """Numbers of the memory that all peers hold alike."""
        return {}

    def load_shared(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:  # noqa: B027
        """Take them over from somebody else; what is this peer's own begins anew."""

    def state_dict(self) -> dict[str, Any]:
        """The whole memory, for this peer to go on with the same bits."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Go on from a saved memory."""


class Plain(Transform):
    """Values travel as they are; the round's codecs do the rest."""

    def encode(self, values: Mapping[str, Tensor]) -> Tensors:
        """The values themselves."""
        return dict(values)

    def decode(self, averages: Mapping[str, Tensor]) -> Tensors:
        """The averages themselves."""
        return dict(averages)


class ErrorFeedback(Transform):
    """What an encoding leaves out is added to the next epoch's values. Subclasses say what is sent of a tensor.

    x = decay·e + value;  sent = send(x);  e ← x − sent    (so sent + e = decay·e + value, exactly what came in)
    """

    decay: float = 1.0

    def __init__(self) -> None:
        self._error: Tensors = {}
        self._pending: Tensors = {}

    @abstractmethod
    def send(self, name: str, values: Tensor) -> Tensor:
        """What the others will get of these values: a new tensor of the same shape."""

    def encode(self, values: Mapping[str, Tensor]) -> Tensors:
        """What is sent; what is left out becomes the next error when the epoch stands."""
        sent, self._pending = {}, {}
        for name, value in values.items():
            error = self._error.get(name)
            whole = value.clone() if error is None else value.add(error, alpha=self.decay)
            sent[name] = self.send(name, whole)
            self._pending[name] = whole.sub_(sent[name])
        return sent

    def decode(self, averages: Mapping[str, Tensor]) -> Tensors:
        """The averages; the error moves on."""
        self._commit()
        return dict(averages)

    def abandon(self) -> None:
        """The error stays as it was."""
        self._pending = {}

    def error_of(self, name: str) -> Tensor | None:
        """What is still owed of a tensor."""
        return self._error.get(name)

    def load_shared(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """What was left out of an outdated state is not owed any more."""
        self._error, self._pending = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """The error."""
        return {"error": {name: tensor.clone() for name, tensor in self._error.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a saved error."""
        self._error = {name: tensor.clone() for name, tensor in state["error"].items()}
        self._pending = {}

    def _commit(self) -> None:
        self._error.update(self._pending)
        self._pending = {}
