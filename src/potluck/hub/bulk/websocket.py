"""WebSocket (RFC 6455) under both connections to the hub: only what a client needs to carry a stream of bytes (pure).

For NATS a WebSocket is one long stream: where a frame begins or ends means nothing. So a frame is never collected, its
bytes go on as they come, and a large message goes straight to its own memory here too (see protocol.py).
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from potluck.errors import ProtocolError
from potluck.hub.bulk.protocol import LEAST_WINDOW_BYTES, Buffer

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
FIN = 0x80
MASKED = 0x80
MAX_CONTROL_BYTES = 125
MAX_RESPONSE_BYTES = 16 * 1024
ZERO_MASK = bytes(4)

_ACCEPT = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3


class ByteStream(Protocol):
    """Who reads what the frames carry."""

    def window(self) -> memoryview | None:
        """Where the next bytes may be put directly."""
        ...

    def filled(self, num_bytes: int) -> None:
        """So many bytes were put into the window."""
        ...

    def feed(self, data: bytes | bytearray, start: int, end: int) -> None:
        """The next bytes."""
        ...


class UpgradeReader:
    """Takes the server's HTTP answer off the beginning of a stream of bytes; itself a ByteStream."""

    def __init__(self, key: str, inner: ByteStream) -> None:
        self._key = key
        self._inner = inner
        self._response: bytearray | None = bytearray()  # None: it was good, and is over

    @property
    def is_upgraded(self) -> bool:
        """Whether the server has agreed."""
        return self._response is None

    def window(self) -> memoryview | None:
        """Where the next bytes may be put directly."""
        return self._inner.window() if self._response is None else None

    def filled(self, num_bytes: int) -> None:
        """So many bytes were put into the window."""
        self._inner.filled(num_bytes)

    def feed(self, data: bytes | bytearray, start: int, end: int) -> None:
        """The next bytes are data[start:end]."""
        if self._response is None:
            self._inner.feed(data, start, end)
            return
        self._response += data[start:end]
        at = self._response.find(b"\r\n\r\n")
        if max(at, len(self._response) if at < 0 else 0) > MAX_RESPONSE_BYTES:
            raise ProtocolError(f"the server answered a WebSocket request with more than {MAX_RESPONSE_BYTES} bytes")
        if at >= 0:
            response, self._response = bytes(self._response), None
            check_upgrade_response(response[:at], self._key)
            self._inner.feed(response, at + 4, len(response))


class FrameReader:
    """Takes frames off a stream of bytes; itself a ByteStream."""

    def __init__(self, inner: ByteStream, *, control: Callable[[int, bytes], None]) -> None:
        """Hand what frames carry to `inner`, and control frames (close, ping, pong) to `control`."""
        self._inner = inner
        self._control = control
        self._header = bytearray()
        self._left_bytes = 0  # of the data frame that is arriving
        self._control_frame: tuple[int, bytearray, int] | None = None  # opcode, what came, how much is still to come

    def window(self) -> memoryview | None:
        """Where the next bytes may be put directly: the rest of a message, as far as this frame goes."""
        if self._left_bytes < LEAST_WINDOW_BYTES:
            return None
        window = self._inner.window()
        return window[: self._left_bytes] if window is not None else None

    def filled(self, num_bytes: int) -> None:
        """So many bytes were put into the window."""
        self._left_bytes -= num_bytes
        self._inner.filled(num_bytes)

    def feed(self, data: bytes | bytearray, start: int, end: int) -> None:
        """The next bytes are data[start:end]."""
        while start < end:
            if self._left_bytes:
                stop = min(end, start + self._left_bytes)
                self._left_bytes -= stop - start
                self._inner.feed(data, start, stop)
                start = stop
            elif self._control_frame is not None:
                start = self._take_control(*self._control_frame, data, start, end)
            else:
                self._header.append(data[start])
                start += 1
                self._try_header()

    def _try_header(self) -> None:
        header = self._header
        if len(header) < 2:
            return
        if header[1] & MASKED:
            raise ProtocolError("the hub sent a masked WebSocket frame, which only clients may")
        short = header[1]
        needed = 2 + (8 if short == 127 else 2 if short == 126 else 0)
        if len(header) < needed:
            return
        size = int.from_bytes(header[2:needed], "big") if needed > 2 else short
        opcode, flags = header[0] & 0x0F, header[0] & 0xF0
        header.clear()
        self._begin(opcode, flags, size)

    def _begin(self, opcode: int, flags: int, size: int) -> None:
        if flags & ~FIN:
            raise ProtocolError("the hub sent a WebSocket frame with an extension that was not agreed on")
        if opcode in (CONTINUATION, BINARY):
            if size >= 1 << 63:
                raise ProtocolError("the hub announced a WebSocket frame of an impossible size")
            self._left_bytes = size
        elif opcode in (CLOSE, PING, PONG):
            if size > MAX_CONTROL_BYTES or flags != FIN:
                raise ProtocolError("the hub sent a WebSocket control frame that is too large or in pieces")
            if size:
                self._control_frame = (opcode, bytearray(), size)
            else:
                self._control(opcode, b"")
        else:
            raise ProtocolError(f"the hub sent a WebSocket frame of kind {opcode}, which carries no NATS")

    def _take_control(
        self, opcode: int, body: bytearray, left: int, data: bytes | bytearray, start: int, end: int
    ) -> int:
        stop = min(end, start + left)
        body += data[start:stop]
        left -= stop - start
        self._control_frame = (opcode, body, left) if left else None
        if not left:
            self._control(opcode, bytes(body))
        return stop


