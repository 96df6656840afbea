"""Which chunk to ask of which keeper (pure): events in, questions out.

Every keeper has a few questions open at a time, and gets another one when it has answered: so the faster ones give
more, and nobody has to know their speeds. How many are open follows from how long an answer takes: enough for the
distance, and not more than about a second's worth of a slow keeper's work.

Where speeds are known, a keeper with a thin line is asked for nothing while one is well whose line carries several
times as much: it would add little, and its own rounds would wait for its line.

When no chunk is left that nobody was asked for, keepers with nothing to do are asked for those that have been waited
for longest, so that one slow or frozen keeper does not hold up the end. A keeper whose answer is not what the inventory
says is out for good. One that fails is left alone for a while, longer each time, and what it was asked for goes to
others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MAX_OPEN = 16  # questions to one keeper
FIRST_OPEN = 2
TARGET_SECONDS = 1.0  # how long an answer should take at most
MAX_ASKED = 2  # how many keepers are asked for one chunk at a time
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 8.0
THIN_LINE = 1 / 4  # of the fastest keeper's: such a line is spared


@dataclass(frozen=True, slots=True, order=True)
class Ask:
    """Ask a keeper for a chunk."""

    keeper: str
    chunk: int


@dataclass(slots=True)
class _Keeper:
    open: dict[int, float] = field(default_factory=dict)  # when each chunk was asked for
    num_open: int = FIRST_OPEN  # how many may be open
    num_given: int = 0
    num_failures: int = 0  # in a row
    paused_until: float = 0.0
    is_present: bool = True
    speed: float | None = None  # of its line, in bytes a second; None: not known
    heard_at: float = 0.0  # or asked, when nothing was open before
    lie: str = ""


class Schedule:
    """One fetch: which chunks are missing, and who gives them."""

    def __init__(self, missing: Iterable[int]) -> None:
        self._missing = set(missing)
        self._unasked = sorted(self._missing, reverse=True)  # taken from the end
        self._keepers: dict[str, _Keeper] = {}
        self._asked: dict[int, int] = {}  # of how many keepers at present

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is there."""
        return not self._missing

    @property
    def num_missing(self) -> int:
        """How many are not."""
        return len(self._missing)

    @property
    def liars(self) -> dict[str, str]:
        """Keepers that gave something wrong, and what."""
        return {name: keeper.lie for name, keeper in self._keepers.items() if keeper.lie}

    @property
    def given(self) -> dict[str, int]:
        """How many good chunks each keeper gave."""
        return {name: keeper.num_given for name, keeper in self._keepers.items()}

    def usable(self) -> list[str]:
        """Keepers that are present and never lied."""
        return [name for name, keeper in self._keepers.items() if keeper.is_present and not keeper.lie]

    def keepers_changed(self, present: Mapping[str, float | None]) -> None:
        """These serve the state now, on lines of these speeds. A keeper that returns starts afresh, unless it lied."""
        for name, speed in present.items():
            keeper = self._keepers.setdefault(name, _Keeper())
            keeper.speed = speed
            if not keeper.is_present:
                keeper.is_present, keeper.num_failures, keeper.paused_until = True, 0, 0.0
                keeper.num_open = FIRST_OPEN
        for name, keeper in self._keepers.items():
            if name not in present and keeper.is_present:
                keeper.is_present = False
                self._take_back(keeper)

    def arrived(self, ask: Ask, now: float) -> bool:
        """A good chunk has come; False if it was there already."""
        keeper = self._keepers[ask.keeper]
        asked_at = self._close(ask)
        keeper.heard_at = now
        keeper.num_failures, keeper.paused_until = 0, 0.0
        if asked_at is not None:
            is_quick = now - asked_at < TARGET_SECONDS
            keeper.num_open = min(keeper.num_open + 1, MAX_OPEN) if is_quick else max(keeper.num_open - 1, 1)
        if ask.chunk not in self._missing:
            return False
        self._missing.discard(ask.chunk)
        keeper.num_given += 1
        return True

    def failed(self, ask: Ask, now: float) -> None:
        """No answer came, or the keeper could not give one."""
        if self._close(ask) is None:
            return
        keeper = self._keepers[ask.keeper]
        keeper.num_open = 1
        if now >= keeper.paused_until:  # of several that fail together, one counts
            keeper.num_failures += 1
            pause = FIRST_PAUSE_SECONDS * 2 ** (keeper.num_failures - 1)
            keeper.paused_until = now + min(pause, LONGEST_PAUSE_SECONDS)

    def all_failed(self, name: str, now: float) -> None:
        """Nothing that this keeper was asked for will be answered."""
        for chunk in list(self._keepers[name].open):
            self.failed(Ask(name, chunk), now)

    def overdue(self, now: float, patience_seconds: float) -> list[str]:
        """Keepers that owe answers and have given none for so long."""
        return [
            name for name, keeper in self._keepers.items() if keeper.open and now - keeper.heard_at >= patience_seconds
        ]

    def lied(self, name: str, what: str) -> None:
        """A keeper's answer is not what the inventory says: it is not asked again."""
        keeper = self._keepers[name]
        keeper.lie = keeper.lie or what
        self._take_back(keeper)

    def due(self, now: float) -> list[Ask]:
        """What to ask now."""
        asks: list[Ask] = []
        least = self._least_speed()
        ready = [
            (name, keeper)
            for name, keeper in self._keepers.items()
            if self._can_be_asked(keeper, now) and (keeper.speed is None or keeper.speed >= least)
        ]
        while ready:  # one question each in turn, so that a few chunks are spread over all
            ready = [(name, keeper) for name, keeper in ready if self._ask(name, keeper, now, asks)]
        return asks

    def next_at(self, now: float) -> float | None:
        """When a keeper's pause ends; None: nobody pauses."""
        pauses = [k.paused_until for k in self._keepers.values() if k.is_present and not k.lie and k.paused_until > now]
        return min(pauses, default=None)

    def _least_speed(self) -> float:
        """Keepers with thinner lines are spared."""
        well = [
            k.speed for k in self._keepers.values() if k.is_present and not k.lie and not k.num_failures and k.speed
        ]
        return THIN_LINE * max(well, default=0.0)

    def _can_be_asked(self, keeper: _Keeper, now: float) -> bool:
        return (
            keeper.is_present and not keeper.lie and now >= keeper.paused_until and len(keeper.open) < keeper.num_open
        )

    def _ask(self, name: str, keeper: _Keeper, now: float, asks: list[Ask]) -> bool:
        """Ask one keeper one thing; returns whether it can be asked more."""
        chunk = self._next_unasked()
        if chunk is None:
            chunk = self._longest_waited_for(keeper)
        if chunk is None:
            return False
        if not keeper.open:
            keeper.heard_at = now
        keeper.open[chunk] = now
        self._asked[chunk] = self._asked.get(chunk, 0) + 1
        asks.append(Ask(name, chunk))
        return self._can_be_asked(keeper, now)

    def _next_unasked(self) -> int | None:
        while self._unasked:
            chunk = self._unasked.pop()
            if chunk in self._missing and not self._asked.get(chunk):
                return chunk
        return None

    def _longest_waited_for(self, idle: _Keeper) -> int | None:
        if idle.open:
            return None  # it is busy with what others may have been asked for
        waited = [
            (asked_at, chunk)
            for keeper in self._keepers.values()
            for chunk, asked_at in keeper.open.items()
            if chunk in self._missing and self._asked.get(chunk, 0) < MAX_ASKED
        ]
        return min(waited)[1] if waited else None

    def _close(self, ask: Ask) -> float | None:
        """The question is answered or given up; when it was asked, if it was still open."""
        asked_at = self._keepers[ask.keeper].open.pop(ask.chunk, None)
        if asked_at is not None:
            self._unask(ask.chunk)
        return asked_at

    def _take_back(self, keeper: _Keeper) -> None:
        for chunk in list(keeper.open):
            del keeper.open[chunk]
            self._unask(chunk)

    def _unask(self, chunk: int) -> None:
        self._asked[chunk] -= 1
        if not self._asked[chunk]:
            del self._asked[chunk]
            if chunk in self._missing:
                self._unasked.append(chunk)
