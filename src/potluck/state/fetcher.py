"""The joiner's side: one state from several keepers at once.

The inventory comes first and must have the digest that was vouched for; then chunks, as schedule.py says, each checked
in a worker before it counts. A keeper that gives something wrong is named and not asked again; one that breaks off is
asked again after a pause. When nobody serves the state any more the fetch ends with MovedOnError, and what has come is
of use for the next one. So does it, much sooner, when nothing comes and others have a state that is as good.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import get_args

from potluck import tasks
from potluck.clock import Clock
from potluck.errors import ConfigurationError, PotluckError, ProtocolError, StateUnavailableError
from potluck.faultpoints import reach
from potluck.link.grouplinks import GroupLinks
from potluck.round.member.workers import Workers
from potluck.state.assembly import Assembly
from potluck.state.chunkpool import Chunk
from potluck.state.inventory import CHUNK_BYTES, Inventory, read_inventory
from potluck.state.schedule import Ask, Schedule
from potluck.state.serving import AskInventory, InventoryAnswer
from potluck.state.snapshot import Snapshot
from potluck.state.source import Packing, Source

logger = logging.getLogger(__name__)

GIB = 1024**3
INVENTORY_SECONDS = 15.0  # for one keeper to answer
LOOK_EVERY_SECONDS = 1.0  # at what is overdue
RETRY_SECONDS = 0.5

Progress = Callable[[int, int], None]
"""Called with the bytes that are there and how many there will be."""


class MovedOnError(StateUnavailableError):
    """Nobody serves this state any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    """How patiently a state is fetched."""

    answer_seconds: float = 20.0
    """A keeper that owes chunks and sends none for so long is given up for a while."""

    gone_seconds: float = 5.0
    """How long to wait for a keeper of this state before looking for another state."""

    max_state_bytes: int = 64 * GIB
    """The largest state that is accepted."""

    packing: Packing = "auto"
    """Whether chunks come packed, without loss: always, never, or where the way is slow."""

    def __post_init__(self) -> None:
        if not (self.answer_seconds > 0 and self.gone_seconds > 0 and self.max_state_bytes > 0):
            raise ConfigurationError(f"{self}: all must be more than 0")
        if self.packing not in get_args(Packing):
            raise ConfigurationError(f"packing={self.packing!r}: choose one of {', '.join(get_args(Packing))}")


@dataclass(slots=True)
class FetchReport:
    """What became of one fetch."""

    given: dict[str, int] = field(default_factory=dict)
    """Chunks that each keeper gave."""

    liars: dict[str, str] = field(default_factory=dict)
    """Keepers that gave something wrong, and what."""

    reused_bytes: int = 0
    """What was here already."""

    fetched_bytes: int = 0
    """What came from keepers."""

    travelled_bytes: int = 0
    """The same as it came: less, where it was packed for the way."""

    came_at: float = -math.inf
    """When something came last, be it a part of a chunk."""

    busy_seconds: float = 0.0
    """For how long keepers gave, from their inventory on; waiting for one is not part of it."""


