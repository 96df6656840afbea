"""How the TCP sockets of direct links are set up: limits, queues and timeouts."""

from __future__ import annotations

import contextlib
import socket
import sys
from dataclasses import dataclass

from potluck.errors import ConfigurationError
from potluck.link.direct.addresses import Endpoint

MIB = 1024 * 1024
WARM_UP_BYTES = 16 * MIB  # glibc then keeps up to twice that much of free memory


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


def _make(endpoint: Endpoint) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if endpoint.ip.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock
