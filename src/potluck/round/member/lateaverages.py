"""The averages of the last epochs, for peers that missed one of them.

A peer that was late for a round, was left out of it, or is still fetching the state needs only that round's averages to
stand where the others do: with Adam and float16 a sixth of the state's bytes. So everybody who holds averages keeps
those of the last epoch, encoded as they travelled, and earlier ones within a budget of memory. That of an aux peer is
larger: it has no model of its own.

The asker names the digest of the commit. It takes the frames of one holder after the other until they add up to
that digest, so a holder can lie no more than a reducer could.

An epoch that one trainer made alone is not kept: that trainer took its own values, which were never encoded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass

from potluck.errors import PotluckError, ProtocolError, StateUnavailableError
from potluck.faultpoints import reach
from potluck.link.grouplinks import GroupLinks
from potluck.link.stream import Stream
from potluck.messages import Message
from potluck.peer.groupsession import GroupSession
from potluck.round.audit.merkle import merkle_root
from potluck.round.audit.seals import sealed_hash
from potluck.round.codecs.memory import num_bytes
from potluck.round.member.heldaverages import HeldAverages, check_average
from potluck.round.member.tensorwork import TensorWork
from potluck.round.member.workers import Workers
from potluck.round.plan.chunks import Chunk, ChunkGrid
from potluck.round.plan.layout import FlatTensors
from potluck.round.plan.messages import Commit, Count, Name

logger = logging.getLogger(__name__)

KEPT_EPOCHS = 16
KEPT_BYTES = {"aux": 512 * 1024**2, "trainer": 64 * 1024**2}  # of all epochs together; the last is always kept
MOST_STREAMS = 8  # served at once
KEPT_SOON_SECONDS = 2.0  # a commit may reach who asks before it reaches who is asked
ANSWER_SECONDS = 10.0  # a holder that sends nothing for so long is given up
MOST_HOLDERS = 4  # that are asked for one epoch
SEALED_DIGEST_CHARACTERS = 64  # of an audited round; other digests are shorter


class FetchAverages(Message, frozen=True, kw_only=True, tag="round.averages"):
    """Opens a stream on which the averages of an epoch come back, one chunk in each item, in order."""

    epoch: Count
    digest: Name


@dataclass(frozen=True, slots=True)
class _Kept:
    digest: str
    averages: HeldAverages
    size_bytes: int


class LateAverages:
    """What one peer keeps of past rounds, and how it gets what it missed."""

    def __init__(self, links: GroupLinks, session: GroupSession, workers: Workers) -> None:
        self.counts: Counter[str] = Counter()
        self._links = links
        self._session = session
        self._workers = workers
        self._most_bytes = KEPT_BYTES.get(session.card.role, 0)
        self._commits: OrderedDict[int, Commit] = OrderedDict()  # the last ones, held by this peer or not
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._has_more = asyncio.Event()  # set, and replaced by another, when something more is kept
        self._num_serving = 0
        links.handle_stream(FetchAverages, self._serve)

    def committed(self, commit: Commit) -> None:
        """An epoch is final."""
        self._commits[commit.epoch] = commit
        while len(self._commits) > KEPT_EPOCHS:
            self._commits.popitem(last=False)
        if commit.restored is not None:  # the run went back: what came before leads nowhere
            self._kept.clear()

    def keep(self, epoch: int, digest: str, averages: HeldAverages) -> None:
        """This peer holds the averages of an epoch that is committed."""
        size_bytes = sum(num_bytes(averages.frame(chunk)) for chunk in range(len(averages.grid)))
        self._kept[epoch] = _Kept(digest, averages, size_bytes)
        while len(self._kept) > 1 and (len(self._kept) > KEPT_EPOCHS or self._kept_bytes > self._most_bytes):
            self._kept.popitem(last=False)
        has_more, self._has_more = self._has_more, asyncio.Event()
        has_more.set()

    @property
    def _kept_bytes(self) -> int:
        return sum(kept.size_bytes for kept in self._kept.values())

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epochs that others can have the averages of, from this peer."""
        return tuple(self._kept)

    # For this peer

    def can_fetch(self, epoch: int) -> bool:
        """Whether somebody who is there should have the averages of an epoch."""
        commit = self._commits.get(epoch)
        if commit is None or commit.restored is not None or len(commit.members) < 2:
            return False
        return self._own(commit) is not None or bool(self._holders(commit))

    async def fetch(self, epoch: int, tensors: FlatTensors) -> None:
        """Write the averages of a past epoch into these tensors; StateUnavailableError if nobody gives them."""
        commit = self._commits.get(epoch)
        if commit is None or commit.restored is not None or not commit.chunk_bytes:
            raise StateUnavailableError(f"this peer has not heard how epoch {epoch} came about")
        if commit.layout != tensors.layout.digest:
            raise StateUnavailableError(f"the averages of epoch {epoch} are of other tensors than this peer has")
        grid = ChunkGrid(runs=commit.runs, chunk_bytes=commit.chunk_bytes)
        if (own := self._own(commit)) is not None:
            await own.averages.write(tensors, self._workers)
            return
        for holder in self._holders(commit):
            try:
                averages = await self._fetch_from(holder, commit, grid)
            except PotluckError as error:
                logger.info("%s did not give the averages of epoch %d: %s", holder, epoch, error)
                continue
            await averages.write(tensors, self._workers)
            self.keep(epoch, commit.digest, averages)
            self.counts["late_averages"] += 1
            return
        raise StateUnavailableError(f"nobody gave this peer the averages of epoch {epoch}")

    def _own(self, commit: Commit) -> _Kept | None:
        kept = self._kept.get(commit.epoch)
        return kept if kept is not None and kept.digest == commit.digest else None

    def _holders(self, commit: Commit) -> list[str]:
        """The peers to ask: aux peers first, which have nothing else to do, then those with fast lines."""
        here = {presence.peer: presence.card for presence in self._session.roster if presence.state == "alive"}
        others = [peer for peer in commit.holders if peer in here and peer != self._session.peer_id]
        others.sort(key=lambda peer: (here[peer].role != "aux", -(here[peer].upload_bytes_per_second or 0.0), peer))
        return others[:MOST_HOLDERS]

    async def _fetch_from(self, holder: str, commit: Commit, grid: ChunkGrid) -> HeldAverages:
        averages = HeldAverages(grid)
        is_sealed = len(commit.digest) == SEALED_DIGEST_CHARACTERS
        wanted = FetchAverages(epoch=commit.epoch, digest=commit.digest)
        async with await self._links.open_stream(holder, wanted, timeout_seconds=ANSWER_SECONDS) as stream:
            for chunk in grid.chunks:
                frames = await stream.receive(timeout_seconds=ANSWER_SECONDS)
                if frames is None or len(frames) != 1:
                    raise ProtocolError(f"it did not send chunk {chunk.index} of {len(grid)}")
                frame = frames[0]
                frame_hash = await self._workers.run(lambda c=chunk, f=frame: _hash(c, f, is_sealed))  # type: ignore[misc]
                averages.put(chunk.index, frame, frame_hash)
                self.counts["late_bytes"] += len(frame)
        hashes = averages.hashes
        digest = merkle_root(hashes).hex() if is_sealed else TensorWork().digest(hashes)
        if digest != commit.digest:
            raise ProtocolError("what it sent is not what was committed")
        return averages

    # For others

    async def _serve(self, stream: Stream) -> None:
        assert isinstance(stream.message, FetchAverages)
        kept = await self._find(stream.message)
        if kept is None:
            await stream.cancel("these averages are not kept here (any more)")
            return
        if self._num_serving >= MOST_STREAMS:
            await stream.cancel("as many peers as possible are served already: ask another, or later")
            return
        self._num_serving += 1
        try:
            for chunk in range(len(kept.averages.grid)):
                await stream.send([kept.averages.frame(chunk)], timeout_seconds=ANSWER_SECONDS)
                reach("round.late_averages", peer=self._session.peer_id, chunk=chunk)
            await stream.finish()
            self.counts["late_served"] += 1
        except PotluckError as error:
            logger.debug("giving averages to %s ended: %s", stream.peer, error)
            await stream.cancel(str(error))
        finally:
            self._num_serving -= 1

    async def _find(self, wanted: FetchAverages) -> _Kept | None:
        """What is asked for, if it is here or comes soon."""
        try:
            async with asyncio.timeout(KEPT_SOON_SECONDS):
                while (kept := self._kept.get(wanted.epoch)) is None and wanted.epoch >= self._newest_epoch:
                    await self._has_more.wait()
        except TimeoutError:
            return None
        return kept if kept is not None and kept.digest == wanted.digest else None

    @property
    def _newest_epoch(self) -> int:
        return next(reversed(self._commits), 0)


def _hash(chunk: Chunk, frame: memoryview, is_sealed: bool) -> bytes:
    """What a frame that came is compared by; ProtocolError or NotFiniteError if it cannot be decoded."""
    frame_hash = check_average(chunk, frame)
    return sealed_hash(frame) if is_sealed else frame_hash
