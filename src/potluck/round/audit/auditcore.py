"""The audit of a round before its commit (pure): which chunks to look at, which peers to ask, who is found out.

Everybody is bound before anything is asked. Members have reported the digest of the averages that they hold and a
commitment to what they contributed; senders have sealed every frame. Only then the auditor, which is the coordinator,
draws chunks of every reducer. For each it hears the reducer and the contributors:

    the reducer or a contributor is gone, or does not answer         nothing can be told: go on without it
    an answer speaks against itself (testimony.py)                   the witness lied
    the reducer left out somebody who was to be waited for           the reducer lied
    a contributor shows other values than those it sealed            the contributor lied
    all agree, and the average of their values is another            the reducer lied
    all agree, and so does the average                               the chunk is good

What rests on a member that is out, as a liar or because it cannot be asked, is done again: its parts; and, if it
contributed, all parts, since its values may be in each and nobody could ever check those.
A reducer that spoils one chunk in ten is found with probability 1 − 0.9ᵏ by a round that looks at k of its chunks.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from potluck.errors import ConfigurationError
from potluck.round.audit.testimony import FalseTestimony, WitnessAccount, reducer_of
from potluck.round.plan.messages import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """How rounds are audited in which a peer reduces that is not trusted."""

    chunks_per_reducer: int = 2
    """So many chunks of each reducer are recomputed; 0: no audit."""

    most_bytes: int = 256 * 1024 * 1024
    """No more contributions are fetched for one audit; where that is too little for all reducers, some are drawn."""

    answer_seconds: float = 5.0
    """A member without an answer by then is left out; chunks that need it for the check are done again."""

    exclusion_seconds: float = 24 * 3600.0
    """So long a liar takes part in no round."""

    silence_seconds: float = 60.0
    """So long a member takes part in no round that is alive and does not testify. It may only be slow or cut off from
    the auditor, so this is short; without it, such a member would cost every round `answer_seconds` and more."""

    def __post_init__(self) -> None:
        if self.chunks_per_reducer < 0 or self.most_bytes < 0:
            raise ConfigurationError(
                "chunks_per_reducer and most_bytes cannot be negative: 0 chunks turn the audit off"
            )
        if not (self.answer_seconds > 0 and self.exclusion_seconds >= 0 and self.silence_seconds >= 0):
            raise ConfigurationError(
                "answer_seconds must be positive, and exclusion_seconds and silence_seconds 0 or more"
            )


@dataclass(frozen=True, slots=True)
class AskWitnesses:
    """Ask these members about a chunk."""

    chunk: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recompute:
    """Average these members' contributions to a chunk, as they showed them."""

    chunk: int
    contributors: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """What came of an audit."""

    num_good: int = 0
    """Chunks that were recomputed and found right."""

    liars: Mapping[int, str] = field(default_factory=dict)
    """Members that lied, and how."""

    missing: Mapping[int, str] = field(default_factory=dict)
    """Members that did not answer."""

    stale: frozenset[int] = frozenset()
    """Chunks that must be done again."""

    @property
    def is_good(self) -> bool:
        """Whether the round can be committed."""
        return not (self.liars or self.missing or self.stale)


Action = AskWitnesses | Recompute | AuditResult


def draw_chunks(plan: Plan, config: AuditConfig, rng: random.Random) -> list[int]:
    """The chunks to look at: some of each reducer's, by chance; some of those, where all would be too many bytes."""
    by_reducer: dict[int, list[int]] = {}
    for part in plan.parts:
        by_reducer.setdefault(part.reducer, []).extend(range(part.start, part.stop))
    drawn = [
        chunk
        for chunks in by_reducer.values()
        for chunk in rng.sample(chunks, min(config.chunks_per_reducer, len(chunks)))
    ]
    rng.shuffle(drawn)
    num_senders = sum(1 for member in plan.members if member.weight > 0)
    affordable = config.most_bytes // (plan.chunk_bytes * max(1, num_senders))
    return drawn[: max(1, affordable)]


@dataclass(slots=True)
class _Case:
    """One chunk under audit."""

    reducer: int
    required: frozenset[int]  # contributors that the reducer had to wait for
    asked: frozenset[int]
    answers: dict[int, WitnessAccount | None] = field(default_factory=dict)  # None: nothing can be told
    recomputing: bool = False
    closed: bool = False


