"""A name for the way a machine computes: two machines of the same name give the same bits for the same work, mostly."""

from __future__ import annotations

import hashlib
from functools import cache

import torch
from torch.nn import functional

SIZE = 96  # large enough that matrix kernels differ between processors


@cache
def arithmetic_of(device: torch.device) -> str:
    """The device's type, and a digest of a fixed piece of work: matrices, exponentials, norms and their gradients."""
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(SIZE, SIZE, generator=generator).to(device).requires_grad_() for _ in range(2))
    with torch.enable_grad():
        mixed = functional.layer_norm(torch.tanh(one @ other), (SIZE,))
        result = functional.gelu(torch.softmax(mixed @ one.T, dim=1)).square().mean()
    gradients = torch.autograd.grad(result, (one, other))
    digest = hashlib.sha256()
    for tensor in (mixed.detach(), result.detach(), *gradients):
        digest.update(tensor.to("cpu", torch.float32).contiguous().numpy().tobytes())
    return f"{device.type}-{digest.hexdigest()[:8]}"
