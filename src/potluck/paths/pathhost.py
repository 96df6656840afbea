"""What a peer that trains nothing does for paths: it leases phases, and helps in the group of each module.

There it reduces, coordinates if it may, keeps the module's states and writes backups. So a module survives the peers
that train it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Self

from potluck.optim.auxiliary import AuxiliaryPeer
from potluck.paths.grid import Grid
from potluck.paths.pathkeeping import PathKeeper
from potluck.paths.phasedesk import PhaseDesk
from potluck.peer.lease import Lease
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.run.group import Group, LinkedPeer
from potluck.state.config import StateConfig

STATES = "paths"  # the folder of paths' states, beside those of the groups


class PathHost:
    """A helper in each module's group, the desk, and the keeper. Lives on the event loop."""

    def __init__(self, desk: PhaseDesk, keeper: PathKeeper) -> None:
        self.desk = desk
        self.keeper = keeper
        self.helpers: dict[str, AuxiliaryPeer] = {}
        self._groups: list[Group] = []

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
        end: Callable[[], int] = lambda: 0,
    ) -> Self:
        """`coordinating` says how the rounds of a module are started; `end` after how many phases a path is done."""
        keeper = PathKeeper(main, grid, states_folder(state.folder))
        host = cls(PhaseDesk(main, lease, grid, end), keeper)
        try:
            for name in grid.modules:
                group = Group(peer, name)
                host._groups.append(group)
                await group.enter()
                host.helpers[name] = await AuxiliaryPeer.of(group, coordinator=coordinating(name), state=state)
        except BaseException:
            await host.close()
            raise
        keeper.start()
        return host

    async def close(self) -> None:
        """Idempotent."""
        await self.keeper.close()
        for helper in self.helpers.values():
            await helper.close()
        for group in self._groups:
            group.close()


def states_folder(folder: FilePath | None) -> FilePath | None:
    """Where the states of paths are written."""
    return folder / STATES if folder is not None else None
