"""States in a run in memory and in virtual time: real keepers, sessions and links, without wires and threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from potluck.hub.presence import Role
from potluck.peer.identity import Identity
from potluck.peer.lease import LeaseView
from potluck.sim.inlineworkers import InlineWorkers
from potluck.sim.memoryrun import MemoryPeer, MemoryRun
from potluck.sim.virtualloop import LoopClock
from potluck.state.config import StateConfig
from potluck.state.keeper import StateKeeper

MIB = 1024 * 1024


def model(seed: int, megabytes: int = 8) -> dict[str, Tensor]:
    """Tensors of several kinds, so many MiB in all and a bit."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(megabytes * MIB // 8, generator=generator),
        "exp_avg": torch.randn(megabytes * MIB // 8, generator=generator),
        "half": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        "step": torch.tensor(seed),
        "empty": torch.empty(0, 4),
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether all bits are equal."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@dataclass
class Committed:
    """As much of a commit as matters here."""

    epoch: int
    holders: tuple[str, ...]


@dataclass
class Chain:
    """As much of a lineage."""

    epoch: int = 0
    head: Committed | None = None


@dataclass
class Right:
    """As much of a lease."""

    is_held: bool = False
    view: LeaseView = field(default_factory=LeaseView)


@dataclass
class Epochs:
    """What a keeper asks of an averager; the test says what is committed."""

    lineage: Any = field(default_factory=Chain)
    lease: Any = field(default_factory=Right)
    is_in_round: bool = False


class Keeping:
    """One peer with its keeper."""

    def __init__(self, peer: MemoryPeer, keeper: StateKeeper, epochs: Epochs) -> None:
        self.peer = peer
        self.keeper = keeper
        self.epochs = epochs

    @property
    def id(self) -> str:
        return self.peer.peer_id

    async def publish(self, tensors: dict[str, Tensor], epoch: int) -> str:
        """Publish, and wait until it is announced to all."""
        digest = await asyncio.wrap_future(self.keeper.publish(tensors, {"epoch": epoch}, epoch))
        await asyncio.sleep(1.0)
        return digest

    @property
    def served(self) -> int:
        """Chunks given to others."""
        return int(self.keeper.statistics().get("serve_chunks", 0))


class StateLab:
    """A run whose epochs the test commits by decree."""

    def __init__(self, run: MemoryRun, config: dict[str, Any]) -> None:
        self.run = run
        self.config = config
        self.chain = Chain()
        self.there: list[Keeping] = []

    async def join(
        self,
        name: str,
        *,
        role: Role = "trainer",
        coordinates: bool = True,
        identity: Identity | None = None,
        folder: Path | None = None,
        **config: Any,
    ) -> Keeping:
        """A new peer with a keeper."""
        peer = await self.run.join(name, role=role, coordinates=coordinates, identity=identity, trusted=coordinates)
        epochs = Epochs(lineage=self.chain)
        options = {"keep": "always", **self.config, **config, "folder": folder}
        keeper = StateKeeper(peer, epochs, StateConfig(**options), workers=InlineWorkers())
        await keeper.start()
        keeping = Keeping(peer, keeper, epochs)
        self.there.append(keeping)
        return keeping

    def elect(self, leader: Keeping) -> None:
        """From now on this peer coordinates, and all who are there know it."""
        for keeping in self.there:
            keeping.epochs.lease.is_held = keeping is leader
            keeping.epochs.lease.view.holder = leader.id

    def commit(self, epoch: int, *holders: Keeping) -> None:
        """From now on the run is at this epoch."""
        self.chain.epoch = epoch
        self.chain.head = Committed(epoch, tuple(keeping.id for keeping in holders))

    async def kill(self, keeping: Keeping) -> None:
        """As SIGKILL."""
        self.there.remove(keeping)
        await self.run.kill(keeping.peer)
        await keeping.keeper.close()

    async def leave(self, keeping: Keeping) -> None:
        """With a good-bye."""
        self.there.remove(keeping)
        await keeping.keeper.close()
        await self.run.leave(keeping.peer)


@asynccontextmanager
async def state_lab(**config: Any) -> AsyncIterator[StateLab]:
    """A run without peers."""
    torch.set_num_threads(1)
    run = MemoryRun(clock=LoopClock())
    await run.open()
    lab = StateLab(run, config)
    try:
        yield lab
    finally:
        for keeping in list(lab.there):
            await keeping.keeper.close()
        await run.close()
