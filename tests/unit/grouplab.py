"""Peers in several groups at once, in memory and in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import torch

from potluck.errors import RoundFailedError
from potluck.round.averager import Averager, AveragerConfig
from potluck.round.codecs import CodecChoice
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.round.coordinator.gathering import GatherConfig
from potluck.round.coordinator.trigger import Quorum
from potluck.round.outcome import RoundResult
from potluck.round.plan.messages import Commit
from potluck.round.plan.partition import PartitionConfig
from potluck.run.group import Group
from potluck.sim.inlineworkers import InlineWorkers
from potluck.sim.memoryrun import MemoryPeer, MemoryRun
from potluck.sim.virtualloop import LoopClock

ELEMENTS = 30_000
TIMEOUT_SECONDS = 40.0
CONFIG = AveragerConfig(
    codecs=CodecChoice.everything("float32"),
    coordinator=CoordinatorConfig(
        trigger=Quorum(grace_seconds=0.5),
        gather=GatherConfig(partition=PartitionConfig(default_bytes_per_second=3e6)),
    ),
)


class Part:
    """One peer's part in one group."""

    def __init__(self, number: int, group: Group, averager: Averager) -> None:
        self.number = number
        self.group = group
        self.averager = averager
        self.values = torch.zeros(ELEMENTS)
        self.commits: list[Commit] = []
        averager.listen(self.commits.append)

    async def average(self, timeout_seconds: float = TIMEOUT_SECONDS) -> RoundResult:
        """Take part once; 2ⁿ is what member n gives."""
        self.values.fill_(2.0**self.number)
        return await self.averager.average({"w": self.values}, weight=1.0, timeout_seconds=timeout_seconds)

    async def close(self) -> None:
        await self.averager.close()


class Guest:
    """One peer, and its parts by group."""

    def __init__(self, number: int, peer: MemoryPeer) -> None:
        self.number = number
        self.peer = peer
        self.parts: dict[str, Part] = {}

    @property
    def held(self) -> set[str]:
        """The groups that it coordinates."""
        return {name for name, part in self.parts.items() if part.averager.lease.is_held}


class GroupLab:
    """A run with guests."""

    def __init__(self, run: MemoryRun) -> None:
        self.run = run
        self.guests: list[Guest] = []
        self.gone: list[Part] = []

    async def join(self, groups: Iterable[str], *, coordinates: bool = True) -> Guest:
        """A peer that is in these groups from the start."""
        names = tuple(groups)
        number = len(self.guests) + len(self.gone)
        peer = await self.run.join(f"p{number}", coordinates=coordinates, groups=names)
        guest = Guest(number, peer)
        self.guests.append(guest)
        for name in names:
            await self.enter(guest, name)
        return guest

    async def enter(self, guest: Guest, name: str) -> Part:
        """A peer joins one more group."""
        group = Group(guest.peer, name)
        await group.enter()
        averager = Averager(group, CONFIG, workers=InlineWorkers())
        await averager.start()
        part = guest.parts[name] = Part(guest.number, group, averager)
        return part

    async def leave_group(self, guest: Guest, name: str) -> None:
        """A peer leaves one of its groups."""
        part = guest.parts.pop(name)
        self.gone.append(part)
        await part.close()
        await part.group.leave()

    async def kill(self, guest: Guest) -> None:
        """As SIGKILL."""
        self.guests.remove(guest)
        self.gone += guest.parts.values()
        await self.run.kill(guest.peer)
        for part in guest.parts.values():
            await part.close()

    def parts(self, name: str) -> list[Part]:
        """Who is in a group."""
        return [guest.parts[name] for guest in self.guests if name in guest.parts]

    def holder(self, name: str) -> Guest | None:
        """Who coordinates a group."""
        return next((guest for guest in self.guests if name in guest.held), None)

    async def average(self, name: str, parts: Sequence[Part] | None = None) -> list[RoundResult | BaseException]:
        """All members of a group take part once."""
        those = self.parts(name) if parts is None else parts
        return await asyncio.gather(*(part.average() for part in those), return_exceptions=True)

    def check_lineages(self, names: Iterable[str]) -> None:
        """No epoch of a group was committed twice, and nobody saw another commit of it than the others."""
        for name in names:
            seen: dict[int, tuple[str, str]] = {}
            for part in [*self.parts(name), *(p for p in self.gone if p.group.name == name)]:
                epochs = [commit.epoch for commit in part.commits]
                assert epochs == sorted(set(epochs)), f"{name}: {epochs}"
                for commit in part.commits:
                    what = (commit.digest, commit.parent)
                    assert seen.setdefault(commit.epoch, what) == what, f"{name}: two commits of epoch {commit.epoch}"


@asynccontextmanager
async def group_lab(seed: int = 0) -> AsyncIterator[GroupLab]:
    torch.set_num_threads(1)
    run = MemoryRun(clock=LoopClock(), seed=seed)
    await run.open()
    there = GroupLab(run)
    try:
        yield there
    finally:
        for guest in there.guests:
            for part in guest.parts.values():
                await part.close()
        await run.close()


def is_made(result: RoundResult | BaseException) -> bool:
    """Whether a round came to its end; any other error than that it failed is raised."""
    if isinstance(result, BaseException) and not isinstance(result, RoundFailedError):
        raise result
    return isinstance(result, RoundResult)
