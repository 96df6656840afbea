"""The state that a verdict names, fetched from its keepers, and checked against what was said of it."""

from __future__ import annotations

import asyncio
from collections import Counter

from potluck.errors import ConfigurationError
from potluck.link.grouplinks import GroupLinks
from potluck.peer.groupsession import GroupSession
from potluck.round.member.workers import Workers
from potluck.state.announcement import Verdict
from potluck.state.appraising import Appraiser
from potluck.state.assembly import Assembly
from potluck.state.backups import backup_folder
from potluck.state.chunklog import ChunkLog
from potluck.state.chunkpool import ChunkPool
from potluck.state.config import StateConfig
from potluck.state.directory import StateDirectory
from potluck.state.fetcher import Fetcher, FetchReport, MovedOnError, Progress
from potluck.state.shelf import Shelf
from potluck.state.snapshot import Snapshot

RETRY_SECONDS = 0.5  # after a state that was not what it was said to be


class CheckedFetch:
    """Fetches one state at a time. Lives on the event loop."""

    def __init__(
        self,
        session: GroupSession,
        links: GroupLinks,
        workers: Workers,
        pool: ChunkPool,
        directory: StateDirectory,
        shelf: Shelf,
        appraiser: Appraiser,
        config: StateConfig,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._session = session
        self._links = links
        self._workers = workers
        self._pool = pool
        self._directory = directory
        self._shelf = shelf
        self._appraiser = appraiser
        self._config = config

    def new_assembly(self) -> Assembly:
        """What puts chunks together; with a folder it finds those of a fetch that was interrupted. To be closed."""
        folder = self._config.folder
        if folder is None:
            return Assembly(self._pool, None)
        return Assembly(self._pool, ChunkLog(backup_folder(folder, self._session.group).parent / "fetching.chunks"))

    async def fetch(
        self,
        verdict: Verdict,
        assembly: Assembly,
        based: Snapshot | None,
        report: FetchReport,
        progress: Progress | None,
        until: float,
        patience_seconds: float,
    ) -> Snapshot:
        """The state; MovedOnError where nobody serves it any more, or it is not what its keepers said."""
        bases = [held.snapshot.hold() for held in self._shelf] + ([based.hold()] if based is not None else [])
        fetcher = Fetcher(
            self._links,
            self._session.clock,
            self._workers,
            self._config.fetching,
            assembly,
            keepers=lambda digest: self._directory.keepers(verdict.epoch, digest),
            report=report,
            progress=progress or self._config.on_progress,
            is_replaceable=verdict.is_replaceable,
            patience_seconds=patience_seconds,
        )
        stop_listening = self._directory.listen(fetcher.keepers_changed)
        try:
            snapshot = await fetcher.fetch(verdict.digest, bases, until=until)
        except MovedOnError:
            self._directory.note_failure(verdict)
            raise
        except ConfigurationError as error:  # one keeper's word, where others have not been asked yet
            if not (verdict.is_replaceable and self._directory.note_failure(verdict)):
                raise
            raise MovedOnError(f"the state {verdict.digest[:12]} is of no use here: {error}") from error
        finally:
            stop_listening()
            for base in bases:
                base.release()
        if verdict.common and snapshot.common_digest != verdict.common:  # only a keeper's own part is taken on trust
            snapshot.release()
            self._directory.note_failure(verdict)
            await asyncio.sleep(RETRY_SECONDS)
            raise MovedOnError(f"{verdict.digest[:12]} was announced to be {verdict.common[:12]} in part, and is not")
        if not await self._appraiser.verify(verdict, snapshot):
            snapshot.release()
            self._directory.note_failure(verdict)
            raise MovedOnError(f"the state {verdict.digest[:12]} is not what its keeper answered for")
        self.counts["fetched"] += 1
        return snapshot
