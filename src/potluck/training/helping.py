"""What a peer does for others beside training: reduces, coordinates if it may, gives out shards, keeps the books."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from potluck.optim.helper import Helper
from potluck.round.averager import Averager, RoundPeer
from potluck.state.keeper import StateConfig
from potluck.training.ballot import BallotDesk
from potluck.training.contributions import ContributionDesk
from potluck.training.historydesk import HistoryDesk
from potluck.training.manifest import Manifest
from potluck.training.optimizers import coordinating
from potluck.training.shards import ShardDesk


class Desks:
    """What whoever coordinates does for the run beside rounds. Lives on the event loop."""

    def __init__(self, peer: RoundPeer, averager: Averager) -> None:
        self.shards = ShardDesk(peer, averager.lease)
        self.contributions = ContributionDesk(peer.session, averager)
        self.history = HistoryDesk(peer.session, averager)
        self.ballot = BallotDesk(peer.session, averager)

    async def close(self) -> None:
        """Calling it twice does no harm."""
        await self.contributions.close()
        await self.history.close()
        await self.ballot.close()


class AuxiliaryWork:
    """The whole part of a peer that trains nothing itself."""

    def __init__(self, helper: Helper, desks: Desks) -> None:
        self._helper = helper
        self._desks = desks

    @classmethod
    async def start(cls, peer: RoundPeer, manifest: Manifest | None = None, folder: Path | None = None) -> Self:
        """Help with what the manifest says; without one, with whatever the trainers do. Backups go to the folder."""
        helper = await Helper.of(
            peer,
            coordinator=coordinating(manifest) if manifest is not None else None,
            state=StateConfig(folder=folder),
        )
        return cls(helper, Desks(peer, helper.collaboration.averager))

    async def close(self) -> None:
        """Leave the round that is under way. Calling it twice does no harm."""
        await self._desks.close()
        await self._helper.close()
