"""What a pipeline has come to: one record in the hub, changed by compare-and-set alone.

A step is committed by the write that names the digest of every unit's average and counts the step. A conductor whose
lease has passed on loses that race, since another has written in between.
"""

from __future__ import annotations

from typing import Annotated, Protocol

import msgspec

from potluck.errors import FatalError, RevisionConflictError
from potluck.hub.connection import Store
from potluck.messages import Message, decode, encode
from potluck.pipeline.messages import Blocks, CommitNotice, Count, Name, Place, Words

KEY = "pipeline.record"


class RunRecord(Message, frozen=True, kw_only=True):
    """How far the run is."""

    step: Count = 0
    life: Count = 0
    """How often it went back to a cut."""
    starts: Blocks = ()
    """Of the layout that counts; empty: none does yet."""
    place: Place = Place()
    """Where the data of this step begin."""
    loss_scale: float = 1.0
    finite_steps: Count = 0
    last: CommitNotice | None = None
    """The commit that made this step."""
    loss: float = 0.0
    cut_step: int = -1
    """The newest cut that is whole on disk; negative: none."""
    morphs: Annotated[tuple[Words, ...], msgspec.Meta(max_length=16)] = ()
    """The latest changes of the layout, with their reasons."""
    excluded: Annotated[tuple[tuple[Name, Words], ...], msgspec.Meta(max_length=64)] = ()
    """Who lied, and how it was found out."""
    losses: Annotated[tuple[tuple[Count, float], ...], msgspec.Meta(max_length=512)] = ()
    """Of some steps, evenly spread: for people to look at."""


class Book(Protocol):
    """Where the record is."""

    async def read(self) -> RunRecord | None:
        """What stands there now; later writes build on it."""

    async def write(self, record: RunRecord) -> None:
        """Replace what was read or written last. FatalError where somebody else has written since."""


class MemoryBook:
    """In this process: for tests."""

    def __init__(self) -> None:
        self.record: RunRecord | None = None

    async def read(self) -> RunRecord | None:
        """As in Book."""
        return self.record

    async def write(self, record: RunRecord) -> None:
        """As in Book."""
        self.record = record


class ConductorReplacedError(FatalError):
    """Another conductor has gone on: this one stops, and nothing is lost."""


class HubBook:
    """In a store of the hub."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._revision = 0

    async def read(self) -> RunRecord | None:
        """As in Book."""
        entry = await self._store.get(KEY)
        if entry is None or entry.value is None:
            return None
        self._revision = entry.revision
        return decode(RunRecord, entry.value)

    async def write(self, record: RunRecord) -> None:
        """As in Book. A write whose answer is lost is looked up: it may have been made."""
        value = encode(record)
        try:
            self._revision = await self._store.put(KEY, value, expected=self._revision)
        except RevisionConflictError as error:
            entry = await self._store.get(KEY)
            if entry is None or entry.value != value:
                raise ConductorReplacedError(
                    f"step {record.step} was written by another conductor: this one stops"
                ) from error
            self._revision = entry.revision


def with_loss(
    losses: tuple[tuple[int, float], ...], step: int, loss: float, most: int = 400
) -> tuple[tuple[int, float], ...]:
    """One more; when there are too many, every other goes."""
    stride = 1
    if len(losses) >= 2:
        stride = max(losses[1][0] - losses[0][0], 1)
    if losses and step - losses[-1][0] < stride:
        return losses
    grown = (*losses, (step, loss))
    return grown if len(grown) <= most else grown[::2]
