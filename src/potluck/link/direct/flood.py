"""A guard against floods that ZeroMQ itself does not stop.

ZeroMQ gathers all parts of a message before it shows us the first, and its queue has no limit (sockets.py says why). So
a member could send without end and fill our memory, unseen. This guard compares, for each TCP connection,
the bytes that the kernel received with those that reached us: what lies between is held by ZeroMQ. A connection that
makes it hold more than any link would send unasked is shut down.

It also bounds the connections that have not greeted yet: their number, their time, and their bytes.

The byte count comes from Linux's TCP_INFO. Elsewhere connections are still bounded in number and time, and the log says
that the rest is missing.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import socket
import struct
import sys
import termios
from collections import Counter
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from potluck.clock import Clock
from potluck.errors import ConfigurationError

logger = logging.getLogger(__name__)

HEARTBEAT_BYTES_PER_SECOND = 64  # ZMTP pings reach us as no message; so much of them is in order
TCP_INFO_BYTES = 136
BYTES_RECEIVED_OFFSET = 128  # tcpi_bytes_received in struct tcp_info, Linux 4.1 and later


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodLimits:
    """What a connection may cost."""

    held_bytes: int
    """Most that ZeroMQ may hold for a peer that has greeted: more than links let anybody have on its way."""

    ungreeted_bytes: int = 64 * 1024
    """Most that a connection may send before it has greeted; handshake and greeting need about 2 KiB."""

    ungreeted_seconds: float = 10.0
    """How long a connection may take to greet."""

    max_ungreeted: int = 64
    """How many connections may be greeting at once; over that, the oldest from the busiest host is cut."""

    def __post_init__(self) -> None:
        if self.held_bytes < self.ungreeted_bytes or self.ungreeted_bytes < 4096:
            raise ConfigurationError(
                f"held_bytes={self.held_bytes} must be at least ungreeted_bytes={self.ungreeted_bytes}, and that 4096"
            )
        if self.ungreeted_seconds <= 0 or self.max_ungreeted < 1:
            raise ConfigurationError(
                f"ungreeted_seconds={self.ungreeted_seconds} and max_ungreeted={self.max_ungreeted} must be positive"
            )


@dataclass(slots=True, eq=False)
class Wire:
    """One TCP connection under ZeroMQ."""

    fd: int  # ZeroMQ's own: never closed by us, and its number may be used again once ZeroMQ has closed it
    ends: tuple[Any, Any]  # its two addresses, by which it is known from a later one with the same number
    opened_at: float
    incoming: bool
    limit_bytes: int
    on_end: Callable[[str], None] | None = None  # called once, with the reason, when it ends other than by our will
    greeted: bool = False  # both sides know that it works; until then it is on the clock
    doubtful: bool = False  # it may have ended
    closed: bool = False
    delivered_bytes: int = 0

    @property
    def host(self) -> str:
        """Where the other end is."""
        return str(self.ends[1][0])

    def delivered(self, parts: Sequence[Sized]) -> None:
        """These parts of a message reached us."""
        for part in parts:
            size = len(part)
            self.delivered_bytes += size + (9 if size > 255 else 2)  # with ZMTP's own header of a part


@dataclass(slots=True)
class FloodGuard:
    """Watches the TCP connections of one carrier."""

    limits: FloodLimits
    clock: Clock
    counts: Counter[str] = field(default_factory=Counter)
    _wires: dict[int, Wire] = field(default_factory=dict)

    def opened(self, fd: int, *, incoming: bool) -> Wire | None:
        """Watch a connection from its beginning; None when it has already gone again.

        Harmless to repeat: its first message may reach us before the news that it has connected, or after.
        """
        ends = _ends(fd)
        known = self._wires.get(fd)
        if known is not None and known.ends == ends:
            return known
        self._ended(known)  # an older one with this number, whose end we have not heard of yet
        if ends is None:
            return None
        wire = self._wires[fd] = Wire(fd, ends, self.clock.monotonic(), incoming, self.limits.ungreeted_bytes)
        ungreeted = [other for other in self._wires.values() if other.incoming and not other.greeted]
        if len(ungreeted) > self.limits.max_ungreeted:
            busiest = Counter(other.host for other in ungreeted).most_common(1)[0][0]
            self.cut(next(other for other in ungreeted if other.host == busiest), "too_many_ungreeted")
        return wire

    def closed(self, fd: int) -> None:
        """ZeroMQ says that the connection with this number has ended.

        That may be news of an older connection with the same number, so the present one is looked at; ZeroMQ tells it
        shortly before it closes the descriptor, so that one which still looks alive is looked at again later.
        """
        wire = self._wires.get(fd)
        if wire is not None:
            wire.doubtful = True
            self._end_if_gone(wire)

    def forget(self, wire: Wire) -> None:
        """Watch no more: its socket is being closed."""
        wire.closed = True
        if self._wires.get(wire.fd) is wire:
            del self._wires[wire.fd]

    def __len__(self) -> int:
        return len(self._wires)

    def wire(self, fd: int) -> Wire | None:
        """The connection that ZeroMQ knows by this number."""
        return self._wires.get(fd)

    def welcome(self, wire: Wire) -> None:
        """The other side is known: from here on it may send packets, even before we have seen its greeting's end."""
        wire.limit_bytes = self.limits.held_bytes

    def check(self) -> None:
        """Cut what exceeds its limits; to be called several times a second."""
        now = self.clock.monotonic()
        for wire in list(self._wires.values()):
            age_seconds = now - wire.opened_at
            if wire.doubtful and self._end_if_gone(wire):
                continue
            if not wire.greeted and age_seconds > self.limits.ungreeted_seconds:
                self.cut(wire, "greeting_too_slow")
                continue
            consumed = consumed_bytes(wire.fd)
            if consumed is None:
                continue
            held = consumed - wire.delivered_bytes
            if held < 0:
                wire.delivered_bytes = consumed  # nobody saves up an allowance
            if held > wire.limit_bytes + HEARTBEAT_BYTES_PER_SECOND * age_seconds:
                logger.warning("%s sent %d bytes that form no message: its connection is cut", wire.host, held)
                self.cut(wire, "flood")

    def cut(self, wire: Wire, reason: str) -> None:
        """Shut a connection down; ZeroMQ sees its end and clears up. Counted once, whatever comes after."""
        if wire.closed:
            return
        self.counts[f"cut_{reason}"] += 1
        self.forget(wire)
        _shut_down(wire)
        if wire.on_end is not None:
            wire.on_end(reason)

    def _end_if_gone(self, wire: Wire) -> bool:
        gone = _ends(wire.fd) != wire.ends
        if gone:
            self._ended(wire)
        return gone

    def _ended(self, wire: Wire | None) -> None:
        if wire is not None and not wire.closed:
            self.forget(wire)
            if wire.on_end is not None:
                wire.on_end("disconnected")


