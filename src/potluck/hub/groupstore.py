"""A part of a store, by the prefix of its keys: to its user it is a store of its own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from potluck.hub.connection import Entry, Store, Subscription


class GroupStore:
    """What one group keeps in the store `groups` under one name, as `lineage`."""

    def __init__(self, store: Store, prefix: str) -> None:
        """`prefix` ends at a dot."""
        self._store = store
        self._prefix = prefix

    async def get(self, key: str) -> Entry | None:
        """As `Store.get`."""
        entry = await self._store.get(self._prefix + key)
        return self._own(entry) if entry is not None else None

    async def entries(self, prefix: str = "") -> list[Entry]:
        """As `Store.entries`."""
        return [self._own(entry) for entry in await self._store.entries(self._prefix + prefix)]

    def put(
        self, key: str, value: bytes, *, expected: int | None = None, ttl_seconds: float | None = None
    ) -> Coroutine[Any, Any, int]:
        """As `Store.put`. Revisions are those of the whole store: they grow, with gaps."""
        return self._store.put(self._prefix + key, value, expected=expected, ttl_seconds=ttl_seconds)

    def delete(self, key: str, *, expected: int | None = None) -> Coroutine[Any, Any, None]:
        """As `Store.delete`."""
        return self._store.delete(self._prefix + key, expected=expected)

    def watch(self, handler: Callable[[Entry], None], prefix: str = "") -> Coroutine[Any, Any, Subscription]:
        """As `Store.watch`: changes of other parts are neither told nor sent here."""
        return self._store.watch(lambda entry: handler(self._own(entry)), self._prefix + prefix)

    def _own(self, entry: Entry) -> Entry:
        return replace(entry, key=entry.key.removeprefix(self._prefix))
