"""Whole rounds in memory and in virtual time: real averagers, sessions and links, without wires and threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import torch
from torch import Tensor

from potluck import faultpoints
from potluck.peer.identity import Identity
from potluck.round.averager import Averager, AveragerConfig
from potluck.round.codecs import CodecChoice
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.round.coordinator.gathering import GatherConfig
from potluck.round.coordinator.trigger import Quorum
from potluck.round.outcome import RoundResult
from potluck.round.plan.partition import PartitionConfig
from potluck.sim.inlineworkers import InlineWorkers
from potluck.sim.memoryrun import MemoryPeer, MemoryRun
from potluck.sim.virtualloop import LoopClock, VirtualTimeLoop, process

TIMEOUT_SECONDS = 60.0
ELEMENTS = 100_000  # several chunks for each of a few reducers
SMALL_CHUNKS = PartitionConfig(default_bytes_per_second=3e6)  # as on slow lines
EXACT = CodecChoice.everything("float32")


def process_name(number: int, session: str) -> str:
    """By which the virtual loop freezes a member."""
    return f"m{number}-{session}"


class Member:
    """One peer with its averager and tensors, in a process of its own as far as freezing is concerned."""

    def __init__(self, peer: MemoryPeer, averager: Averager, number: int, options: dict[str, Any]) -> None:
        self.peer = peer
        self.options = options  # with which it has joined
        self.averager = averager
        self.number = number
        self.values = torch.full((ELEMENTS,), float(number))
        self.is_aux = peer.session.card.role == "aux"
        self.process = process_name(number, peer.session.card.session)

    @property
    def id(self) -> str:
        return self.peer.peer_id

    def fill(self) -> None:
        """Values that tell who contributed: the average of a set of members is unlike that of any other."""
        self.values.copy_(torch.arange(ELEMENTS) % 7 + 2.0**self.number)

    async def average(self, **options: Any) -> RoundResult:
        """Take part once."""
        options = {"weight": 1.0, "timeout_seconds": TIMEOUT_SECONDS, **options}
        tensors = None if self.is_aux else {"w": self.values}
        return await self.averager.average(tensors, **options)


def loop_of_lab() -> VirtualTimeLoop:
    """The loop on which all of this runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


class Lab:
    """A run in memory with members."""

    def __init__(self, run: MemoryRun, config: AveragerConfig) -> None:
        self.run = run
        self.config = config
        self.members: list[Member] = []

    async def join(self, *, identity: Identity | None = None, number: int | None = None, **options: Any) -> Member:
        """A new member; the first one coordinates unless said otherwise."""
        number = len(self.members) if number is None else number
        options.setdefault("coordinates", not self.members)
        with process(process_name(number, self.run.next_session)):
            peer = await self.run.join(f"m{number}", identity=identity, **options)
            averager = Averager(peer, self.config, workers=InlineWorkers())
            await averager.start()
        member = Member(peer, averager, number, options)
        self.members.append(member)
        return member

    async def kill(self, member: Member) -> None:
        """As SIGKILL."""
        self.members.remove(member)
        await self.run.kill(member.peer)
        await member.averager.close()

    def sever(self, member: Member) -> None:
        """Nothing moves to or from it; nobody is told."""
        self.run.sever(member.peer)

    async def average(self, members: Sequence[Member] | None = None, **options: Any) -> list[RoundResult]:
        """Everybody takes part once."""
        return await asyncio.gather(*self.start(members, **options))

    def start(self, members: Sequence[Member] | None = None, **options: Any) -> list[asyncio.Task[RoundResult]]:
        """Everybody starts to take part, with values of their own."""
        started = []
        for member in list(self.members if members is None else members):
            member.fill()
            with process(member.process):
                started.append(asyncio.create_task(member.average(**options)))
        return started

    def freeze(self, member: Member) -> None:
        """As SIGSTOP."""
        loop_of_lab().freeze(member.process)

    def is_frozen(self, member: Member) -> bool:
        """Whether it is stopped."""
        return loop_of_lab().is_frozen(member.process)

    def thaw(self, member: Member) -> None:
        """As SIGCONT."""
        loop_of_lab().thaw(member.process)

    def coordinator(self) -> Member:
        """Who holds the lease."""
        [holder] = [member for member in self.members if member.averager.lease.is_held]
        return holder


@asynccontextmanager
async def lab(
    num_members: int = 0,
    *,
    all_coordinate: bool = False,
    choice: CodecChoice = EXACT,
    seed: int = 0,
    **coordinator: Any,
) -> AsyncIterator[Lab]:
    """A run with so many trainers, of whom the first (or all) may coordinate; the first holds the lease."""
    torch.set_num_threads(1)  # everything is on one thread here: more of them would only get in each other's way
    run = MemoryRun(clock=LoopClock(), seed=seed)
    await run.open()
    coordinator.setdefault("trigger", Quorum(grace_seconds=0.5))
    coordinator.setdefault("gather", GatherConfig(partition=SMALL_CHUNKS))
    config = AveragerConfig(codecs=choice, coordinator=CoordinatorConfig(**coordinator))
    there = Lab(run, config)
    for number in range(num_members):
        await there.join(coordinates=all_coordinate or number == 0)
        await asyncio.sleep(0.1)
    try:
        yield there
    finally:
        for member in there.members:  # who is frozen cannot be closed
            there.thaw(member)
        for member in list(there.members):
            await member.averager.close()
        await run.close()


def mean_of(members: Sequence[Member], weights: Mapping[int, float] | None = None) -> Tensor:
    """What the average of these members' values must be, in float64."""
    weights = weights or {}
    total = torch.zeros(ELEMENTS, dtype=torch.float64)
    sum_of_weights = 0.0
    for member in members:
        weight = weights.get(member.number, 1.0)
        total += weight * (torch.arange(ELEMENTS, dtype=torch.float64) % 7 + 2.0**member.number)
        sum_of_weights += weight
    return total / sum_of_weights


def assert_same_average(holders: Sequence[Member], expected: Tensor | None = None) -> None:
    """All hold the same bits, and they are right."""
    first = holders[0].values
    for member in holders[1:]:
        assert torch.equal(member.values, first), f"member {member.number} holds something else"
    if expected is not None:
        torch.testing.assert_close(first.double(), expected, rtol=1e-6, atol=1e-6)


def contributors_of(value: float) -> frozenset[int]:
    """Whose values are in an average of element 0, where all weights are equal: 2ⁱ for member i."""
    for count in range(1, 12):
        total = round(value * count, 3)
        if total == int(total) and int(total).bit_count() == count:
            return frozenset(bit for bit in range(12) if int(total) >> bit & 1)
    raise AssertionError(f"{value} is nobody's average")


def contributors_in(values: Tensor) -> set[frozenset[int]]:
    """Whose values are in averages, by samples of all chunks."""
    samples = range(0, ELEMENTS, ELEMENTS // 50)
    return {contributors_of(float(values[index]) - index % 7) for index in samples}


@contextmanager
def at_point(point: str, action: Callable[[], None], **labels: object) -> Iterator[list[str]]:
    """Do something the first time that a point with these labels is reached; yields what was reached. May be nested."""
    reached: list[str] = []

    def hook(name: str, found: Mapping[str, object]) -> None:
        if before is not None:
            before(name, found)
        if name == point and not reached and all(found.get(key) == value for key, value in labels.items()):
            reached.append(name)
            action()

    before = faultpoints.install(hook)
    try:
        yield reached
    finally:
        faultpoints.install(before)
