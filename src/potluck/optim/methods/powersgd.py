"""PowerSGD: a matrix travels as a factor of low rank, with error feedback. One factor a round.

A gradient M (n × m) is approximated by P·Qᵀ with rank r. PowerSGD averages P = M·Q and then Q = Mᵀ·P in the same step,
which would take two rounds for an epoch. Here the two take turns (as in ACP-SGD): in one epoch Q is fixed and P = M·Q
is averaged, in the next P is fixed and Q = Mᵀ·P is. It is the same power iteration at half the traffic, and averaging
stays linear: mean(M_i·Q) = mean(M_i)·Q.

    fixed ← orthonormal(the factor that was averaged last)
    sent = M·fixed;  approximation = sent·fixedᵀ;  e ← M − approximation, where M = gradient + e

The factors are shared by all peers and part of the run's state; the error is a peer's own. Tensors that would not
shrink are sent whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from potluck.errors import ConfigurationError
from potluck.optim.methods.transform import Tensors, Transform


class PowerSGD(Transform):
    """Low rank with error feedback."""

    def __init__(self, rank: int = 2, *, min_compression: float = 2.0) -> None:
        """Tensors that would not shrink by `min_compression` are sent whole."""
        if rank < 1 or not min_compression >= 1.0:
            raise ConfigurationError("PowerSGD needs a rank of 1 or more, and a min_compression of 1 or more")
        self._rank = rank
        self._min_compression = min_compression
        self._turns: dict[str, int] = {}  # of each tensor, even: P is averaged; odd: Q is
        self._fixed: Tensors = {}  # the factor that stays, orthonormal
        self._shapes: dict[str, torch.Size] = {}
        self._error: Tensors = {}
        self._pending: Tensors = {}

    def is_compressed(self, shape: torch.Size) -> bool:
        """Whether a tensor of this shape travels as a factor."""
        if len(shape) < 2:
            return False
        rows, columns = shape[0], shape[1:].numel()
        sent = self._rank * max(rows, columns)
        return min(rows, columns) > self._rank and rows * columns >= self._min_compression * sent

    def encode(self, values: Mapping[str, Tensor]) -> Tensors:
        """Factors for matrices, and the rest as it is."""
        sent, self._pending = {}, {}
        for name, value in values.items():
            self._shapes[name] = value.shape
            if not self.is_compressed(value.shape):
                sent[name] = value
                continue
            error = self._error.get(name)
            matrix = _matrix(value if error is None else value + error)
            fixed = self._fixed_factor(name, matrix)
            sent[name] = self._oriented(name, matrix) @ fixed
            self._pending[name] = (matrix - self._product(name, sent[name], fixed)).reshape(value.shape)
        return sent

    def decode(self, averages: Mapping[str, Tensor]) -> Tensors:
        """The approximation of the mean; the averaged factor is the next one that stays."""
        decoded: Tensors = {}
        for name, average in averages.items():
            shape = self._shapes[name]
            if not self.is_compressed(shape):
                decoded[name] = average
                continue
            decoded[name] = self._product(name, average, self._fixed[name]).reshape(shape)
            self._fixed[name] = orthonormal(average)
            self._turns[name] = self._turns.get(name, 0) + 1
        self._error.update(self._pending)
        self._pending = {}
        return decoded

    def abandon(self) -> None:
        """The error stays as it was."""
        self._pending = {}

    def shared(self) -> Tensors:
        """The factors that stay."""
        return dict(self._fixed)

    def shared_numbers(self) -> dict[str, Any]:
        """Whose turn it is."""
        return {"turns": dict(self._turns)}

    def load_shared(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Take over somebody's factors."""
        self._fixed = {name: tensor.clone() for name, tensor in tensors.items()}
        self._turns = {name: int(turn) for name, turn in numbers.get("turns", {}).items()}

    def forget(self) -> None:
        """The error is of an outdated state."""
        self._error, self._pending = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Factors, turn and error."""
        return {
            "turns": dict(self._turns),
            "fixed": {name: tensor.clone() for name, tensor in self._fixed.items()},
            "error": {name: tensor.clone() for name, tensor in self._error.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved memory."""
        self._turns = dict(state["turns"])
        self._fixed = {name: tensor.clone() for name, tensor in state["fixed"].items()}
        self._error = {name: tensor.clone() for name, tensor in state["error"].items()}
        self._pending = {}

    def _is_odd(self, name: str) -> bool:
        return self._turns.get(name, 0) % 2 == 1

    def _oriented(self, name: str, matrix: Tensor) -> Tensor:
        return matrix.T if self._is_odd(name) else matrix

    def _product(self, name: str, averaged: Tensor, fixed: Tensor) -> Tensor:
        product = averaged @ fixed.T
        return product.T if self._is_odd(name) else product

    def _fixed_factor(self, name: str, matrix: Tensor) -> Tensor:
        fixed = self._fixed.get(name)
        if fixed is None:  # the same random one for everybody: seeded by the name
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
            generator = torch.Generator().manual_seed(seed)
            start = torch.randn(self._oriented(name, matrix).shape[1], self._rank, generator=generator)
            fixed = self._fixed[name] = orthonormal(start.to(matrix))
        return fixed


def orthonormal(matrix: Tensor) -> Tensor:
    """Columns that span the same space, each of length 1 (Gram-Schmidt, twice, which is enough).

    A column that vanishes is replaced by a direction of its own, so that later columns stay well defined.
    """
    columns: list[Tensor] = []
    for number, column in enumerate(matrix.float().unbind(1)):
        for _ in range(2):
            for other in columns:
                column = column - other * (other @ column)
        length = column.norm()
        if length <= 1e-12:
            column = torch.zeros_like(column)
            column[number % column.numel()] = 1.0
            for other in columns:
                column = column - other * (other @ column)
            length = column.norm().clamp_min(1e-12)
        columns.append(column / length)
    return torch.stack(columns, dim=1)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1)
