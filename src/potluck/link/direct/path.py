"""The path to one peer: which side dials, when, at which address, and which connection stays.

Any peer with addresses can be dialled by anybody; one connection serves both directions. Where both could dial, the one
with the smaller id does so first and the other only when nothing came for a while. When two connections were made at
once, both sides keep the one dialled by the smaller id.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from typing import Protocol

from potluck.clock import Clock
from potluck.errors import ConfigurationError
from potluck.link.direct.addresses import Endpoint
from potluck.link.direct.admission import KnownPeer
from potluck.link.direct.connection import Connection, Shared
from potluck.link.direct.dialling import Dial
from potluck.link.direct.greeting import LinkKeys

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathConfig:
    """How patiently a peer dials."""

    dial_timeout_seconds: float = 5.0
    """How long one address may take, from the first packet to the end of the greeting."""

    yield_seconds: float = 2.0
    """How long the peer with the larger id waits for the other to dial."""

    first_backoff_seconds: float = 0.25
    """Wait before dialling again when all addresses failed; doubles each time. Short at first, since a peer that has
    just joined is often refused only until the other has read the roster."""

    longest_backoff_seconds: float = 60.0
    """Longest wait before dialling again."""

    steady_seconds: float = 5.0
    """A path that lasted so long was no failed attempt when it breaks."""

    def __post_init__(self) -> None:
        for name in ("dial_timeout_seconds", "first_backoff_seconds", "longest_backoff_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be positive")
        for name in ("yield_seconds", "steady_seconds"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name}={getattr(self, name)} must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """What all paths of one carrier share."""

    peer: str
    listens: bool  # others can dial this peer
    config: PathConfig
    keys: LinkKeys
    shared: Shared

    @property
    def clock(self) -> Clock:
        """The time, for all of them."""
        return self.shared.clock

    def count(self, what: str) -> None:
        """Add one to a counter of the carrier."""
        self.shared.counts[what] += 1


class PathOwner(Protocol):
    """What a path tells its carrier."""

    def opened(self, path: DirectPath) -> None:
        """Packets can be sent."""
        ...

    def closed(self, path: DirectPath, reason: str) -> None:
        """Packets cannot be sent any more."""
        ...

    def writable(self, path: DirectPath) -> None:
        """There is room again, for somebody who was refused."""
        ...

    def received(self, path: DirectPath, frame: memoryview, payload: memoryview | None) -> None:
        """A packet came, hostile until checked."""
        ...


class DirectPath:
    """The path to one session of one peer."""

    def __init__(self, owner: PathOwner, station: Station, member: KnownPeer, *, wanted: bool) -> None:
        """`wanted`: dial as soon as there are addresses; else once somebody wants to send."""
        self.member = member
        self.line: Connection | None = None  # open, dialled by either side
        self.offences = 0
        self.last_failure = ""
        self.addresses: list[Endpoint] = []
        self._owner = owner
        self._station = station
        self._wanted = wanted
        self._dial: Dial | None = None  # under way
        self._timer: asyncio.TimerHandle | None = None
        self._next_address = 0
        self._failed_rounds = 0  # how often in a row all addresses failed
        self._opened_at = 0.0
        self._stopped = False
        self._loop = asyncio.get_running_loop()

    @property
    def peer(self) -> str:
        """The peer at its other end."""
        return self.member.peer

    def set_addresses(self, addresses: list[Endpoint]) -> None:
        """Where the peer may be dialled, the best first."""
        if addresses != self.addresses:
            self.addresses = addresses
            self._failed_rounds = 0
            self._stop_dialling()
        if self._wanted and self._idle:
            self._dial_after(0.0 if self._dials_first else self._station.config.yield_seconds)

    def want(self) -> None:
        """Somebody has something to send."""
        self._wanted = True
        if self._idle:
            self._dial_after(0.0)

    def accepts(self) -> bool:
        """Whether a connection that the peer has dialled is wanted."""
        if self._station.peer > self.peer:
            return True
        if self.line is not None and self.line.dialled:
            # It dials although our connection stands: it did so before it knew, or its side of it is broken.
            return self._station.clock.monotonic() - self._opened_at > self._station.config.steady_seconds
        return self._dial is None or not self._dial.is_connected

    def adopt(self, line: Connection) -> None:
        """Use this connection from now on, and hang up any other."""
        self._stop_dialling()
        if self.line is not None:
            self.line.close()
            self._forget_line("replaced by a newer connection")
        if self._stopped or self.line is not None:  # by what the owner did on hearing that
            line.close()
            return
        self.line = line
        self.last_failure = ""
        self._opened_at = self._station.clock.monotonic()
        self._station.count("paths_opened")
        self._owner.opened(self)

    def _lose(self, reason: str) -> None:
        """The connection in use broke: tell, and dial again."""
        if self._station.clock.monotonic() - self._opened_at >= self._station.config.steady_seconds:
            self._failed_rounds = 0
        self._forget_line(reason)
        if self._idle:
            if self._dials_first:
                self._dial_later()
            else:
                self._dial_after(self._station.config.yield_seconds)

    def stop(self, reason: str) -> None:
        """Hang up for good; the owner is told if the path was open."""
        self._stopped = True
        self._stop_dialling()
        if self.line is not None:
            self.line.close()
            self._forget_line(reason)

    def signal(self, mark: bytes) -> None:
        """Send one byte, if there is a connection with room."""
        if self.line is not None:
            self.line.signal(mark)

    # What connections and dials tell

    def packet(self, connection: Connection, frame: memoryview, payload: memoryview | None) -> None:
        """A packet came."""
        if self.line is connection:
            self._owner.received(self, frame, payload)

    def room(self, connection: Connection) -> None:
        """There is room again."""
        if self.line is connection:
            self._owner.writable(self)

    def ended(self, connection: Connection, reason: str) -> None:
        """A connection broke."""
        if self.line is connection:
            self._lose(reason)

    def dial_opened(self, dial: Dial, connection: Connection) -> None:
        """Our dial succeeded."""
        self._dial = None
        self.adopt(connection)

    def dial_failed(self, dial: Dial, reason: str) -> None:
        """Our dial failed."""
        self._dial = None
        self._note_failure(dial.endpoint, reason)
        self._dial_next()

    # Dialling

    @property
    def _dials_first(self) -> bool:
        return self._station.peer < self.peer or not self._station.listens

    @property
    def _idle(self) -> bool:
        return self.line is None and self._dial is None and self._timer is None and not self._stopped

    def _dial_after(self, seconds: float) -> None:
        if self.addresses:
            self._next_address = 0
            self._timer = self._loop.call_later(seconds, self._dial_next)

    def _dial_later(self) -> None:
        config = self._station.config
        delay = min(config.longest_backoff_seconds, config.first_backoff_seconds * 2 ** min(self._failed_rounds, 16))
        self._failed_rounds += 1
        self._dial_after(delay * random.uniform(0.5, 1.0))

    def _dial_next(self) -> None:
        """Try the next address; after the last, start over later."""
        self._timer = None
        while self._next_address < len(self.addresses):
            endpoint = self.addresses[self._next_address]
            self._next_address += 1
            self._station.count("dials")
            try:
                self._dial = Dial(
                    self,
                    self._station.shared,
                    self._station.keys,
                    endpoint=endpoint,
                    their_key=self.member.key,
                    timeout_seconds=self._station.config.dial_timeout_seconds,
                )
            except OSError as error:  # no way there, or no descriptors left
                self._note_failure(endpoint, f"cannot connect: {error.strerror}")
            else:
                return
        self._dial_later()

    def _stop_dialling(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._dial is not None:
            self._dial.close()
            self._dial = None

    def _note_failure(self, endpoint: Endpoint, reason: str) -> None:
        self._station.count("dials_failed")
        self.last_failure = f"{endpoint}: {reason}"
        logger.debug("no direct path to %s by %s", self.peer, self.last_failure)

    def _forget_line(self, reason: str) -> None:
        self.line = None
        self._station.count("paths_closed")
        self._owner.closed(self, reason)
