"""Which earlier states a run could go back to, and who has them.

The host's own backups are on its disk. What others hold, in memory or on disk, they announce (state/announcement.py):
an organiser listens for a moment, and believes of it what any peer would. What only a stranger has, beside peers that
are trusted, is not believed: its owner knows the digest, and an order may name that.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from potluck.errors import ConfigurationError, ProtocolError
from potluck.hub.connection import Delivery, Entry, HubConnection
from potluck.hub.presence import Presence
from potluck.hub.subjects import Subjects
from potluck.messages import decode
from potluck.peer.roster import Roster
from potluck.state.announcement import KEPT, WANTED, Announcements, Kept, judge

if TYPE_CHECKING:
    from potluck.state.backupfile import BackupInfo

logger = logging.getLogger(__name__)

LISTEN_SECONDS = 1.0  # who is asked what it keeps answers within a quarter of a second
HOST = "this host"
DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierState:
    """A state that a run could go on from."""

    epoch: int
    digest: str
    num_bytes: int
    keepers: tuple[str, ...]
    """The names of those who have it."""

    saved_at: float | None = None
    """When the host saved it; None: others have it."""

    is_on_disk: bool = True
    """False: it is in others' memory, for as long as the newest epochs are."""


def saved(backups: Iterable[BackupInfo]) -> list[EarlierState]:
    """The host's own."""
    return [
        EarlierState(
            epoch=backup.epoch,
            digest=backup.digest,
            num_bytes=backup.inventory.num_bytes,
            keepers=(HOST,),
            saved_at=backup.saved_at,
        )
        for backup in backups
    ]


async def announced(hub: HubConnection, subjects: Subjects, own_id: str) -> list[EarlierState]:
    """What peers say now that they hold, as far as it can be believed."""
    roster, announcements = Roster(), Announcements()

    def changed(entry: Entry) -> None:
        if entry.value is None:
            roster.forget(entry.key)
            return
        try:
            roster.apply(decode(Presence, entry.value))
        except ProtocolError as error:
            logger.debug("the roster's entry %s was passed over: %s", entry.key, error)

    def heard(delivery: Delivery) -> None:
        peer = delivery.subject.rsplit(".", 2)[-2]
        try:
            announcements.take(peer, decode(Kept, delivery.payload))
        except ProtocolError as error:
            logger.debug("what %s says to keep cannot be read: %s", peer, error)

    listening = [
        await hub.store("roster").watch(changed),
        await hub.subscribe(subjects.news("*", KEPT), heard),
    ]
    try:
        await hub.publish(subjects.news(own_id, WANTED), b"")
        await asyncio.sleep(LISTEN_SECONDS)
    finally:
        for each in listening:
            await each.cancel()
    return _believed(announcements, roster)


def _believed(announcements: Announcements, roster: Roster) -> list[EarlierState]:
    found: list[EarlierState] = []
    on_disk = announcements.on_disk()
    for told, backups in ((on_disk, True), (announcements, False), (announcements, True)):
        for epoch in told.epochs(roster, backups=backups):
            verdict = judge(epoch, told.claims(epoch, roster, backups=backups))
            if verdict is not None and verdict.keepers:
                keepers = tuple(_name(roster.get(peer), peer) for peer in verdict.keepers)
                found.append(
                    EarlierState(
                        epoch=epoch,
                        digest=verdict.digest,
                        num_bytes=verdict.num_bytes,
                        keepers=keepers,
                        is_on_disk=told is on_disk,
                    )
                )
    return found


def _name(presence: Presence | None, peer: str) -> str:
    return (presence.card.name if presence is not None else "") or peer[:12]


def merged(own: Sequence[EarlierState], others: Sequence[EarlierState]) -> list[EarlierState]:
    """One row for each epoch, the newest first; the host's own backup is what counts where there is one."""
    by_epoch: dict[int, EarlierState] = {}
    for state in (*own, *others):
        by_epoch.setdefault(state.epoch, state)
    return sorted(by_epoch.values(), key=lambda state: -state.epoch)


def chosen(there: Sequence[EarlierState], epoch: int, *, digest: str, is_paused: bool) -> EarlierState:
    """The one to go back to; ConfigurationError says what there is instead."""
    if digest:
        if not DIGEST.fullmatch(digest):
            raise ConfigurationError(f"--digest {digest!r} is not a digest: it has 64 characters of 0-9 and a-f")
        return EarlierState(epoch=epoch, digest=digest, num_bytes=0, keepers=())
    found = next((state for state in there if state.epoch == epoch), None)
    if found is None:
        known = "; ".join(f"{state.epoch} ({', '.join(state.keepers)})" for state in there) or "none"
        raise ConfigurationError(
            f"nobody who is here shows a state of epoch {epoch}. There are: {known}. If a peer has a backup of it, "
            "`potluck checkpoint list --json --path STATE_PATH` there tells its digest: name that by --digest"
        )
    if not found.is_on_disk and not is_paused:
        raise ConfigurationError(
            f"the state of epoch {epoch} is only in the memory of {', '.join(found.keepers)}, and not for long while "
            "the run trains: `potluck run pause` first"
        )
    return found
