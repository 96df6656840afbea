"""Naming the model: everybody who helps now may propose a name and vote for one; each person has one vote.

A vote is signed with the key of a peer that is in the run, and may be sent by anybody: so the peer itself goes on
training meanwhile. The coordinator checks the signature, takes the person from the guard's roster, and writes the
ballot. A person with ten peers has one vote. Who came in by an invite that many may use is a person of its own with
each key: the ballot is as honest as the invites.
"""

from __future__ import annotations

import asyncio
import logging
import unicodedata
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from potluck import tasks
from potluck.errors import ConfigurationError, ProtocolError, RetryableError
from potluck.hub.connection import Delivery, Subscription
from potluck.hub.keys import Signer, verify
from potluck.hub.presence import Presence
from potluck.messages import Message, decode, encode
from potluck.peer.groupsession import GroupSession
from potluck.peer.session import Session
from potluck.plaintext import clean_all

if TYPE_CHECKING:
    from potluck.round.averager import Averager

logger = logging.getLogger(__name__)

KEY = "model-name"
TOPIC = "vote"
LONGEST_MODEL_NAME = 40
MAX_VOTES = 1000  # so that the ballot fits into a message
MAX_VOTE_BYTES = 1024
MAX_WAITING = 1000
RETRY_SECONDS = 1.0
FUTURE_SECONDS = 60.0  # a vote from later than that would shut out its own successors


class Vote(Message, frozen=True, kw_only=True):
    """One peer's wish; an empty name takes it back."""

    peer: str
    name: str
    at: float  # hub time: the newest one counts


class SignedVote(Message, frozen=True, kw_only=True):
    """A vote and its peer's signature."""

    body: bytes
    signature: bytes


class CastVote(Message, frozen=True, kw_only=True, array_like=True):
    """What one person wants."""

    name: str
    at: float


class Ballot(Message, frozen=True, kw_only=True):
    """All votes. A name is proposed by voting for it."""

    votes: dict[str, CastVote] = {}  # by person

    def counted(self) -> list[tuple[str, int]]:
        """The names with their votes, the most wanted first."""
        names = Counter(vote.name for vote in self.votes.values() if vote.name)
        return sorted(names.items(), key=lambda item: (-item[1], item[0]))


def clean_name(text: str) -> str:
    """A name that can be shown on one line; ConfigurationError where nothing is left of it, or it is too long."""
    printable = "".join(" " if unicodedata.category(c).startswith("C") else c for c in text)
    name = " ".join(printable.split())
    if not 1 <= len(name) <= LONGEST_MODEL_NAME:
        raise ConfigurationError(f"a model's name has 1 to {LONGEST_MODEL_NAME} characters, not {len(name)}")
    return name


def sign_vote(name: str, run: str, signer: Signer, at: float) -> bytes:
    """A vote as it is sent."""
    body = encode(Vote(peer=signer.public_key, name=clean_name(name) if name else "", at=at))
    return encode(SignedVote(body=body, signature=signer.sign(_context(run) + body)))


def read_vote(data: bytes, run: str) -> Vote:
    """The vote; ProtocolError unless the peer that it names signed it for this run."""
    signed = decode(SignedVote, data, limit_bytes=MAX_VOTE_BYTES)
    vote = decode(Vote, signed.body, limit_bytes=MAX_VOTE_BYTES)
    if not verify(vote.peer, _context(run) + signed.body, signed.signature):
        raise ProtocolError(f"the vote is not signed by {vote.peer[:60]}: ignored")
    try:
        name = clean_name(vote.name) if vote.name else ""
    except ConfigurationError as error:
        raise ProtocolError(f"no vote: {error}") from error
    return msgspec.structs.replace(vote, name=name)


def cast(ballot: Ballot, presence: Presence | None, vote: Vote, now: float) -> Ballot:
    """The ballot after this vote; unchanged when it does not count."""
    if presence is None or presence.peer != vote.peer or presence.card.role == "observer":
        return ballot
    before = ballot.votes.get(presence.person)
    if vote.at > now + FUTURE_SECONDS or (before is not None and vote.at <= before.at):
        return ballot
    if before is None and len(ballot.votes) >= MAX_VOTES:
        return ballot
    votes = {**ballot.votes, presence.person: CastVote(name=vote.name, at=vote.at)}
    return msgspec.structs.replace(ballot, votes=votes)


def read_ballot(data: bytes | None) -> Ballot:
    """The ballot in the store; an empty one where there is none that can be read."""
    if data is None:
        return Ballot()
    try:
        return clean_all(decode(Ballot, data))
    except ProtocolError as error:
        logger.warning("the ballot cannot be read and is begun anew: %s", error)
        return Ballot()


async def send_vote(session: Session, name: str, signer: Signer) -> None:
    """Vote with this key; the ballot shows it within a second or two, while somebody coordinates."""
    data = sign_vote(name, session.subjects.run, signer, session.now())
    await session.hub.publish(session.subjects.news(session.peer_id, TOPIC), data)


class BallotDesk:
    """Writes the ballot while this peer holds the coordinator's lease. Lives on the event loop."""

    def __init__(self, session: GroupSession, averager: Averager) -> None:
        self.counts: Counter[str] = Counter()
        self._session = session
        self._lease = averager.lease
        self._store = session.hub.store("ballot")
        self._news: Subscription | None = None
        self._waiting: asyncio.Queue[Vote] = asyncio.Queue(MAX_WAITING)
        self._task = asyncio.create_task(self._keep_counting(), name="ballot")

    async def close(self) -> None:
        """Count no more. Idempotent."""
        await tasks.end(self._task)
        if self._news is not None:
            await self._news.cancel()
            self._news = None

    def _vote_came(self, delivery: Delivery) -> None:
        if not self._lease.token or self._waiting.full():
            return
        try:
            self._waiting.put_nowait(read_vote(delivery.payload, self._session.subjects.run))
        except ProtocolError:
            self.counts["bad_votes"] += 1

    async def _keep_counting(self) -> None:
        while self._news is None:
            try:
                subject = self._session.subjects.news("*", TOPIC)
                self._news = await self._session.hub.subscribe(subject, self._vote_came)
            except RetryableError as error:
                logger.debug("votes cannot be heard yet: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
        while True:
            votes = [await self._waiting.get()]
            while not self._waiting.empty():
                votes.append(self._waiting.get_nowait())
            while votes and self._lease.token:
                if await self._write(votes):
                    votes = []
                else:
                    await asyncio.sleep(RETRY_SECONDS)

    async def _write(self, votes: list[Vote]) -> bool:
        try:
            entry = await self._store.get(KEY)
            before = ballot = read_ballot(entry.value if entry is not None else None)
            for vote in votes:
                ballot = cast(ballot, self._session.roster.get(vote.peer), vote, self._session.now())
            if ballot is not before:
                await self._store.put(KEY, encode(ballot), expected=entry.revision if entry is not None else 0)
        except RetryableError as error:  # another coordinator wrote first, or the hub is away
            self.counts["retries"] += 1
            logger.debug("the ballot cannot be written just now: %s", error)
            return False
        self.counts["votes"] += len(votes)
        return True


def _context(run: str) -> bytes:
    return f"potluck vote {run}\0".encode()
