"""Which of the open paths to one peer to use now (pure).

The first path that opens is used at once. A better one is used once it has proved itself: a probe sent over it was
echoed, so it works both ways. A path that closes is left at once; so is one that is *silent*, open as far as its
carrier knows while nothing is acknowledged on it. Each failure doubles the time that a path must then stay open before
it is preferred again, so that one that flaps is soon left alone; a minute without failure and it is forgiven. When
only silent paths are left they take turns.
"""

from __future__ import annotations

from dataclasses import dataclass

FORGIVEN_SECONDS = 60.0
LARGEST_WAIT_SECONDS = 30.0
FIRST_PROBE_SECONDS = 1.0
LARGEST_PROBE_SECONDS = 30.0


@dataclass(slots=True)
class PathState:
    """What is known of one path."""

    rank: int  # 0 is best
    is_open: bool = False
    is_proved: bool = False
    is_silent: bool = False
    num_failures: int = 0
    failed_at: float = -FORGIVEN_SECONDS
    usable_at: float = 0.0  # when it may be preferred to another that works
    probe_at: float = 0.0
    probe_seconds: float = FIRST_PROBE_SECONDS
    probe_number: int = 0


class Paths:
    """All paths to one peer, by kind of carrier."""

    def __init__(self, preference: tuple[str, ...], settle_seconds: float) -> None:
        self._preference = preference
        self._settle_seconds = settle_seconds
        self._states: dict[str, PathState] = {}
        self._next_probe = 1
        self.current: str | None = None

    def opened(self, kind: str, now: float) -> None:
        """The carrier can send now."""
        state = self._state(kind)
        state.is_open = True
        state.is_proved = state.is_silent = False
        state.usable_at = now + self._wait_seconds(state, now)
        state.probe_at, state.probe_seconds = now, FIRST_PROBE_SECONDS

    def closed(self, kind: str, now: float) -> None:
        """The carrier cannot send any more."""
        state = self._state(kind)
        if state.is_open:
            state.is_open = state.is_proved = False
            self._failed(state, now)

    def silent(self, kind: str, now: float) -> None:
        """Nothing sent there is answered."""
        state = self._state(kind)
        if not state.is_open:
            return
        state.is_silent = True
        state.is_proved = False
        self._failed(state, now)
        state.usable_at = now + self._wait_seconds(state, now)
        state.probe_at, state.probe_seconds = now + FIRST_PROBE_SECONDS, FIRST_PROBE_SECONDS

    def answered(self, kind: str) -> None:
        """What was sent there is acknowledged, so it is not silent."""
        self._state(kind).is_silent = False

    def echoed(self, kind: str, number: int) -> None:
        """A probe came back on the path it was sent on."""
        state = self._states.get(kind)
        if state is not None and state.is_open and number and number == state.probe_number:
            state.is_proved = True
            state.is_silent = False

    def is_open(self, kind: str) -> bool:
        """Whether the carrier can send."""
        return self._state(kind).is_open

    def choose(self, now: float) -> str | None:
        """The path to use from now on; None: there is none."""
        current = self._states.get(self.current) if self.current is not None else None
        if current is not None and current.is_open and not current.is_silent:
            better = [
                (state.rank, kind)
                for kind, state in self._states.items()
                if state.rank < current.rank and state.is_open and state.is_proved and now >= state.usable_at
            ]
            if better:
                self.current = min(better)[1]
            return self.current
        candidates = [
            (state.is_silent, state.failed_at if state.is_silent else 0.0, now < state.usable_at, state.rank, kind)
            for kind, state in self._states.items()
            if state.is_open
        ]
        self.current = min(candidates)[-1] if candidates else None
        return self.current

    def due_probes(self, now: float) -> list[tuple[str, int]]:
        """Paths that should prove themselves, each with the number that its probe must carry."""
        due = []
        for kind, state in self._states.items():
            if self._needs_proof(kind, state) and now >= state.probe_at:
                state.probe_number = self._next_probe
                self._next_probe += 1
                state.probe_at = now + state.probe_seconds
                state.probe_seconds = min(state.probe_seconds * 2, LARGEST_PROBE_SECONDS)
                due.append((kind, state.probe_number))
        return due

    def next_at(self) -> float | None:
        """When `choose` or `due_probes` may say something new though nothing happens; None: never."""
        current = self._states.get(self.current) if self.current is not None else None
        due = [state.probe_at for kind, state in self._states.items() if self._needs_proof(kind, state)]
        if current is not None:
            due += [s.usable_at for s in self._states.values() if s.is_open and s.is_proved and s.rank < current.rank]
        return min(due, default=None)

    def _needs_proof(self, kind: str, state: PathState) -> bool:
        if not state.is_open or state.is_proved or kind == self.current or self.current is None:
            return False
        return state.is_silent or state.rank < self._states[self.current].rank

    def _failed(self, state: PathState, now: float) -> None:
        state.num_failures = state.num_failures + 1 if now - state.failed_at <= FORGIVEN_SECONDS else 1
        state.failed_at = now

    def _wait_seconds(self, state: PathState, now: float) -> float:
        if not state.num_failures or now - state.failed_at > FORGIVEN_SECONDS:
            return 0.0
        return min(self._settle_seconds * 2.0 ** min(state.num_failures - 1, 16), LARGEST_WAIT_SECONDS)

    def _state(self, kind: str) -> PathState:
        state = self._states.get(kind)
        if state is None:
            known = self._preference.index(kind) if kind in self._preference else len(self._preference)
            state = self._states[kind] = PathState(rank=known)
        return state
