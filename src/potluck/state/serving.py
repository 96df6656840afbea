"""The keeper's side: inventories and chunks for any peer that asks, within limits.

A joiner asks for the inventory of a state by its digest, then opens a stream and sends the numbers of the chunks that
it wants; they come back in that order, packed where it asks for that and it makes them smaller. A stream's own credit
sees to it that nothing piles up for a joiner that does not read. All streams together stay within a rate if one is set,
and take turns; and while a round exchanges, a trainer leaves its line to that for part of the time: so no joiner
starves another or the training. A snapshot that is being served stays in memory until its last byte has arrived.
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from potluck.clock import Clock
from potluck.errors import ConfigurationError, DeadlineExceededError, PeerError, RetryableError
from potluck.faultpoints import reach
from potluck.link.grouplinks import GroupLinks
from potluck.link.links import Incoming, SendReceipt, Stream
from potluck.messages import Message
from potluck.round.member.workers import Workers
from potluck.state.announcement import Digest
from potluck.state.inventory import MIB
from potluck.state.packing import pack
from potluck.state.schedule import MAX_OPEN
from potluck.state.shelf import Shelf
from potluck.state.snapshot import Snapshot

logger = logging.getLogger(__name__)

NUMBER = struct.Struct(">I")
PACKED = b"packed"  # stands beside numbers of chunks that may come packed, and beside each that does
SEND_SECONDS = 60.0  # a joiner that takes nothing for so long is given up
IDLE_SECONDS = 60.0  # … or asks nothing
STREAMS_PER_PEER = 2
BURST_BYTES = 4 * MIB  # what a trainer sends to a joiner in a round before it rests: enough for a long way
LONGEST_REST_SECONDS = 5.0
LOOK_EVERY_SECONDS = 0.05  # whether the round is over


class AskInventory(Message, frozen=True, kw_only=True, tag="state.inventory"):
    """What does the state with this digest consist of?"""

    digest: Digest


class InventoryAnswer(Message, frozen=True, kw_only=True, tag="state.inventory.answer"):
    """The inventory is the frame beside it."""


class FetchChunks(Message, frozen=True, kw_only=True, tag="state.chunks"):
    """Opens a stream: numbers of chunks one way, the chunks the other."""

    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """How much a keeper gives to others."""

    max_streams: int = 8
    """Joiners served at once; others are told to ask elsewhere, or later."""

    max_snapshots: int = 4
    """States in memory because they are being served, except those on the shelf; the oldest is dropped first."""

    bytes_per_second: float | None = None
    """For all joiners together; None: no limit but `trainer_share`."""

    trainer_share: float = 0.5
    """How much of a round a trainer's line may be busy with this; an aux peer, or one with a rate, needs no rest."""

    def __post_init__(self) -> None:
        if self.max_streams < 1 or self.max_snapshots < 1:
            raise ConfigurationError(f"{self}: a keeper serves at least one joiner and one state")
        if self.bytes_per_second is not None and not self.bytes_per_second > 0:
            raise ConfigurationError(f"bytes_per_second={self.bytes_per_second}: it must be more than 0, or None")
        if not 0 < self.trainer_share <= 1:
            raise ConfigurationError(f"trainer_share={self.trainer_share}: it must be more than 0 and at most 1")


class Turnstile:
    """Lets bytes pass at a rate, first come, first served."""

    def __init__(self, bytes_per_second: float | None, clock: Clock) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._free_at = 0.0
        self._turns = asyncio.Lock()  # fair: in the order of asking

    async def admit(self, num_bytes: int) -> None:
        """Return when so many bytes may leave."""
        if self._rate is None:
            return
        async with self._turns:
            now = self._clock.monotonic()
            if self._free_at > now:
                await asyncio.sleep(self._free_at - now)
            self._free_at = max(self._free_at, now) + num_bytes / self._rate


@dataclass(eq=False, slots=True)
class _Service:
    """One stream that is served, and the snapshot that it keeps in memory."""

    stream: Stream
    snapshot: Snapshot
    num_unsettled: int = 0
    is_over: bool = False
    is_released: bool = False
    burst_bytes: int = 0
    burst_began: float = 0.0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)  # all that was sent

    def sent(self, num_bytes: int, now: float, receipt: SendReceipt) -> None:
        if not self.burst_bytes:
            self.burst_began = now
        self.burst_bytes += num_bytes
        self.num_unsettled += 1
        self.arrived.clear()
        receipt.watch(self.settled)

    def settled(self) -> None:
        self.num_unsettled -= 1
        if not self.num_unsettled:
            self.arrived.set()
        self.release_if_done()

    def release_if_done(self) -> None:
        if self.is_over and not self.num_unsettled and not self.is_released:
            self.is_released = True
            self.snapshot.release()


