"""A store in the hub, by plain subjects: what an ordinary member is permitted to use.

    write     a request on the key's own subject, or to the guard, which passes it on; the header
              Nats-Expected-Last-Subject-Sequence makes it a compare-and-set, Nats-TTL gives it an end
    read      JetStream's direct get, of one key or of a range of revisions; asked for directly, or through the guard
    delete    a write of a mark (KV-Operation: PURGE), which has a revision like any other write and goes by itself
    expiry    the hub writes a mark of its own (Nats-Marker-Reason)

There is one message per key, so the messages from revision 1 on are exactly the present entries. Reading them page by
page never misses a key: one that changes meanwhile moves to a higher revision, which is still to be read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
from nats.aio.msg import Msg

from potluck.errors import DeadlineExceededError, HubUnavailableError, ProtocolError, RevisionConflictError
from potluck.hub.connection import Entry, Subscription
from potluck.hub.nats.jetstream import WRONG_LAST_SEQUENCE, decode_answer
from potluck.hub.nats.requests import status_of
from potluck.hub.nats.watch import NatsWatch
from potluck.hub.stores import DELETED_FOR_SECONDS, check_key, check_prefix, check_ttl

if TYPE_CHECKING:
    from potluck.hub.nats.connection import NatsConnection

PAGE_ENTRIES = 1000
PAGE_BYTES = 4 * 1024 * 1024  # the hub sends a page without waiting for us, so it must fit in its buffer for us
END_OF_PAGE = "204"
NOT_FOUND = "404"
# In a cluster any replica answers a read, also one that lags a little behind the one that took our write.
LAG_SECONDS = 2.0
LAG_POLL_SECONDS = 0.05
MAX_WRITES_REMEMBERED = 1024
FIRST_TRY = 0.25  # of the time that a read may take


class NatsStore:
    """One store of the run, over one connection."""

    def __init__(self, connection: NatsConnection, name: str) -> None:
        self.name = name
        self._connection = connection
        self._subjects = connection.subjects
        self._read_subject = connection.read_subject(name)
        self._written: dict[str, tuple[int, float]] = {}  # our own writes of late: revision, and when

    async def get(self, key: str) -> Entry | None:
        """The newest version of a key, at least as new as our own last write of it."""
        entry = await self._read(check_key(key))
        while self._lags_behind_us(key, entry):
            await asyncio.sleep(LAG_POLL_SECONDS)
            entry = await self._read(key)
        return entry if entry is not None and entry.value is not None else None

    async def entries(self, prefix: str = "") -> list[Entry]:
        """All live keys that start with `prefix`, by key."""
        versions = await self.versions(prefix)
        return sorted((entry for entry in versions if entry.value is not None), key=lambda entry: entry.key)

    async def put(
        self, key: str, value: bytes, *, expected: int | None = None, ttl_seconds: float | None = None
    ) -> int:
        """Write a key and return its revision; see Store."""
        ttl_seconds = check_ttl(ttl_seconds)
        headers = {} if ttl_seconds is None else {"Nats-TTL": f"{ttl_seconds}s"}
        try:
            return await self._write(check_key(key), value, expected, headers)
        except RevisionConflictError:
            if expected != 0:
                raise
            # To the hub, the mark of a deletion is a version; to our callers, it is nothing.
            mark = await self._read(key)
            if mark is None or mark.value is not None:
                raise
            return await self._write(key, value, mark.revision, headers)

    async def delete(self, key: str, *, expected: int | None = None) -> None:
        """Delete a key; a missing one is no error. `expected` as in `put`."""
        if expected == 0:
            entry = await self.get(key)
            if entry is not None:
                raise self._conflict(key, 0)
            return
        mark = {"KV-Operation": "PURGE", "Nats-TTL": f"{DELETED_FOR_SECONDS}s"}
        await self._write(check_key(key), b"", expected, mark)

    async def watch(self, handler: Callable[[Entry], None], prefix: str = "") -> Subscription:
        """Call `handler` for every live key, then for every change; see Store."""
        watch = NatsWatch(self, self._connection, handler, check_prefix(prefix))
        await watch.start()
        return watch

    # For the watch

    def change_subject(self, prefix: str) -> str:
        """Where the hub tells the changes of the keys with this prefix."""
        return self._subjects.store_change(self.name, f"{prefix}>")

    async def versions(self, prefix: str = "") -> list[Entry]:
        """The newest version of every key that starts with `prefix`, marks of deletions included."""
        newest: dict[str, Entry] = {}
        start = 1
        while True:
            page, last, num_left = await self._page(check_prefix(prefix), start)
            newest.update((entry.key, entry) for entry in page)
            if num_left == 0:
                return list(newest.values())
            start = last + 1

    async def newest_revision(self, prefix: str) -> int:
        """The revision of the newest version among the keys with this prefix; 0 when there is none."""
        entry = await self._read(f"{prefix}>")
        return entry.revision if entry is not None else 0

    def entry_of(self, headers: Mapping[str, str], payload: bytes) -> Entry:
        """The version that a message from the hub carries."""
        try:
            subject = headers["Nats-Subject"]
            is_mark = "KV-Operation" in headers or "Nats-Marker-Reason" in headers
            return Entry(
                key=subject.removeprefix(self._subjects.store_write(self.name, "")),
                value=None if is_mark else payload,
                revision=int(headers["Nats-Sequence"]),
                written_at=datetime.fromisoformat(headers["Nats-Time-Stamp"]).timestamp(),
            )
        except (KeyError, ValueError) as error:
            raise ProtocolError(f"the hub's answer about the store {self.name} cannot be read: {error!r}") from error

    # Inside

    async def _page(self, prefix: str, start: int) -> tuple[list[Entry], int, int]:
        """The versions from revision `start` on, as many as fit; the last revision; how many there are after it."""
        wanted = {
            "seq": start,
            "next_by_subj": self._subjects.store_write(self.name, f"{prefix}>"),
            "batch": PAGE_ENTRIES,
            "max_bytes": PAGE_BYTES,
        }
        messages = await self._ask(wanted, is_last=lambda message: bool(status_of(message)))
        end = messages.pop()
        status = status_of(end)
        if status == NOT_FOUND and not messages:
            return [], start, 0
        headers = end.headers or {}
        if status != END_OF_PAGE:
            raise HubUnavailableError(f"the hub cannot list the store {self.name}: {_description(end)}")
        page = [self.entry_of(message.headers or {}, message.data) for message in messages]
        return page, int(headers["Nats-Last-Sequence"]), int(headers["Nats-Num-Pending"])

    async def _read(self, key: str) -> Entry | None:
        """The newest version of a key, be it the mark of a deletion; the newest of several for a wildcard."""
        [message] = await self._ask({"last_by_subj": self._subjects.store_write(self.name, key)})
        status = status_of(message)
        if status == NOT_FOUND:
            return None
        if status:
            raise HubUnavailableError(f"the hub cannot read the store {self.name}: {_description(message)}")
        return self.entry_of(message.headers or {}, message.data)

    async def _ask(self, wanted: dict[str, Any], is_last: Callable[[Msg], bool] = lambda _: True) -> list[Msg]:
        """Read, and soon once more when no answer comes: of a cluster, the server that was to answer may have died."""
        timeout_seconds = self._connection.config.reply_timeout_seconds
        first_seconds = timeout_seconds * FIRST_TRY
        try:
            return await self._ask_once(wanted, is_last, first_seconds)
        except DeadlineExceededError:
            return await self._ask_once(wanted, is_last, timeout_seconds - first_seconds)

    async def _ask_once(
        self, wanted: dict[str, Any], is_last: Callable[[Msg], bool], timeout_seconds: float
    ) -> list[Msg]:
        return await self._connection.request_messages(
            self._read_subject, msgspec.json.encode(wanted), timeout_seconds=timeout_seconds, is_last=is_last
        )

    async def _write(self, key: str, value: bytes, expected: int | None, headers: dict[str, str]) -> int:
        if expected is not None:
            headers = {**headers, "Nats-Expected-Last-Subject-Sequence": str(expected)}
        [message] = await self._connection.request_messages(
            self._connection.write_subject(self.name, key),
            value,
            headers=headers,
            timeout_seconds=self._connection.write_timeout_seconds,
        )
        answer = decode_answer(message.data)
        if answer.error is None:
            self._remember_write(key, answer.seq)
            return answer.seq
        if answer.error.err_code in WRONG_LAST_SEQUENCE:
            raise self._conflict(key, expected)
        raise answer.error.explained(f"the hub did not write {key} in the store {self.name}")

    def _remember_write(self, key: str, revision: int) -> None:
        now = time.monotonic()
        if len(self._written) >= MAX_WRITES_REMEMBERED:
            self._written = {k: write for k, write in self._written.items() if now - write[1] < LAG_SECONDS}
        self._written[key] = (revision, now)

    def _lags_behind_us(self, key: str, entry: Entry | None) -> bool:
        revision, written_at = self._written.get(key, (0, 0.0))
        return (entry.revision if entry else 0) < revision and time.monotonic() - written_at < LAG_SECONDS

    def _conflict(self, key: str, expected: int | None) -> RevisionConflictError:
        return RevisionConflictError(
            f"{key} in the store {self.name} no longer has revision {expected}: somebody else changed it first; "
            "read it again and decide anew"
        )


def _description(message: Msg) -> str:
    headers = message.headers or {}
    return f"{headers.get('Status', '')} {headers.get('Description', '')}".strip()
