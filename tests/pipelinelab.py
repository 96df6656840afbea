"""A whole pipeline in one process: a run in memory, conductor, servers, feeders; and one process to compare with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from potluck.clock import SystemClock
from potluck.pipeline.blocks import State, run_blocks
from potluck.pipeline.blueprint import Blueprint
from potluck.pipeline.book import MemoryBook
from potluck.pipeline.conducting import Conductor, ConductorConfig
from potluck.pipeline.cuts import CutShelf
from potluck.pipeline.evaluating import Evaluation
from potluck.pipeline.following import Following
from potluck.pipeline.holding import Holding
from potluck.pipeline.judging import Judge
from potluck.pipeline.layout import Layout
from potluck.pipeline.member import MemberConfig, Part, PipelineMember
from potluck.pipeline.messages import Place
from potluck.pipeline.serving import ServerConfig
from potluck.pipeline.staffing import Staff
from potluck.pipeline.stepping import StageLostError, StepOutcome
from potluck.pipeline.unitstate import Optimizing
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
        mixed = functional.dropout(torch.tanh(self.inner(self.norm(hidden))), self.dropout, self.training)
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


def batch_of(step: int, first: int, samples: int) -> State:
    rows = []
    for number in range(first, first + samples):
        generator = torch.Generator().manual_seed(1000 * step + number)
        rows.append(torch.randint(VOCABULARY, (7,), generator=generator))
    return (torch.stack(rows),)


class LabSource:
    """Data that depend on the step and the sample alone."""

    def batch(self, step: int, place: Place, first: int, samples: int) -> State:
        assert place == Place(number=step, skip=0)
        return batch_of(step, first, samples)

    def after(self, step: int, place: Place, samples: int) -> Place:
        return Place(number=step + 1, skip=0)


def make_optimizer(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters.values(), lr=LEARNING_RATE)


def reference(blocks: list[nn.Module], steps: Sequence[Sequence[int]], *, max_norm: float = 0.0) -> list[float]:
    """One process that takes the same steps with the whole batch of each; its losses. Changes the blocks."""
    parameters = list({id(p): p for block in blocks for p in block.parameters()}.values())
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
    losses = []
    for step, samples in enumerate(steps):
        total = sum(samples)
        loss = torch.zeros(())
        first = 0
        for micro, size in enumerate(samples):
            (found,) = run_blocks(
                dict(enumerate(blocks)), range(len(blocks)), batch_of(step, first, size), (RUN_SEED, step, micro)
            )
            loss = loss + found * (size / total)
            first += size
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


class LabCourse:
    """Steps of the sizes that a test says."""

    def __init__(self, max_norm: float = 0.0) -> None:
        self.steps: list[Sequence[int]] = []
        self._max_norm = max_norm

    def sizes(self, step: int, num_stages: int) -> tuple[int, ...]:
        return tuple(self.steps[step])

    def max_norm(self, step: int) -> float:
        return self._max_norm

    def stands_still(self, step: int) -> str:
        return ""


class Pipeline:
    """A conductor and its members on a MemoryRun."""

    def __init__(
        self, run: MemoryRun, num_stages: int, make_blocks: Callable[[], list[nn.Module]], max_norm: float
    ) -> None:
        self.run = run
        self.make_blocks = make_blocks
        self.num_stages = num_stages
        self.blueprint = Blueprint.of(make_blocks, RUN_SEED)
        self.course = LabCourse(max_norm)
        self.book = MemoryBook()
        self.term = 0
        self.judge: Judge | None = None
        self.followings: list[Following] = []
        self.members: dict[str, PipelineMember] = {}
        self.peers: dict[str, MemoryPeer] = {}
        self.events: list[tuple[str, Mapping[str, object]]] = []

    def layout_for(self, num_servers: int) -> Layout:
        return Layout.even(self.blueprint.num_blocks, self.num_stages)

    async def open(self, config: ConductorConfig | None = None) -> None:
        """A conductor, or the next one."""
        self.term += 1
        self.home = await self.run.join(f"conductor{self.term}")
        sizes = [4 * values for values in self.blueprint.num_values[: self.blueprint.num_blocks]]
        staff = Staff([1.0] * self.blueprint.num_blocks, sizes, self.layout_for)
        self.conductor = Conductor(
            self.home.links,
            self.home.session.roster,
            SystemClock(),
            blueprint=self.blueprint,
            staff=staff,
            course=self.course,
            book=self.book,
            term=self.term,
            judge=self.judge,
            config=config,
        )
        self.conductor.on_event = lambda event, about: self.events.append((event, about))
        self.conductor.roll.rate_of = lambda peer, offer: 1.0  # type: ignore[method-assign]  # of equal speed here
        self.conductor.record = self.book.record or self.conductor.record
        for following in self.followings:
            following.set(self.home.peer_id)

    async def join(
        self,
        name: str,
        part: Part,
        config: MemberConfig | None = None,
        cuts: CutShelf | None = None,
        evaluation: Evaluation | None = None,
    ) -> PipelineMember:
        peer = await self.run.join(name)
        following = Following(self.home.peer_id)
        self.followings.append(following)
        holding = Holding(self.blueprint, Optimizing(make_optimizer))
        source = LabSource() if part.feeds else None
        member = PipelineMember(
            peer.links,
            SystemClock(),
            peer.peer_id,
            following,
            holding,
            part,
            source=source,
            cuts=cuts,
            evaluation=evaluation,
            config=config,
        )
        await poll_until(lambda: peer.session.roster.get(self.home.peer_id), 20, "the conductor to be in the roster")
        await member.start()
        self.peers[name], self.members[name] = peer, member
        return member

    async def serve(self, name: str, *stages: int, config: ServerConfig | None = None) -> PipelineMember:
        member_config = MemberConfig(server=config) if config is not None else None
        member = await self.join(name, Part(serves=True, stages=stages), member_config)
        await poll_until(lambda: member.holding.blocks and not member.holding.missing, 30, f"{name} to hold its blocks")
        return member

    async def listen(self, name: str, part: Part | None = None) -> PipelineMember:
        """A member that holds all blocks, and that the conductor counts on to hear their averages."""
        member = await self.join(name, part or Part(listens=True))
        known, num_blocks = self.conductor.roll.peers, self.blueprint.num_blocks
        peer_id = self.peers[name].peer_id
        await poll_until(
            lambda: peer_id in known and len(known[peer_id].blocks) == num_blocks, 30, f"{name} to be counted on"
        )
        return member

    async def feed(self, name: str) -> PipelineMember:
        return await self.join(name, Part(feeds=True))

    async def step(self, samples: Sequence[int]) -> StepOutcome:
        """The next step, of micro-batches of these sizes."""
        number = self.conductor.record.step
        self.course.steps[number:] = [samples]
        while True:
            await self.conductor.until_ready()
            try:
                return await self.conductor.take_step()
            except StageLostError:
                if self.conductor.record.step != number:
                    raise

    async def leave(self, name: str, samples: Sequence[int]) -> bool:
        """A member hands over while the run goes on, and is gone."""
        leaving = asyncio.create_task(self.members[name].leave(60))
        while not leaving.done():
            await self.step(samples)
        await self.kill(name)
        return leaving.result()

    def shape(self) -> tuple[int, int]:
        """Stages, and servers of each in the last attempt; no replicas where they differ."""
        layout = self.conductor.layout
        counts = [0] * (layout.num_stages if layout is not None else 0)
        for member in self.members.values():
            for stage in member.server.stages:
                counts[stage] += 1
        return len(counts), counts[0] if len(set(counts)) == 1 else 0

    async def kill(self, name: str) -> None:
        await self.run.kill(self.peers.pop(name))
        await self.members.pop(name).close()

    def weights(self) -> list[Tensor]:
        """Every block's parameters; all holders of a block that stands must agree to the bit."""
        found: list[Tensor] = []
        for number in range(self.blueprint.num_blocks):
            holders = [m.holding for m in self.members.values() if number in m.holding.standing]
            holders = [h for h in holders if h.step == self.conductor.record.step]
            assert holders, f"nobody has block {number}"
            copies = [[p.detach() for p in holding.blocks[number].parameters()] for holding in holders]
            for other in copies[1:]:
                assert all(torch.equal(a, b) for a, b in zip(copies[0], other, strict=True)), "replicas differ"
            found += copies[0]
        return found

    async def settled(self) -> None:
        """All have heard of the last commit."""
        step = self.conductor.record.step
        await poll_until(
            lambda: all(m.holding.step == step for m in self.members.values() if m.holding.blocks),
            30,
            "everybody to take the last step",
        )

    async def close(self) -> None:
        for member in self.members.values():
            await member.close()
        await self.conductor.close()


@asynccontextmanager
async def pipeline(
    num_stages: int,
    make_blocks: Callable[[], list[nn.Module]] = build,
    config: ConductorConfig | None = None,
    *,
    max_norm: float = 0.0,
    judge: Judge | None = None,
) -> AsyncIterator[Pipeline]:
    run = MemoryRun(clock=SystemClock())
    await run.open()
    made = Pipeline(run, num_stages, make_blocks, max_norm)
    made.judge = judge
    await made.open(config)
    try:
        yield made
    finally:
        await made.close()
        await run.close()