class Serving:
    """Serves what is on a shelf."""

    def __init__(
        self,
        links: GroupLinks,
        shelf: Shelf,
        config: ServingConfig,
        clock: Clock,
        workers: Workers,
        *,
        peer_id: str,
        is_trainer: bool,
        is_in_round: Callable[[], bool],
    ) -> None:
        """`is_in_round` tells whether others wait for what this peer exchanges with them."""
        self.counts: Counter[str] = Counter()
        self._links = links
        self._shelf = shelf
        self._config = config
        self._peer_id = peer_id
        self._share = config.trainer_share if is_trainer and config.bytes_per_second is None else 1.0
        self._is_in_round = is_in_round
        self._services: list[_Service] = []  # the oldest first
        self._turnstile = Turnstile(config.bytes_per_second, clock)
        self._clock = clock
        self._workers = workers
        links.handle(AskInventory, self._inventory_asked)
        links.handle_stream(FetchChunks, self._serve)

    async def close(self) -> None:
        """End all streams. Idempotent."""
        for service in list(self._services):
            await service.stream.cancel("the keeper leaves")

    def _inventory_asked(self, incoming: Incoming[AskInventory]) -> tuple[Message, list[bytes]]:
        return InventoryAnswer(), [self._find(incoming.message.digest).inventory.encoded]

    def _find(self, digest: str) -> Snapshot:
        snapshot = self._shelf.find(digest)
        if snapshot is None:
            raise RetryableError(f"the state {digest[:12]} is not kept here (any more): ask another keeper")
        return snapshot

    async def _serve(self, stream: Stream) -> None:
        assert isinstance(stream.message, FetchChunks)
        reason = self._why_not(stream)
        if reason:
            self.counts["refused"] += 1
            await stream.cancel(reason)
            return
        service = _Service(stream, self._find(stream.message.digest).hold())
        self._services.append(service)
        await self.make_room()
        self.counts["streams"] += 1
        try:
            while (frames := await stream.receive(timeout_seconds=IDLE_SECONDS)) is not None:
                numbers, may_pack = _read_asks(frames, service.snapshot.inventory.num_chunks)
                for number in numbers:
                    await self._give(service, number, may_pack)
        except (PeerError, DeadlineExceededError) as error:
            logger.debug("serving a state to %s ended: %s", stream.peer, error)
            await stream.cancel(str(error))
        finally:
            self._services.remove(service)
            service.is_over = True
            service.release_if_done()

    def _why_not(self, stream: Stream) -> str:
        assert isinstance(stream.message, FetchChunks)
        if self._shelf.find(stream.message.digest) is None:
            return "this state is not kept here (any more)"
        if sum(service.stream.peer == stream.peer for service in self._services) >= STREAMS_PER_PEER:
            return "you are being served already"
        if len(self._services) >= self._config.max_streams:
            return "as many joiners as possible are served already: ask another keeper, or later"
        return ""

    async def make_room(self) -> None:
        """End the oldest services when too many states that are off the shelf are held for their sake."""
        kept = {state.snapshot.digest for state in self._shelf}
        old = list(dict.fromkeys(s.snapshot.digest for s in self._services if s.snapshot.digest not in kept))
        for digest in old[: -self._config.max_snapshots]:
            for service in list(self._services):
                if service.snapshot.digest == digest:
                    self.counts["too_old"] += 1
                    await service.stream.cancel("the state is too old to be served: fetch the newest")

    async def _give(self, service: _Service, number: int, may_pack: bool) -> None:
        if service.burst_bytes >= BURST_BYTES:
            await self._rest(service)
            service.burst_bytes = 0
        packed = await self._packed(service.snapshot, number) if may_pack else None
        data = service.snapshot.view(number) if packed is None else packed
        num_bytes = len(data)
        await self._turnstile.admit(num_bytes)
        now = self._clock.monotonic()
        frames = [NUMBER.pack(number), data] if packed is None else [NUMBER.pack(number), data, PACKED]
        receipt = await service.stream.send(frames, timeout_seconds=SEND_SECONDS)
        service.sent(num_bytes, now, receipt)
        self.counts["chunks"] += 1
        self.counts["bytes"] += num_bytes
        reach("state.chunk_served", peer=self._peer_id, number=self.counts["chunks"])

    async def _packed(self, snapshot: Snapshot, number: int) -> bytes | None:
        item_bytes = snapshot.inventory.item_bytes_of(number)
        packed = await self._workers.run(lambda: pack(snapshot.view(number), item_bytes))
        if packed is not None:
            self.counts["packed_chunks"] += 1
        return packed

    async def _rest(self, service: _Service) -> None:
        """In a round, leave the line to it for a while, in proportion to how long it was busy with this joiner.

        That needs no measured speed, which would in turn depend on how fast we send. Between rounds nobody waits for
        this line, and the joiner gets all of it.
        """
        if self._share == 1 or not self._is_in_round():
            return
        while not service.arrived.is_set():
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await service.arrived.wait()
            except TimeoutError:
                peer = service.stream.peer
                if self._clock.monotonic() - self._links.delivered_at(peer, bulk=False) >= SEND_SECONDS:
                    raise DeadlineExceededError(f"nothing arrived at {peer} for {SEND_SECONDS:g} s") from None
        now = self._clock.monotonic()
        share = self._share / len(self._services)
        rest_seconds = min((now - service.burst_began) * (1 - share) / share, LONGEST_REST_SECONDS)
        self.counts["rests"] += 1
        for _ in range(math.ceil(rest_seconds / LOOK_EVERY_SECONDS)):
            if not self._is_in_round():
                break
            await asyncio.sleep(LOOK_EVERY_SECONDS)


def _read_asks(frames: list[memoryview], num_chunks: int) -> tuple[list[int], bool]:
    """The chunks that are asked for, and whether they may come packed; PeerError for what no joiner of ours sends."""
    may_pack = frames[1:] == [PACKED]
    if len(frames) != 1 + may_pack or len(frames[0]) % NUMBER.size or len(frames[0]) > NUMBER.size * MAX_OPEN:
        raise PeerError("it asks in a way that is not understood")
    numbers = [number for (number,) in NUMBER.iter_unpack(frames[0])]
    if any(number >= num_chunks for number in numbers):
        raise PeerError(f"it asks for a chunk beyond the {num_chunks} that there are")
    return numbers, may_pack
