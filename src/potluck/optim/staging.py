"""Between a GPU and a round: copies in memory of the CPU, made while the GPU goes on.

A round reads and writes chunks of tensors in worker threads. On a GPU each of these would be a copy that everything
waits for, in an order that nobody has fixed: streams belong to threads. So what a peer brings to a round is copied once
as a whole, by a stream of its own, into pinned memory that every round uses again; and the averages go back once.

    training thread   ── offer ──┐                                    ┌── averages into the offer ── step
    a stream beside              └── copy to pinned memory ── Moment  │
    worker threads                                            wait ── round

Tensors of the CPU are not copied. What has no streams (MPS) is copied in the ordinary way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class Moment:
    """All that devices were told to do so far, by this thread; others can wait for it."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Of the devices of these tensors."""
        devices = {tensor.device for tensor in tensors if has_streams(tensor.device)}
        self._events = {device: _module(device).current_stream(device).record_event() for device in devices}

    def wait_on_device(self) -> None:
        """What this thread tells a device from here on comes after it. This thread goes on."""
        for device, event in self._events.items():
            _module(device).current_stream(device).wait_event(event)

    def wait(self) -> None:
        """This thread goes on when it has passed."""
        for event in self._events.values():
            event.synchronize()

    @property
    def is_now(self) -> bool:
        """Whether there is nothing to wait for, as with tensors of the CPU."""
        return not self._events


class StagedTensors:
    """The tensors of one round, and where the round finds them."""

    def __init__(self, tensors: Mapping[str, Tensor], host: dict[str, Tensor], copied: Moment) -> None:
        self.host = host
        """To be averaged in place, when `copied` has passed."""
        self.copied = copied
        self._tensors = tensors

    @torch.no_grad()
    def bring_back(self) -> None:
        """The averages into the tensors. What this thread tells the device from here on comes after it."""
        for name, tensor in self._tensors.items():
            if self.host[name] is not tensor:
                tensor.copy_(self.host[name], non_blocking=True)


class Staging:
    """One peer's memory for what it sends. For one round at a time."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._streams: dict[torch.device, Any] = {}

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor]) -> StagedTensors:
        """Begin to copy what is not on the CPU. The tensors must stay until `copied` has passed."""
        host: dict[str, Tensor] = {}
        by_device: dict[torch.device, list[str]] = {}
        for name, tensor in tensors.items():
            if tensor.device.type == "cpu":
                host[name] = tensor
            else:
                host[name] = self._buffer(name, tensor)
                by_device.setdefault(tensor.device, []).append(name)
        moments = [self._copy(device, names, tensors, host) for device, names in by_device.items()]
        return StagedTensors(tensors, host, _all(moments))

    def _copy(
        self, device: torch.device, names: list[str], tensors: Mapping[str, Tensor], host: Mapping[str, Tensor]
    ) -> Moment:
        if not has_streams(device):
            for name in names:
                host[name].copy_(tensors[name])
            return Moment(())
        module = _module(device)
        if device not in self._streams:
            self._streams[device] = module.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(module.current_stream(device))
        with module.stream(stream):
            for name in names:
                host[name].copy_(tensors[name], non_blocking=True)
            return Moment([tensors[names[0]]])

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        known = self._buffers.get(name)
        if known is None or known.shape != tensor.shape or known.dtype != tensor.dtype:
            known = self._buffers[name] = pinned(torch.empty(tensor.shape, dtype=tensor.dtype))
        return known


def pinned(tensor: Tensor) -> Tensor:
    """A tensor of the CPU in memory that a GPU copies from and to on its own; as it is, where there is none."""
    try:
        return tensor.pin_memory()
    except (RuntimeError, NotImplementedError) as error:  # no such device, or the system grants no more such memory
        logger.debug("memory is not pinned: %s", error)
        return tensor


def has_streams(device: torch.device) -> bool:
    """Whether work on a device is in streams that can wait for each other."""
    return device.type not in ("cpu", "meta") and hasattr(_module(device), "Stream")


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _all(moments: list[Moment]) -> Moment:
    whole = Moment(())
    for moment in moments:
        whole._events.update(moment._events)
    return whole
