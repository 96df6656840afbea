"""A model that no device of this peer holds: each has a part of every layer, and all of one layer while it computes.

    this peer's own model      whole, on the CPU: what the optimizer steps, and what rounds and states see
    its copy on the devices    in parts (FSDP2); a layer's parts are gathered for its forward and its backward

Parameters go from the whole to the parts when they have changed, and gradients from the parts to the whole after each
batch, one tensor at a time. So no device needs room for more than its part, one layer, and what a batch takes; and the
optimizer is the same as on one device, on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WHOLE = 0.9  # of a device's free memory, that a model may take on it before any batch


def fits(model: nn.Module, device: torch.device, num_tensors: int) -> bool:
    """Whether a device has room for the model, with so many tensors beside each of its own."""
    if device.type == "cpu":
        return True
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return True
    free, _total = module.mem_get_info(device)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return bool(size * (2 + num_tensors) <= WHOLE * free)  # itself and its gradients


def in_parts(model: nn.Module, device: torch.device, num_parts: int) -> nn.Module:
    """The model, of which this process holds one part; to be called by all at once."""
    mesh = init_device_mesh(device.type, (num_parts,))
    options: dict[str, Any] = {"mesh": mesh}
    for layers in [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]:
        for layer in layers:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, **options)
    if not isinstance(model, nn.Sequential):  # whose layers are all there is
        fully_shard(model, **options)
    return model.to(device)


@torch.no_grad()
def hand_down(whole: nn.Module | None, parts: nn.Module, rank: int, num_parts: int) -> None:
    """Give every process its part of the parameters as they are now; `whole` is rank 0's, None elsewhere."""
    sources = dict(whole.named_parameters()) if whole is not None else {}
    for name, parameter in parts.named_parameters():
        local = _local(parameter)
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=local.device)
        if whole is not None:
            full.copy_(sources[name])
        dist.broadcast(full, 0)
        mine = full.chunk(num_parts, dim=0)
        if rank < len(mine):
            local.copy_(mine[rank])
    others = dict(whole.named_buffers()) if whole is not None else {}
    for name, buffer in parts.named_buffers():
        if whole is not None:
            buffer.copy_(others[name])
        dist.broadcast(buffer, 0)


@torch.no_grad()
def hand_up(parts: nn.Module, whole: nn.Module | None) -> None:
    """Add the gradients of all parts to those of the whole, which is rank 0's; the parts have none then."""
    targets = dict(whole.named_parameters()) if whole is not None else {}
    for name, parameter in parts.named_parameters():
        if parameter.grad is None:
            continue
        gradient: Tensor = parameter.grad.full_tensor()  # type: ignore[attr-defined]
        parameter.grad = None
        if whole is not None:
            target = targets[name]
            found = gradient.to(target.device)
            target.grad = found if target.grad is None else target.grad.add_(found)
    for name, buffer in parts.named_buffers() if whole is not None else ():
        dict(whole.named_buffers())[name].copy_(buffer)  # type: ignore[union-attr]


def let_go(parts: nn.Module) -> None:
    """Have nothing hold the connections any more: torch keeps meshes for good, and they hold their groups."""
    for parameter in parts.parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        getattr(mesh, "_pg_registry", {}).clear()


def _local(parameter: Tensor) -> Tensor:
    found: Tensor = parameter.to_local()  # type: ignore[attr-defined]
    return found