class Fetcher:
    """Fetches one state into an assembly."""

    def __init__(
        self,
        links: GroupLinks,
        clock: Clock,
        workers: Workers,
        config: FetchConfig,
        assembly: Assembly,
        *,
        keepers: Callable[[str], Iterable[str]],
        speed_of: Callable[[str], float | None] = lambda _keeper: None,
        is_outdated: Callable[[], bool] = lambda: False,
        report: FetchReport,
        progress: Progress | None = None,
        is_replaceable: bool = False,
        patience_seconds: float = 0.0,
    ) -> None:
        """`keepers` tells who serves a state; call `keepers_changed` when that may be others. `speed_of` tells what a
        keeper's line carries, in bytes a second, if that is known; `is_outdated` whether a newer state is available.

        `is_replaceable` says that others serve a state that differs only in what is each peer's own.
        """
        self.report = report
        self._links = links
        self._clock = clock
        self._workers = workers
        self._config = config
        self._assembly = assembly
        self._keepers = keepers
        self._speed_of = speed_of
        self._is_outdated = is_outdated
        self._progress = progress or (lambda _done, _total: None)
        self._is_replaceable = is_replaceable
        self._patience_seconds = patience_seconds
        self._schedule = Schedule(())
        self._sources: dict[str, Source] = {}
        self._wake = asyncio.Event()
        self._is_over = False

    async def fetch(self, digest: str, bases: Sequence[Snapshot], *, until: float) -> Snapshot:
        """The state with that digest. MovedOnError, as above.

        `until` is when to give up, on the loop's clock; or so long after something came last, if that is later: a state
        that comes slowly is not given up.
        """
        inventory = await self._fetch_inventory(digest, until)
        missing = await self._workers.run(lambda: self._assembly.begin(inventory, bases))
        self.report.reused_bytes = self._assembly.held_bytes - self.report.fetched_bytes
        self._schedule = Schedule(missing)
        self._tell_progress(inventory)
        began = self._clock.monotonic()
        try:
            await self._fetch_chunks(inventory, until)
        finally:
            self._is_over = True
            self.report.busy_seconds += self._clock.monotonic() - began
            await tasks.end(*(source.task for source in self._sources.values()))
            self._note_outcome()
        return await self._workers.run(self._assembly.finish)

    def _note_outcome(self) -> None:
        for keeper, number in self._schedule.given.items():
            self.report.given[keeper] = self.report.given.get(keeper, 0) + number
        self.report.liars |= self._schedule.liars

    # The inventory

    async def _fetch_inventory(self, digest: str, until: float) -> Inventory:
        gone_at: float | None = None
        while True:
            keepers = [keeper for keeper in self._keepers(digest) if keeper not in self.report.liars]
            for keeper in keepers:
                inventory = await self._ask_inventory(keeper, digest, until)
                if inventory is not None:
                    return inventory
            gone_at = self._check_time(digest, until, bool(keepers) and not self._is_replaceable, gone_at)
            await asyncio.sleep(RETRY_SECONDS)

    async def _ask_inventory(self, keeper: str, digest: str, until: float) -> Inventory | None:
        left = max(until - self._now(), 0.01)
        try:
            answer = await self._links.request(
                keeper, AskInventory(digest=digest), reply=InventoryAnswer, timeout_seconds=min(INVENTORY_SECONDS, left)
            )
            if len(answer.frames) != 1:
                raise ProtocolError("an inventory is one frame")
            inventory = read_inventory(answer.frames[0], digest)
        except ProtocolError as error:
            self._name_liar(keeper, str(error))
            return None
        except PotluckError as error:
            logger.info("%s did not give the inventory of %s: %s", keeper, digest[:12], error)
            return None
        if inventory.num_bytes > self._config.max_state_bytes:
            raise ConfigurationError(
                f"the state has {inventory.num_bytes} bytes, and max_state_bytes is {self._config.max_state_bytes}: "
                "raise it if this machine has the memory"
            )
        if inventory.chunk_bytes != CHUNK_BYTES:
            raise ConfigurationError(
                f"the run's states are in chunks of {inventory.chunk_bytes} bytes, this version makes {CHUNK_BYTES}: "
                "use the same version of Potluck as the others"
            )
        return inventory

    def _name_liar(self, keeper: str, what: str) -> None:
        self.report.liars.setdefault(keeper, what)
        logger.warning("keeper %s is not asked again, since it gave something wrong: %s", keeper, what)

    # The chunks

    async def _fetch_chunks(self, inventory: Inventory, until: float) -> None:
        digest, schedule = inventory.digest, self._schedule
        gone_at: float | None = None
        self.report.came_at = self._now()
        while not schedule.is_complete:
            self._wake.clear()
            now = self._now()
            self._note_arrivals()
            schedule.keepers_changed(
                {k: self._speed_of(k) for k in self._serving(digest) if k not in self.report.liars}
            )
            self._end_useless_sources()
            for keeper in schedule.overdue(now, self._config.answer_seconds):
                if now - self._arrived_at(keeper) >= self._config.answer_seconds:
                    self._sources[keeper].give_up(f"it sent nothing for {self._config.answer_seconds:g} s")
            for ask in schedule.due(now):
                self._source(ask.keeper, inventory).ask(ask.chunk)
            is_stuck = self._is_replaceable and now - self.report.came_at > self._config.answer_seconds
            gone_at = self._check_time(digest, until, bool(schedule.usable()) and not is_stuck, gone_at)
            look_at = now + LOOK_EVERY_SECONDS
            await self._pause(min(schedule.next_at(now) or look_at, look_at) - now)

    def _arrived_at(self, keeper: str) -> float:
        """When something of a stream came from this keeper last: a chunk may take minutes on a slow line."""
        return self._links.arrived_at(keeper, bulk=False)

    def _note_arrivals(self) -> None:
        giving = [keeper for keeper, source in self._sources.items() if not source.is_over]
        self.report.came_at = max([self.report.came_at, *map(self._arrived_at, giving)])

    def _serving(self, digest: str) -> Iterable[str]:
        """Peers that say they have the state, and peers that are sending it, even after the run has moved on."""
        giving = [keeper for keeper, source in self._sources.items() if not source.is_over]
        return dict.fromkeys([*self._keepers(digest), *giving])

    def _end_useless_sources(self) -> None:
        # What they were asked for is taken back: if they sent it later, it would look as if nobody had asked.
        useful = set(self._schedule.usable())
        for keeper, source in self._sources.items():
            if keeper not in useful and not source.is_over:
                source.give_up("it does not serve the state any more")

    def _check_time(self, digest: str, until: float, has_keepers: bool, gone_at: float | None) -> float | None:
        """When nobody served the state any more, if so; raises when that or the whole takes too long."""
        now = self._now()
        if now >= max(until, self.report.came_at + self._patience_seconds):
            raise StateUnavailableError(
                f"the state {digest[:12]} did not come: {self._schedule.num_missing} chunks are missing, of keepers "
                f"{self._describe_keepers()}, and nothing came for {self._patience_seconds:.0f} s. Look at the links "
                "to them, or allow more (load_seconds in [patience] of run.toml)"
            )
        if has_keepers:
            return None
        if gone_at is not None and (now - gone_at >= self._config.gone_seconds or self._is_outdated()):
            raise MovedOnError(f"nobody who tells the truth serves the state {digest[:12]} any more")
        return now if gone_at is None else gone_at

    def _describe_keepers(self) -> str:
        liars = self._schedule.liars | self.report.liars
        names = [f"{name} (left aside: {liars[name]})" if name in liars else name for name in self._schedule.given]
        return ", ".join(names) or "none"

    def _source(self, keeper: str, inventory: Inventory) -> Source:
        source = self._sources.get(keeper)
        if source is None or source.is_over:
            source = Source(
                keeper,
                inventory,
                self._links,
                self,
                self._clock,
                answer_seconds=self._config.answer_seconds,
                packing=self._config.packing,
            )
            self._sources[keeper] = source
        return source

    def keepers_changed(self) -> None:
        """Others may serve the state now."""
        self._wake.set()

    async def _pause(self, seconds: float) -> None:
        """Until something has come, keepers have changed, or so long."""
        try:
            async with asyncio.timeout(max(seconds, 0.0)):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _now(self) -> float:
        return self._clock.monotonic()

    def _tell_progress(self, inventory: Inventory) -> None:
        self._progress(self._assembly.held_bytes, inventory.num_bytes)

    # What sources tell (SourceOwner)

    def chunk_came(self, source: Source, number: int, data: memoryview, *, is_packed: bool) -> asyncio.Future[None]:
        """Check a chunk in a worker; the future is done when it counts, or is known to be wrong."""
        ask = Ask(source.keeper, number)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def checked(chunk: Chunk | None) -> None:
            self._take(ask, chunk, len(data), source)
            if not done.done():
                done.set_result(None)

        def failed(error: Exception) -> None:
            if not done.done():
                done.set_exception(error)

        check = self._assembly.check_packed if is_packed else self._assembly.check
        self._workers.submit(lambda: check(number, data), checked, failed)
        return done

    def _take(self, ask: Ask, chunk: Chunk | None, num_bytes: int, source: Source) -> None:
        if self._is_over:
            if chunk is not None:
                self._assembly.discard(chunk)
            return
        if chunk is None:
            source.give_up("its chunk was wrong")
            self.lied(ask.keeper, f"chunk {ask.chunk} does not have the hash that the inventory names")
            return
        self._assembly.add(chunk)
        self.report.came_at = self._now()
        if self._schedule.arrived(ask, self._now()):
            self.report.fetched_bytes += source.inventory.bytes_of(ask.chunk)
            self.report.travelled_bytes += num_bytes
            self._tell_progress(source.inventory)
            reach("state.chunk_arrived", keeper=ask.keeper, missing=self._schedule.num_missing)
        self._wake.set()

    def lied(self, keeper: str, what: str) -> None:
        """A keeper gave something wrong."""
        self._schedule.lied(keeper, what)
        self._name_liar(keeper, what)
        self._wake.set()

    def broke_off(self, keeper: str, reason: str) -> None:
        """A keeper's stream is over."""
        if not self._is_over:
            logger.info("keeper %s broke off: %s", keeper, reason)
            self._schedule.all_failed(keeper, self._now())
            self._wake.set()
