"""The stores of a run: which there are, who may read and write them, and how the hub keeps them.

A store is a JetStream stream with one message per key. Reading goes by direct gets and writing by publishing, so that
a member needs no right to create anything; changes are told again by the hub on plain subjects.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from potluck.errors import ConfigurationError, DeadlineExceededError, HubUnavailableError
from potluck.hub.connection import HubConnection
from potluck.hub.nats.jetstream import STREAM_NAME_IN_USE, JetStreamError, decode_answer
from potluck.hub.subjects import Subjects
from potluck.messages import MAX_MESSAGE_BYTES

Readers = Literal["guard", "all"]
Writers = Literal["guard", "coordinators"]
Storage = Literal["file", "memory"]

STORE_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
KEY = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
MAX_KEY_LENGTH = 256
DELETED_FOR_SECONDS = 300  # how long the mark of a deletion stays: long enough for a compare-and-set on it
HEADER_BYTES = 4096  # beside the value: compare-and-set, time to live
RETRY_SECONDS = 0.25
ATTEMPT_SECONDS = 3.0  # a cluster without a leader does not answer at all: ask again rather than wait


MANIFEST_KEY = "current"  # the only key of the manifest's store
FLEET_KEY = "desired"  # the only key of the fleet's store


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDefinition:
    """One store."""

    name: str
    description: str
    readers: Readers = "guard"
    writers: Writers = "guard"
    storage: Storage = "file"
    expires: bool = False
    """Whether keys may have a time to live whose end watchers are told."""

    def __post_init__(self) -> None:
        if not STORE_NAME.fullmatch(self.name):
            raise ConfigurationError(f"{self.name!r} cannot name a store: use lower-case letters, digits and hyphens")


# All in files: the lease's revisions are fencing tokens, which must never start again from 1, and a roster that
# outlives a restart of the hub keeps everyone's direct links open meanwhile.
STORES: tuple[StoreDefinition, ...] = (
    StoreDefinition(name="members", description="who may join, and as what", expires=True),
    StoreDefinition(name="bans", description="who may not", expires=True),
    StoreDefinition(name="invites", description="invites and how often they were used", expires=True),
    StoreDefinition(name="requests", description="requests for access that wait for an organiser", expires=True),
    StoreDefinition(name="policy", description="who may join the run without an invite", expires=True),
    StoreDefinition(name="queues", description="queues and topics, and their limits", expires=True),
    StoreDefinition(name="fleet", description="the jobs of a fleet's machines", readers="all"),
    StoreDefinition(name="roster", description="who is present; the guard's word", readers="all", expires=True),
    StoreDefinition(name="manifest", description="what the run trains and how", readers="all"),
    StoreDefinition(
        name="lease", description="who coordinates", readers="all", writers="coordinators", expires=True
    ),
    StoreDefinition(name="lineage", description="the committed epochs", readers="all", writers="coordinators"),
    StoreDefinition(
        name="groups", description="the same for each other group, and cuts", readers="all", writers="coordinators",
        expires=True,
    ),
    StoreDefinition(name="shards", description="who trains on what", readers="all", writers="coordinators"),
    StoreDefinition(name="contributions", description="who gave how much", readers="all", writers="coordinators"),
    StoreDefinition(name="history", description="how the run has gone", readers="all", writers="coordinators"),
    StoreDefinition(name="ballot", description="names for the model, and votes", readers="all", writers="coordinators"),
)  # fmt: skip


def readable_stores() -> list[StoreDefinition]:
    """The stores that every member may read and watch; the guard uses all of them."""
    return [store for store in STORES if store.readers == "all"]


def writable_stores(coordinates: bool) -> list[StoreDefinition]:
    """The stores that a member may write, by whether it may coordinate."""
    return [store for store in STORES if coordinates and store.writers == "coordinators"]


def check_key(key: str) -> str:
    """The key itself, or ConfigurationError."""
    if len(key) > MAX_KEY_LENGTH or not KEY.fullmatch(key):
        raise ConfigurationError(
            f"{key[:80]!r} cannot be a key: use letters, digits, _ and -, in parts joined by dots, "
            f"{MAX_KEY_LENGTH} characters at most"
        )
    return key


def check_prefix(prefix: str) -> str:
    """The prefix itself, or ConfigurationError."""
    if prefix and not (prefix.endswith(".") and KEY.fullmatch(prefix[:-1])):
        raise ConfigurationError(f"{prefix[:80]!r} cannot be a prefix of keys: it is empty, or it ends at a dot")
    return prefix


def check_ttl(ttl_seconds: float | None) -> int | None:
    """The time to live in whole seconds, or ConfigurationError."""
    if ttl_seconds is None:
        return None
    if ttl_seconds < 1 or ttl_seconds != int(ttl_seconds):
        raise ConfigurationError(f"a time to live is a whole number of seconds, at least 1, not {ttl_seconds}")
    return int(ttl_seconds)


def stream_config(definition: StoreDefinition, subjects: Subjects, replicas: int) -> dict[str, Any]:
    """How the hub shall keep a store, in JetStream's words."""
    config: dict[str, Any] = {
        "name": subjects.stream(definition.name),
        "description": definition.description,
        "subjects": [subjects.store_write(definition.name, ">")],
        "republish": {
            "src": subjects.store_write(definition.name, ">"),
            "dest": subjects.store_change(definition.name, ">"),
        },
        "max_msgs_per_subject": 1,
        "max_msg_size": MAX_MESSAGE_BYTES + HEADER_BYTES,
        "discard": "new",
        "storage": definition.storage,
        "num_replicas": replicas,
        "allow_direct": True,
        "allow_msg_ttl": True,  # for the marks of deletions
    }
    if definition.expires:
        # Expiry leaves a mark too. JetStream then lets a writer empty the whole stream by a header, which the
        # guard does not pass on (storedesk.py).
        config["subject_delete_marker_ttl"] = DELETED_FOR_SECONDS * 10**9
    return config


