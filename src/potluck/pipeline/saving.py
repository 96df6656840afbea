"""When a cut is made, and of what: the state of one step, from one holder of each unit, on the disk of a peer.

While the run trains, a cut is made at a step's beginning: the fence tells holders to keep their units as they are
(`pins`), and the saver fetches them while the step goes on. Between two steps nothing changes, and no pins are needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from msgspec.structs import replace

from potluck import tasks
from potluck.errors import PotluckError
from potluck.link.links import Links
from potluck.pipeline.book import RunRecord
from potluck.pipeline.messages import Cut, SaveCut, Saved
from potluck.pipeline.roll import Roll, RunState

logger = logging.getLogger(__name__)

SAVE_SECONDS = 3600.0


class CutMaker:
    """One conductor's cuts."""

    def __init__(
        self,
        links: Links,
        roll: Roll,
        state: RunState,
        write: Callable[[RunRecord], Awaitable[None]],
        settle: Callable[[], Awaitable[None]],
    ) -> None:
        """`settle` has all holders take the last step, at a boundary."""
        self._links = links
        self._roll = roll
        self._state = state
        self._write = write
        self._settle = settle
        self._saving: asyncio.Task[None] | None = None
        self._cut_due: tuple[str, SaveCut] | None = None
        self._cut_wanted: asyncio.Future[None] | None = None

    async def close(self) -> None:
        """Idempotent."""
        await tasks.end(self._saving)

    def _saver(self) -> str | None:
        return next((name for name, peer in self._roll.peers.items() if peer.offer.saves), None)

    def pins(self, standing: Mapping[str, frozenset[int]]) -> dict[str, tuple[int, ...]]:
        """For a cut at this step: which member keeps which unit as it is now, until it is on disk."""
        self._cut_due = None
        saver = self._saver()
        every = self._roll.peers[saver].offer.saves_every if saver is not None else 0
        record = self._state.record
        is_busy = self._saving is not None and not self._saving.done()
        if saver is None or not every or is_busy or record.step == 0 or record.step < record.cut_step + every:
            return {}
        keepers: list[tuple[str, ...]] = []
        pins: dict[str, list[int]] = {}
        for unit in range(self._roll.blueprint.num_units):
            able = [n for n, held in sorted(standing.items()) if unit in self._roll.blueprint.units_in(held)]
            keepers.append(tuple(able[:1]))
            if able:
                pins.setdefault(able[0], []).append(unit)
        cut = Cut(step=record.step, place=record.place, loss_scale=record.loss_scale)
        self._cut_due = (saver, SaveCut(life=record.life, cut=cut, holders=tuple(keepers)))
        return {name: tuple(units) for name, units in pins.items()}

    def fenced(self) -> None:
        """All have heard the step begin, so the pins are made: the saver may fetch them."""
        if self._cut_due is not None:
            saver, order = self._cut_due
            self._cut_due = None
            self._saving = asyncio.create_task(self._save(saver, order), name="pipeline-save")

    async def _save(self, saver: str, order: SaveCut) -> None:
        try:
            saved = await self._links.request(saver, order, reply=Saved, timeout_seconds=SAVE_SECONDS)
        except PotluckError as error:
            logger.warning("step %d is not saved: %s", order.cut.step, error)
            self._roll.on_event("not saved", {"step": order.cut.step, "reason": str(error)})
            return
        self._state.record = replace(self._state.record, cut_step=order.cut.step)  # written with the next commit
        if (peer := self._roll.peers.get(saver)) is not None:
            peer.offer = replace(peer.offer, cuts=(*peer.offer.cuts, order.cut)[-64:])
        self._roll.on_event("saved", {"step": order.cut.step, "bytes": saved.message.num_bytes})

    async def save_now(self, seconds: float) -> bool:
        """Save a cut at the next boundary, as before the host leaves; whether one is on disk then."""
        if self._saver() is None or self._state.record.step == 0:
            return False
        if self._cut_wanted is None or self._cut_wanted.done():
            self._cut_wanted = asyncio.get_running_loop().create_future()
        step = self._state.record.step
        self._roll.changed.set()
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._cut_wanted)
        except TimeoutError:
            return False
        return self._state.record.cut_step >= step

    async def save_if_wanted(self) -> None:
        """At a boundary: what `save_now` asked for."""
        if (wanted := self._cut_wanted) is not None and not wanted.done():
            await self._save_as_it_is()
            wanted.set_result(None)

    async def _save_as_it_is(self) -> None:
        """Between two steps nothing changes: once all have taken the last one, their states are the cut."""
        saver, record = self._saver(), self._state.record
        if saver is None or record.cut_step == record.step:
            return
        standing = self._roll.standing()
        await self._settle()
        holders = tuple(
            tuple(name for name, held in sorted(standing.items()) if unit in self._roll.blueprint.units_in(held))
            for unit in range(self._roll.blueprint.num_units)
        )
        cut = Cut(step=record.step, place=record.place, loss_scale=record.loss_scale)
        await tasks.end(self._saving)
        await self._save(saver, SaveCut(life=record.life, cut=cut, holders=holders))
        await self._write(self._state.record)
