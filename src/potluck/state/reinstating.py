"""Going back on purpose: the state of an earlier epoch becomes that of a new one.

The lineage is not turned back. The coordinator commits an epoch whose state is known beforehand, by its digest;
then everybody is behind, and fetches it as it would any other. Here is what that needs of a keeper: to get hold of the
earlier state, from this peer's disk or from somebody who offers it, and to show it as the state of the new epoch.
"""

from __future__ import annotations

import logging

from potluck.errors import BackupError, StateUnavailableError
from potluck.peer.groupsession import GroupSession
from potluck.round.member.workers import Workers
from potluck.state.announcement import Verdict
from potluck.state.backups import Backups
from potluck.state.directory import ASK_EVERY_SECONDS, StateDirectory
from potluck.state.fetcher import FetchReport, MovedOnError
from potluck.state.resuming import StateTaker
from potluck.state.shelf import Held, Shelf
from potluck.state.snapshot import Snapshot

logger = logging.getLogger(__name__)


class Reinstating:
    """One peer's part in going back. Lives on the event loop."""

    def __init__(
        self,
        session: GroupSession,
        directory: StateDirectory,
        shelf: Shelf,
        taker: StateTaker,
        *,
        backups: Backups | None,
        workers: Workers,
    ) -> None:
        self._session = session
        self._directory = directory
        self._shelf = shelf
        self._taker = taker
        self._backups = backups
        self._workers = workers

    async def bring(self, epoch: int, digest: str) -> bool:
        """Have an earlier state at hand and offer it to others, if this peer has it in memory or on disk."""
        if self._shelf.find(digest) is not None:
            return True
        snapshot = await self._workers.run(lambda: self._read(digest))
        if snapshot is None:
            return False
        self._offer(epoch, snapshot)
        return True

    async def fetch(self, epoch: int, digest: str, *, timeout_seconds: float) -> None:
        """Have it at hand, from any peer that offers it; StateUnavailableError when nobody does in time."""
        if await self.bring(epoch, digest):
            return
        clock = self._session.clock
        until = clock.monotonic() + timeout_seconds
        while True:
            if (offered := self._offered(epoch, digest)) is not None:
                try:
                    snapshot = await self._taker.fetch_for_resuming(offered, None, FetchReport(), None, until)
                except MovedOnError as error:
                    logger.info("the state of epoch %d is looked for elsewhere: %s", epoch, error)
                else:
                    self._offer(epoch, snapshot)
                    return
            left = until - clock.monotonic()
            if left <= 0:
                raise StateUnavailableError(
                    f"nobody who is here has the state of epoch {epoch} ({digest[:12]}…) that the run should go back "
                    "to: start a peer that has a backup of it"
                )
            await self._directory.ask()
            await self._directory.until_changed(min(left, ASK_EVERY_SECONDS))

    async def show(self, epoch: int, digest: str) -> bool:
        """Make a state at hand that of an epoch which was just committed, for everybody to fetch; False: it is not."""
        found = self._shelf.find(digest)
        if found is None:
            return False
        snapshot = found.hold()
        try:
            await self._taker.take_over(Held(epoch, snapshot, made_at=epoch), keeps=True)
            self._taker.save(epoch, snapshot, made_at=epoch)
        finally:
            snapshot.release()
        self._shelf.drop_backup()
        self._directory.announce()
        return True

    def _offer(self, epoch: int, snapshot: Snapshot) -> None:
        self._shelf.put(epoch, snapshot, made_at=epoch, is_backup=True)
        snapshot.release()
        self._directory.announce()

    def _read(self, digest: str) -> Snapshot | None:
        if self._backups is None:
            return None
        for info in self._backups.infos():
            if info.digest == digest:
                try:
                    return self._backups.read(info)
                except BackupError as error:
                    logger.warning("the backup of epoch %d cannot be used to go back to: %s", info.epoch, error)
        return None

    def _offered(self, epoch: int, digest: str) -> Verdict | None:
        """The state, if somebody else offers it: that it is the right one, its digest will show."""
        for claim in (*self._directory.claims(epoch), *self._directory.claims(epoch, backups=True)):
            state = claim.state
            if state is not None and state.digest == digest and state.is_served and claim.peer != self._session.peer_id:
                return Verdict(
                    epoch=epoch,
                    digest=digest,
                    num_bytes=state.num_bytes,
                    made_at=state.made_at,
                    keepers=(claim.peer,),
                    is_trusted=True,
                )
        return None
