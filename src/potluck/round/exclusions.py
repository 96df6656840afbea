"""Who lied, and until when it takes part in nothing (pure).

Exclusions stand in the commits, each of which carries on those of the one before: a new coordinator knows them, and
everybody can read them. What was found out in a round that came to no commit is remembered by the coordinator alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from potluck.round.plan import Commit, Exclusion, shortened

MAX_EXCLUSIONS = 64  # a commit is a message of bounded size; those that end last are kept


class Exclusions:
    """One coordinator's list, together with that of the lineage."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._found: dict[str, Exclusion] = {}

    def add(self, peer: str, reason: str, now: float) -> None:
        """An audit found that a peer lied."""
        self._found[peer] = Exclusion(until=now + self._seconds, reason=shortened(reason))

    def current(self, head: Commit | None, now: float) -> dict[str, Exclusion]:
        """Whose time is not over, given the newest commit; `now` is hub time."""
        self._found = {peer: given for peer, given in self._found.items() if given.until > now}
        known: Mapping[str, Exclusion] = head.excluded if head is not None else {}
        merged = {peer: given for peer, given in {**known, **self._found}.items() if given.until > now}
        latest = sorted(merged, key=lambda peer: (-merged[peer].until, peer))[:MAX_EXCLUSIONS]
        return {peer: merged[peer] for peer in latest}


def why_excluded(exclusion: Exclusion, now: float) -> str:
    """For the peer itself, which reads it in the commit."""
    hours = (exclusion.until - now) / 3600.0
    return shortened(f"it is excluded for another {hours:.1f} h, since an audit found that {exclusion.reason}")
