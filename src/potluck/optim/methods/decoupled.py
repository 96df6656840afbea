"""DeMo, decoupled momentum: each peer keeps its momentum to itself, and shares only its strongest frequencies.

    δ ← 0.999·δ + lr·g
    q = the k largest of the 2-D discrete cosine transform of δ, in chunks of 64;  δ ← δ − IDCT(q)
    θ ← θ − lr·sign(IDCT(mean q))

The transform is linear, so the mean of what each peer sends, back in the domain of the parameters, is IDCT(mean q).
`Demo.decode` returns the sign: used with plain SGD, its learning rate is that of the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from potluck.errors import ConfigurationError
from potluck.optim.methods.transform import ErrorFeedback, Tensors


@lru_cache(maxsize=64)
def dct_matrix(size: int) -> Tensor:
    """The orthonormal DCT-II: rows are frequencies. Its transpose undoes it."""
    positions = torch.arange(size, dtype=torch.float64)
    frequencies = positions.unsqueeze(1)
    matrix = torch.cos(math.pi / size * (positions + 0.5) * frequencies) * math.sqrt(2.0 / size)
    matrix[0] *= math.sqrt(0.5)
    return matrix.float()


def fitting_chunk(size: int, most: int) -> int:
    """The largest divisor of `size` that is at most `most`."""
    return next(chunk for chunk in range(min(size, most), 0, -1) if size % chunk == 0)


def strongest(values: Tensor, k: int, chunk: int) -> Tensor:
    """What is left of the values when each chunk keeps its k strongest frequencies."""
    if not values.numel():
        return values.clone()
    matrix = values.reshape(1, -1) if values.dim() < 2 else values.reshape(values.shape[0], -1)
    height, width = (fitting_chunk(size, chunk) for size in matrix.shape)
    rows, columns = matrix.shape[0] // height, matrix.shape[1] // width
    tiles = matrix.view(rows, height, columns, width).transpose(1, 2)  # rows × columns × height × width
    vertical, horizontal = dct_matrix(height).to(values), dct_matrix(width).to(values)
    frequencies = (vertical @ tiles @ horizontal.T).reshape(rows * columns, height * width)
    kept = frequencies.abs().topk(min(k, frequencies.shape[1]), dim=1).indices
    sparse = torch.zeros_like(frequencies).scatter_(1, kept, frequencies.gather(1, kept))
    back = vertical.T @ sparse.view(rows, columns, height, width) @ horizontal
    return back.transpose(1, 2).reshape(matrix.shape).reshape(values.shape).contiguous()


class Demo(ErrorFeedback):
    """The strongest frequencies of a momentum that is never shared as a whole."""

    def __init__(self, *, lr: float, decay: float = 0.999, k: int = 32, chunk: int = 64, sign: bool = True) -> None:
        super().__init__()
        if not (lr > 0 and 0.0 <= decay <= 1.0 and k >= 1 and chunk >= 1):
            raise ConfigurationError("DeMo needs lr > 0, 0 ≤ decay ≤ 1, k ≥ 1 and chunk ≥ 1")
        self.lr = lr
        self.decay = decay
        self._k = k
        self._chunk = chunk
        self._sign = sign

    def send(self, name: str, values: Tensor) -> Tensor:
        """IDCT(q)."""
        return strongest(values, self._k, self._chunk)

    def encode(self, values: Mapping[str, Tensor]) -> Tensors:
        """Momentum from the gradients, and what is sent of it."""
        return super().encode({name: value * self.lr for name, value in values.items()})

    def decode(self, averages: Mapping[str, Tensor]) -> Tensors:
        """The sign of the mean."""
        mean = super().decode(averages)
        return {name: tensor.sign() for name, tensor in mean.items()} if self._sign else mean
