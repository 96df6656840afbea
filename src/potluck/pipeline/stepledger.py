"""One step of a pipeline: each micro-batch counts once in each stage, and the step commits once. Pure.

    actions = ledger.begin()              # events in, actions out; the conductor carries them out
    actions = ledger.held(...) | fed(...) | averaged(...) | gone(...) | stalled()

Weights do not change within a step, so a micro-batch may be computed anywhere, and again. What must not happen is that
a stage adds its gradient twice, or not at all. Every step runs in **attempts**:

1. *Fence.* All servers hear the attempt's number. Each drops what it has under way from earlier attempts, and answers
   which ids it has added in this step. From then on it adds nothing that belongs to an earlier attempt. When all have
   answered, what each stage has is known exactly, and nothing else can be added behind the ledger's back.
2. *Feed.* Ids that some stage lacks are sent through the pipeline again, under the same ids. Each names the stages that
   have it already: those compute what passes through and add nothing.
3. *Average.* Once every id is through, each unit averages, all or nothing. Contributions name their ids, which must
   partition the step.
   Spot checks are made now: if a server lied, the step begins anew without it, and nothing counts that was added
   before.
4. *Commit.* One compare-and-set names the digest of every unit's average and the total gradient norm.

Any loss before the commit (a server, a feeder, a micro-batch that makes no progress) starts the next attempt. The
servers that live keep their sums, so only what was lost is computed again, and what was under way. A server that was
frozen and comes back speaks of an old attempt and is not heard.

A **unit** is what is averaged together: the parameters of one stage, or parameters that several stages share (an
embedding tied to the head), whose gradients are summed over those stages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

NORM_TOLERANCE = 1e-3  # relative: members add the squares of the same values, in orders of their own


@dataclass(frozen=True)
class Item:
    """A micro-batch to send through the pipeline."""

    id: int
    samples: int
    held_by: tuple[int, ...] = ()
    """Stages that have added it in this step already."""


@dataclass(frozen=True)
class Fence:
    """Tell all members of this attempt, and ask what they hold."""

    attempt: int
    servers: tuple[tuple[str, ...], ...]
    """Who computes, by stage."""
    members: tuple[str, ...]
    """Everybody who must answer: servers and listeners."""
    valid_from: int = 0
    """What was added in attempts before this one does not count."""


@dataclass(frozen=True)
class Feed:
    """Have a feeder send these."""

    attempt: int
    feeder: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Average:
    """Have the members of each unit average what they hold."""

    attempt: int
    members: tuple[tuple[str, ...], ...]
    """By unit: all who hold a part of it, servers and listeners."""


@dataclass(frozen=True)
class Verify:
    """Have the verifier of this server say what it found, before the commit."""

    attempt: int
    server: str
    verifier: str


@dataclass(frozen=True)
class Commit:
    """Commit the step, by compare-and-set; nothing is applied before."""

    step: int
    attempt: int
    digests: tuple[str, ...]
    total_norm: float
    is_applied: bool
    """False: the total is not finite, all units skip this step."""


@dataclass(frozen=True)
class Exclude:
    """A member takes no further part in this step."""

    member: str
    reason: str


@dataclass(frozen=True)
class Dispute:
    """One of these reported a false norm of an average that they all hold."""

    suspects: frozenset[str]
    reason: str


@dataclass(frozen=True)
class StageLost:
    """Nobody who lives holds these stages: the run must restore its newest cut."""

    stages: tuple[int, ...]


Action = Fence | Feed | Average | Verify | Commit | Exclude | Dispute | StageLost
Contributions = Mapping[tuple[str, int], tuple[int, ...]]
"""Ids by (server, stage)."""


class Phase(Enum):
    """How far an attempt is."""

    FENCING = "fencing"
    FEEDING = "feeding"
    AVERAGING = "averaging"
    COMMITTING = "committing"
    LOST = "lost"


@dataclass(frozen=True)
class Member:
    """A server, or one that only listens until it is needed."""

    stages: tuple[int, ...]
    """Whose blocks it holds."""
    listens: bool = False
    units: frozenset[int] | None = None
    """Whose averages it hears; None: those of its stages. One that is still loading hears more than it holds."""
    spare: tuple[int, ...] = ()
    """Stages that it holds beside those that it serves, and serves when nobody else does."""


@dataclass(frozen=True)
class _Report:
    digest: str
    squared_norm: float


def partition_error(expected: set[tuple[int, int]], contributions: Contributions) -> str:
    """Why these contributions do not partition the (stage, id) pairs of a unit; empty where they do."""
    counts = Counter((stage, micro) for (_, stage), ids in contributions.items() for micro in ids)
    if twice := sorted(pair for pair, count in counts.items() if count > 1):
        return f"stage {twice[0][0]} has micro-batch {twice[0][1]} {counts[twice[0]]} times"
    if missing := sorted(expected - counts.keys()):
        return f"stage {missing[0][0]} lacks micro-batch {missing[0][1]}, and {len(missing) - 1} more"
    if foreign := sorted(counts.keys() - expected):
        return f"micro-batch {foreign[0][1]} of stage {foreign[0][0]} is not in this step"
    return ""


def agreed_norm(norms: Mapping[str, float], trusted: frozenset[str] = frozenset()) -> tuple[float, frozenset[str]]:
    """The squared norm of an average that all of these members hold bit by bit, and who may have reported a false one.

    A trusted member's figure counts, else the median. Of two that differ the larger one counts: gradients are clipped
    too much rather than not at all. Where neither side has more members, all of them are suspects.
    """
    norms = {member: norm if norm >= 0 else math.inf for member, norm in norms.items()}  # also where it is no number
    ordered = sorted(norms.values())
    believed = [norm for member, norm in norms.items() if member in trusted]
    counts = believed[0] if believed else ordered[len(ordered) // 2]
    is_same = partial(math.isclose, counts, rel_tol=NORM_TOLERANCE)
    others = frozenset(member for member, norm in norms.items() if not is_same(norm)) - trusted
    is_tie = not believed and 2 * len(others) >= len(norms)
    return counts, frozenset(norms) if is_tie else others


@dataclass
class StepLedger:
    """The books of one step."""

    step: int
    num_stages: int
    samples: Sequence[int]
    """Of each micro-batch; its place is its id."""
    members: dict[str, Member]
    feeders: list[str]
    units: tuple[tuple[int, ...], ...] = ()
    """The stages of each unit, none where it has no parameters; one unit per stage when empty."""
    checks: dict[str, str] = field(default_factory=dict)
    """Servers whose work of this step is computed again before the commit, each with its verifier."""
    trusted: frozenset[str] = frozenset()
    """Members whose reports are believed: the conductor's own peer."""
    attempt: int = 0
    """Of a conductor's term: later terms begin at larger numbers."""
    valid_from: int = 0
    """What was added before this attempt was made of lies, and does not count."""
    phase: Phase = Phase.FENCING
    _held: dict[str, dict[int, frozenset[int]]] = field(default_factory=dict)
    _waiting: dict[int, str] = field(default_factory=dict)  # id -> its feeder
    _reports: dict[tuple[int, str], _Report] = field(default_factory=dict)
    _unchecked: set[str] = field(default_factory=set)  # servers whose verifier has not answered in this attempt
    num_fed: int = 0
    num_replayed: int = 0

    def __post_init__(self) -> None:
        self.members, self.feeders = dict(self.members), list(self.feeders)
        self._before = self.attempt
        self.units = self.units or tuple((stage,) for stage in range(self.num_stages))

    @property
    def num_attempts(self) -> int:
        """How often this term has tried."""
        return self.attempt - self._before

    @property
    def ids(self) -> range:
        """All micro-batches of the step."""
        return range(len(self.samples))

    @property
    def awaited(self) -> tuple[str, ...]:
        """Members whose answer is missing in this phase; feeders while they feed."""
        if self.phase is Phase.FENCING:
            return tuple(sorted(self.members.keys() - self._held.keys()))
        if self.phase is Phase.FEEDING:
            return tuple(sorted(set(self._waiting.values())))
        if self.phase is Phase.AVERAGING:
            return tuple(
                sorted(
                    {
                        m
                        for unit in range(len(self.units))
                        for m in self._holders(unit)
                        if (unit, m) not in self._reports
                    }
                )
            )
        return ()

    # Events

    def begin(self) -> list[Action]:
        """Start the first attempt."""
        return self._next_attempt()

    def held(self, member: str, attempt: int, held: Mapping[int, frozenset[int]]) -> list[Action]:
        """A member answers the fence: what it has added, by stage."""
        if attempt != self.attempt or self.phase is not Phase.FENCING or member not in self.members:
            return []
        stages = (*self.members[member].stages, *self.members[member].spare)
        if any(stage not in stages or any(micro not in self.ids for micro in ids) for stage, ids in held.items()):
            return self.gone(member, "it claims what is not its own")
        self._held[member] = {stage: frozenset(ids) for stage, ids in held.items() if ids}
        return self._feed() if not self.awaited else []

    def fed(self, micro: int, attempt: int) -> list[Action]:
        """A micro-batch is through: forward, backward, and added by every stage."""
        if attempt != self.attempt or self.phase is not Phase.FEEDING:
            return []
        if self._waiting.pop(micro, None) is not None:
            self.num_fed += 1
        return self._average() if not self._waiting else []

    def averaged(
        self,
        member: str,
        attempt: int,
        unit: int,
        *,
        digest: str,
        squared_norm: float,
        contributions: Contributions,
    ) -> list[Action]:
        """A member has the average of a unit; says out of which contributions."""
        if attempt != self.attempt or self.phase is not Phase.AVERAGING or member not in self._holders(unit):
            return []
        expected = {(stage, micro) for stage in self.units[unit] for micro in self.ids}
        if error := partition_error(expected, contributions):
            return self.gone(member, f"its average is not of this step: {error}")
        self._reports[unit, member] = _Report(digest, squared_norm)
        return self._commit_if_all()

    def hears_also(self, name: str, units: frozenset[int]) -> bool:
        """A member loads more blocks from now on: whether it hears their averages in this step already."""
        member = self.members.get(name)
        if member is None or member.units is None or self.phase not in (Phase.FENCING, Phase.FEEDING):
            return False
        self.members[name] = replace(member, units=member.units | units)
        return True

    def checked(self, server: str, attempt: int) -> list[Action]:
        """A check has found nothing, or could not be made."""
        if attempt != self.attempt or self.phase is not Phase.AVERAGING:
            return []
        self._unchecked.discard(server)
        return self._commit_if_all()

    def lied(self, server: str, attempt: int, reason: str) -> list[Action]:
        """A check has failed: the step goes on without this server, and from its start.

        What others added may be made of what it gave them. The same holds for one that leaves before it is checked.
        """
        return self.gone(server, reason) if attempt == self.attempt else []

    def gone(self, who: str, reason: str = "it left") -> list[Action]:
        """A member or feeder is dead, unreachable or excluded."""
        serves = any(who in servers for servers in self.servers)
        is_feeder = who in self.feeders
        if is_feeder:
            self.feeders.remove(who)
        member = self.members.pop(who, None)
        if member is None and not is_feeder:
            return []
        actions: list[Action] = [Exclude(who, reason)] if member is not None else []
        if self.phase is Phase.COMMITTING:  # the averages are named: every holder applies them
            return actions + self._lost()
        if who in self.checks and member is not None:  # nobody can check it any more: nothing counts that it touched
            self.valid_from = self.attempt + 1
        self._promote()
        if lost := self._lost():
            return actions + lost
        if serves or self.phase is Phase.AVERAGING or who in self._waiting.values():
            return actions + self._next_attempt()
        # Nobody waits for what it computes: it listened, or had nothing to feed.
        is_fenced = self.phase is Phase.FENCING and not self.awaited
        return actions + (self._feed() if is_fenced else [])

    def stalled(self) -> list[Action]:
        """Nothing has moved for too long: fence, and see who answers."""
        if self.phase in (Phase.COMMITTING, Phase.LOST):
            return []
        return self._next_attempt()

    # Actions

    def _next_attempt(self) -> list[Action]:
        self.attempt += 1
        self.phase = Phase.FENCING
        self._held.clear()
        self._waiting.clear()
        self._reports.clear()
        self._unchecked.clear()
        self._promote()
        if lost := self._lost():
            return lost
        return [Fence(self.attempt, self.servers, tuple(sorted(self.members)), self.valid_from)]

    def _feed(self) -> list[Action]:
        holder: dict[tuple[int, int], str] = {}
        for member in sorted(self._held):
            for stage, ids in self._held[member].items():
                for micro in ids:
                    if (stage, micro) in holder:  # cannot be, unless a server breaks the rules
                        return self.gone(
                            member, f"micro-batch {micro} of stage {stage} is held by {holder[stage, micro]} too"
                        )
                    holder[stage, micro] = member
        items = []
        for micro in self.ids:
            held_by = tuple(stage for stage in range(self.num_stages) if (stage, micro) in holder)
            if len(held_by) < self.num_stages:
                items.append(Item(micro, self.samples[micro], held_by))
        if not items:
            return self._average()
        if not self.feeders:
            return []  # until one joins, and the step is begun again
        self.phase = Phase.FEEDING
        if self.num_attempts > 1:
            self.num_replayed += len(items)
        shares: dict[str, list[Item]] = {}
        for place, item in enumerate(items):
            feeder = self.feeders[place % len(self.feeders)]
            self._waiting[item.id] = feeder
            shares.setdefault(feeder, []).append(item)
        return [Feed(self.attempt, feeder, tuple(share)) for feeder, share in shares.items()]

    def _average(self) -> list[Action]:
        self.phase = Phase.AVERAGING
        average = Average(self.attempt, tuple(self._holders(unit) for unit in range(len(self.units))))
        verifying = [
            Verify(self.attempt, server, verifier)
            for server, verifier in self.checks.items()
            if server in self.members and verifier in self.members
        ]
        self._unchecked = {each.server for each in verifying}
        return [average, *verifying]

    def _commit_if_all(self) -> list[Action]:
        return self._commit() if not self.awaited and not self._unchecked else []

    def _commit(self) -> list[Action]:
        digests, squared = [], 0.0
        excluded: dict[str, str] = {}
        disputes: list[Action] = []
        for unit in range(len(self.units)):
            if not self.units[unit]:  # it has no parameters
                digests.append("")
                continue
            reports = {member: self._reports[unit, member] for member in self._holders(unit)}
            counts = Counter(report.digest for report in reports.values())
            most = max(counts.values())
            agreed = next(report for report in reports.values() if counts[report.digest] == most)
            # A peer with another average would have other weights from now on.
            excluded |= {
                member: "its average differs from that of the others"
                for member, report in reports.items()
                if report.digest != agreed.digest
            }
            norms = {m: report.squared_norm for m, report in reports.items() if report.digest == agreed.digest}
            norm, suspects = agreed_norm(norms, self.trusted)
            if suspects:
                reason = f"the norm that it reports of unit {unit} is not {norm:.3g}"
                disputes.append(Dispute(suspects, reason))
                if len(suspects) < len(norms):  # where it is unknown who is right, both hold the average
                    excluded |= dict.fromkeys(suspects, reason)
            digests.append(agreed.digest)
            squared += norm
        self.phase = Phase.COMMITTING
        actions: list[Action] = disputes
        for member, reason in excluded.items():
            actions += self.gone(member, reason)
        if self.phase is Phase.LOST:
            return actions
        is_finite = math.isfinite(squared)
        total = math.sqrt(squared) if is_finite else squared
        return [*actions, Commit(self.step, self.attempt, tuple(digests), total, is_finite)]

    # Who holds what

    def _holders(self, unit: int) -> tuple[str, ...]:
        return tuple(sorted(name for name in self.members if self.hears(name, unit)))

    def hears(self, name: str, unit: int) -> bool:
        """Whether a member gets the average of this unit."""
        member, stages = self.members[name], self.units[unit]
        if not stages:
            return False
        return unit in member.units if member.units is not None else bool(set(stages) & set(member.stages))

    @property
    def servers(self) -> tuple[tuple[str, ...], ...]:
        """Who computes, by stage."""
        return tuple(
            tuple(sorted(n for n, m in self.members.items() if stage in m.stages and not m.listens))
            for stage in range(self.num_stages)
        )

    def _promote(self) -> None:
        """A stage without servers takes the first of its listeners."""
        for stage, servers in enumerate(self.servers):
            if not servers:
                for name, member in sorted(self.members.items()):
                    if stage in member.stages or stage in member.spare:
                        stages = tuple(sorted({*(() if member.listens else member.stages), stage}))
                        self.members[name] = replace(member, listens=False, stages=stages)
                        break

    def _lost(self) -> list[Action]:
        held = {stage for member in self.members.values() for stage in (*member.stages, *member.spare)}
        lost = tuple(stage for stage in range(self.num_stages) if stage not in held)
        if lost:
            self.phase = Phase.LOST
        return [StageLost(lost)] if lost else []


@dataclass
class LossScale:
    """By how much losses are multiplied before backward, so that small gradients survive float16 on their way."""

    scale: float = 1.0
    highest: float = 65536.0
    grow_after: int = 1000
    """Steps in a row that were finite; 0: the scale never grows."""
    _finite_steps: int = 0

    def update(self, *, is_finite: bool) -> None:
        """After a step: halved where it was skipped, doubled after many that were not."""
        self._finite_steps = self._finite_steps + 1 if is_finite else 0
        if not is_finite:
            self.scale = max(self.scale / 2, 2.0**-24)
        elif self.grow_after and self._finite_steps >= self.grow_after:
            self.scale, self._finite_steps = min(self.scale * 2, self.highest), 0
