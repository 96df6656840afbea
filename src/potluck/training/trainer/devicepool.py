"""Several devices, one peer: a process for each further device computes its share of every batch.

    this process (rank 0)     the member of the run: optimizer, rounds, state, data; computes on the first device
    the pool (rank 1, 2, …)    a copy of the model on another device each; no optimizer, no link to anybody else

    for each batch:  shares to the pool ─▶ forward, backward on all (DDP averages the gradients) ─▶ rank 0 steps

The run sees one peer: traffic, state and samples are those of one, however many devices it has. When the parameters of
rank 0 have changed, by its own step or by a round, they are broadcast before the next batch. All of it stays on this
machine: gloo over loopback between CPUs, NCCL between GPUs. A model that fits on no device is in parts on them
(sharding.py), and whole on the CPU of rank 0.

If one of its processes ends, nothing can be averaged any more: the peer ends, and names it. If rank 0 ends, all do.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

from potluck.errors import FatalError
from potluck.peer import environment
from potluck.recipes.catalogue import reopen
from potluck.recipes.recipe import Batch, Origin, Recipe
from potluck.training.trainer import sharding
from potluck.training.trainer.machine import is_out_of_memory
from potluck.training.trainer.models import untrained
from potluck.training.trainer.precision import MixedPrecision, Precision

logger = logging.getLogger(__name__)

WAIT_SECONDS = 300.0  # for all to be there, and for a step of the slowest
END_SECONDS = 10.0  # for the pool to end when it is told to
LOOK_EVERY_SECONDS = 1.0  # whether rank 0 is still there
OUT_OF_MEMORY = 12  # how one of the pool ends that had no room
BACKENDS = {"cuda": "nccl", "xpu": "xccl"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePoolSpec:
    """What one of its processes needs to know."""

    origin: Origin
    """By which the same recipe is made again, with the run's files."""

    seed: int
    precision: Precision
    devices: tuple[str, ...]
    is_sharded: bool = False
    """Whether each device holds a part of the model (sharding.py), rather than all of it."""

    meeting: str = ""
    """A file by which the processes find each other; the pool's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """One batch's share. The bytes of its parts follow."""

    parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    weight: float
    scale: float
    has_new_parameters: bool
    data: Any  # the recipe's, where it has changed


class DevicePool:
    """The further devices of this peer, as its trainer sees them."""

    def __init__(self, spec: DevicePoolSpec, recipe: Recipe[Any], model: nn.Module) -> None:
        """Start a process for each device but the first, and wait until all are there."""
        self.size = len(spec.devices)
        self.computing = model
        """The model, as losses are to be computed with: gradients come out averaged over all devices."""
        self._model = model
        self._recipe = recipe
        self._told_data: Any = None
        self._folder = tempfile.TemporaryDirectory(prefix="potluck-device-")
        self._spec = replace(spec, meeting=str(Path(self._folder.name) / "meeting"))
        self._members: list[tuple[BaseProcess, Connection]] = []
        try:
            for rank in range(1, self.size):
                self._members.append(self._start(rank))
            with self._explained():
                _meet(self._spec, 0)
                self.computing = self._made_to_compute()
        except BaseException:
            self.close()
            raise
        self._version = _version_of(model)

    def _made_to_compute(self) -> nn.Module:
        device = torch.device(self._spec.devices[0])
        if not self._spec.is_sharded:
            return _distributed(self._model, device)
        parts = sharding.in_parts(untrained(self._recipe, self._spec.seed), device, self.size)
        sharding.hand_down(self._model, parts, 0, self.size)
        return parts

    def hand_out(self, batch: Batch, scale: float) -> tuple[Batch, float]:
        """Give each process its share; this process's own, and what its loss is to be multiplied by.

        Shares may be unequal: weighted so, their mean is that over all samples.
        """
        parts = [part.tensor_split(self.size) for part in batch]
        total = len(batch[0])
        version = _version_of(self._model)
        data = msgspec.to_builtins(self._recipe.data)
        shares = []
        for rank in range(self.size):
            share = tuple(part[rank] for part in parts)
            count = len(share[0])
            weight = count * self.size / total
            shares.append((share if count else tuple(part[:1] for part in batch), weight))
        with self._explained():
            for (share, weight), (_, connection) in zip(shares[1:], self._members, strict=True):
                order = _Order(
                    parts=tuple((tuple(part.shape), part.dtype) for part in share),
                    weight=weight,
                    scale=scale,
                    has_new_parameters=version != self._version,
                    data=data if data != self._told_data else None,
                )
                connection.send(order)
                for part in share:
                    connection.send_bytes(_bytes_of(part))
            if version != self._version:
                self._tell_parameters()
        self._version, self._told_data = version, data
        return shares[0]

    def _tell_parameters(self) -> None:
        if self._spec.is_sharded:
            sharding.hand_down(self._model, self.computing, 0, self.size)
        else:
            _broadcast_parameters(self._model)

    @contextlib.contextmanager
    def computed_together(self) -> Iterator[None]:
        """Around forward and backward: FatalError where one of its processes has ended meanwhile."""
        with self._explained():
            yield
            if self._spec.is_sharded:
                sharding.hand_up(self.computing, self._model)

    def close(self) -> None:
        """End the pool. Idempotent."""
        members, self._members = self._members, []
        for _, connection in members:
            with contextlib.suppress(OSError):
                connection.close()  # which tells them
        for process, _ in members:
            process.join(END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        if self._spec.is_sharded:
            sharding.let_go(self.computing)
        self.computing = self._model
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # DDP refers to itself, and holds the group's connections
        self._folder.cleanup()

    def _start(self, rank: int) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_compute_for,
            args=(self._spec, rank, theirs, os.getpid()),
            name=f"potluck-device-{rank}",
            daemon=True,
        )
        process.start()
        theirs.close()
        return process, ours

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """What torch says where a process has gone, in words that help."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            if is_out_of_memory(error):
                raise
            deadline = time.monotonic() + END_SECONDS  # it may still be on its way out
            while time.monotonic() < deadline:
                for process, _ in self._members:
                    if process.exitcode is not None:
                        raise FatalError(self._why(process)) from error
                time.sleep(0.05)
            raise

    def _why(self, process: BaseProcess) -> str:
        rank = int(process.name.rpartition("-")[2])
        code = process.exitcode or 0
        first, device = self._spec.devices[0], self._spec.devices[rank]
        if code == OUT_OF_MEMORY:
            return (
                f"{device}, which computes for this peer, has no room for its share of a batch: this peer ends, and "
                f"the run goes on. Start again with a smaller --batch-size, or with --device {first} alone"
            )
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
        return (
            f"the process that computes on {device} for this peer {how}: this peer ends, and the run goes on. Start "
            f"again; with --device {first} it computes on one device alone"
        )


# In the pool's processes


def _compute_for(spec: DevicePoolSpec, rank: int, orders: Connection, parent: int) -> None:
    """One of the pool: computes its shares until rank 0 closes the line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which then ends this
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    try:
        _compute(spec, rank, orders)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        os._exit(OUT_OF_MEMORY)  # rank 0 says what to do about it
    os._exit(0)  # there is nobody left to take leave of


