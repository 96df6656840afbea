"""Peers that train together in one process: real rounds and real threads, a hub and links in memory.

Each trainer has a thread of its own, as in a user's program; all peers share one event loop. A trainer notes which
batches went into which epoch, so that a plain loop can be compared with what they did together, however they raced.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from potluck.clock import SystemClock
from potluck.errors import RetryableError
from potluck.hub.keys import Signer, new_seed
from potluck.hub.stores import MANIFEST_KEY
from potluck.optim.method import RunState
from potluck.peer.identity import Identity
from potluck.run.joined import Joined
from potluck.run.loopthread import LoopThread
from potluck.sim.memoryrun import MemoryPeer, MemoryRun
from potluck.state import directory, handingover, resumechoice, resuming
from potluck.training.manifest.manifest import Manifest
from potluck.training.manifest.noticeboard import sign

# libuv opens one pipe per process, for good, with its first loop: here, before a test counts.
LoopThread().__enter__().close()

DEVICE = torch.device(os.environ.get("POTLUCK_TEST_DEVICE", "cpu"))  # where models are; see tests/accelerator
PATIENCE_SECONDS = 100.0  # the machine may be busy
FEATURES = 5


class MemoryStates:
    """States of a run in memory: what a keeper would keep."""

    def __init__(self) -> None:
        self.newest: RunState | None = None
        self.num_published = 0
        self.num_fetched = 0
        self._published: dict[int, list[dict[str, Tensor]]] = {}
        self._lock = threading.Lock()

    def publish(self, snapshot: RunState) -> None:
        with self._lock:
            self.num_published += 1
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in snapshot.tensors.items()}
            self._published.setdefault(snapshot.epoch, []).append(tensors)
            if self.newest is None or snapshot.epoch >= self.newest.epoch:
                self.newest = RunState(epoch=snapshot.epoch, tensors=tensors, metadata=snapshot.metadata)

    def check_alike(self, *, at_least: int) -> None:
        """What several published of an epoch is the same to the last bit, and there are so many such epochs."""
        several = {epoch: found for epoch, found in self._published.items() if epoch > 0 and len(found) > 1}
        assert len(several) >= at_least, f"only {sorted(several)} of {len(self._published)} epochs are of several peers"
        for epoch, (first, *others) in several.items():
            for other in others:
                assert first.keys() == other.keys()
                assert all(torch.equal(first[name], other[name]) for name in first), f"epoch {epoch} differs"

    async def resume(self, *, base: Mapping[str, Tensor], timeout_seconds: float) -> RunState | None:
        return None

    def deviates(self) -> bool:
        return False

    async def repair(self, *, epoch: int, base: Mapping[str, Tensor], timeout_seconds: float) -> RunState | None:
        raise AssertionError("nobody deviates here")

    def statistics(self) -> dict[str, int]:
        return {}

    async def fetch(self, *, at_least_epoch: int, base: Mapping[str, Tensor], timeout_seconds: float) -> RunState:
        end = asyncio.get_running_loop().time() + min(timeout_seconds, 2.0)
        while asyncio.get_running_loop().time() < end:
            with self._lock:
                if self.newest is not None and self.newest.epoch >= at_least_epoch:
                    self.num_fetched += 1
                    return self.newest
            await asyncio.sleep(0.01)
        raise RetryableError(f"nobody has epoch {at_least_epoch}")


class TrainLab:
    """A run in memory, with as many joined peers as a test wants."""

    def __init__(self, loop: LoopThread, memory: MemoryRun) -> None:
        self.loop = loop
        self.memory = memory
        self.states = MemoryStates()
        self.runs: list[Joined] = []

    def join(self, name: str, **options: Any) -> Joined:
        options.setdefault("coordinates", not self.runs)

        async def start() -> MemoryPeer:
            return await self.memory.join(name, identity=Identity.temporary(), **options)

        run = Joined(start, self.loop).open()
        self.runs.append(run)
        return run

    def put_up(self, manifest: Manifest) -> None:
        """Have an organiser say what the run trains."""
        store = self.memory.hub.connect("GUARD").store("manifest")
        signed = sign(msgspec.structs.replace(manifest, run=self.memory.hub.subjects.run), Signer(new_seed("user")))
        self.loop.call(store.put(MANIFEST_KEY, signed))

    def kill(self, run: Joined) -> None:
        """As SIGKILL, as far as the others can tell."""
        peer = run.peer
        assert isinstance(peer, MemoryPeer)
        self.loop.call(self.memory.kill(peer))
        run.close()


QUICK = {  # seconds; in memory, what a peer says is heard at once
    (resumechoice, "BEGIN_SECONDS"): 0.25,
    (resuming, "BEGIN_SECONDS"): 0.25,
    (directory, "SPEAK_PAUSE_SECONDS"): 0.025,
    (handingover, "HEARD_SECONDS"): 0.05,
}


@contextmanager
def quick_answers() -> Iterator[None]:
    """Wait less for what others may have to say: at the beginning of a run, and before a peer leaves."""
    usual = {(module, name): getattr(module, name) for module, name in QUICK}
    for (module, name), seconds in QUICK.items():
        setattr(module, name, seconds)
    try:
        yield
    finally:
        for (module, name), seconds in usual.items():
            setattr(module, name, seconds)


@contextmanager
def train_lab() -> Iterator[TrainLab]:
    torch.set_num_threads(1)
    with LoopThread("lab-loop") as loop, quick_answers():

        async def open_run() -> MemoryRun:
            memory = MemoryRun(clock=SystemClock())
            await memory.open()
            return memory

        lab = TrainLab(loop, loop.call(open_run()))
        try:
            yield lab
        finally:
            for run in reversed(lab.runs):
                run.close()
            loop.call(lab.memory.close())


def together(*work: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> list[Any]:
    """Do these things each in a thread, and return what they returned; the first error is raised."""
    with concurrent.futures.ThreadPoolExecutor(len(work), "trainer") as pool:
        futures = [pool.submit(each) for each in work]
        done, late = concurrent.futures.wait(futures, seconds, concurrent.futures.FIRST_EXCEPTION)
        for future in done:
            future.result()
        assert not late, f"{len(late)} of {len(work)} trainers did not come to an end"
        return [future.result() for future in futures]


# A small problem


def make_model(seed: int = 0, hidden: int = 7) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model.to(DEVICE)


def make_batch(number: int, size: int = 4) -> tuple[Tensor, Tensor]:
    """The same for everybody who asks for this number."""
    generator = torch.Generator().manual_seed(10_000 + number)
    inputs = torch.randn(size, FEATURES, generator=generator)
    return inputs.to(DEVICE), inputs.sum(dim=1, keepdim=True).sin().to(DEVICE)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def parameters_of(model: nn.Module) -> list[Tensor]:
    """On the CPU, wherever the model is: Lightning takes it there in the end."""
    return [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]


def quality_of(model: nn.Module) -> float:
    """The loss on samples that nobody trains on."""
    device = next(model.parameters()).device
    inputs, targets = make_batch(999_999, 256)
    with torch.no_grad():
        return loss_of(model, (inputs.to(device), targets.to(device))).item()