def frame_header(size: int, mask: bytes, opcode: int = BINARY) -> bytes:
    """What stands before `size` masked bytes."""
    first = bytes((FIN | opcode,))
    if size <= MAX_CONTROL_BYTES:
        return first + bytes((MASKED | size,)) + mask
    if size < 1 << 16:
        return first + bytes((MASKED | 126,)) + size.to_bytes(2, "big") + mask
    return first + bytes((MASKED | 127,)) + size.to_bytes(8, "big") + mask


def plain_frame_header(size: int) -> bytes:
    """What stands before `size` bytes that go as they are: masked with zeros.

    Clients must mask, so that a web page cannot make a browser send bytes which a proxy on the way takes for another
    request. Under TLS no proxy sees them, or it has ended the TLS itself and knows that this is a WebSocket. A mask of
    zeros satisfies the receiver, changes nothing, and saves touching every byte.
    """
    return frame_header(size, ZERO_MASK)


def masked_frame(pieces: Sequence[Buffer], opcode: int = BINARY) -> list[Buffer]:
    """The pieces as one frame with a random mask, for connections without TLS. This copies."""
    mask = os.urandom(4)
    size = sum(map(len, pieces))
    masked = np.empty(-(-size // 8) * 8, np.uint8)
    masked[size:] = 0
    position = 0
    for piece in pieces:
        masked[position : position + len(piece)] = np.frombuffer(piece, np.uint8)
        position += len(piece)
    words = masked.view(np.uint64)  # eight bytes at a time
    np.bitwise_xor(words, np.frombuffer(mask * 2, np.uint64), out=words)
    return [frame_header(size, mask, opcode), masked.data[:size]]


def upgrade_request(host: str, key: str) -> bytes:
    """The HTTP request that turns a connection into a WebSocket."""
    lines = (
        "GET / HTTP/1.1",
        f"Host: {host}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Key: {key}",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Protocol: nats",
    )
    return "\r\n".join((*lines, "", "")).encode("ascii")


def new_key() -> str:
    """A fresh Sec-WebSocket-Key."""
    return base64.b64encode(os.urandom(16)).decode("ascii")


def check_upgrade_response(response: bytes, key: str) -> None:
    """ProtocolError unless the server has agreed to speak WebSocket, and to us."""
    status, *lines = response.decode("latin-1").split("\r\n")
    fields = status.split(" ", 2)
    if len(fields) < 2 or not fields[0].startswith("HTTP/1.1") or fields[1] != "101":
        raise ProtocolError(f"the server does not speak WebSocket here: it answered {status[:80]!r}")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    digest = hashlib.sha1(key.encode() + _ACCEPT, usedforsecurity=False).digest()
    accept = base64.b64encode(digest).decode("ascii")
    if headers.get("sec-websocket-accept") != accept:
        raise ProtocolError("the server's answer to the WebSocket request is not meant for us: something is in between")
    if "sec-websocket-extensions" in headers:
        raise ProtocolError("the server turned on a WebSocket extension that was not asked for")
