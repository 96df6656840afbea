"""Spot checks: which server checks which, which difference is rounding, and who is excluded. Pure.

    checks = judge.choose(serving, holding)              # at a step's beginning; those who are checked are not told
    finding = judge.hear(check, result, arithmetics)     # what the verifier found, before the step's commit

In a check, another holder of the same blocks computes again all that a server did in one step: its outputs, the
gradients of its inputs, and its sum. What went in and out, the server's neighbours tell the verifier.

**Tolerance.** Two machines round differently. How far apart honest ones are is measured for each pair of arithmetics,
by the checks themselves: sixteen times the median of what was found so far, between a floor (what the codec alone may
change) and a ceiling. A pair that is not measured yet has the ceiling.

**Disputes.** A failed check is one word against another: the server's, the verifier's, and that of a neighbour who says
that it sent something else. One of them lies. A peer is the liar if it is the only one that all of its disputes have in
common: it is excluded, and those disputes count no more against the others. Where that names nobody and a server fails
three checks, the server goes; after twelve, a neighbour that it contradicted each time goes too. The conductor's own
peer is believed: where it has room, it loads the blocks in dispute, and decides. Two members that report different
norms of one average are in dispute too.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

CEILING = 0.02
MEASURED_AFTER = 8  # honest checks of a pair
MARGIN = 16.0  # times the median
MAX_MEASURED = 64
ALONE_AFTER = 3  # failed checks of a server
NEIGHBOURS_AFTER = 12  # failed checks in which a neighbour contradicted it: most often a third one clears that up
ARBITER_AFTER = 30  # failed checks while the conductor's own peer is about to load the blocks
MAX_DISPUTES = 256
FLOORS = {"raw": 1e-4, "float16": 1e-3, "bfloat16": 8e-3, "blockwise8": 0.02}  # twice what the last digit is worth

Kind = Literal["output", "gradient", "sum"]
Pair = tuple[str, str]


@dataclass(frozen=True)
class Check:
    """One server's work of one step, computed again by another holder of its blocks."""

    server: str
    verifier: str


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What a verifier found. Errors are relative to the size of what it computed itself."""

    compared: int
    """Micro-batches that were computed again."""
    missing: int = 0
    """Those of the server's sum that nobody told enough about."""
    errors: Mapping[Kind, float] = field(default_factory=dict)
    contradicted_by: tuple[str, ...] = ()
    """Neighbours who say that they sent or got something else than the server says."""
    note: str = ""
    """Why nothing could be compared."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What follows from a check."""

    failed: str = ""
    """Why the step goes on without the server; empty: it does not."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Who is excluded from the run, and why."""


@dataclass(frozen=True)
class Dispute:
    """A failed check: one of the suspects lies."""

    server: str
    """That was checked; empty: two reports of one average differ."""
    suspects: frozenset[str]
    neighbour: str = ""
    """Who says something else about what passed."""


class Tolerances:
    """What counts as rounding, by pair of arithmetics."""

    def __init__(self, codec: str = "raw") -> None:
        self._floors: dict[Kind, float] = {"output": FLOORS[codec], "gradient": FLOORS[codec], "sum": FLOORS["raw"]}
        self._seen: dict[tuple[Pair, Kind], deque[float]] = {}

    def limit(self, one: str, other: str, kind: Kind) -> float:
        """The largest error that is taken for rounding between these two."""
        floor = self._floors[kind]
        ceiling = max(CEILING, 2 * floor)
        seen = self._seen.get((_pair(one, other), kind), ())
        if len(seen) < MEASURED_AFTER:
            return ceiling
        return min(max(MARGIN * statistics.median(seen), floor), ceiling)

    def note(self, one: str, other: str, kind: Kind, error: float) -> None:
        """An error that was taken for rounding."""
        self._seen.setdefault((_pair(one, other), kind), deque(maxlen=MAX_MEASURED)).append(error)

    def table(self) -> list[tuple[str, str, str, float]]:
        """Each pair that was seen, the kind, and its limit."""
        return [(*pair, kind, self.limit(*pair, kind)) for pair, kind in sorted(self._seen)]


def _pair(one: str, other: str) -> Pair:
    return (one, other) if one <= other else (other, one)


