"""Watches a demo's run over the hub, as `potluck monitor` does, and writes down what happened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from potluck.cli.demo.record import DemoRecord, Incident, IncidentKind, SeenCommit, SeenLoss
from potluck.errors import DeadlineExceededError
from potluck.hub.joinlink import JoinLink, fetch_address
from potluck.peer.identity import Identity
from potluck.peer.roster import RosterEvent
from potluck.run.peer import Peer, PeerConfig

if TYPE_CHECKING:
    from potluck.monitor.view import Overview, PeerRow
    from potluck.monitor.watcher import Watcher
    from potluck.round.plan.messages import Commit

NAME = "observer"
LOOK_EVERY_SECONDS = 0.5
PATIENCE_SECONDS = 180.0  # however slow the machine, a run that stands still for longer has not got over something


class DemoObserver:
    """Who watches. Lives on the event loop of an open session."""

    def __init__(self, peer: Peer, watcher: Watcher, record: DemoRecord, began_at: float) -> None:
        """`began_at` is when the demo began, by this machine's clock."""
        self.record = record
        self._peer = peer
        self._watcher = watcher
        self._began_at = began_at
        self._names = {presence.peer: presence.card.name for presence in peer.session.roster}
        self._news = asyncio.Event()
        peer.session.roster.listen(self._somebody_came)

    @property
    def now(self) -> float:
        """Seconds since the demo began."""
        return time.time() - self._began_at

    @property
    def coordinator(self) -> str:
        """The name of the coordinator, as far as is known."""
        return self._names.get(self._watcher.view.coordinator, "")

    def look(self) -> tuple[Overview, list[PeerRow]]:
        """The run as it is now; ourselves left out."""
        now = self._peer.clock.monotonic()
        return self._watcher.view.overview(now), [r for r in self._watcher.view.rows(now) if r.name != NAME]

    async def until(self, what: str, is_so: Callable[[], bool]) -> None:
        """Wait until this is so; looked at after each commit and now and then."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not is_so():
                    self._news.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_EVERY_SECONDS):
                            await self._news.wait()
        except TimeoutError:
            raise DeadlineExceededError(
                f"{what} did not come within {PATIENCE_SECONDS:g} s; the run is at epoch {self.record.epoch}"
            ) from None

    async def until_epoch(self, epoch: int) -> None:
        """Wait until this epoch is committed; any progress renews the patience."""
        while (reached := self.record.epoch) < epoch:
            await self._until_after(reached)

    async def _until_after(self, epoch: int) -> None:
        await self.until(f"epoch {epoch + 1}", lambda: self.record.epoch > epoch)

    def note(self, kind: IncidentKind, who: str) -> Incident:
        """Write down that something happens now."""
        record = self.record
        incident = Incident(kind=kind, who=who, at_seconds=self.now, epoch=record.epoch, term=record.term)
        record.incidents.append(incident)
        return incident

    async def until_over(self, incident: Incident) -> float:
        """Wait until the run has recovered; returns the seconds."""
        await self.until(
            f"an epoch after: {incident.who}, {incident.kind}", lambda: self._seconds(incident) is not None
        )
        return self._seconds(incident) or 0.0

    def committed(self, commit: Commit) -> None:
        """An epoch is final."""
        given = {self._names.get(m.peer, m.peer): m.weight for m in commit.members if m.weight > 0}
        self.record.commits.append(
            SeenCommit(
                at_seconds=commit.committed_at - self._began_at,
                epoch=commit.epoch,
                term=commit.term,
                weights=given,
                sent_bytes=sum(member.sent_bytes for member in commit.members),
            )
        )
        loss = self.look()[0].loss
        if loss is not None:
            self.record.losses.append(SeenLoss(at_seconds=self.now, epoch=commit.epoch, loss=loss))
        self._news.set()

    def _seconds(self, incident: Incident) -> float | None:
        return incident.recovery_seconds(self.record.commits)

    def _somebody_came(self, event: RosterEvent) -> None:
        self._names[event.peer] = event.presence.card.name
        self._news.set()


@asynccontextmanager
async def watching(link: str, record: DemoRecord, began_at: float) -> AsyncIterator[DemoObserver]:
    """Be in the run as an observer."""
    from potluck.monitor.watcher import Watcher
    from potluck.round.lineage import Lineage

    parsed = JoinLink.parse(link)
    config = PeerConfig(role="observer", name=NAME, client_mode=True, link=parsed)
    peer = Peer(await fetch_address(parsed), parsed.run, Identity.temporary(), config)
    await peer.start()
    watcher = Watcher(peer.session)
    observer = DemoObserver(peer, watcher, record, began_at)
    lineage = Lineage(peer.session.hub.store("lineage"), parsed.run, observer.committed)
    try:
        await watcher.start()
        await lineage.start()
        yield observer
    finally:
        record.bad_heads = lineage.bad_heads
        await lineage.close()
        await watcher.close()
        await peer.close()
