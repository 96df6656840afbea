"""Peers that train, keep and save in several groups, in memory and in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from grouplab import CONFIG, ELEMENTS

from potluck.errors import RoundFailedError
from potluck.hub.presence import Role
from potluck.peer.identity import Identity
from potluck.round.averager import Averager
from potluck.round.plan.messages import Commit
from potluck.run.cutboard import Cut, CutBoard, board_of
from potluck.run.group import Group
from potluck.sim.inlineworkers import InlineWorkers
from potluck.sim.memoryrun import MemoryPeer, MemoryRun
from potluck.sim.virtualloop import LoopClock
from potluck.state.backups import BackupConfig
from potluck.state.config import StateConfig
from potluck.state.following import Follower
from potluck.state.keeper import StateKeeper

TIMEOUT_SECONDS = 20.0
PATIENCE_SECONDS = 200.0


class Post:
    """One peer in one group: it averages, and publishes a state for each epoch; an aux peer follows."""

    def __init__(self, number: int, group: Group, config: StateConfig) -> None:
        self.number = number
        self.group = group
        self.averager = Averager(group, CONFIG, workers=InlineWorkers())
        self.keeper = StateKeeper(group, self.averager, config, workers=InlineWorkers())
        self.commits: list[Commit] = []
        self.averager.listen(self.commits.append)
        self.state = torch.zeros(ELEMENTS)
        self.epoch = 0
        self.resumed_from: int | None = None
        self.follower: Follower | None = None
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.averager.start()
        await self.keeper.start()
        self.returning = self.keeper.go_back_with(self.averager)
        if self.group.session.card.role == "aux":
            clock = self.group.session.clock
            self.follower = Follower(
                self.keeper, self.averager, self.group.session.roster, clock, num_training=lambda: 0
            )
            self.follower.start()
        else:
            self.task = asyncio.create_task(self._train())

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])
        if self.follower is not None:
            await self.follower.close()
        await self.returning.close()
        await self.keeper.close()
        await self.averager.close()

    async def _train(self) -> None:
        fetched = await self.keeper.resume(base={"w": self.state}, timeout_seconds=PATIENCE_SECONDS)
        if fetched is not None:
            with fetched:
                fetched.write_into({"w": self.state})
                self.epoch, self.resumed_from = fetched.epoch, fetched.made_at
        self.keeper.publish({"w": self.state}, {}, self.epoch)
        while True:
            await asyncio.sleep(1.0 + 0.37 * self.number)
            if self.averager.epoch > self.epoch:
                with await self.keeper.fetch(at_least_epoch=self.averager.epoch, timeout_seconds=60) as newer:
                    newer.write_into({"w": self.state})
                    self.epoch = newer.epoch
                continue
            update = torch.full((ELEMENTS,), 2.0**self.number)
            try:
                result = await self.averager.average(
                    {"w": update}, weight=1.0, epoch=self.epoch + 1, timeout_seconds=TIMEOUT_SECONDS
                )
            except RoundFailedError:
                continue
            if result.holds:
                self.state += update
                self.epoch += 1
                self.keeper.publish({"w": self.state}, {}, self.epoch)


class CutLab:
    """A run with several groups; what it keeps on disk outlives it."""

    def __init__(self, run: MemoryRun, folder: Path) -> None:
        self.run = run
        self.folder = folder
        self.posts: dict[str, dict[str, Post]] = {}
        self.peers: dict[str, MemoryPeer] = {}
        self._identities: dict[str, Identity] = {}

    async def join(
        self, name: str, groups: Iterable[str], *, role: Role = "trainer", coordinates: bool = False, **options: Any
    ) -> MemoryPeer:
        names = tuple(groups)
        seed = self._identities.setdefault(name, Identity.temporary()).seed
        peer = await self.run.join(
            name, role=role, coordinates=coordinates, trusted=coordinates, groups=names, identity=Identity(seed)
        )
        self.peers[name] = peer
        self.posts[name] = {}
        number = len(self.posts)
        for group in names:
            config = StateConfig(**{"keep": "always", "cut_every_seconds": 0.0, "grace_seconds": 4.0, **options})
            place = Group(peer, group)
            await place.enter()
            post = self.posts[name][group] = Post(number, place, config)
            await post.start()
        return peer

    async def join_host(self, groups: Iterable[str], **options: Any) -> MemoryPeer:
        """An aux peer that may coordinate, and saves."""
        options = {"folder": self.folder / "host", "backups": BackupConfig(every_epochs=1), **options}
        return await self.join("host", groups, role="aux", coordinates=True, **options)

    async def kill(self, *names: str) -> None:
        """As SIGKILL, all at once."""
        for name in names:
            await self.run.kill(self.peers.pop(name))
        for name in names:
            for post in self.posts.pop(name).values():
                await post.close()

    @property
    def board(self) -> CutBoard:
        return board_of(next(iter(self.peers.values())).session)

    def head(self, group: str) -> Commit:
        """The newest commit of a group that any peer knows."""
        heads = [posts[group].averager.lineage.head for posts in self.posts.values() if group in posts]
        return max((head for head in heads if head is not None), key=lambda head: head.epoch)

    def epochs(self, group: str) -> set[int]:
        return {posts[group].epoch for posts in self.posts.values() if group in posts and not posts[group].follower}

    def resumed_from(self, group: str) -> list[int]:
        """At which epoch the states were made that the trainers of a group began with."""
        found = [posts[group].resumed_from for posts in self.posts.values() if group in posts]
        return [epoch for epoch in found if epoch is not None]

    async def until(self, condition: Callable[[], bool], what: str) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not condition():
            assert loop.time() - began < PATIENCE_SECONDS, f"waited in vain for {what}"
            await asyncio.sleep(0.05)
        return loop.time() - began

    async def until_epoch(self, group: str, epoch: int) -> None:
        await self.until(lambda: min(self.epochs(group), default=0) >= epoch, f"epoch {epoch} of {group}")

    async def until_safe(self, number: int) -> Cut:
        await self.until(lambda: self.board.safe is not None and self.board.safe.number >= number, f"cut {number}")
        found = self.board.latest()
        assert found is not None
        return found

    async def close(self) -> None:
        for posts in self.posts.values():
            for post in posts.values():
                await post.close()
        for identity in self._identities.values():
            identity.close()


@asynccontextmanager
async def cut_lab(folder: Path, seed: int = 0) -> AsyncIterator[CutLab]:
    torch.set_num_threads(1)
    run = MemoryRun(clock=LoopClock(), seed=seed)
    await run.open()
    there = CutLab(run, folder)
    try:
        yield there
    finally:
        await there.close()
        await run.close()