class Audit:
    """One audit: feed it what witnesses say, carry out its actions; it ends with one Verdict."""

    def __init__(
        self, plan: Plan, holders: Collection[int], chunks: Collection[int], liars: Mapping[int, str] | None = None
    ) -> None:
        """`holders` have the averages and can be asked; `chunks` were drawn; `liars` are found out already."""
        self._plan = plan
        self._holders = frozenset(holders)
        self._cases = {chunk: self._case(chunk) for chunk in chunks}
        self._liars = dict(liars or {})
        self._silent: dict[int, str] = {}  # who did not answer about some chunk, and why
        self._missing: dict[int, str] = {}  # … and was needed
        self._gone: set[int] = set()  # who was needed, and was out before
        self._num_good = 0
        self._over = False

    def start(self) -> list[Action]:
        """The questions, by peer."""
        actions: list[Action] = []
        for chunk, case in self._cases.items():
            if case.reducer in self._holders:
                actions.append(AskWitnesses(chunk, tuple(sorted(case.asked))))
            else:  # it made this average and then went: nobody can say any more what of
                self._gone.add(case.reducer)
                case.closed = True
        return actions + self._finish()

    def testified(self, member: int, chunk: int, account: WitnessAccount | FalseTestimony) -> list[Action]:
        """A member has answered."""
        case = self._cases[chunk]
        if case.closed or member in case.answers or member not in case.asked:
            return []
        if isinstance(account, FalseTestimony):
            self._convict(member, account.reason)
        case.answers[member] = account if isinstance(account, WitnessAccount) else None
        return self._look(chunk, case)

    def unheard(self, member: int, chunk: int, reason: str) -> list[Action]:
        """A member has not answered in time, or cannot."""
        case = self._cases[chunk]
        if case.closed or member in case.answers or member not in case.asked:
            return []
        self._silent[member] = reason
        case.answers[member] = None
        return self._look(chunk, case)

    def recomputed(self, chunk: int, average: bytes) -> list[Action]:
        """The hash of the average of what the contributors showed; empty where none came of it."""
        case = self._cases[chunk]
        if case.closed or not case.recomputing:
            return []
        account = case.answers[case.reducer]
        assert account is not None, "nothing is recomputed before the reducer has answered"
        if average == account.average:
            self._num_good += 1
        else:
            self._convict(case.reducer, f"the average of chunk {chunk} that it gave out is not that of its inputs")
        return self._close(case)

    def is_closed(self, chunk: int) -> bool:
        """Whether nothing more has to be known of a chunk."""
        return self._cases[chunk].closed

    def _case(self, chunk: int) -> _Case:
        reducer = reducer_of(self._plan, chunk)
        members = self._plan.members
        return _Case(
            reducer=reducer,
            required=frozenset(i for i, m in enumerate(members) if m.sends and m.receives),
            asked=frozenset(i for i in self._holders if i == reducer or members[i].weight > 0),
        )

    def _look(self, chunk: int, case: _Case) -> list[Action]:
        """Go on with a chunk as far as the answers allow."""
        if case.reducer not in case.answers:
            return []
        account = case.answers[case.reducer]
        if account is None:
            self._miss(case.reducer)
            return self._close(case)
        inputs = account.inputs or {}
        if left_out := case.required - inputs.keys():
            names = ", ".join(self._plan.members[index].peer for index in sorted(left_out))
            self._convict(case.reducer, f"it left {names} out of chunk {chunk}, which it had to wait for")
            return self._close(case)
        if any(member in case.asked and member not in case.answers for member in inputs):
            return []
        return self._compare(chunk, case, inputs)

    def _compare(self, chunk: int, case: _Case, inputs: Mapping[int, bytes]) -> list[Action]:
        """Everybody who can be heard has been: do reducer and contributors tell the same?"""
        is_clear = True
        for member, frame_hash in inputs.items():
            account = case.answers.get(member)
            if account is None:
                self._miss(member)
            elif account.contribution != frame_hash:
                self._convict(member, f"it showed other values of chunk {chunk} than it had sent and sealed")
            else:
                continue
            is_clear = False
        if not is_clear:
            return self._close(case)
        case.recomputing = True
        return [Recompute(chunk, tuple(sorted(inputs)))]

    def _convict(self, member: int, reason: str) -> None:
        self._liars.setdefault(member, reason)

    def _miss(self, member: int) -> None:
        if member in self._silent:
            self._missing.setdefault(member, self._silent[member])
        elif member not in self._liars:
            self._gone.add(member)

    def _close(self, case: _Case) -> list[Action]:
        case.closed = True
        return self._finish()

    def _finish(self) -> list[Action]:
        if self._over or not all(case.closed for case in self._cases.values()):
            return []
        self._over = True
        missing = {member: why for member, why in self._missing.items() if member not in self._liars}
        stale = frozenset(self._stale(self._liars.keys() | missing.keys() | self._gone))
        return [AuditResult(num_good=self._num_good, liars=self._liars, missing=missing, stale=stale)]

    def _stale(self, out: Collection[int]) -> Iterator[int]:
        """What rests on members that can no longer be asked: all of it if one of them contributed, else its parts."""
        everything = any(self._plan.members[member].weight > 0 for member in out)
        for part in self._plan.parts:
            if everything or part.reducer in out:
                yield from range(part.start, part.stop)
