"""Which server of the next stage gets a task: interleaved weighted round robin, by measured rate and link. Pure.

    server = router.choose(samples=4, now=now)        # None: everybody has enough; ask again later
    router.accepted(server, task, samples=4, now=now) | router.busy(server, now) | router.gone(server)
    router.finished(server, task, now)                # the receipt; it measures the server's rate

Each server has a *debt*: the seconds of work that it was given, by what its work is expected to cost. The next task
goes to the smallest debt. So tasks alternate, and a server of rate r gets the share r/Σr.

- **Cost of a task**: max(compute, transfer, (compute + transfer + latency) / window). Compute and transfer overlap,
  hence the maximum. A window of tasks in flight hides latency, and no more of it than that.
- **Measured rate**: an average of seconds per sample in which the newest receipt counts for a tenth. The interval of a
  task begins at its start or at the receipt before it, whichever is later: tasks that overlap measure the rate and not
  the time that each took. Only this machine's clock is used. A task under way for longer than the average counts at
  once, so a server that slows down loses its share before its receipt comes.
- **Newcomers** have one unproven task at a time. They are tried soon, since they start at the smallest debt of all.
- **Busy** is no fault: the server is passed over for a moment. A server that is **gone** gets nothing until it is added
  again. What was measured of it stays.
- A server that could take nothing for a while does not catch up afterwards: its debt is raised to that of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

NEWEST_SHARE = 0.1  # of the newest receipt in the average of a server's rate
NUM_WARMING_UP = 1  # receipts that say nothing: the first task warms up the machine's own caches
PROVEN_AFTER = 1  # measured receipts
BUSY_PAUSE_SECONDS = 0.02
LONGEST_BUSY_PAUSE_SECONDS = 0.5
MAX_REMEMBERED = 1024  # servers that are gone, with their measured rate


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How many tasks may be under way at one server."""

    max_window: int = 8
    """Tasks at once, by memory."""

    min_window: int = 2
    """One is computed while the next is on its way."""

    assumed_seconds_per_sample: float = 1.0
    """Until a server of the stage has been measured."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_window <= self.max_window:
            raise ValueError(f"a window of {self.min_window} to {self.max_window} tasks: it needs 1 or more, in order")


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """What is known of the way to a server; zero where nothing is."""

    latency_seconds: float = 0.0
    transfer_seconds_per_sample: float = 0.0


FREE = LinkCost()


@dataclass(slots=True)
class _Task:
    samples: float
    started_at: float
    cost_seconds: float


@dataclass(slots=True)
class _Server:
    link: LinkCost = FREE
    debt_seconds: float = 0.0
    blocked_until: float = 0.0
    num_busy: int = 0
    is_here: bool = True
    tasks: dict[object, _Task] = field(default_factory=dict)
    average: float = 0.0  # of seconds per sample, still biased towards 0
    num_receipts: int = 0
    num_measured: int = 0
    last_finished_at: float = -math.inf

    @property
    def is_proven(self) -> bool:
        return self.num_measured >= PROVEN_AFTER

    def measured(self) -> float | None:
        """Seconds per sample, without the bias of a young average."""
        return self.average / (1 - (1 - NEWEST_SHARE) ** self.num_measured) if self.num_measured else None

    def measure(self, seconds_per_sample: float) -> None:
        self.num_receipts += 1
        if self.num_receipts > NUM_WARMING_UP:
            self.average += NEWEST_SHARE * (seconds_per_sample - self.average)
            self.num_measured += 1


class StageRouter:
    """One sender's view of the servers of one stage."""

    def __init__(self, config: RouterConfig | None = None) -> None:
        self._config = config or RouterConfig()
        self._servers: dict[str, _Server] = {}

    # Who is there

    def add(self, server: str, *, link: LinkCost = FREE) -> None:
        """A server of this stage; also one that was gone and is back."""
        known = self._servers.get(server)
        if known is not None and known.is_here:
            known.link = link
            return
        self._forget_oldest()
        known = self._servers.setdefault(server, _Server())
        known.link, known.is_here, known.blocked_until, known.num_busy = link, True, 0.0, 0
        known.debt_seconds = self._least_debt(but=known)

    def gone(self, server: str) -> tuple[object, ...]:
        """It has left or cannot be reached: returns the tasks that it had."""
        known = self._servers.get(server)
        if known is None:
            return ()
        tasks = tuple(known.tasks)
        known.tasks.clear()
        known.is_here = False
        return tasks

    @property
    def servers(self) -> tuple[str, ...]:
        """Who is here."""
        return tuple(name for name, server in self._servers.items() if server.is_here)

    # A task

    def choose(self, *, samples: float, now: float) -> str | None:
        """The server for a task of so many samples; None while nobody can take one."""
        free = [(name, server) for name, server in self._servers.items() if self._is_free(server, now)]
        if not free:
            return None
        # The cost of this task counts too: of two with the same debt the faster one is done sooner.
        name, _ = min(free, key=lambda item: (item[1].debt_seconds + self._cost(item[1], samples, now), item[0]))
        return name

    def accepted(self, server: str, task: object, *, samples: float, now: float) -> None:
        """The server has taken the task."""
        known = self._servers[server]
        floor = self._least_debt(but=known)
        waited = not known.tasks  # it stood idle; what it did not do then it need not do now
        if waited:
            known.debt_seconds = max(known.debt_seconds, floor)
        cost = self._cost(known, samples, now)
        known.debt_seconds += cost
        known.tasks[task] = _Task(samples, now, cost)

    def busy(self, server: str, now: float, task: object = None) -> None:
        """The server has no room now; if the task was counted as accepted already, it is not any more."""
        known = self._servers[server]
        if (refused := known.tasks.pop(task, None)) is not None:
            known.debt_seconds -= refused.cost_seconds
        pause = min(BUSY_PAUSE_SECONDS * 2**known.num_busy, LONGEST_BUSY_PAUSE_SECONDS)
        known.num_busy += 1
        known.blocked_until = now + pause

    def finished(self, server: str, task: object, now: float) -> None:
        """The receipt of a task; one that is unknown is ignored."""
        known = self._servers.get(server)
        done = known.tasks.pop(task, None) if known is not None else None
        if known is None or done is None:
            return
        since = max(done.started_at, known.last_finished_at)
        known.measure(max(now - since, 0.0) / max(done.samples, 1e-9))
        known.last_finished_at = now
        known.blocked_until, known.num_busy = 0.0, 0

    def dropped(self, server: str, task: object) -> None:
        """The task is void: it says nothing about the server."""
        if (known := self._servers.get(server)) is not None:
            known.tasks.pop(task, None)

    def forget_tasks(self) -> None:
        """All tasks are void."""
        for server in self._servers.values():
            server.tasks.clear()

    def overdue(self, now: float, *, longer_than_seconds: float) -> tuple[tuple[str, object], ...]:
        """Tasks that have had no receipt for so long; they stay until they are dropped or finished."""
        return tuple(
            (name, task)
            for name, server in self._servers.items()
            for task, known in server.tasks.items()
            if now - known.started_at > longer_than_seconds
        )

    def next_free_at(self, now: float) -> float | None:
        """When a server that was busy may be asked again; None where only receipts help."""
        times = [s.blocked_until for s in self._servers.values() if s.is_here and s.blocked_until > now]
        return min(times, default=None)

    def seconds_per_sample(self, server: str, now: float) -> float:
        """What a sample is expected to cost at that server, link included."""
        return self._cost(self._servers[server], 1.0, now)

    # What is expected

    def _is_free(self, server: _Server, now: float) -> bool:
        if not server.is_here or server.blocked_until > now:
            return False
        return len(server.tasks) < (self._window(server) if server.is_proven else 1)

    def _window(self, server: _Server) -> int:
        """Tasks that keep it at work while receipts and the next task travel."""
        seconds = (server.measured() or 0.0) * self._typical_samples(server)
        if seconds <= 0:
            return self._config.max_window
        hidden = 1 + math.ceil(2 * server.link.latency_seconds / seconds)
        return min(max(hidden, self._config.min_window), self._config.max_window)

    @staticmethod
    def _typical_samples(server: _Server) -> float:
        return max((task.samples for task in server.tasks.values()), default=1.0)

    def _compute(self, server: _Server, now: float) -> float:
        measured = server.measured()
        if measured is None:
            known = [m for s in self._servers.values() if s.is_here and (m := s.measured()) is not None]
            measured = sorted(known)[len(known) // 2] if known else self._config.assumed_seconds_per_sample
        if server.tasks:
            oldest = next(iter(server.tasks.values()))
            under_way = (now - max(oldest.started_at, server.last_finished_at)) / max(oldest.samples, 1e-9)
            measured = max(measured, under_way)
        return measured

    def _cost(self, server: _Server, samples: float, now: float) -> float:
        compute = self._compute(server, now) * samples
        transfer = server.link.transfer_seconds_per_sample * samples
        window = self._config.max_window if server.is_proven else 1
        return max(compute, transfer, (compute + transfer + 2 * server.link.latency_seconds) / window)

    def _least_debt(self, *, but: _Server) -> float:
        return min((s.debt_seconds for s in self._servers.values() if s.is_here and s is not but), default=0.0)

    def _forget_oldest(self) -> None:
        absent = [name for name, server in self._servers.items() if not server.is_here]
        for name in absent[: max(0, len(absent) - MAX_REMEMBERED)]:
            del self._servers[name]
