"""A whole pipeline in one process: a run in memory, conductor, servers, feeders; and one process to compare with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from potluck.clock import SystemClock
from potluck.pipeline.averaging import LinkedGroup
from potluck.pipeline.blocks import State, run_blocks, ties_of, units_of
from potluck.pipeline.compute import StageCompute
from potluck.pipeline.conducting import Conductor, ConductorConfig
from potluck.pipeline.feeding import Feeder, FeederConfig
from potluck.pipeline.layout import Layout
from potluck.pipeline.messages import Enlist, Enlisted
from potluck.pipeline.serving import ServerConfig, StageServer
from potluck.sim.memoryrun import MemoryPeer, MemoryRun
from potluck.testing.polling import poll_until

WIDTH, VOCABULARY = 12, 16
RUN_SEED = 11
LEARNING_RATE = 0.05


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, text: Tensor) -> State:
        return self.table(text[:, :-1]), text[:, 1:]


class Mix(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, hidden: Tensor, targets: Tensor) -> State:
        mixed = functional.dropout(torch.tanh(self.inner(self.norm(hidden))), self.dropout)
        return hidden + mixed, targets


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter | None) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, VOCABULARY)
        if weight is not None:
            self.out.weight = weight

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.out(hidden).flatten(0, 1), targets.flatten())


def build(*, num_layers: int = 4, tied: bool = False, dropout: float = 0.0) -> list[nn.Module]:
    torch.manual_seed(RUN_SEED)
    embed = Embed()
    layers = [Mix(dropout) for _ in range(num_layers)]
    return [embed, *layers, Head(embed.table.weight if tied else None)]


def batch_of(step: int, micro: int, samples: int) -> State:
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return (torch.randint(VOCABULARY, (samples, 7), generator=generator),)


def make_optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=LEARNING_RATE)


def reference(blocks: list[nn.Module], steps: Sequence[Sequence[int]], *, max_norm: float = 0.0) -> list[float]:
    """One process that takes the same steps with the whole batch of each; its losses. Changes the blocks."""
    parameters = list({id(p): p for block in blocks for p in block.parameters()}.values())
    optimizer = make_optimizer(parameters)
    losses = []
    for step, samples in enumerate(steps):
        total = sum(samples)
        loss = torch.zeros(())
        for micro, size in enumerate(samples):
            (found,) = run_blocks(
                dict(enumerate(blocks)), range(len(blocks)), batch_of(step, micro, size), (RUN_SEED, step, micro)
            )
            loss = loss + found * (size / total)
        optimizer.zero_grad()
        loss.backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], *, relative: float = 1e-5) -> None:
    """Equal to float32 rounding, relative to the size of each tensor."""
    for one, other in zip(found, expected, strict=True):
        error = (one - other).abs().max()
        assert error <= relative * other.abs().max() + 1e-7, (float(error), float(other.abs().max()))


class Pipeline:
    """A conductor, servers and feeders on a MemoryRun."""

    def __init__(self, run: MemoryRun, num_stages: int, make_blocks: Callable[[], list[nn.Module]]) -> None:
        self.run = run
        self.make_blocks = make_blocks
        blocks = make_blocks()
        self.layout = Layout.even(len(blocks), num_stages)
        self.ties = ties_of(blocks)
        self.units = units_of(self.layout.stages, self.ties)
        self.servers: dict[str, StageServer] = {}
        self.computes: dict[str, dict[int, StageCompute]] = {}
        self.blocks: dict[str, dict[int, nn.Module]] = {}
        self.peers: dict[str, MemoryPeer] = {}
        self.feeders: dict[str, Feeder] = {}

    async def open(self, config: ConductorConfig | None = None) -> None:
        self.home = await self.run.join("conductor")
        self.conductor = Conductor(
            self.home.links,
            self.home.session.roster,
            num_stages=self.layout.num_stages,
            units=self.units,
            config=config,
        )

    async def serve(
        self, name: str, *stages: int, listens: bool = False, config: ServerConfig | None = None
    ) -> StageServer:
        peer = await self.run.join(name)
        blocks = dict(enumerate(self.make_blocks()))
        computes = {
            stage: StageCompute(
                stage=stage,
                stages=self.layout.stages,
                blocks=blocks,
                ties=self.ties,
                make_optimizer=make_optimizer,
                run_seed=RUN_SEED,
            )
            for stage in stages
        }
        sizes = {unit: sum(p.numel() for p in found) for c in computes.values() for unit, found in c.units.items()}
        group = LinkedGroup(peer.links, peer.peer_id, sizes)
        server = StageServer(peer.links, SystemClock(), self.home.peer_id, computes, group, config)
        await server.start()
        self.peers[name], self.servers[name], self.computes[name], self.blocks[name] = peer, server, computes, blocks
        await self._enlist(peer, Enlist(stages=stages, listens=listens))
        return server

    async def feed(self, name: str, config: FeederConfig | None = None) -> Feeder:
        peer = await self.run.join(name)
        feeder = Feeder(peer.links, SystemClock(), self.home.peer_id, batch_of, config)
        self.peers[name], self.feeders[name] = peer, feeder
        await self._enlist(peer, Enlist(feeds=True))
        return feeder

    async def _enlist(self, peer: MemoryPeer, offer: Enlist) -> None:
        await poll_until(lambda: peer.session.roster.get(self.home.peer_id), 20, "the conductor to be in the roster")
        await peer.links.request(self.home.peer_id, offer, reply=Enlisted, timeout_seconds=20)

    async def kill(self, name: str) -> None:
        await self.run.kill(self.peers.pop(name))
        if (server := self.servers.pop(name, None)) is not None:
            await server.close()
        if (feeder := self.feeders.pop(name, None)) is not None:
            await feeder.close()

    def weights(self) -> list[Tensor]:
        """Every block's parameters, from the first server that has it; all servers of a stage must agree."""
        found: list[Tensor] = []
        for stage, numbers in enumerate(self.layout.stages):
            names = [name for name in self.servers if stage in self.computes[name]]
            for number in numbers:
                copies = [[p.detach() for p in self.blocks[name][number].parameters()] for name in names]
                for other in copies[1:]:
                    assert all(torch.equal(a, b) for a, b in zip(copies[0], other, strict=True)), "replicas differ"
                found += copies[0]
        return found

    async def close(self) -> None:
        for server in self.servers.values():
            await server.close()
        for feeder in self.feeders.values():
            await feeder.close()
        self.conductor.close()


@asynccontextmanager
async def pipeline(
    num_stages: int,
    make_blocks: Callable[[], list[nn.Module]] = build,
    config: ConductorConfig | None = None,
) -> AsyncIterator[Pipeline]:
    run = MemoryRun(clock=SystemClock())
    await run.open()
    made = Pipeline(run, num_stages, make_blocks)
    await made.open(config)
    try:
        yield made
    finally:
        await made.close()
        await run.close()
