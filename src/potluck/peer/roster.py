"""Who is in the run, as far as this peer knows (pure).

The guard writes one Presence per peer into the hub's `roster` store; this table follows it and says what each change
means. A peer is *present* while it is alive or suspect: a suspect may only be slow, so nobody drops its work, but
nobody starts new work with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from potluck.hub.presence import Presence

Change = Literal["joined", "changed", "suspect", "alive", "dead", "left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterEvent:
    """One thing that happened to one peer."""

    change: Change
    presence: Presence

    @property
    def peer(self) -> str:
        """The peer that it happened to."""
        return self.presence.peer


class Roster:
    """The peers of a run, by id."""

    def __init__(self) -> None:
        self._entries: dict[str, Presence] = {}
        self._listeners: list[Callable[[RosterEvent], None]] = []

    def __contains__(self, peer: str) -> bool:
        return peer in self._entries

    def __iter__(self) -> Iterator[Presence]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_working(self) -> int:
        """How many train or help. Those who only watch come and go, and are nobody's concern."""
        return sum(presence.card.role != "observer" for presence in self)

    def get(self, peer: str) -> Presence | None:
        """The present peer of that id, if there is one."""
        return self._entries.get(peer)

    def alive(self) -> list[Presence]:
        """Peers that are present and not under suspicion, by id."""
        return sorted((p for p in self._entries.values() if p.state == "alive"), key=lambda presence: presence.peer)

    def listen(self, listener: Callable[[RosterEvent], None]) -> Callable[[], None]:
        """Call `listener` for each event from now on; the returned function ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def apply(self, presence: Presence) -> list[RosterEvent]:
        """Take in the guard's word on one peer; tell the listeners; return what it meant."""
        events = list(self._meaning(self._entries.get(presence.peer), presence))
        if presence.state in ("alive", "suspect"):
            self._entries[presence.peer] = presence
        else:
            self._entries.pop(presence.peer, None)
        for event in events:
            for listener in list(self._listeners):
                listener(event)
        return events

    def forget(self, peer: str) -> list[RosterEvent]:
        """The hub no longer lists this peer: it left without our hearing of it."""
        known = self._entries.get(peer)
        if known is None:
            return []
        return self.apply(_with_state(known, "left", "no longer in the hub's roster"))

    @staticmethod
    def _meaning(known: Presence | None, now: Presence) -> Iterator[RosterEvent]:
        present = now.state in ("alive", "suspect")
        if known is None:
            if present:
                yield RosterEvent(change="joined", presence=now)
            return
        if known.card.session != now.card.session:
            yield RosterEvent(change="dead", presence=_with_state(known, "dead", "its process was started anew"))
            if present:
                yield RosterEvent(change="joined", presence=now)
            return
        if known.state != now.state:
            yield RosterEvent(change=now.state, presence=now)
        elif known != now:
            yield RosterEvent(change="changed", presence=now)


def _with_state(presence: Presence, state: Literal["dead", "left"], reason: str) -> Presence:
    return msgspec.structs.replace(presence, state=state, reason=reason)
