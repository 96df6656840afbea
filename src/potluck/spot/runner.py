"""Watches over the machines of an experiment and mends what is missing, until told to stop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from potluck.errors import PotluckError, RetryableError
from potluck.spot.provider import Machine, NoCapacityError, Provider
from potluck.spot.supervision import End, Rest, Standing, Start, Supervision, standing

logger = logging.getLogger(__name__)

LONGEST_PAUSE_SECONDS = 300.0


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the machines, as the log has it."""

    at: float
    workers: int
    wanted_workers: int
    aux: int
    wanted_aux: int
    slots: tuple[str, ...]
    dollars_per_hour: float | None
    dollars: float
    """Spent since the runner began: an estimate by the prices now."""


class Runner:
    """Keeps every slot filled."""

    def __init__(
        self,
        provider: Provider,
        supervision: Supervision,
        *,
        interval_seconds: float = 15.0,
        log_path: Path | None = None,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        """Nothing is started before `run`."""
        self._provider, self._supervision, self._interval = provider, supervision, interval_seconds
        self._log_path, self._say = log_path, say
        config = supervision.config
        self._kinds = tuple(dict.fromkeys(config.kinds + config.aux_kinds))
        self._last: Standing | None = None
        self._last_at: float | None = None
        self._too_dear: list[str] = []
        self.dollars = 0.0

    async def run(self, stop: asyncio.Event) -> None:
        """Look and mend again and again; an error of the provider makes it wait longer, and never ends it.

        Only what is wrong from the start is raised: a mistake in the options. Later the same error has another cause,
        as when the credentials expire, and the machines are better watched again than left alone.
        """
        pause = self._interval
        while not stop.is_set():
            try:
                await self.turn()
                pause = self._interval
            except PotluckError as error:
                if self._is_fatal(error):
                    raise
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                self._say(f"{error}; next try in {pause:.0f} s")
            try:
                await asyncio.wait_for(stop.wait(), pause)
            except TimeoutError:
                continue

    def _is_fatal(self, error: PotluckError) -> bool:
        return self._last is None and not isinstance(error, RetryableError)

    async def turn(self) -> Standing:
        """Look once, and start and end what the supervision says."""
        machines = await asyncio.to_thread(self._provider.machines)
        prices = await asyncio.to_thread(self._provider.prices, self._kinds)
        actions = self._supervision.decide(machines, time.monotonic(), prices)
        ends = [action for action in actions if isinstance(action, End)]
        for end in ends:
            self._say(f"ending {end.machine.id}: {end.why}")
        if ends:
            await asyncio.to_thread(self._provider.end, [end.machine.id for end in ends])
        for action in actions:
            if isinstance(action, Rest):
                self._say(
                    f"{action.slot.name} was gone {action.lived_seconds:.0f} s after its start; "
                    f"next try in {action.seconds:.0f} s"
                )
            if isinstance(action, Start) and (started := await self._start(action)) is not None:
                machines.append(started)
        self._tell_too_dear(prices)
        return self._tell(machines, prices)

    async def _start(self, start: Start) -> Machine | None:
        try:
            machine = await asyncio.to_thread(self._provider.start, start.slot, start.kind)
        except PotluckError as error:
            if self._is_fatal(error):
                raise
            # What is refused may be this kind alone: the other slots are looked after all the same.
            other_kind = isinstance(error, NoCapacityError) or not isinstance(error, RetryableError)
            wait = self._supervision.failed(start, time.monotonic(), other_kind=other_kind)
            self._say(f"{start.slot.name} ({start.kind}): {error}; next try in {wait:.0f} s")
            return None
        self._supervision.started(start, machine, time.monotonic())
        line = f", {start.slot.bandwidth_mbit:g} Mbit/s" if start.slot.bandwidth_mbit is not None else ""
        self._say(f"{start.slot.name} is {machine.id} ({start.kind}{line})")
        return machine

    def _tell_too_dear(self, prices: dict[str, float]) -> None:
        """Say it when slots cannot be filled at the price allowed, and when they can again."""
        config = self._supervision.config
        too_dear = [slot.name for slot in self._supervision.slots if config.affordable(slot, prices) is None]
        if too_dear != self._too_dear:
            names = ", ".join(too_dear) or "none"
            self._say(f"slots that no machine is cheap enough for ({config.max_price:g} $/h at most): {names}")
        self._too_dear = too_dear

    def _tell(self, machines: list[Machine], prices: dict[str, float]) -> Standing:
        now = time.time()
        found = standing(self._supervision.slots, machines, prices)
        if self._last_at is not None and self._last is not None and self._last.dollars_per_hour is not None:
            self.dollars += self._last.dollars_per_hour * (now - self._last_at) / 3600
        if found != self._last:
            cost = f", {found.dollars_per_hour:.2f} $/h" if found.dollars_per_hour is not None else ""
            self._say(
                f"{found.num_workers} of {found.wanted_workers} workers, "
                f"{found.num_aux} of {found.wanted_aux} aux peers{cost}"
            )
        if self._log_path is not None:
            turn = Turn(
                at=now,
                workers=found.num_workers,
                wanted_workers=found.wanted_workers,
                aux=found.num_aux,
                wanted_aux=found.wanted_aux,
                slots=tuple(sorted(machine.slot for machine in machines if machine.state != "ending")),
                dollars_per_hour=found.dollars_per_hour,
                dollars=self.dollars,
            )
            with self._log_path.open("ab") as log:
                log.write(msgspec.json.encode(turn) + b"\n")
        self._last, self._last_at = found, now
        return found
