"""When preemptible machines come and go: real logs, and a generator fitted to them (pure).

Two forms of logs are read: `milliseconds,add|remove,node` (one line an event) and `date, time, machines` (how many a
request for many held). The generator draws what such logs show: departures come in bursts with exponential gaps, and
another machine comes after a while. Its figures lie between those of two logs of eleven hours, of AWS g4dn and p3 spot
machines: peaks of 24 and 32, 4.5 and 6.9 bursts an hour of 1.5 and 2.1 machines, each missing for 97 and 33 minutes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from potluck.errors import ConfigurationError


@dataclass(frozen=True, order=True, slots=True)
class Change:
    """One machine comes or goes."""

    seconds: float
    kind: Literal["add", "remove"]
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionConfig:
    """How often machines are taken away, and how soon others come."""

    num_machines: int
    """How many are asked for, and are there at the start."""
    bursts_per_hour: float = 5.0
    """How often some are taken away at once."""
    mean_burst: float = 1.8
    """How many go at once, on average (geometric, at least one)."""
    mean_return_seconds: float = 3600.0
    """How long it takes until another takes the place of one that went, on average."""

    def __post_init__(self) -> None:
        if self.num_machines < 1 or self.bursts_per_hour < 0 or self.mean_burst < 1 or self.mean_return_seconds <= 0:
            raise ConfigurationError(f"no machines can come and go like this: {self}")


def generate(config: PreemptionConfig, hours: float, seed: int) -> list[Change]:
    """Return the changes of some hours, in order; the same seed gives the same changes."""
    rng = random.Random(seed)
    alive = [f"node{i + 1}" for i in range(config.num_machines)]
    changes = [Change(0.0, "add", node) for node in alive]
    returning: list[float] = []
    num_made, now, end = len(alive), 0.0, hours * 3600
    next_burst = _gap(rng, config)
    while True:
        now = min([next_burst, *returning])
        if now >= end:
            return changes
        if returning and now == min(returning):
            returning.remove(now)
            num_made += 1
            alive.append(f"node{num_made}")
            changes.append(Change(now, "add", alive[-1]))
            continue
        burst = 1
        while rng.random() < 1 - 1 / config.mean_burst:
            burst += 1
        for _ in range(min(burst, len(alive))):
            changes.append(Change(now, "remove", alive.pop(rng.randrange(len(alive)))))
            returning.append(now + rng.expovariate(1 / config.mean_return_seconds))
        next_burst = now + _gap(rng, config)


def _gap(rng: random.Random, config: PreemptionConfig) -> float:
    per_second = config.bursts_per_hour / 3600  # the smallest rates become 0 here
    return rng.expovariate(per_second) if per_second else float("inf")


def parse_trace(text: str) -> list[Change]:
    """Read a log of either form; ConfigurationError with the line that is wrong."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ConfigurationError("the trace is empty")
    try:
        int(lines[0][1].split(",")[0])
    except ValueError:
        return _from_counts(lines)
    return _from_events(lines)


def _from_events(lines: Sequence[tuple[int, str]]) -> list[Change]:
    changes: list[Change] = []
    alive: set[str] = set()
    for number, line in lines:
        words = [word.strip() for word in line.split(",")]
        if len(words) != 3 or not words[0].isdigit() or words[1] not in ("add", "remove"):
            raise ConfigurationError(f"line {number} of the trace is not `milliseconds,add|remove,node`: {line!r}")
        if (words[1] == "add") == (words[2] in alive):
            raise ConfigurationError(
                f"line {number} of the trace cannot be: {words[2]} is {'' if words[2] in alive else 'not '}there"
            )
        alive ^= {words[2]}
        changes.append(Change(int(words[0]) / 1000, "add" if words[1] == "add" else "remove", words[2]))
    return sorted(changes, key=lambda change: change.seconds)


def _from_counts(lines: Sequence[tuple[int, str]]) -> list[Change]:
    counts: list[tuple[float, int]] = []
    for number, line in lines:
        words = [word.strip() for word in line.split(",")]
        try:
            moment, machines = datetime.strptime(f"{words[0]} {words[1]}", "%Y-%m-%d %H:%M:%S"), int(words[2])
        except (ValueError, IndexError):
            raise ConfigurationError(f"line {number} of the trace is not `date, time, machines`: {line!r}") from None
        counts.append((moment.timestamp(), machines))
    counts.sort(key=lambda each: each[0])  # real logs have lines out of order
    began = counts[0][0]
    alive: list[str] = []
    changes: list[Change] = []
    num_made = 0
    for at, machines in counts:
        while len(alive) < machines:
            num_made += 1
            alive.append(f"node{num_made}")
            changes.append(Change(at - began, "add", alive[-1]))
        while len(alive) > machines:  # the log does not say which one went: the oldest
            changes.append(Change(at - began, "remove", alive.pop(0)))
    return changes


def compressed(changes: Sequence[Change], factor: float) -> list[Change]:
    """Return the same changes, `factor` times as fast."""
    if factor <= 0:
        raise ConfigurationError(f"time can be compressed by a factor above 0, not {factor}")
    return [Change(change.seconds / factor, change.kind, change.node) for change in changes]