def consumed_bytes(fd: int) -> int | None:
    """How many bytes ZeroMQ has read from this TCP connection; None where that cannot be known."""
    if _libc is None:
        return None
    info = ctypes.create_string_buffer(TCP_INFO_BYTES)
    length = ctypes.c_uint(TCP_INFO_BYTES)
    # Called directly, since a Python socket object would own the descriptor, and this one is ZeroMQ's.
    if _libc.getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(length)) != 0:
        return None
    if length.value < TCP_INFO_BYTES:
        return None
    received: int = struct.unpack_from("=Q", info, BYTES_RECEIVED_OFFSET)[0]
    try:
        unread: int = struct.unpack("=i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0]
    except OSError:
        return None
    return received - unread


def _load_libc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    return ctypes.CDLL(None, use_errno=True)


def warn_if_missing() -> None:
    """Say in the log, once, when this system cannot count bytes."""
    global _warned
    if _libc is None and not _warned:
        _warned = True
        logger.warning("this system cannot tell floods by byte counts: a hostile member could fill this peer's memory")


def _twin(fd: int) -> socket.socket:
    """Another descriptor of the same socket, ours to close."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _ends(fd: int) -> tuple[Any, Any] | None:
    """The two addresses of a TCP connection; None when the descriptor is none (any more)."""
    try:
        with _twin(fd) as twin:
            if twin.type != socket.SOCK_STREAM or twin.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            return twin.getsockname(), twin.getpeername()
    except OSError:
        return None


def _shut_down(wire: Wire) -> None:
    """End the connection, if the descriptor still is that connection's.

    The twin keeps its number from changing hands between the look and the act.
    """
    try:
        with _twin(wire.fd) as twin:
            if (twin.getsockname(), twin.getpeername()) == wire.ends:
                twin.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        logger.debug("a connection to cut had already gone: %s", error)


_libc = _load_libc()
_warned = False