def _compute(spec: DevicePoolSpec, rank: int, orders: Connection) -> None:
    device = torch.device(spec.devices[rank])
    recipe = reopen(spec.origin)
    torch.manual_seed(spec.seed + rank)
    model = untrained(recipe, spec.seed, None if spec.is_sharded else device)
    precision = MixedPrecision(spec.precision, device)
    _meet(spec, rank)
    size = len(spec.devices)
    computing = sharding.in_parts(model, device, size) if spec.is_sharded else _distributed(model, device)
    if spec.is_sharded:
        sharding.hand_down(None, computing, rank, size)
    while True:
        try:
            order: _Order = orders.recv()
            parts = [_tensor_of(orders.recv_bytes(), shape, dtype) for shape, dtype in order.parts]
        except (EOFError, OSError):
            return
        if order.data is not None:
            recipe.data = msgspec.convert(order.data, type(recipe.data))
        if order.has_new_parameters and spec.is_sharded:
            sharding.hand_down(None, computing, rank, size)
        elif order.has_new_parameters:
            _broadcast_parameters(model)
        with precision.lowered():
            loss = recipe.loss(computing, tuple(part.to(device) for part in parts))
        (loss * (order.weight * order.scale)).backward()  # type: ignore[no-untyped-call]
        if spec.is_sharded:
            sharding.hand_up(computing, None)
        for parameter in model.parameters():
            parameter.grad = None


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_SECONDS)
    os._exit(1)


# On both sides


def _meet(spec: DevicePoolSpec, rank: int) -> None:
    environment.keep_gloo_on_this_machine()
    device = torch.device(spec.devices[rank])
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    dist.init_process_group(
        BACKENDS.get(device.type, "gloo"),
        store=FileStore(spec.meeting, len(spec.devices)),
        rank=rank,
        world_size=len(spec.devices),
        timeout=timedelta(seconds=WAIT_SECONDS),
    )


def _distributed(model: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device])


@torch.no_grad()
def _broadcast_parameters(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)


def _version_of(model: nn.Module) -> int:
    """Another number whenever a parameter was changed in place, as optimizers and rounds do."""
    return sum(parameter._version for parameter in model.parameters())


def _bytes_of(part: Tensor) -> bytes:
    return part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _tensor_of(data: bytes, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(tuple(shape))
