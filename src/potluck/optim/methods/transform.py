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

import torch
from torch import Tensor

from potluck.round.codecs import CodecSpec

Tensors = dict[str, Tensor]


class Transform(ABC):
    """A way to encode. One instance per model; not for several threads at once."""

    @abstractmethod
    def encode(self, values: Mapping[str, Tensor]) -> Tensors:
        """What travels instead of the values: tensors that may be written over. `values` may be spoilt or returned."""

    @abstractmethod
    def decode(self, averages: Mapping[str, Tensor]) -> Tensors:
        """What the step uses, from the averages of what travelled. The epoch stands: the memory moves on."""

    @property
    def codec(self) -> CodecSpec | None:
        """The codec that a round must use for what travels; None: any will do."""
        return None

    def abandon(self) -> None:  # noqa: B027 - without a memory there is nothing to undo
        """What was encoded last was not used."""

    def shared(self) -> Tensors:
        """Tensors of the memory that all peers hold alike."""
        return {}

    def shared_numbers(self) -> dict[str, Any]:
        """Numbers of the memory that all peers hold alike."""
        return {}

    def load_shared(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:  # noqa: B027
        """Take them over from somebody else; what is this peer's own stays."""

    def forget(self) -> None:  # noqa: B027
        """What is this peer's own begins anew: it is of an outdated state."""

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

    x = decay·e + value;  sent = received(send(x));  e ← x − sent
    (so sent + e = decay·e + value, exactly what came in)
    """

    decay: float = 1.0

    def __init__(self) -> None:
        self._error: Tensors = {}
        self._pending: Tensors = {}

    @abstractmethod
    def send(self, name: str, values: Tensor) -> Tensor:
        """What travels of these values: a new tensor."""

    def received(self, name: str, sent: Tensor) -> Tensor:
        """What the others make of it, in the shape of the values."""
        return sent

    def encode(self, values: Mapping[str, Tensor]) -> Tensors:
        """What is sent; what is left out becomes the next error when the epoch stands."""
        sent, self._pending = {}, {}
        for name, value in values.items():
            error = self._error.get(name)
            whole = value.clone() if error is None else value.add(error, alpha=self.decay)
            sent[name] = self.send(name, whole)
            self._pending[name] = whole.sub_(self.received(name, sent[name]))
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

    def forget(self) -> None:
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


class BlockFeedback(ErrorFeedback):
    """Error feedback around a sparse codec: what travels are blocks of the tensors, in whatever domain."""

    def __init__(self, codec: CodecSpec) -> None:
        super().__init__()
        self._codec = codec
        self._places: dict[str, tuple[tuple[int, ...], torch.dtype, torch.device]] = {}

    @property
    def codec(self) -> CodecSpec:
        """The sparse one: it would be no use to send the zeros."""
        return self._codec

    @abstractmethod
    def to_travel(self, values: Tensor) -> Tensor:
        """What travels of a tensor: blocks that the codec sends as they are."""

    @abstractmethod
    def from_travel(self, blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
        """What such blocks amount to, in the shape of the tensor."""

    def send(self, name: str, values: Tensor) -> Tensor:
        """Blocks."""
        self._places[name] = (tuple(values.shape), values.dtype, values.device)
        return self.to_travel(values)

    def received(self, name: str, sent: Tensor) -> Tensor:
        """The tensor that blocks stand for."""
        shape, dtype, device = self._places[name]
        return self.from_travel(sent, shape).to(device, dtype)

    def decode(self, averages: Mapping[str, Tensor]) -> Tensors:
        """The averages, dense; the error moves on."""
        return {name: self.received(name, average) for name, average in super().decode(averages).items()}
