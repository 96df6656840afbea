"""Machines that come and go as preemptible ones do: read from a trace, or generated like one.

    events = generate(P3, machines=128, hours=32, seed=1)
    events = read_trace(Path("p3-spot.csv"))                 # milliseconds,add|remove,node

The constants are fitted to two public logs of about eleven hours each (Bamboo, NSDI 2023, MIT licence): AWS p3 machines
(344 events, at most 32 alive) and g4dn (153 events, at most 24). Machines leave in groups whose sizes are geometric,
and those that are missing from the request come back, in groups too. As in the logs, things happen on whole minutes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.errors import ConfigurationError

MINUTE_SECONDS = 60.0


@dataclass(frozen=True)
class Event:
    """A machine comes or goes."""

    seconds: float
    machine: str
    comes: bool


@dataclass(frozen=True, kw_only=True)
class Churn:
    """How machines of one kind behave."""

    leaves_per_hour: float
    """Of a machine that is there."""
    leave_group: float
    """How many go at once, on average."""
    returns_per_hour: float
    """Of a machine that was asked for and is missing."""
    return_group: float


P3 = Churn(leaves_per_hour=0.61, leave_group=2.1, returns_per_hour=1.8, return_group=2.2)
G4DN = Churn(leaves_per_hour=0.55, leave_group=1.55, returns_per_hour=0.6, return_group=1.3)


def generate(churn: Churn, *, machines: int, hours: float, seed: int) -> tuple[Event, ...]:
    """So many machines are asked for; the share that the provider has at most times is there from the start."""
    chance = random.Random(seed)
    share = churn.returns_per_hour / (churn.returns_per_hour + churn.leaves_per_hour)
    alive = [f"m{number}" for number in range(round(machines * share))]
    events = [Event(0.0, machine, True) for machine in alive]
    num_named = len(alive)
    for minute in range(1, int(hours * 60)):
        now = minute * MINUTE_SECONDS
        for _ in range(_events(chance, len(alive) * churn.leaves_per_hour / 60 / churn.leave_group)):
            for _ in range(min(_group(chance, churn.leave_group), len(alive))):
                machine = alive.pop(chance.randrange(len(alive)))
                events.append(Event(now, machine, False))
        missing = machines - len(alive)
        for _ in range(_events(chance, missing * churn.returns_per_hour / 60 / churn.return_group)):
            for _ in range(min(_group(chance, churn.return_group), machines - len(alive))):
                alive.append(f"m{num_named}")
                events.append(Event(now, alive[-1], True))
                num_named += 1
    return tuple(events)


def _events(chance: random.Random, mean: float) -> int:
    """How many happen in a minute: Poisson."""
    count, passed = 0, chance.expovariate(1.0)
    while passed < mean:
        count += 1
        passed += chance.expovariate(1.0)
    return count


def _group(chance: random.Random, mean: float) -> int:
    """Geometric, from 1 on."""
    size = 1
    while chance.random() > 1 / mean:
        size += 1
    return size


def read_trace(path: Path) -> tuple[Event, ...]:
    """A log of `milliseconds,add|remove,node` lines."""
    events = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3 or not fields[0].isdigit() or fields[1] not in ("add", "remove"):
            raise ConfigurationError(
                f"{path}, line {number}: {line!r} is no event. Lines are milliseconds,add|remove,node"
            )
        events.append(Event(int(fields[0]) / 1000, fields[2], fields[1] == "add"))
    return tuple(events)


def overlay(traces: Iterable[Sequence[Event]]) -> tuple[Event, ...]:
    """Several traces at once, each with machines of its own: more machines than one log has."""
    merged = [
        Event(event.seconds, f"{number}.{event.machine}", event.comes)
        for number, trace in enumerate(traces)
        for event in trace
    ]
    return tuple(sorted(merged, key=lambda event: event.seconds))
