"""Which server to try next, when, and what to tell of a hub that stays away (pure).

After a loss, the servers of the same kind (TCP or WebSocket) come first, the lost one last among them: in a cluster
the next server takes over at once, and a single hub's peers do not drift to the slower way. Between passes over all
servers the wait doubles, with jitter, so that a thousand peers do not come back in the same instant.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from potluck.errors import CertificateError, PotluckError

LONG_SECONDS = 60.0  # a hub that is away for longer than a restart takes
TELL_EVERY_SECONDS = 600.0
MAX_LEARNT = 32  # a cluster has a handful of servers; a list that grows past this is a mistake


class ServerPool:
    """The servers of one hub: those of the address, and those that it told us about."""

    def __init__(self, servers: Iterable[str]) -> None:
        self._given = tuple(dict.fromkeys(servers))
        self._learnt: list[str] = []

    def learn(self, servers: Iterable[str]) -> None:
        """Take in the servers of the cluster that the hub names; the newest word replaces older ones."""
        self._learnt = [server for server in dict.fromkeys(servers) if server not in self._given][:MAX_LEARNT]

    def is_learnt(self, server: str) -> bool:
        """Whether we know of a server only because the hub named it. It may be one that only the hub can reach."""
        return server not in self._given

    def first_order(self) -> list[str]:
        """In which order to try on the first connect: as the address says."""
        return list(self._given)

    def order_after(self, lost: str) -> list[str]:
        """In which order to try after the connection to that server was lost."""
        servers = [*self._given, *self._learnt]
        if lost in servers:
            at = servers.index(lost)
            servers = [*servers[at + 1 :], *servers[: at + 1]]
        return sorted(servers, key=lambda server: is_websocket(server) != is_websocket(lost))


def is_websocket(server: str) -> bool:
    """Whether a server is spoken to by WebSocket."""
    return server.startswith(("ws://", "wss://"))


class Backoff:
    """How long to wait before the next pass: doubling from `first_seconds` to `limit_seconds`, each with jitter."""

    def __init__(self, first_seconds: float, limit_seconds: float, *, chance: random.Random | None = None) -> None:
        self._first_seconds = first_seconds
        self._limit_seconds = limit_seconds
        self._chance = chance or random.Random()
        self._next_seconds = first_seconds

    def next_seconds(self) -> float:
        """The wait before the next pass: somewhere between half of the present limit and all of it."""
        wait = self._next_seconds * self._chance.uniform(0.5, 1.0)
        self._next_seconds = min(self._next_seconds * 2, self._limit_seconds)
        return wait

    def reset(self) -> None:
        """A connection has lasted: start small again."""
        self._next_seconds = self._first_seconds


class Absence:
    """What to tell of a hub that does not come back (pure).

    Another certificate at the hub's address has two reasons that cannot be told apart from here: the run was started
    anew, or somebody in between answers for it. The second must not be able to make members leave or lose their work.
    So the attempts go on in either case, nothing is sent, and the person is told of both, now and then.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._tell_at = now + LONG_SECONDS
        self._is_doubted = False

    def failed(self, error: PotluckError, now: float) -> str:
        """An attempt has failed: what to tell the person about it; empty where there is nothing new."""
        is_news = isinstance(error, CertificateError) and not self._is_doubted
        if not is_news and now < self._tell_at:
            return ""
        self._is_doubted |= is_news
        self._tell_at = now + TELL_EVERY_SECONDS
        return (
            f"the hub is away for {now - self._since:.0f} s: {error}. This peer keeps its work and goes on trying. If "
            "the run was started anew, end this with Ctrl-C and join by the new link, which an organiser has"
        )
