"""Which peers an audit found, and until when they are excluded (pure).

Exclusions stand in the commits, each of which carries on those of the one before: a new coordinator knows them, and
everybody can read them. What was found out in a round that came to no commit is remembered by the coordinator alone.
An organiser may lift one early. The guard keeps that in the member's record and tells it in the roster, so every
coordinator knows it, and nobody can claim it; what is found out afterwards counts again.

Who says that it is ready, and is then lost in one attempt after the other, is no liar. But where it is half of a run,
every attempt is given up for its sake: after some of them, the next at that epoch goes without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from potluck.round.plan.messages import Commit, Exclusion, shortened

MAX_EXCLUSIONS = 64  # a commit is a message of bounded size; those that end last are kept
PATIENT_ATTEMPTS = 3  # at an epoch, before it goes on without those who were lost in each of them


class Exclusions:
    """One coordinator's list, together with that of the lineage."""

    def __init__(self) -> None:
        self._found: dict[str, Exclusion] = {}

    def add(self, peer: str, reason: str, now: float, seconds: float) -> None:
        """A peer was found out, and is excluded for so long."""
        self._found[peer] = Exclusion(until=now + seconds, reason=shortened(reason), since=now)

    def current(
        self, head: Commit | None, now: float, pardons: Mapping[str, float] | None = None
    ) -> dict[str, Exclusion]:
        """Peers that are still excluded, given the newest commit; `now`, and when a peer was pardoned, are hub time."""
        known: Mapping[str, Exclusion] = head.excluded if head is not None else {}
        pardons = pardons or {}
        self._found = {peer: given for peer, given in self._found.items() if _counts(peer, given, now, pardons)}
        merged = {peer: given for peer, given in known.items() if _counts(peer, given, now, pardons)}
        for peer, given in self._found.items():
            if peer not in merged or merged[peer].until < given.until:
                merged[peer] = given
        latest = sorted(merged, key=lambda peer: (-merged[peer].until, peer))[:MAX_EXCLUSIONS]
        return {peer: merged[peer] for peer in latest}


class Absences:
    """Who was lost in the attempts at one epoch, as one coordinator saw it."""

    def __init__(self) -> None:
        self._lost: Counter[str] = Counter()

    def note(self, peers: Iterable[str]) -> None:
        """An attempt was given up, in which these were lost."""
        self._lost.update(set(peers))

    def clear(self) -> None:
        """An epoch was committed."""
        self._lost.clear()

    def barred(self, ready: Collection[str]) -> dict[str, str]:
        """Which of the ready peers to leave out, and why; none, if they were the majority."""
        absent = [peer for peer in ready if self._lost[peer] >= PATIENT_ATTEMPTS]
        if 2 * len(absent) > len(ready):
            return {}
        return {peer: f"it was lost in {self._lost[peer]} attempts at this epoch" for peer in absent}


def _counts(peer: str, given: Exclusion, now: float, pardons: Mapping[str, float]) -> bool:
    return given.until > now and not (peer in pardons and pardons[peer] >= given.since)


def why_excluded(exclusion: Exclusion, now: float) -> str:
    """For the peer itself, which reads it in the commit."""
    seconds = exclusion.until - now
    time_left = f"{seconds / 3600.0:.1f} h" if seconds >= 600 else f"{seconds:.0f} s"
    return shortened(f"it is excluded for another {time_left}, since an audit found that {exclusion.reason}")
