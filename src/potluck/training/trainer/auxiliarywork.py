"""What a peer does for others beside training: reduces, coordinates if it may, gives out shards, keeps the books."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self

from potluck.hub.subjects import MAIN
from potluck.optim.auxiliary import AuxiliaryPeer
from potluck.optim.collaboration import Collaboration
from potluck.paths.pathhost import PathHost
from potluck.round.averager import RoundPeer
from potluck.run.group import Group, LinkedPeer, group_of
from potluck.run.joined import Joined
from potluck.state.config import StateConfig
from potluck.training.books.ballot import BallotDesk
from potluck.training.books.contributions import ContributionDesk
from potluck.training.books.evaluations import EvaluationDesk
from potluck.training.books.historydesk import HistoryDesk
from potluck.training.books.receipts import ReceiptDesk, ReceiptKeeper
from potluck.training.books.shards import ShardDesk
from potluck.training.manifest.manifest import Manifest
from potluck.training.manifest.noticeboard import NoticeBoard
from potluck.training.manifest.rollback import RestorationDesk
from potluck.training.trainer.optimizers import coordinating


class CoordinatorDesks:
    """What a coordinator does for the run beside rounds. Lives on the event loop."""

    def __init__(self, peer: RoundPeer, collaboration: Collaboration, manifest: Callable[[], Manifest | None]) -> None:
        """`manifest` returns the newest one."""
        peer = group_of(peer)
        averager, keeper = collaboration.averager, collaboration.keeper
        self.shards = ShardDesk(peer, averager.lease, averager.measured)
        self.contributions = ContributionDesk(peer.session, averager)
        self.receipts = ReceiptDesk(peer, averager)
        self.restorations = (
            RestorationDesk(averager, keeper.restoring, manifest, keeper.cut_desk) if keeper is not None else None
        )
        self.history = HistoryDesk(peer.session, averager)
        self.ballot = BallotDesk(peer.session, averager)

    async def close(self) -> None:
        """Idempotent."""
        if self.restorations is not None:
            await self.restorations.close()
        await self.receipts.close()
        await self.contributions.close()
        await self.history.close()
        await self.ballot.close()


def open_desks(run: Joined, collaboration: Collaboration, manifest: Callable[[], Manifest | None]) -> None:
    """Have a trainer be ready to do what coordinators do: in a private run trainers are. They close with the run."""

    async def opened() -> CoordinatorDesks:
        return CoordinatorDesks(collaboration.peer, collaboration, manifest)

    run.attach(run.call(opened()).close)


def keep_receipts(run: Joined, collaboration: Collaboration, path: Path) -> None:
    """Have a trainer keep its receipts in this file, as long as it is in the run."""

    async def kept() -> ReceiptKeeper:
        return ReceiptKeeper(collaboration.peer, collaboration.averager.lease.view, path)

    run.attach(run.call(kept()).close)


class AuxiliaryWork:
    """The whole part of a peer that trains nothing itself."""

    def __init__(self, groups: list[Group], board: NoticeBoard, helper: AuxiliaryPeer, desks: CoordinatorDesks) -> None:
        """`groups` are those that it is in, `main` first."""
        self.board = board
        self.evaluations = EvaluationDesk(groups[0])
        self._groups = groups
        self._others: list[AuxiliaryPeer] = []
        self._helper = helper
        self._desks = desks
        self._paths: PathHost | None = None

    @classmethod
    async def start(cls, peer: LinkedPeer, state: StateConfig | None = None) -> Self:
        """Help with what the manifest says; without one, with whatever the trainers do. `state`: see StateConfig.

        In other groups that this peer is in it helps with whatever their trainers do. ConfigurationError where the
        manifest is signed by somebody else than the organiser.
        """
        group = Group(peer)
        board = NoticeBoard.of(group.session)
        try:
            await board.start()
            board.check()
            manifest = board.manifest
            helper = await AuxiliaryPeer.of(
                group,
                coordinator=coordinating(manifest) if manifest is not None else None,
                state=state,
            )
        except BaseException:
            await board.close()
            group.close()
            raise
        collaboration = helper.collaboration
        names = [name for name in peer.session.card.groups if name != MAIN]
        work = cls([group], board, helper, CoordinatorDesks(group, collaboration, lambda: board.manifest))
        board.listen(work._follow)
        try:
            for name in names:
                work._groups.append(Group(peer, name))
                await work._groups[-1].enter()
                work._others.append(await AuxiliaryPeer.of(work._groups[-1], state=state))
            if manifest is not None and manifest.paths is not None:
                work._paths = await _host_paths(peer, group, collaboration, board, manifest, state)
            work._wait_for_states()
        except BaseException:
            await work.close()
            raise
        return work

    @property
    def helpers(self) -> list[AuxiliaryPeer]:
        """In each group that it is in: `main`, those that its invite names, those of paths' modules."""
        return [self._helper, *self._others, *(self._paths.helpers.values() if self._paths is not None else ())]

    def _follow(self, manifest: Manifest) -> None:
        """Have it coordinate as the manifest says, and wait for states."""
        self._helper.collaboration.coordinate_by(coordinating(manifest))
        self._wait_for_states()

    def _wait_for_states(self) -> None:
        if (manifest := self.board.manifest) is not None:
            for helper in self.helpers:
                helper.wait_for_states(manifest.patience.load_seconds)

    async def close(self) -> None:
        """Leave the round that is under way. Idempotent."""
        if self._paths is not None:
            await self._paths.close()
        await self._desks.close()
        for helper in (*self._others, self._helper):
            await helper.close()
        await self.board.close()
        for group in self._groups:
            group.close()


async def _host_paths(
    peer: LinkedPeer,
    group: Group,
    collaboration: Collaboration,
    board: NoticeBoard,
    first: Manifest,
    state: StateConfig | None,
) -> PathHost:
    from potluck.training.trainer.pathwork import host_paths  # what runs without paths do not need

    lease = collaboration.averager.lease
    return await host_paths(peer, group, lease, lambda: board.manifest or first, state or StateConfig())
