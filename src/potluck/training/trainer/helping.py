"""What a peer does for others beside training: reduces, coordinates if it may, gives out shards, keeps the books."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self

from potluck.optim.collaboration import Collaboration
from potluck.optim.helper import Helper
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
from potluck.training.manifest.notice import NoticeBoard
from potluck.training.manifest.rollback import RestorationDesk
from potluck.training.trainer.optimizers import coordinating


class Desks:
    """What whoever coordinates does for the run beside rounds. Lives on the event loop."""

    def __init__(self, peer: RoundPeer, collaboration: Collaboration, manifest: Callable[[], Manifest | None]) -> None:
        """`manifest` returns the newest one."""
        peer = group_of(peer)
        averager, keeper = collaboration.averager, collaboration.keeper
        self.shards = ShardDesk(peer, averager.lease, averager.measured)
        self.contributions = ContributionDesk(peer.session, averager)
        self.receipts = ReceiptDesk(peer, averager)
        self.restorations = RestorationDesk(averager, keeper.restoring, manifest) if keeper is not None else None
        self.history = HistoryDesk(peer.session, averager)
        self.ballot = BallotDesk(peer.session, averager)

    async def close(self) -> None:
        """Calling it twice does no harm."""
        if self.restorations is not None:
            await self.restorations.close()
        await self.receipts.close()
        await self.contributions.close()
        await self.history.close()
        await self.ballot.close()


def open_desks(run: Joined, collaboration: Collaboration, manifest: Callable[[], Manifest | None]) -> None:
    """Have a trainer be ready to do what coordinators do: in a private run trainers are. They close with the run."""

    async def opened() -> Desks:
        return Desks(collaboration.peer, collaboration, manifest)

    run.attach(run.call(opened()).close)


def keep_receipts(run: Joined, collaboration: Collaboration, path: Path) -> None:
    """Have a trainer keep its receipts in this file, as long as it is in the run."""

    async def kept() -> ReceiptKeeper:
        return ReceiptKeeper(collaboration.peer, collaboration.averager.lease.view, path)

    run.attach(run.call(kept()).close)


class AuxiliaryWork:
    """The whole part of a peer that trains nothing itself."""

    def __init__(self, group: Group, board: NoticeBoard, helper: Helper, desks: Desks) -> None:
        self.board = board
        self.evaluations = EvaluationDesk(group)
        self._group = group
        self._helper = helper
        self._desks = desks

    @classmethod
    async def start(cls, peer: LinkedPeer, state: StateConfig | None = None) -> Self:
        """Help with what the manifest says; without one, with whatever the trainers do. `state`: see StateConfig.

        ConfigurationError where the manifest is signed by somebody else than the organiser.
        """
        group = Group(peer)
        board = NoticeBoard.of(group.session)
        try:
            await board.start()
            board.check()
            manifest = board.manifest
            helper = await Helper.of(
                group,
                coordinator=coordinating(manifest) if manifest is not None else None,
                state=state,
            )
        except BaseException:
            await board.close()
            group.close()
            raise
        collaboration = helper.collaboration
        board.listen(lambda newest: collaboration.coordinate_by(coordinating(newest)))
        return cls(group, board, helper, Desks(group, collaboration, lambda: board.manifest))

    async def close(self) -> None:
        """Leave the round that is under way. Calling it twice does no harm."""
        await self._desks.close()
        await self._helper.close()
        await self.board.close()
        self._group.close()