async def ensure_stores(
    connection: HubConnection, subjects: Subjects, replicas: int = 1, *, timeout_seconds: float = 30.0
) -> None:
    """Make sure that all stores of the run exist and are kept as defined. Only the guard may do this."""
    deadline = time.monotonic() + timeout_seconds
    for definition in STORES:
        await ensure_store(
            connection, subjects, definition, replicas, timeout_seconds=max(deadline - time.monotonic(), 0.1)
        )


async def ensure_store(
    connection: HubConnection,
    subjects: Subjects,
    definition: StoreDefinition,
    replicas: int = 1,
    *,
    timeout_seconds: float = 30.0,
) -> None:
    """Make sure that one store exists and is kept as defined.

    A hub that is just starting, or a cluster that chooses its leader, cannot do it yet: that is waited for.
    """
    config = stream_config(definition, subjects, replicas)
    deadline = time.monotonic() + timeout_seconds
    while True:
        left_seconds = deadline - time.monotonic()
        try:
            return await _create_or_update(connection, config, min(max(left_seconds, 0.1), ATTEMPT_SECONDS))
        except (HubUnavailableError, DeadlineExceededError):
            if left_seconds < RETRY_SECONDS:
                raise
        await asyncio.sleep(RETRY_SECONDS)


async def _create_or_update(connection: HubConnection, config: dict[str, Any], timeout_seconds: float) -> None:
    error = await _ask(connection, "CREATE", config, timeout_seconds)
    if error is not None and error.err_code == STREAM_NAME_IN_USE:
        error = await _ask(connection, "UPDATE", config, timeout_seconds)
    if error is not None:
        raise error.explained(
            f"the hub does not keep the store {config['name']} as this version of Potluck wants it (if another version "
            "made it, delete that stream or use another run name)"
        )


async def _ask(
    connection: HubConnection, verb: str, config: dict[str, Any], timeout_seconds: float
) -> JetStreamError | None:
    answer = await connection.request(
        f"$JS.API.STREAM.{verb}.{config['name']}", msgspec.json.encode(config), timeout_seconds=timeout_seconds
    )
    return decode_answer(answer).error
