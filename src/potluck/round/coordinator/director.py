"""The coordinator's side of one round (pure): watch the members, repair what breaks, end in a commit or an abort.

The director knows reports (attendance.py), deaths and time. It never touches a tensor. What it can do is publish a
revised plan:

- A member whose values cannot be used is no longer waited for (`sends` off). It still gets the averages.
- A member that is dead, silent, or without the averages when all others have them, is out (`receives` off).
- A reducer between which and another member nothing gets through any more loses its chunks to one that reaches all.
  Where there is none, the fewest members that make one are out (reach.py).
- Chunks that a reducer has lost are done again by others, in two steps. First a revision says so, and every
  survivor answers with what it holds. Then those of the chunks that not all survivors hold get a new reducer and a
  higher generation (reassignment.py). Only they move again; one that reaches a survivor late is discarded with the
  older generation.

When every receiver reports a digest under the newest revision, the round can be committed. Where digests differ, the
one that most members hold counts, and the others are left out: they must fetch the state. Between digests that equally
many hold, the coordinator's own decides, since it could commit anything anyway. If it has none, nobody can tell who
lies (a weight is only claimed): the round is given up, unless an audit is about to find out.

Members that are out though they live (silent, or cut off) may be only out of *our* reach. A minority must not run away
with the epoch, so the round is given up unless those who hold it outnumber those who were lost that way. The next
attempt is with the peers that say then that they are ready.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from potluck.round.coordinator.attendance import Attendance
from potluck.round.coordinator.reach import Choice, Reach
from potluck.round.coordinator.reassignment import reassign
from potluck.round.outcome import FailedRound
from potluck.round.plan.messages import Plan, Report, shortened

OTHER_DIGEST = "its averages have another digest"


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectorTimeouts:
    """How long the director waits for what. All of it is far above what a healthy round needs."""

    silent_seconds: float = 1.5
    """A member that sends no report for this long, though others are waiting, is out; they report every 0.3 s."""

    stalled_seconds: float = 3.0
    """When a member has had nothing for this long though it waits for another, the link between them is broken."""

    straggler_seconds: float = 2.0
    """Once most hold all averages, the others have this long before the round is committed without them; or twice as
    long as most took, if that is longer, or `expected_seconds` from the start."""

    expected_seconds: float = 0.0
    """How long the round should take by measured speeds; slow lines get that time."""

    pause_seconds: float = 0.75
    """Two looks at the clock further apart than this mean that the coordinator itself stood still: what members said
    meanwhile has not been read yet, and their silence proves nothing. No more than this counts of that time."""

    repeat_seconds: float = 0.5
    """A plan that somebody has not answered is published again after this long: the hub may have lost it."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish this revision of the plan."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Finish:
    """Commit: these members hold the averages with this digest."""

    plan: Plan
    digest: str
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the round; the reason names the peers and the phase."""

    reason: str


Decision = Publish | Finish | GiveUp


class Director:
    """Watches over one round."""

    def __init__(self, plan: Plan, patience: DirectorTimeouts, now: float, *, coordinator: str = "") -> None:
        """`coordinator` is the peer that directs, a member or not."""
        self.plan = plan
        self._coordinator = coordinator
        self.started_at = now
        self._patience = patience
        self._attendance = Attendance(len(plan.members), plan.num_chunks, now)
        self._to_redo: set[int] = set()  # reducers whose chunks are taken over once all survivors have answered
        self._tainted: set[int] = set()  # chunks to be done again though all survivors hold them
        self._lost: set[int] = set()  # out, though perhaps alive
        self._gone: dict[int, str] = {}  # dead, or left, and how: also while an audit is under way
        self._reach = Reach()
        self._majority_at: float | None = None
        self._published_revision = plan.revision
        self._published_at = now
        self._ticked_at = now
        self._over = False

    def report_arrived(self, member: int, report: Report, now: float) -> list[Decision]:
        """Take in a member's report."""
        if self._over or report.key != self.plan.key or not self._attendance.take(member, report, now):
            return []
        self._stop_sending(self._offenders(member, report))
        return self._next(now)

    def member_gone(self, member: int, reason: str, now: float) -> list[Decision]:
        """A member died or left."""
        self._gone[member] = reason
        self._lost.discard(member)  # now its fate is known
        if self._over or not self.plan.members[member].receives:
            return []
        self._take_out({member: reason})
        return self._next(now)

    def overrule(
        self, liars: Mapping[int, str], missing: Mapping[int, str], stale: Collection[int], now: float
    ) -> list[Decision]:
        """An audit says that the round is not finished after all: without these members, do these chunks again."""
        self._over = False
        self._excuse(now - self._ticked_at, now)
        self._tainted |= set(stale)
        self._to_redo |= {part.reducer for part in self.plan.parts if self._tainted & set(range(part.start, part.stop))}
        self._take_out({index: why for index, why in self._gone.items() if self.plan.members[index].receives})
        self._take_out(dict(liars))
        self._lose({index: why for index, why in missing.items() if index not in self._gone})
        return self._next(now)

    def tick(self, now: float) -> list[Decision]:
        """Look at the clock; to be called a few times a second."""
        if self._over:
            return []
        pause_seconds = now - self._ticked_at - self._patience.pause_seconds
        if pause_seconds > 0:
            self._excuse(pause_seconds, now)
        self._ticked_at = now
        self._lose(self._silent(now))
        self._lose(self._stragglers(now))
        self._mend(self._broken_links())
        return self._next(now) or self._repeat(now)

    def _excuse(self, seconds: float, now: float) -> None:
        """The hub was away, and with it our plans, or we stood still: nobody's silence in that time means anything."""
        self._ticked_at = now
        self._attendance.excuse(seconds, now)
        if self._majority_at is not None:
            self._majority_at = min(now, self._majority_at + seconds)

    def seconds_of(self, member: int) -> float:
        """How long a member took to have all averages; 0 if it has not got them."""
        done_at = self._attendance.done_at(member)
        return done_at - self.started_at if done_at is not None else 0.0

    def report_of(self, member: int) -> Report | None:
        """The newest report of a member."""
        return self._attendance.report_of(member)

    @property
    def lost(self) -> tuple[str, ...]:
        """The peers that are out though they may live."""
        return tuple(self._name(index) for index in sorted(self._lost))

    def expired(self, reason: str = "its deadline passed") -> list[Decision]:
        """The round's deadline has come."""
        if self._over:
            return []
        return self._give_up(f"{reason}: {self.describe_trouble()}")

    def describe_trouble(self) -> str:
        """Who keeps the round from ending, in words."""
        lacking = [self._name(index) for index in self._receivers() if not self._is_done(index)]
        waited_for = sorted({self._name(index) for index in self._attendance.waited_for()})
        text = f"averages are missing at {', '.join(lacking)}" if lacking else "all hold the averages"
        return f"{text}; waited for {', '.join(waited_for)}" if waited_for else text

    def failure(self, reason: str, now: float) -> FailedRound:
        """What is to be told of a round that was given up."""
        members = self.plan.members
        return FailedRound(
            key=self.plan.key,
            phase="committing" if self._receivers() and self._all_done() else "exchanging",
            reason=reason,
            members=tuple(member.peer for member in members),
            troubles={member.peer: member.trouble for member in members if member.trouble},
            seconds=now - self.started_at,
        )

    def _next(self, now: float) -> list[Decision]:
        """Publish what was revised, take over chunks when all have answered, and end when all is done."""
        receivers = self._receivers()
        if not receivers:
            return self._give_up("no member is left")
        if not any(member.weight > 0 and member.sends for member in self.plan.members) and not self._all_done():
            return self._give_up("nobody is left who could contribute: " + self._troubles())
        if self._to_redo and all(self._is_current(index) for index in receivers):
            trouble = self._redo()
            if trouble:
                return self._give_up(trouble)
        decisions: list[Decision] = []
        if self._published_revision < self.plan.revision:
            decisions.append(self._publish(now))
        return decisions + self._conclude(now)

    def _publish(self, now: float) -> Decision:
        self._published_revision = self.plan.revision
        self._published_at = now
        return Publish(self.plan)

    def _repeat(self, now: float) -> list[Decision]:
        """The plan once more, if somebody seems not to have it."""
        unanswered = not all(self._is_current(index) for index in self._receivers())
        if unanswered and now - self._published_at >= self._patience.repeat_seconds:
            return [self._publish(now)]
        return []

    def _offenders(self, accuser: int, report: Report) -> dict[int, str]:
        """Senders whose values could not be used, as a reducer says, or as they say themselves."""
        members = self.plan.members
        reduces = any(part.reducer == accuser for part in self.plan.parts)
        return {
            offence.member: shortened(f"{offence.reason} (seen by {members[accuser].peer})")
            for offence in report.offences
            if offence.member < len(members)
            and members[offence.member].sends
            and (reduces or offence.member == accuser)
        }

    def _conclude(self, now: float) -> list[Decision]:
        receivers = self._receivers()
        done = [index for index in receivers if self._is_done(index)]
        if self._majority_at is None and 2 * len(done) > len(receivers):
            self._majority_at = now
        if len(done) < len(receivers) or self._to_redo:
            return []
        digests = {index: self._attendance.digest(index) for index in receivers}
        digest = self._agreed(digests)
        if digest is None:
            return self._give_up("nobody can tell whose averages are right: " + self._describe_digests(digests))
        holders = tuple(index for index in receivers if digests[index] == digest)
        liars = {index: OTHER_DIGEST for index in receivers if index not in holders}
        if len(holders) <= len(self._lost):
            return self._give_up("too many members were lost: " + self._troubles())
        self._take_out(liars, redo=False)
        self._over = True
        return [Finish(self.plan, digest, holders)]

    def _agreed(self, digests: Mapping[int, str]) -> str | None:
        """The digest that counts; None where that cannot be told."""
        votes = Counter(digests.values())
        first = sorted(digest for digest, count in votes.items() if count == max(votes.values()))
        own = next((digest for index, digest in digests.items() if self._name(index) == self._coordinator), None)
        if own in first:
            return own
        return first[0] if len(first) == 1 or self.plan.audit else None

    def _describe_digests(self, digests: Mapping[int, str]) -> str:
        return ", ".join(f"{self._name(index)} holds {digest[:8]}" for index, digest in digests.items())

    def _redo(self) -> str:
        """Give the chunks that not all survivors hold to other reducers. Returns what makes that impossible."""
        held = self._attendance.held_by_all(self._receivers()) - self._tainted
        parts = reassign(self.plan.parts, self._to_redo, held, sorted(self._choose_reducers().reducers))
        if parts is None:
            return "no member is left that could reduce: " + self._troubles()
        self._to_redo.clear()
        self._tainted.clear()
        if parts != self.plan.parts:
            self._revise(parts=parts)
        return ""

    def _lose(self, reasons: dict[int, str]) -> None:
        self._lost |= reasons.keys()
        self._take_out(reasons)

    def _take_out(self, reasons: dict[int, str], *, redo: bool = True) -> None:
        if redo:
            self._to_redo |= {index for index in reasons if any(part.reducer == index for part in self.plan.parts)}
        self._change(reasons, sends=False, receives=False, reduces=False)

    def _stop_sending(self, reasons: dict[int, str]) -> None:
        self._change(reasons, sends=False)

    def _change(self, reasons: dict[int, str], **flags: object) -> None:
        if not reasons:
            return
        members = list(self.plan.members)
        for index, why in reasons.items():
            members[index] = msgspec.structs.replace(members[index], trouble=shortened(why), **flags)
        self._revise(members=tuple(members))

    def _revise(self, **changes: object) -> None:
        self.plan = msgspec.structs.replace(self.plan, revision=self.plan.revision + 1, **changes)
        self._majority_at = None

    def _silent(self, now: float) -> dict[int, str]:
        silent = {
            index: self._attendance.silent_seconds(index, now)
            for index in self._receivers()
            if not self._is_done(index)
        }
        limit = self._patience.silent_seconds
        return {index: f"sent no report for {seconds:.1f} s" for index, seconds in silent.items() if seconds > limit}

    def _stragglers(self, now: float) -> dict[int, str]:
        """Members that still lack averages long after most have them all."""
        if self._majority_at is None or now < self._latest_at(self._majority_at):
            return {}
        return {
            index: "still lacked averages when most had them" for index in self._receivers() if not self._is_done(index)
        }

    def _latest_at(self, majority_at: float) -> float:
        """Until when stragglers are waited for."""
        patience = self._patience
        return max(
            majority_at + patience.straggler_seconds,
            self.started_at + 2 * (majority_at - self.started_at),
            self.started_at + patience.expected_seconds,
        )

    def _broken_links(self) -> dict[int, set[int]]:
        """By reducer, the members between which and it nothing gets through any more.

        A reducer that has had nothing for long blames the senders it waits for. A member that has had nothing for long
        blames the reducers whose averages it lacks, unless these wait for somebody themselves.
        """
        receivers, attendance = self._receivers(), self._attendance
        broken: dict[int, set[int]] = {}
        for index in receivers:
            if attendance.idle_seconds(index) < self._patience.stalled_seconds:
                continue
            for sender in attendance.waits_for(index):
                if self.plan.members[sender].sends and sender in receivers:
                    broken.setdefault(index, set()).add(sender)
            for reducer in attendance.lacks_from(index):
                if reducer in receivers and self._is_current(reducer) and not attendance.waits_for(reducer):
                    broken.setdefault(reducer, set()).add(index)
        return broken

    def _mend(self, broken: dict[int, set[int]]) -> None:
        """Let those reduce who reach everybody; if nobody does, leave out as few as possible."""
        news = [
            (index, other) for index, others in broken.items() for other in others if self._reach.broke(index, other)
        ]
        if not news:
            return
        choice = self._choose_reducers()
        receivers = self._receivers()
        self._lose({index: self._describe_break(index, receivers) for index in choice.lost})
        unfit = {part.reducer for part in self.plan.parts} & set(self._receivers()) - choice.reducers
        self._to_redo |= unfit
        self._change({index: self._describe_break(index, receivers) for index in unfit})

    def _choose_reducers(self) -> Choice:
        members = self.plan.members
        weights = {index: members[index].weight for index in self._receivers()}
        return self._reach.choose([index for index in weights if members[index].reduces], weights)

    def _describe_break(self, index: int, among: Collection[int]) -> str:
        names = ", ".join(self._name(other) for other in sorted(self._reach.partners(index, among)))
        return f"nothing gets through between it and {names}"

    def _give_up(self, reason: str) -> list[Decision]:
        self._over = True
        return [GiveUp(reason)]

    def _receivers(self) -> list[int]:
        return [index for index, member in enumerate(self.plan.members) if member.receives]

    def _is_current(self, index: int) -> bool:
        """Whether its newest report answers the newest plan."""
        return self._attendance.is_current(index, self.plan.revision)

    def _is_done(self, index: int) -> bool:
        return self._attendance.is_done(index, self.plan.revision)

    def _all_done(self) -> bool:
        return all(self._is_done(index) for index in self._receivers())

    def _name(self, index: int) -> str:
        return self.plan.members[index].peer

    def _troubles(self) -> str:
        return "; ".join(f"{member.peer}: {member.trouble}" for member in self.plan.members if member.trouble)