@dataclass
class Judge:
    """One conductor's judgement."""

    rate: float
    """The share of (server, step) that is checked."""
    tolerances: Tolerances = field(default_factory=Tolerances)
    trusted: frozenset[str] = frozenset()
    """Verifiers whose word is enough: the conductor's own peer."""
    has_arbiter: bool = False
    """One of the trusted has room for more blocks, and will decide."""
    excluded: dict[str, str] = field(default_factory=dict)
    chance: random.Random = field(default_factory=random.SystemRandom)
    num_checks: int = 0
    num_failed: int = 0
    num_unchecked: int = 0
    """Checks that were due and could not be made."""
    _disputes: list[Dispute] = field(default_factory=list)

    @property
    def suspects(self) -> frozenset[str]:
        """Who is in a dispute."""
        return frozenset(name for dispute in self._disputes for name in dispute.suspects)

    def choose(self, serving: Mapping[str, frozenset[int]], holding: Mapping[str, frozenset[int]]) -> tuple[Check, ...]:
        """The checks of the next step: who computes which blocks, and who has which.

        A verifier has one at most, except for servers that are in a dispute: those are checked in every step.
        """
        if self.rate <= 0:
            return ()
        checks: list[Check] = []
        free = {name for name in holding if name not in self.excluded}
        suspects = self.suspects
        for server in sorted(serving, key=lambda name: (name not in suspects, name)):
            if server not in suspects and self.chance.random() >= self.rate:
                continue
            counts = {
                name: sum({server, name} <= each.suspects for each in self._disputes)
                for name, blocks in sorted(holding.items())
                if name != server and name not in self.excluded and blocks >= serving[server]
            }
            # One that it is in dispute with already is asked where there is no other: not where the others are busy.
            able = [name for name in counts if counts[name] == min(counts.values())]
            if server not in suspects or any(name in free for name in able):
                able = [name for name in able if name in free]
            if able:
                checks.append(Check(server, self.chance.choice(able)))
                free.discard(checks[-1].verifier)
            elif not counts:
                self.num_unchecked += 1
        return tuple(checks)

    def hear(self, check: Check, result: CheckResult, arithmetics: Mapping[str, str]) -> Finding:
        """A verifier has answered."""
        if not result.compared and not result.contradicted_by:
            self.num_unchecked += 1
            return Finding()
        self.num_checks += 1
        if result.contradicted_by:
            other = min(result.contradicted_by)
            reason = f"{other[:8]} and it do not say the same about what passed"
            return self._failed(check, reason, other)
        pair = arithmetics.get(check.server, ""), arithmetics.get(check.verifier, "")
        for kind, error in result.errors.items():
            limit = self.tolerances.limit(*pair, kind)
            if math.isnan(error) or error > limit:
                words = f"its {kind} differs by {error:.2g}, and {limit:.2g} would be rounding"
                return self._failed(check, f"{words} ({check.verifier[:8]} computed it again)")
        for kind, error in result.errors.items():
            self.tolerances.note(*pair, kind, error)
        return Finding()

    def disagree(self, suspects: frozenset[str], reason: str) -> dict[str, str]:
        """One of these said something false about what they all have: who is excluded, and why."""
        dispute = Dispute("", suspects - self.trusted)
        if not dispute.suspects:
            return {}
        self.num_failed += 1
        self._disputes = [*self._disputes, dispute][-MAX_DISPUTES:]
        return self._exclude(dict.fromkeys(self._named(dispute), reason))

    def _exclude(self, found: dict[str, str]) -> dict[str, str]:
        for name in found:
            self._disputes = [each for each in self._disputes if name not in each.suspects]
        self.excluded |= found
        return found

    def _failed(self, check: Check, reason: str, neighbour: str = "") -> Finding:
        self.num_failed += 1
        server = check.server
        suspects = {server, check.verifier, neighbour} - {"", *self.trusted}
        dispute = Dispute(server, frozenset(suspects), neighbour)
        self._disputes = [*self._disputes, dispute][-MAX_DISPUTES:]
        found = {name: reason if name == server else f"it spoke against {server[:8]}" for name in self._named(dispute)}
        self._exclude(found)
        return Finding(failed="" if server in self.trusted else reason, excluded=found)

    def _named(self, newest: Dispute) -> set[str]:
        """Who is the liar, as far as the disputes tell."""
        if len(newest.suspects) == 1:
            return set(newest.suspects)
        for name in sorted(newest.suspects):
            with_it = [each.suspects for each in self._disputes if name in each.suspects]
            if frozenset.intersection(*with_it) == {name}:
                return {name}
        same = [e for e in self._disputes if e.server == newest.server and bool(e.neighbour) == bool(newest.neighbour)]
        patience = NEIGHBOURS_AFTER if newest.neighbour else ALONE_AFTER
        if len(same) < (ARBITER_AFTER if self.has_arbiter else patience):
            return set()
        return {newest.server, newest.neighbour}.intersection(*(each.suspects for each in same))
