"""The desk for stores: reads for members, and writes for coordinators.

Nobody but a guard may ask JetStream. It answers wherever a request says, and a hub never checks where that is: a member
that may read or write a stream directly can have entries, or at least the acknowledgement of a write, published on
subjects and kept in stores that are closed to it. So members ask here, and get their answers in their own inbox or not
at all. A write is passed on with those headers alone that a store needs; others would let a coordinator empty a store.
"""

from __future__ import annotations

import logging
from collections import Counter

import msgspec

from potluck.errors import ConfigurationError, NobodyAnswersError
from potluck.hub.connection import Delivery
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.nats.jetstream import UNAVAILABLE
from potluck.hub.nats.subscription import NatsDelivery
from potluck.hub.stores import check_key, readable_stores, writable_stores
from potluck.hub.subjects import Subjects
from potluck.messages import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

MAX_READ_BYTES = 1024
READABLE = frozenset(store.name for store in readable_stores())
WRITABLE = frozenset(store.name for store in writable_stores(coordinates=True))
WRITE_HEADERS = ("Nats-Expected-Last-Subject-Sequence", "Nats-TTL", "KV-Operation")
NO_LEADER = msgspec.json.encode({"error": {"code": UNAVAILABLE, "description": "the store has no leader now"}})


class StoreDesk:
    """Passes questions on. Its caller has checked that the answer goes to the sender's own inbox."""

    def __init__(self, hub: NatsConnection, subjects: Subjects) -> None:
        self._hub = hub
        self._subjects = subjects
        self.counts: Counter[str] = Counter()

    async def read(self, delivery: Delivery) -> None:
        """Have the hub send entries of a store straight to the sender's inbox."""
        store = delivery.subject.rpartition(".")[2]
        if store not in READABLE or len(delivery.payload) > MAX_READ_BYTES:
            self.counts["refused_reads"] += 1
            return
        self.counts["reads"] += 1
        subject = f"$JS.API.DIRECT.GET.{self._subjects.stream(store)}"
        await self._hub.forward(subject, delivery.payload, reply=delivery.reply)

    async def write(self, delivery: Delivery) -> None:
        """Write an entry, or delete it, in the sender's place, and answer what the hub says to that."""
        assert isinstance(delivery, NatsDelivery)
        _, _, rest = delivery.subject.removeprefix(f"{self._subjects.root}.write.").partition(".")
        store, _, key = rest.partition(".")
        try:
            check_key(key)
        except ConfigurationError:
            store = ""
        if store not in WRITABLE or len(delivery.payload) > MAX_MESSAGE_BYTES:
            self.counts["refused_writes"] += 1
            return
        self.counts["writes"] += 1
        try:
            [answer] = await self._hub.request_messages(
                self._subjects.store_write(store, key),
                delivery.payload,
                headers={name: delivery.headers[name] for name in WRITE_HEADERS if name in delivery.headers},
                timeout_seconds=self._hub.config.reply_timeout_seconds,
            )
        except NobodyAnswersError:
            # Only the guard is told this by the server; without it the sender would wait in vain.
            await delivery.respond(NO_LEADER)
        else:
            await delivery.respond(answer.data)
