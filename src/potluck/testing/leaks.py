"""What a test left behind: threads, sockets, pipes and tasks.

A check takes a `Resources` before and asks for `leaks_since` after. Threads that are just ending and objects that wait
for the garbage collector are given a moment; what is still there then is a leak.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from potluck.testing.polling import ConditionNotMetError, poll_until, poll_until_sync

SETTLE_SECONDS = 3.0
# Files are left out: imports, caches and logging open them in their own time. These do not open by themselves.
WATCHED_DESCRIPTORS = ("socket:", "pipe:", "anon_inode:[eventpoll]", "anon_inode:[eventfd]", "/dev/net/tun")


@dataclass(frozen=True)
class Resources:
    """The threads and descriptors of this process at one moment."""

    threads: frozenset[threading.Thread]
    descriptors: Counter[str]

    @classmethod
    def take(cls) -> Resources:
        """Look now."""
        return cls(threads=frozenset(threading.enumerate()), descriptors=_descriptors())

    def leaks_since(self, settle_seconds: float | None = None) -> list[str]:
        """Say what is there now that was not there then; an empty list is good."""
        if not self._new():
            return []
        gc.collect()
        try:
            poll_until_sync(lambda: not self._new(), _or_default(settle_seconds), "threads and sockets to go")
        except ConditionNotMetError:
            return self._new()
        return []

    def _new(self) -> list[str]:
        threads = [
            f"thread {thread.name}"
            for thread in threading.enumerate()
            if thread not in self.threads and thread.is_alive()
        ]
        return threads + [f"descriptor {target}" for target in (_descriptors() - self.descriptors)]


def _descriptors() -> Counter[str]:
    """Count what is open. A socket or pipe, which has a number, counts once: pytest's capture duplicates some."""
    targets: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # the descriptor by which the folder itself is read
            continue
        if target.startswith(WATCHED_DESCRIPTORS):
            targets[target] = 1 if target.startswith(("socket:", "pipe:")) else targets[target] + 1
    return targets


def _or_default(settle_seconds: float | None) -> float:
    return SETTLE_SECONDS if settle_seconds is None else settle_seconds


async def pending_tasks(
    before: frozenset[asyncio.Task[object]] = frozenset(), settle_seconds: float | None = None
) -> list[str]:
    """Say which tasks of the running loop are still pending, other than this one and those from before."""

    def left() -> list[str]:
        tasks = asyncio.all_tasks() - before - {asyncio.current_task()}
        return [f"task {task.get_name()}: {task.get_coro()!r}" for task in tasks]

    try:
        await poll_until(lambda: not left(), _or_default(settle_seconds), "tasks to end")
    except ConditionNotMetError:
        return left()
    return []
