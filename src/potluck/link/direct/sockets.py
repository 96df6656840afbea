"""How the ZeroMQ sockets of direct links are set up: credentials, limits, queues and timeouts."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from potluck.errors import ConfigurationError
from potluck.link.direct.addresses import Endpoint
from potluck.link.direct.admission import ZAP_DOMAIN
from potluck.link.direct.greeting import Caller
from potluck.link.direct.noise import TAG_BYTES

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

MIB = 1024 * 1024
WARM_UP_BYTES = 16 * MIB  # glibc then keeps up to twice that much of free memory


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketSettings:
    """Limits and timeouts of every socket; those who want to talk to each other need the same `trusted_lan`."""

    trusted_lan: bool = False
    """Send in the clear, and only to near addresses. Off unless asked for."""

    max_payload_bytes: int = 1 * MIB
    """Largest payload of a packet, either way."""

    max_header_bytes: int = 512 * 1024
    """Largest header of a packet, either way."""

    queued_to_send: int = 32
    """How many packets for one peer wait in ZeroMQ; they stay in the sender's own buffers meanwhile."""

    held_bytes: int = 48 * MIB
    """Most of what one peer has sent that may lie in ZeroMQ until it is taken; beyond it, the connection is cut. Links
    have less than that on its way to one peer (`LinkConfig.max_in_flight_bytes`)."""

    io_threads: int = 1
    """Threads that move bytes; a connection stays on one of them."""

    handshake_seconds: float = 10.0
    """How long a connection may take to prove its key."""

    heartbeat_seconds: float = 5.0
    """How often a silent connection is tried."""

    silence_seconds: float = 30.0
    """A connection from which nothing came for so long after the first trial is given up."""

    backlog: int = 128
    """How many connections may wait to be accepted."""

    max_sockets: int = 4096
    """Most ZeroMQ sockets of one carrier; each dialled peer takes three."""

    def __post_init__(self) -> None:
        for name in (
            "max_payload_bytes",
            "max_header_bytes",
            "queued_to_send",
            "held_bytes",
            "io_threads",
            "backlog",
        ):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("handshake_seconds", "heartbeat_seconds", "silence_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be positive")
        if self.max_sockets < 16:
            raise ConfigurationError(f"max_sockets={self.max_sockets} must be at least 16")


def make_context(settings: SocketSettings) -> Context:
    """A context of one carrier."""
    _warm_up_memory()
    context: Context = zmq.Context(settings.io_threads)
    context.set(zmq.MAX_SOCKETS, settings.max_sockets)
    return context


def _warm_up_memory() -> None:
    """Have the C library keep memory of the size of packets for the next ones, instead of giving it back each time.

    ZeroMQ allocates each packet that arrives. At first glibc takes such sizes from the system and returns them page by
    page, which costs a receiver half as much again as receiving does. It stops doing so for all sizes up to that of the
    largest block (of at most 32 MiB) that was ever freed: so one is, of memory that is never touched.
    """
    block = bytearray(WARM_UP_BYTES)
    del block


async def terminate(context: Context) -> None:
    """End the context's threads; that waits for lingering packets, so not on the loop's own thread."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def work() -> None:
        context.destroy()  # which also closes what was forgotten, and would else be waited for without end
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever waited
            loop.call_soon_threadsafe(ended.set_result, None)

    thread = threading.Thread(target=work, name="potluck-zmq-term")
    thread.start()
    await asyncio.shield(ended)
    thread.join()


def make_listener(context: Context, settings: SocketSettings) -> Socket:
    """The socket that others connect to; bind it with `bind`."""
    socket = _make_socket(context, zmq.ROUTER, settings)
    socket.router_mandatory = True  # an unknown or full peer is an error here, where it would be silence
    socket.zap_domain = ZAP_DOMAIN
    socket.backlog = settings.backlog
    socket.plain_server = True  # ZeroMQ's name for credentials, which a ZAP handler judges
    return socket


def make_dialler(context: Context, settings: SocketSettings, caller: Caller, timeout_seconds: float) -> Socket:
    """A socket for one connection to one address; it does not connect again by itself."""
    socket = _make_socket(context, zmq.DEALER, settings)
    socket.reconnect_ivl = -1  # each connection is greeted and watched from its start, so every dial is a new socket
    socket.connect_timeout = max(1, int(timeout_seconds * 1000))
    socket.plain_username, socket.plain_password = caller.username, caller.password
    return socket


def bind(socket: Socket, addresses: Sequence[str]) -> tuple[Endpoint, ...]:
    """Listen on each address (port 0: any free one) and say where that is."""
    bound = []
    for address in addresses:
        endpoint = Endpoint.parse(address, lowest_port=0)
        socket.ipv6 = endpoint.ip.version == 6
        try:
            socket.bind(str(endpoint))
        except zmq.ZMQError as error:
            raise ConfigurationError(
                f"cannot listen on {address}: {error.strerror}. Choose another port or interface with --listen, "
                "port 0 for any free one, or join with --client-mode"
            ) from error
        last_endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        bound.append(Endpoint.parse(bytes(last_endpoint).decode("ascii"), lowest_port=0))
    return tuple(bound)


def connect(socket: Socket, endpoint: Endpoint) -> None:
    """Begin to connect."""
    socket.ipv6 = endpoint.ip.version == 6
    socket.connect(str(endpoint))


def _make_socket(context: Context, kind: int, settings: SocketSettings) -> Socket:
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = settings.queued_to_send
    # No limit on what is received: libzmq 4.3.5 aborts the whole process when a connection is lost while that queue is
    # full and a ZMTP ping stands behind it, which any peer can bring about. Links keep what is on its way within their
    # credit, and the flood guard sees to those who do not.
    socket.rcvhwm = 0
    largest = max(settings.max_payload_bytes, settings.max_header_bytes)
    socket.maxmsgsize = largest + 1 + TAG_BYTES  # of one part, as it is on the wire
    socket.handshake_ivl = int(settings.handshake_seconds * 1000)
    # No heartbeats of ZeroMQ's own: see pulse.py.
    socket.tcp_maxrt = int(settings.silence_seconds * 1000)  # bytes that nobody acknowledges for so long
    return socket
