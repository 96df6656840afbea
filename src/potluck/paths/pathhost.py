"""What a peer that trains nothing does for paths: it leases phases, and helps in the group of each module.

There it reduces, coordinates if it may, keeps the module's states and writes backups. So a module survives the peers
that train it. Often all peers of a run are stopped at once. So the last aux peer waits a moment before it leaves: it
takes what trainers that leave have made last, and makes a cut of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Self

from potluck.errors import PotluckError
from potluck.optim.auxiliary import AuxiliaryPeer
from potluck.paths.grid import Grid
from potluck.paths.moduleheir import ModuleHeir, ModuleMethod
from potluck.paths.pathkeeping import PathKeeper
from potluck.paths.phasedesk import PhaseDesk
from potluck.peer.lease import Lease
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.run.cuts import propose
from potluck.run.group import Group, LinkedPeer
from potluck.state.config import StateConfig

logger = logging.getLogger(__name__)

STATES = "paths"  # the folder of paths' states, beside those of the groups
LAST_STATES_SECONDS = 5.0  # for trainers that stop at the same time to give what only they have
LAST_CUT_SECONDS = 10.0
LOOK_EVERY_SECONDS = 0.1


class PathHost:
    """A helper in each module's group, the desk, and the keeper. Lives on the event loop."""

    def __init__(self, peer: LinkedPeer, desk: PhaseDesk, keeper: PathKeeper) -> None:
        self._peer = peer
        self.desk = desk
        self.keeper = keeper
        self.heirs: dict[str, ModuleHeir] = {}
        self._groups: list[Group] = []
        self._main: Group | None = None  # until it is left, where this peer has a disk

    @property
    def helpers(self) -> dict[str, AuxiliaryPeer]:
        """By module."""
        return {name: heir.helper for name, heir in self.heirs.items()}

    @classmethod
    async def start(
        cls,
        peer: LinkedPeer,
        main: Group,
        lease: Lease,
        grid: Grid,
        *,
        coordinating: Callable[[str], CoordinatorConfig],
        state: StateConfig,
        method: ModuleMethod | None = None,
        end: Callable[[], int] = lambda: 0,
    ) -> Self:
        """`coordinating` says how the rounds of a module are started; `end` after how many phases a path is done.

        `method` is that of the trainers.
        """
        keeper = PathKeeper(main, grid, states_folder(state.folder))
        host = cls(peer, PhaseDesk(main, lease, grid, end), keeper)
        try:
            for name in grid.modules:
                group = Group(peer, name)
                host._groups.append(group)
                await group.enter()
                host.heirs[name] = await ModuleHeir.of(
                    group,
                    method or ModuleMethod(),
                    len(grid.paths_through(name)),
                    coordinator=coordinating(name),
                    state=state,
                )
        except BaseException:
            await host.close()
            raise
        keeper.start()
        host._main = main if state.folder is not None else None
        return host

    async def close(self) -> None:
        """Idempotent. If the trainers leave too, their last states are taken first."""
        main, self._main = self._main, None
        if main is not None:
            await self._take_last_states(main)
        await self.keeper.close()
        for heir in self.heirs.values():
            await heir.close()
        for group in self._groups:
            group.close()

    async def _take_last_states(self, main: Group) -> None:
        """Wait until the trainers have gone, and make a cut of what they left: the run goes on from it."""
        session = main.session
        until = session.clock.monotonic() + LAST_STATES_SECONDS
        while session.hub.is_connected and any(_epoch(helper) for helper in self.helpers.values()):
            others = [presence for presence in session.roster.alive() if presence.peer != session.peer_id]
            if any(presence.card.role == "aux" for presence in others):
                return  # it stays, and does the same
            if not any(presence.card.role == "trainer" for presence in others):
                await self._cut()
                return
            if session.clock.monotonic() >= until:
                return  # they train on, and have it all
            await asyncio.sleep(LOOK_EVERY_SECONDS)

    async def _cut(self) -> None:
        lost = [name for name, helper in self.helpers.items() if (helper.kept_epoch or 0) < _epoch(helper)]
        if lost:
            text = "nobody who stays has the newest state of %s: the run will go on from the cut before, or a backup"
            logger.warning(text, ", ".join(lost))
            return
        try:
            cut = await propose(self._peer, {}, saved=True, timeout_seconds=LAST_CUT_SECONDS)
        except PotluckError as error:
            logger.warning("no last cut is made, and the run will go on from the one before: %s", error)
        else:
            logger.info("the run will go on from %s", cut.describe())


def _epoch(helper: AuxiliaryPeer) -> int:
    return helper.collaboration.averager.epoch


def states_folder(folder: FilePath | None) -> FilePath | None:
    """Where the states of paths are written."""
    return folder / STATES if folder is not None else None
