"""A unit's state from one peer to another, in pieces.

A holder copies a unit at the first request for it, at the step where it stands then, and gives the pieces of that copy
while it trains on. Copies that nobody reads are dropped. What is fetched is checked by its digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from potluck.clock import Clock
from potluck.errors import PotluckError, ProtocolError, StateUnavailableError
from potluck.link.dispatch import Incoming
from potluck.link.links import Links
from potluck.pipeline.holding import Holding
from potluck.pipeline.messages import FetchUnit, UnitPiece
from potluck.pipeline.wire import NamedSpec, pack, unpack

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
IN_FLIGHT = 4
UNUSED_SECONDS = 30.0
MAX_COPIES = 3  # of one unit
MAX_STATE_BYTES = 64 << 30


@dataclass
class Copy:
    """A unit's state at one step."""

    life: int
    step: int
    specs: tuple[NamedSpec, ...]
    whole: Tensor
    digest: str
    used_at: float
    is_pinned: bool = False


class UnitServer:
    """Gives what this peer holds to others."""

    def __init__(self, links: Links, clock: Clock, holding: Holding) -> None:
        self._links = links
        self._clock = clock
        self._holding = holding
        self._copies: dict[int, list[Copy]] = {}
        self.bytes_given = 0
        self.cuts: CutReader | None = None
        links.handle(FetchUnit, self._fetch)

    def close(self) -> None:
        """Give nothing more."""
        self._links.unhandle(FetchUnit)
        self._copies.clear()

    async def pin(self, units: Sequence[int]) -> None:
        """Copy these now, for a cut; pins of before are let go."""
        for copies in self._copies.values():
            for copy in copies:
                copy.is_pinned = False
        for unit in units:
            if (made := await self._copy(unit, self._holding.step)) is not None:
                made.is_pinned = True

    async def _fetch(self, incoming: Incoming[FetchUnit]) -> tuple[UnitPiece, list[memoryview]]:
        ask = incoming.message
        self._drop_unused()
        if ask.is_cut:
            if self.cuts is None:
                raise StateUnavailableError("this peer keeps no cuts")
            found: Copy | None = await self.cuts.read(ask.unit, ask.step)
        else:
            found = self._known(ask) or await self._copy(ask.unit, ask.step)
            if found is not None and (found.life != ask.life or (ask.is_exact and found.step != ask.step)):
                found = None
        if found is None:
            raise StateUnavailableError(f"unit {ask.unit} does not stand at step {ask.step} here")
        copy = found
        copy.used_at = self._clock.monotonic()
        piece = copy.whole[ask.offset : ask.offset + PIECE_BYTES]
        self.bytes_given += len(piece)
        answer = UnitPiece(
            step=copy.step,
            num_bytes=len(copy.whole),
            digest=copy.digest,
            specs=copy.specs if ask.offset == 0 else (),
        )
        return answer, [piece.numpy().data]

    def _known(self, ask: FetchUnit) -> Copy | None:
        """With an offset: the very copy that the first piece was of."""
        for copy in reversed(self._copies.get(ask.unit, [])):
            if copy.life == ask.life and (
                copy.step == ask.step if ask.is_exact or ask.offset else copy.step >= ask.step
            ):
                return copy
        return None

    async def _copy(self, unit: int, step: int) -> Copy | None:
        async with self._holding.changing:
            state, life, at = self._holding.state_of(unit), self._holding.life, self._holding.step
            if state is None or at < step:
                return None
            known = next((c for c in self._copies.get(unit, []) if (c.life, c.step) == (life, at)), None)
            if known is not None:
                return known

            def work() -> Copy:
                specs, whole = pack(state.tensors())
                return Copy(life, -1, specs, whole, digest_of(whole), 0.0)

            copy: Copy = await self._holding.thread.run(work)
            copy.step, copy.used_at = at, self._clock.monotonic()
            copies = self._copies.setdefault(unit, [])
            copies.append(copy)
            free = [each for each in copies if not each.is_pinned]
            for old in free[:-MAX_COPIES]:
                copies.remove(old)
            return copy

    def _drop_unused(self) -> None:
        since = self._clock.monotonic() - UNUSED_SECONDS
        for copies in self._copies.values():
            copies[:] = [copy for copy in copies if copy.is_pinned or copy.used_at > since]


class CutReader(Protocol):
    """Where cuts are read from; a disk (cuts.py)."""

    async def read(self, unit: int, step: int) -> Copy:
        """A unit's state in a cut."""


@dataclass(frozen=True)
class Fetched:
    """A unit's state."""

    step: int
    tensors: dict[str, Tensor]
    num_bytes: int


async def fetch_unit(links: Links, holders: Sequence[str], ask: FetchUnit, *, timeout_seconds: float) -> Fetched:
    """A unit's state from the first of these holders that gives it whole."""
    errors = []
    for holder in holders:
        try:
            return await _fetch_from(links, holder, ask, timeout_seconds)
        except PotluckError as error:
            errors.append(f"{holder[:8]}: {error}")
    raise StateUnavailableError(f"unit {ask.unit} cannot be fetched ({'; '.join(errors) or 'nobody has it'})")


async def _fetch_from(links: Links, holder: str, ask: FetchUnit, timeout_seconds: float) -> Fetched:
    first = await links.request(holder, ask, reply=UnitPiece, timeout_seconds=timeout_seconds)
    head = first.message
    if head.num_bytes > MAX_STATE_BYTES:
        raise ProtocolError(f"a state of {head.num_bytes} bytes is more than any unit has: dropped")
    whole = torch.empty(head.num_bytes, dtype=torch.uint8)
    _put(whole, 0, first.frames)
    room = asyncio.Semaphore(IN_FLIGHT)

    async def piece(offset: int) -> None:
        async with room:
            more = FetchUnit(
                unit=ask.unit, life=ask.life, step=head.step, is_exact=True, is_cut=ask.is_cut, offset=offset
            )
            answer = await links.request(holder, more, reply=UnitPiece, timeout_seconds=timeout_seconds)
            if answer.message.digest != head.digest:
                raise ProtocolError("the holder has dropped what it gave: once more from the start")
            _put(whole, offset, answer.frames)

    try:
        async with asyncio.TaskGroup() as group:
            for offset in range(PIECE_BYTES, head.num_bytes, PIECE_BYTES):
                group.create_task(piece(offset))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    if digest_of(whole) != head.digest:
        raise ProtocolError("the bytes are not those that the holder named: dropped")
    return Fetched(head.step, unpack(head.specs, whole), head.num_bytes)


def digest_of(whole: Tensor) -> str:
    """SHA-256 of these bytes."""
    return hashlib.sha256(whole.numpy().data).hexdigest()


def _put(whole: Tensor, offset: int, frames: Sequence[memoryview]) -> None:
    if len(frames) != 1 or offset + frames[0].nbytes > len(whole):
        raise ProtocolError("a piece that does not fit: dropped")
    if frames[0].nbytes:
        whole[offset : offset + frames[0].nbytes] = torch.frombuffer(bytearray(frames[0]), dtype=torch.uint8)
