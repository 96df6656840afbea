"""Following a store: its changes as the hub tells them, and a look at the whole store whenever some may be missing.

Changes are missed when the connection was away, when too many came at once, and in a cluster now and then: an
interest takes a moment to reach the other servers, and a broken route between them swallows messages in silence. So
the watch looks at the whole store again after each of the former, when a change shows that an earlier one is missing,
and when a regular check of the newest revision says so. What was told already is not told again (watchledger.py).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from potluck import tasks
from potluck.errors import NobodyAnswersError, PotluckError, ProtocolError
from potluck.hub.connection import Delivery, Entry, Subscription
from potluck.hub.nats.subscription import NatsDelivery
from potluck.hub.nats.watchledger import WatchLedger

if TYPE_CHECKING:
    from potluck.hub.nats.connection import NatsConnection
    from potluck.hub.nats.store import NatsStore

logger = logging.getLogger(__name__)

FIRST_CHECK_SECONDS = 1.0  # soon after a sync: by then an interest has reached every server of a cluster
CHECK_EVERY_SECONDS = 30.0
IN_FLIGHT_SECONDS = 1.0  # a change may be on its way to us while its revision can be read already
RETRY_FIRST_SECONDS = 0.1
RETRY_LIMIT_SECONDS = 5.0
MORE_LOOKS = 3  # before we believe that a key has gone without leaving a mark, or that the hub has lost data
LOOK_AGAIN_SECONDS = 0.25


class NatsWatch:
    """One watch. Made by NatsStore.watch."""

    def __init__(
        self, store: NatsStore, connection: NatsConnection, handler: Callable[[Entry], None], prefix: str
    ) -> None:
        self._store = store
        self._connection = connection
        self._handler = handler
        self._prefix = prefix
        self._ledger = WatchLedger()
        self._behind = asyncio.Event()
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Tell the present keys, then follow."""
        self._connection.adopt(self)
        try:
            self._subscription = await self._connection.subscribe(
                self._store.change_subject(self._prefix), self._changed
            )
            await self._first_sync()
        except BaseException:
            await self.cancel()
            raise
        self._task = asyncio.create_task(self._follow(), name=f"watch of {self._store.name}")

    def resync(self) -> None:
        """Changes may have been missed: look at the whole store again."""
        self._behind.set()

    async def cancel(self) -> None:
        """Stop. Idempotent."""
        self._connection.release(self)
        await tasks.end(self._task)
        if self._subscription is not None:
            await self._subscription.cancel()

    def _changed(self, delivery: Delivery) -> None:
        assert isinstance(delivery, NatsDelivery)
        try:
            entry = self._store.entry_of(delivery.headers, delivery.payload)
            previous = int(delivery.headers.get("Nats-Last-Sequence", 0))
        except (ProtocolError, ValueError):
            logger.warning("a change of the store %s cannot be read; looking at all of it", self._store.name)
            self.resync()
            return
        if self._ledger.shows_gap(entry.key, previous):
            self.resync()
        if self._ledger.observe(entry):
            self._tell(entry)

    async def _follow(self) -> None:
        wait_seconds = FIRST_CHECK_SECONDS
        retry_seconds = RETRY_FIRST_SECONDS
        while True:
            await self._until_behind(wait_seconds)
            try:
                if self._behind.is_set() or await self._is_behind():
                    await self._sync()
                    wait_seconds = FIRST_CHECK_SECONDS
                else:
                    wait_seconds = CHECK_EVERY_SECONDS * random.uniform(0.5, 1.0)
                retry_seconds = RETRY_FIRST_SECONDS
            except PotluckError as error:
                # Not connected, most often: then the reconnect wakes us.
                logger.debug("the store %s cannot be looked at now: %s", self._store.name, error)
                self._behind.set()
                await asyncio.sleep(retry_seconds * random.uniform(0.5, 1.0))
                retry_seconds = min(retry_seconds * 2, RETRY_LIMIT_SECONDS)

    async def _until_behind(self, wait_seconds: float) -> None:
        try:
            async with asyncio.timeout(wait_seconds):
                await self._behind.wait()
        except TimeoutError:
            pass

    async def _is_behind(self) -> bool:
        newest = await self._store.newest_revision(self._prefix)
        if newest <= self._ledger.horizon:
            return False
        await asyncio.sleep(IN_FLIGHT_SECONDS)
        return newest > self._ledger.horizon

    async def _first_sync(self) -> None:
        """Look at the store, which may have been made just now: in a cluster its servers take a moment to be ready."""
        clock = asyncio.get_running_loop().time
        until = clock() + self._connection.config.reply_timeout_seconds
        while True:
            try:
                await self._sync()
            except NobodyAnswersError:
                if clock() >= until:
                    raise
                await asyncio.sleep(RETRY_FIRST_SECONDS)
            else:
                return

    async def _sync(self) -> None:
        self._behind.clear()
        self._ledger.begin_sync()
        try:
            snapshot = await self._store.versions(self._prefix)
            for _ in range(MORE_LOOKS):
                if self._ledger.trusts(snapshot):
                    break
                await asyncio.sleep(LOOK_AGAIN_SECONDS)
                snapshot = await self._store.versions(self._prefix)
        except BaseException:
            self._ledger.abort_sync()
            raise
        for entry in self._ledger.end_sync(snapshot):
            self._tell(entry)

    def _tell(self, entry: Entry) -> None:
        try:
            self._handler(entry)
        except Exception:  # a change's journey ends here: the next one must still be told
            self._connection.dispatched.handler_errors += 1
            logger.exception("a watcher of the store %s failed on the key %s", self._store.name, entry.key)
