"""Who has given how much: a book in the hub, written by the coordinator after each commit.

A commit says what each member's values weighed, which in a run by target batch is its samples. The book adds that up.
It knows up to which epoch it counts: epochs that a coordinator did not live to write down are counted as missed, so
that the sums never claim to be more than they are.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from potluck.errors import ProtocolError, RetryableError
from potluck.messages import Message, decode, encode
from potluck.peer.session import Session
from potluck.plaintext import clean_all
from potluck.round.plan.messages import Commit
from potluck.training.books.commitdesk import CommitDesk

if TYPE_CHECKING:
    from potluck.round.averager import Averager

logger = logging.getLogger(__name__)

KEY = "book"
MAX_PEOPLE = 1000  # so that the book fits into a message; who gave least makes room
MAX_COORDINATORS = 64
LONGEST_NAME = 24
RETRY_SECONDS = 1.0


class Given(Message, frozen=True, kw_only=True, array_like=True):
    """What one peer has given."""

    name: str = ""  # as it called itself last; shown, never trusted
    epochs: int = 0
    samples: float = 0.0
    last_epoch: int = 0


class ContributionBook(Message, frozen=True, kw_only=True):
    """What all peers have given."""

    epoch: int = 0  # counted up to here
    missed: int = 0  # epochs that nobody wrote down
    peers: dict[str, Given] = {}
    coordinators: tuple[str, ...] = ()  # whose receipts count; the newest last

    def ranked(self) -> list[tuple[str, Given]]:
        """By samples, the largest first."""
        return sorted(self.peers.items(), key=lambda item: (-item[1].samples, item[0]))


def added(book: ContributionBook, commit: Commit, names: dict[str, str]) -> ContributionBook:
    """The book with one more epoch; unchanged when it counts that one already."""
    if commit.epoch <= book.epoch:
        return book
    peers = dict(book.peers)
    for member in commit.members:
        if member.weight > 0:
            before = peers.get(member.peer, Given())
            peers[member.peer] = Given(
                name=(names.get(member.peer) or before.name)[:LONGEST_NAME],
                epochs=before.epochs + 1,
                samples=before.samples + member.weight,
                last_epoch=commit.epoch,
            )
    if len(peers) > MAX_PEOPLE:
        kept = sorted(peers, key=lambda peer: (-peers[peer].samples, peer))[:MAX_PEOPLE]
        peers = {peer: peers[peer] for peer in kept}
    missed = book.missed + commit.epoch - book.epoch - 1
    earlier = [peer for peer in book.coordinators if peer != commit.coordinator]
    coordinators = tuple([*earlier, commit.coordinator][-MAX_COORDINATORS:])
    return msgspec.structs.replace(book, epoch=commit.epoch, missed=missed, peers=peers, coordinators=coordinators)


def given_by(peer: str, commit: Commit) -> float:
    """The samples of a peer that an epoch holds, as the book and receipts count them."""
    return sum(member.weight for member in commit.members if member.peer == peer)


class ContributionDesk(CommitDesk):
    """Writes the book while this peer holds the coordinator's lease."""

    def __init__(self, session: Session, averager: Averager) -> None:
        super().__init__(averager, "contributions")
        self._session = session
        self._store = session.hub.store("contributions")

    async def see_to(self, commits: list[Commit]) -> None:
        """Write them down, as soon as the hub is there."""
        while self.averager.lease.token:
            if await self._write(commits):
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _write(self, commits: list[Commit]) -> bool:
        try:
            book, revision = await read_book(self._session)
            names = {presence.peer: presence.card.name for presence in self._session.roster}
            for commit in commits:
                book = added(book, commit, names)
            await self._store.put(KEY, encode(book), expected=revision)
        except RetryableError as error:  # another coordinator wrote first, or the hub is away
            self.counts["retries"] += 1
            logger.debug("contributions cannot be written just now: %s", error)
            return False
        self.counts["written"] += 1
        return True


async def read_book(session: Session) -> tuple[ContributionBook, int]:
    """The book as it stands in the hub, and its revision; empty, with 0, when there is none."""
    entry = await session.hub.store("contributions").get(KEY)
    if entry is None or entry.value is None:
        return ContributionBook(), 0
    try:
        return clean_all(decode(ContributionBook, entry.value)), entry.revision
    except ProtocolError as error:
        logger.warning("the book of contributions cannot be read and is begun anew: %s", error)
        return ContributionBook(), entry.revision
