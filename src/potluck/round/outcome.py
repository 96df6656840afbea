"""What a peer learns of an epoch it took part in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Literal

from potluck.round.plan.messages import Commit, RoundKey

MemberRole = Literal["reducer", "sender", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Where the time of a round went, as one member saw it."""

    gathering: float = 0.0
    """From being ready to having the plan."""

    exchanging: float = 0.0
    """From the plan to holding all averages."""

    committing: float = 0.0
    """From there until the commit was seen."""

    applying: float = 0.0
    """Writing the averages into the tensors."""

    def __add__(self, other: PhaseSeconds) -> PhaseSeconds:
        more = asdict(other)
        return PhaseSeconds(**{phase: seconds + more[phase] for phase, seconds in asdict(self).items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBehind:
    """An epoch was committed, and this peer does not have its averages: it must fetch the state."""

    head_epoch: int
    holders: tuple[str, ...]
    """Who has them."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRound:
    """An attempt at an epoch that its coordinator gave up."""

    key: RoundKey
    phase: Literal["planning", "exchanging", "committing"]
    reason: str
    members: tuple[str, ...] = ()
    troubles: Mapping[str, str] = field(default_factory=dict)
    """By member: why less was expected of it in the end."""

    seconds: float = 0.0
    """Since the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """One committed epoch, as one peer saw it."""

    commit: Commit
    role: MemberRole
    sent_bytes: int
    received_bytes: int
    seconds: PhaseSeconds
    left_behind: LeftBehind | None
    alone: bool = False
    """No other peer's values are in it and no other peer has use for it: the tensors were left as they were."""

    contributed: float = 0.0
    """The share of this peer's values that others had in time: these may count though the peer does not hold it."""

    @property
    def holds(self) -> bool:
        """Whether this peer has the averages; its tensors, if it gave any, then hold them too."""
        return self.left_behind is None

    def describe(self) -> str:
        """The round in one line."""
        commit, seconds = self.commit, self.seconds
        text = (
            f"epoch {commit.epoch} committed: {len(commit.holders)} of {len(commit.members)} members hold it, "
            f"{self.sent_bytes / 1e6:.1f} MB sent, {self.received_bytes / 1e6:.1f} MB received; "
            f"gathering {seconds.gathering:.2f} s, exchanging {seconds.exchanging:.2f} s, "
            f"committing {seconds.committing:.2f} s, applying {seconds.applying:.2f} s"
        )
        if slow := describe_slow(commit):
            text += f"; slow: {slow}"
        if commit.left_out:
            text += f"; left out: {_named(commit.left_out)}"
        if troubled := {member.peer: member.trouble for member in commit.members if member.trouble}:
            text += f"; in trouble: {_named(troubled)}"
        if self.left_behind is not None:
            text += f"; this peer does not hold it: {self.left_behind.reason}"
        return text


def describe_slow(commit: Commit) -> str:
    """Members that took much longer than most to have all averages."""
    seconds = {member.peer: member.seconds for member in commit.members if member.holds}
    typical = median(seconds.values()) if seconds else 0.0
    slow = {peer: taken for peer, taken in seconds.items() if taken > 1.5 * typical and taken > typical + 0.1}
    return ", ".join(f"{peer} ({taken:.2f} s)" for peer, taken in sorted(slow.items(), key=lambda item: -item[1]))


def _named(reasons: Mapping[str, str]) -> str:
    return ", ".join(f"{peer} ({why})" for peer, why in sorted(reasons.items()))
