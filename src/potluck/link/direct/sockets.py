"""How the TCP sockets of direct links are set up: limits, queues and timeouts."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from potluck.errors import ConfigurationError
from potluck.link.direct.addresses import Endpoint

MIB = 1024 * 1024
WARM_UP_BYTES = 16 * MIB  # glibc then keeps up to twice that much of free memory

# Linux: what TCP tells about a connection (struct tcp_info, up to data_segs_out), and how fast it may send.
_TELLS = sys.platform == "linux"
_TCP_INFO = struct.Struct("=16x I 4x I 40x I 28x I 16x Q 16x I I 4x I")
_SO_MAX_PACING_RATE = 47
_PACE = struct.Struct("=I")
_NO_PACE = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far TCP has come on one connection with what it was given to send."""

    acknowledged_bytes: int
    waiting_bytes: int
    """Not sent yet, or not acknowledged, about."""

    sent_packets: int
    repeated_packets: int
    way_seconds: float
    """There and back, now."""

    shortest_way_seconds: float
    """There and back, at the best of times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketSettings:
    """Limits and timeouts of every connection; those who want to talk to each other need the same `trusted_lan`."""

    trusted_lan: bool = False
    """Send in the clear, and only to near addresses. Off unless asked for."""

    max_payload_bytes: int = 1 * MIB
    """Largest payload of a packet, either way."""

    max_header_bytes: int = 512 * 1024
    """Largest header of a packet, either way."""

    queued_bytes: int = 4 * MIB
    """How much may wait to be sent to one peer; a packet that is begun below it may exceed it."""

    queued_buffers: int = 2048
    """In how many pieces; a packet has one or two."""

    max_ungreeted: int = 64
    """How many connections may be greeting at once; over that, the oldest from the busiest host is cut."""

    handshake_seconds: float = 10.0
    """How long a connection may take to greet."""

    heartbeat_seconds: float = 5.0
    """How often a silent connection is tried."""

    silence_seconds: float = 30.0
    """A connection from which nothing came for so long after the first trial is given up."""

    backlog: int = 128
    """How many connections may wait to be accepted."""

    def __post_init__(self) -> None:
        for name in (
            "max_payload_bytes",
            "max_header_bytes",
            "queued_bytes",
            "queued_buffers",
            "max_ungreeted",
            "backlog",
        ):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("handshake_seconds", "heartbeat_seconds", "silence_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be positive")


def warm_up_memory() -> None:
    """Have the C library keep memory of the size of packets for the next ones, instead of giving it back each time.

    At first glibc takes such sizes from the system and returns them page by page, which costs a receiver half as much
    again as receiving does. It stops doing so for all sizes up to that of the largest block (of at most 32 MiB) that
    was ever freed: so one is, of memory that is never touched.
    """
    block = bytearray(WARM_UP_BYTES)
    del block


def listen(address: str, settings: SocketSettings) -> tuple[socket.socket, Endpoint]:
    """Listen on an address (port 0: any free one), and say where that is; ConfigurationError where it cannot be."""
    endpoint = Endpoint.parse(address, lowest_port=0)
    sock = _make(endpoint)
    try:
        if sys.platform != "win32":  # where it would let others take the port as well
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if endpoint.ip.version == 6:
            with contextlib.suppress(OSError):  # IPv4 as well, where the system can
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((str(endpoint.ip), endpoint.port))
        sock.listen(settings.backlog)
    except OSError as error:
        sock.close()
        raise ConfigurationError(
            f"cannot listen on {address}: {error.strerror}. Choose another port or interface with --listen, "
            "port 0 for any free one, or join with --client-mode"
        ) from error
    return sock, Endpoint(endpoint.ip, sock.getsockname()[1])


def begin_to_connect(endpoint: Endpoint) -> socket.socket:
    """A socket that becomes writable when it is connected, or cannot be; OSError where that is clear at once."""
    sock = _make(endpoint)
    try:
        sock.connect((str(endpoint.ip), endpoint.port))
    except (BlockingIOError, InterruptedError):
        pass
    except OSError:
        sock.close()
        raise
    return sock


def prepare(sock: socket.socket, settings: SocketSettings) -> None:
    """Set up a connected socket."""
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # it may be gone already, which reading shows
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # bytes that nobody acknowledges for so long; elsewhere the pulse shows
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.silence_seconds * 1000))


def progress_of(sock: socket.socket) -> Progress | None:
    """How far TCP has come; None where the system does not tell, or the connection is gone."""
    if not _TELLS:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return None
    if len(info) < _TCP_INFO.size:  # a kernel from before 2016
        return None
    packet_bytes, unacknowledged, way, repeated, acknowledged, unsent, shortest, sent = _TCP_INFO.unpack(info)
    return Progress(
        acknowledged_bytes=acknowledged,
        waiting_bytes=unsent + unacknowledged * packet_bytes,
        sent_packets=sent,
        repeated_packets=repeated,
        way_seconds=way / 1e6,
        shortest_way_seconds=shortest / 1e6,
    )


def set_pace(sock: socket.socket, bytes_per_second: float | None) -> None:
    """Have TCP send at most so fast, evenly; None: as fast as it wants. Where the system cannot, nothing happens."""
    if _TELLS:
        rate = _NO_PACE if bytes_per_second is None else max(1, min(int(bytes_per_second), _NO_PACE - 1))
        with contextlib.suppress(OSError):  # it may be gone already, which reading shows
            sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _PACE.pack(rate))


def renew_measure(sock: socket.socket) -> None:
    """Have TCP take its measure of the way for a new one.

    BBR sends next to nothing for two tenths of a second and one way whenever that measure is ten seconds old, and in
    the middle of a round everybody waits for it. Chosen anew, it begins with the shortest way that TCP remembers. What
    else it knew is lost, so this is for connections whose pace is set.
    """
    if _may_choose_bbr():
        with contextlib.suppress(OSError):  # it may be gone already, which reading shows
            if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"bbr":
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")


@cache
def _may_choose_bbr() -> bool:
    """Whether a connection that has left BBR may come back to it."""
    try:
        return "bbr" in Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    except OSError:
        return False


def _make(endpoint: Endpoint) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if endpoint.ip.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock
