"""From who is ready to a plan (pure).

The coordinator hands in every Ready it hears, with the roster as it stands. Out comes a plan: the members in the order
of their ids, what each contributes, who reduces how much, how the values are cut into chunks. A peer that cannot be
taken is named in the plan with the reason, and so learns it from the commit.

Some only *stand by*: they expect the epoch to be due in a moment and say so ahead, so that nobody waits for a meeting
then. They are ready once all who are have the weight together that makes an epoch, and not for ever.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from potluck.errors import ConfigurationError, RetryableError
from potluck.hub.presence import Presence
from potluck.round.aggregators import AggregatorSpec
from potluck.round.audit.auditcore import AuditConfig
from potluck.round.coordinator.trigger import ReadySender
from potluck.round.plan.chunks import ChunkGrid, fitting_chunk_bytes, largest_reply_bytes, traffic_bytes
from potluck.round.plan.messages import MAX_MEMBERS, MEAN, Commit, Part, Participant, Plan, Ready, RoundKey
from potluck.round.plan.partition import Partition, PartitionConfig, partition, predicted_seconds, round_shares
from potluck.round.plan.shares import MemberCapacity, known_speeds, levelled
from potluck.round.plan.specs import CodecSpan
from potluck.round.plan.weights import DEFAULT_CAP, WeightBook, check_cap

LEAST_ROUND_SECONDS = 20.0
READY_SECONDS = 3.5  # members repeat it each second; who has not for so long is not ready any more


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherConfig:
    """How a run plans its rounds."""

    aggregator: AggregatorSpec = MEAN
    """How contributions become one."""

    trusted_reducers: bool = False
    """Whether only peers that the organisers trust may reduce; by their invites, as the guard says in the roster."""

    audit: AuditConfig = field(default_factory=AuditConfig)
    """How rounds are audited in which others may reduce too."""

    weight_cap: float | None = DEFAULT_CAP
    """Nobody's weight counts for more than so many times what others usually give, but of trusted peers; None: as all
    say. Robust aggregators do not look at weights; the books do."""

    batch_weight: float = 0.0
    """What all together give to an epoch, where a run has such a number: a bound in its first epoch (weights.py)."""

    most_weight: float = math.inf
    """No peer's weight counts for more, trusted ones included: where a run knows how much one can have (paths/)."""

    is_held_twice: bool = False
    """Whether what one peer alone contributes goes to a helper too, so that no epoch dies with its only holder. Without
    it a lone peer takes its own values, and sends nothing."""

    partition: PartitionConfig = field(default_factory=PartitionConfig)
    """How parts are cut."""

    least_round_seconds: float = LEAST_ROUND_SECONDS
    """The deadline of the quickest round."""

    least_bytes_per_second: float = 32 * 1024
    """The slowest line that a round's deadline has room for."""

    most_round_seconds: float = 3600.0
    """The deadline of the slowest round."""

    def __post_init__(self) -> None:
        if not 0 < self.least_round_seconds <= self.most_round_seconds:
            raise ConfigurationError("a round needs a deadline: 0 < least_round_seconds ≤ most_round_seconds")
        check_cap(self.weight_cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan, and how long it should take."""

    plan: Plan
    predicted_seconds: float
    is_measured: bool
    """Whether the prediction rests on measured speeds."""

    chunk_seconds: float
    """How long the slowest needs for one chunk to each reducer, or of a reducer to all, as far as speeds are known."""


@dataclass(slots=True)
class _Waiting:
    ready: Ready
    since: float
    heard_at: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer that is ready, alive, and at the right epoch."""

    presence: Presence
    ready: Ready
    since: float
    weight: float
    """Of what it says, how much counts."""

    stands_by: bool = False
    """Whether it awaits more weight than there is: it starts no round, and takes part in one that others start."""

    @property
    def peer(self) -> str:
        """Its id."""
        return self.presence.peer

    @property
    def sends(self) -> bool:
        """Whether it contributes; an aux peer or an observer never does."""
        return self.ready.sends and self.ready.weight > 0 and self.presence.card.role == "trainer"


class Gathering:
    """Who is ready."""

    def __init__(self, config: GatherConfig) -> None:
        self.config = config
        self.weights = WeightBook()
        self._waiting: dict[str, _Waiting] = {}

    def take(self, peer: str, ready: Ready, now: float) -> None:
        """A peer says that it is ready, or that it is not any more."""
        if ready.withdrawn:
            self.forget(peer)
            return
        known = self._waiting.get(peer)
        # Under another lease the wait begins anew: after an outage of the hub its peers come back one by one, and the
        # first must not run away with the epoch because they had been ready for long.
        is_same = known is not None and _wait_of(known.ready) == _wait_of(ready)
        self._waiting[peer] = _Waiting(ready, known.since if known is not None and is_same else now, now)

    def forget(self, peer: str) -> None:
        """A peer is gone."""
        self._waiting.pop(peer, None)

    def committed(self, commit: Commit) -> None:
        """An epoch is final: who was ready for it is not ready for the next."""
        self._waiting = {peer: waiting for peer, waiting in self._waiting.items() if waiting.ready.epoch > commit.epoch}
        self.weights.committed(commit, self.config.weight_cap)

    def candidates(
        self, roster: Iterable[Presence], *, epoch: int, token: int, now: float, hub_now: float
    ) -> list[Candidate]:
        """The peers that could take part in the round for this epoch, under this lease, by id."""
        found = []
        for presence in sorted(roster, key=lambda presence: presence.peer):
            waiting = self._waiting.get(presence.peer)
            if (
                waiting is not None
                and presence.state == "alive"
                and presence.card.session == waiting.ready.session
                and presence.card.role in ("trainer", "aux")
                and waiting.ready.epoch == epoch
                and waiting.ready.token == token
                and now - waiting.heard_at <= READY_SECONDS
                and (not waiting.ready.until or hub_now <= waiting.ready.until)
            ):
                found.append(Candidate(presence, waiting.ready, waiting.since, waiting.ready.weight))
        return _as_far_as_ready(self._weighed(found, epoch))

    def _weighed(self, found: list[Candidate], epoch: int) -> list[Candidate]:
        """With as much of their weights as counts."""
        counted = self.weights.counted(
            {candidate.peer: candidate.ready.weight for candidate in found if candidate.sends},
            cap=self.config.weight_cap,
            exempt={candidate.peer for candidate in found if candidate.presence.trusted},
            batch=self.config.batch_weight if epoch == 1 else 0.0,  # later, who coordinates may be new itself
        )
        most = self.config.most_weight
        return [replace(candidate, weight=min(counted.get(candidate.peer, 0.0), most)) for candidate in found]

    def propose(
        self, candidates: Sequence[Candidate], key: RoundKey, *, hub_now: float, barred: Mapping[str, str] | None = None
    ) -> Proposal:
        """The plan for these peers. RetryableError when they cannot do it among themselves.

        `barred` are peers that may not take part, and why.
        """
        barred = barred or {}
        left_out = {candidate.peer: barred[candidate.peer] for candidate in candidates if candidate.peer in barred}
        candidates = [candidate for candidate in candidates if candidate.peer not in barred]
        layout, runs = _common_layout(candidates)
        if sum(candidate.sends for candidate in candidates) == 1:
            candidates = self._around_one(candidates, key)
        taken: list[Candidate] = []
        for candidate in candidates:
            if candidate.ready.layout not in ("", layout):
                left_out[candidate.peer] = (
                    "it holds other tensors, or other codecs, than most: see its recipe and version"
                )
            elif len(taken) >= MAX_MEMBERS:
                left_out[candidate.peer] = f"a round has at most {MAX_MEMBERS} members"
            else:
                taken.append(candidate)
        members = self._members(taken)
        self._check_trusted(members)
        chunk_bytes, parts, predicted_seconds = self._cut(members, runs)
        plan = Plan(
            key=key,
            members=tuple(self._participants(taken, members)),
            parts=parts,
            layout=layout,
            runs=runs,
            chunk_bytes=chunk_bytes,
            aggregator=self.config.aggregator,
            deadline=hub_now + self._deadline_seconds(predicted_seconds, traffic_bytes(runs, len(taken))),
            audit=self._is_audited(taken, members),
            left_out=left_out,
        )
        return Proposal(
            plan=plan,
            predicted_seconds=predicted_seconds,
            is_measured=any(member.upload_bytes_per_second for member in members),
            chunk_seconds=self._chunk_seconds(plan, members, {part.reducer for part in parts}),
        )

    def _around_one(self, candidates: list[Candidate], key: RoundKey) -> list[Candidate]:
        """The members of a round with nothing to average: sending the values may take minutes.

        Only a first attempt counts on a helper: one that fails, or lies, must not keep a lone peer from going on.
        """
        others = [c for c in candidates if c.ready.layout or c.presence.card.role == "trainer"]
        if not self.config.is_held_twice or len(others) > 1 or key.attempt > 0:
            return others
        is_able = self._may_reduce(others[0])
        helpers = [c for c in candidates if c not in others and (is_able or self._may_reduce(c))]
        return others + sorted(helpers, key=lambda c: (not c.presence.trusted, not self._may_reduce(c)))[:1]

    def _members(self, candidates: list[Candidate]) -> list[MemberCapacity]:
        able = [candidate for candidate in candidates if self._may_reduce(candidate)]
        reducers = {candidate.peer for candidate in able if candidate.ready.reduces} or {c.peer for c in able}
        cards = [candidate.presence.card for candidate in candidates]
        uploads = levelled([card.upload_bytes_per_second for card in cards])
        downloads = levelled([card.download_bytes_per_second for card in cards])
        return [
            MemberCapacity(
                peer=candidate.peer,
                sends=candidate.sends,
                reduces=candidate.peer in reducers,
                upload_bytes_per_second=upload,
                download_bytes_per_second=download,
            )
            for candidate, upload, download in zip(candidates, uploads, downloads, strict=True)
        ]

    def _may_reduce(self, candidate: Candidate) -> bool:
        presence = candidate.presence
        return bool(presence.card.addresses) and (presence.trusted or not self.config.trusted_reducers)

    def _check_trusted(self, members: list[MemberCapacity]) -> None:
        if self.config.trusted_reducers and len(members) > 1 and not any(member.reduces for member in members):
            raise RetryableError(
                f"none of the {len(members)} members may reduce: this run lets only trusted peers do so, and none that "
                "accepts connections is here. Start an aux peer whose invite says so (potluck members invite --trusted)"
            )

    def _is_audited(self, candidates: list[Candidate], members: list[MemberCapacity]) -> bool:
        """Whether a peer that the organisers do not trust might reduce, now or after a repair."""
        strangers = any(m.reduces and not c.presence.trusted for c, m in zip(candidates, members, strict=True))
        return strangers and len(members) > 1 and self.config.audit.chunks_per_reducer > 0

    def _participants(self, candidates: list[Candidate], members: list[MemberCapacity]) -> Iterable[Participant]:
        alone = len(candidates) == 1
        for candidate, member in zip(candidates, members, strict=True):
            yield Participant(
                peer=candidate.peer,
                session=candidate.ready.session,
                weight=candidate.weight,
                claimed=candidate.ready.weight if candidate.weight < candidate.ready.weight else 0.0,
                phases=candidate.ready.phases,
                sends=candidate.sends,
                reduces=member.reduces or alone,
            )

    def _cut(self, members: list[MemberCapacity], runs: tuple[CodecSpan, ...]) -> tuple[int, tuple[Part, ...], float]:
        """The size of a chunk, who reduces which, and how long it should take."""
        num_senders = sum(1 for member in members if member.sends)
        contribution_bytes = traffic_bytes(runs, num_senders)
        shared = _shares(tuple(members), contribution_bytes, self.config.partition)
        used = sum(1 for share in shared.shares if share > 0)
        chunk_bytes = fitting_chunk_bytes(runs, used, self._slowest_upload(members))
        grid = ChunkGrid(runs=runs, chunk_bytes=chunk_bytes)
        counts = round_shares(shared.shares, len(grid))
        ranges = grid.parts(counts)
        parts = tuple(
            Part(reducer=index, start=chunks.start, stop=chunks.stop)
            for index, chunks in enumerate(ranges)
            if len(chunks)
        )
        seconds = predicted_seconds(
            members, counts, contribution_bytes=contribution_bytes, config=self.config.partition
        )
        return chunk_bytes, parts, seconds

    def _chunk_seconds(self, plan: Plan, members: list[MemberCapacity], reducers: set[int]) -> float:
        """How long the busiest member takes to send one chunk to everybody it sends to."""
        num_senders = sum(1 for member in members if member.sends)
        frame_bytes = max(plan.chunk_bytes, largest_reply_bytes(plan.runs, plan.chunk_bytes, num_senders))
        speeds = [member.upload_bytes_per_second for member in members]
        uploads = known_speeds(speeds, self.config.partition.default_bytes_per_second)
        copies = [len(members) - 1 if index in reducers else len(reducers) for index in range(len(members))]
        return max(frame_bytes * num_copies / upload for num_copies, upload in zip(copies, uploads, strict=True))

    def _slowest_upload(self, members: list[MemberCapacity]) -> float:
        speeds = [member.upload_bytes_per_second for member in members if member.sends]
        return min(known_speeds(speeds, self.config.partition.default_bytes_per_second))

    def _deadline_seconds(self, predicted_seconds: float, contribution_bytes: int) -> float:
        """Far above what is predicted, or what a slow line needs: lines that stand still are seen much earlier."""
        wanted = 10.0 + 5.0 * max(predicted_seconds, contribution_bytes / self.config.least_bytes_per_second)
        return min(max(wanted, self.config.least_round_seconds), self.config.most_round_seconds)


def _as_far_as_ready(found: list[Candidate]) -> list[Candidate]:
    """A peer that stands by is ready since all together had the weight that it awaits.

    One that awaits more than there is goes without a round only if it has said until when it waits.
    """
    weight, reached = 0.0, []
    for candidate in sorted(found, key=lambda candidate: candidate.since):
        weight += candidate.weight
        reached.append((weight, candidate.since))
    ready = []
    for candidate in found:
        reached_at = next((since for weight, since in reached if weight >= candidate.ready.awaits), None)
        if reached_at is not None:
            since = max(candidate.since, reached_at) if candidate.ready.awaits else candidate.since
            ready.append(replace(candidate, since=since))
        elif not candidate.ready.until:
            ready.append(replace(candidate, stands_by=True))
    return ready


def _wait_of(ready: Ready) -> tuple[int, str, int]:
    return ready.epoch, ready.session, ready.token


def senders(candidates: Iterable[Candidate]) -> list[ReadySender]:
    """What a trigger wants to know of them."""
    return [
        ReadySender(
            peer=candidate.peer,
            weight=candidate.weight,
            since=candidate.since,
            start=candidate.ready.start,
            phases=candidate.ready.phases,
        )
        for candidate in candidates
        if candidate.sends and not candidate.stands_by
    ]


def alive_trainers(roster: Iterable[Presence]) -> frozenset[str]:
    """The peers that a round would wait for."""
    return frozenset(p.peer for p in roster if p.state == "alive" and p.card.role == "trainer")


def present_trainers(roster: Iterable[Presence]) -> frozenset[str]:
    """Also those under suspicion, who may only not have found the way back yet."""
    return frozenset(p.peer for p in roster if p.card.role == "trainer")


@lru_cache(maxsize=8)  # it takes some milliseconds, and members and speeds change rarely
def _shares(members: tuple[MemberCapacity, ...], contribution_bytes: int, config: PartitionConfig) -> Partition:
    return partition(members, contribution_bytes=contribution_bytes, num_chunks=1 << 20, config=config)


def _common_layout(candidates: Iterable[Candidate]) -> tuple[str, tuple[CodecSpan, ...]]:
    """The layout that most of those have who contribute; of two, the one with more weight behind it."""
    found: defaultdict[tuple[str, tuple[CodecSpan, ...]], list[float]] = defaultdict(list)
    for candidate in candidates:
        if candidate.sends:
            found[candidate.ready.layout, candidate.ready.runs].append(candidate.weight)
    if not found:
        raise RetryableError("nobody is ready to contribute: a round needs at least one trainer with values")
    return min(found, key=lambda layout: (-len(found[layout]), -sum(found[layout]), layout[0]))
