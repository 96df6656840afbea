"""The NATS protocol as the bulk wire speaks it: bytes in, events out, no I/O (pure).

    hub says    INFO {json}   MSG subject sid [reply] bytes   HMSG subject sid [reply] header-bytes bytes
                PING   PONG   +OK   -ERR 'text'
    we say      CONNECT {json}   SUB subject sid   UNSUB sid   PUB subject bytes   PING   PONG

Made for megabytes: once the size of a message is known and is within the limit, it gets memory of its own, `window`
offers that memory to the socket, and what arrives there is never copied again. So the views handed out stay valid for
as long as somebody holds them. Everything else comes through `feed`, in pieces of any size.

Whatever is odd is a ProtocolError, and nothing is kept beyond the limits: a line has MAX_LINE_BYTES, a message what
the reader was made for. A larger message that the hub permits is read past and counted: any member can send one, and it
must not cost us the connection.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from potluck.errors import ProtocolError
from potluck.hub.keys import Signer

KIB = 1024
MAX_LINE_BYTES = 32 * KIB  # INFO names every server of a cluster; all other lines are far shorter
LEAST_WINDOW_BYTES = 4 * KIB  # what is left of a message is copied rather than asked for by itself when it is less
RECORD_BYTES = 16 * KIB  # the largest TLS record: full ones cost least
MAX_NUMBER_DIGITS = 10

CRLF = b"\r\n"
PING = b"PING\r\n"
PONG = b"PONG\r\n"

Buffer = bytes | bytearray | memoryview


class HubSpeech(Protocol):
    """Who is told what the hub says."""

    def said_info(self, fields: Mapping[str, Any]) -> None:
        """Who the hub is; comes first, and again when its cluster changes."""
        ...

    def said_message(self, subject: str, payload: memoryview) -> None:
        """Something was published for us. The view stays valid."""
        ...

    def said_too_much(self, subject: str, num_bytes: int) -> None:
        """Something was published for us that is larger than we take, and is read past."""
        ...

    def said_ping(self) -> None:
        """Are we there?"""
        ...

    def said_pong(self) -> None:
        """All that we said before our PING has been dealt with."""
        ...

    def said_error(self, text: str) -> None:
        """The hub refuses something; after most complaints it hangs up."""
        ...


class HubReader:
    """Reads what the hub says."""

    def __init__(self, speech: HubSpeech, *, max_message_bytes: int) -> None:
        self.hub_limit_bytes = max_message_bytes
        """What the hub itself lets through; more than that is not a member's doing, and ends the connection."""
        self.last_subscription = 1
        """Numbers up to this are our subscriptions', old ones included; a message for another was never asked for."""
        self._speech = speech
        self._max_message_bytes = max_message_bytes
        self._line = bytearray()  # the beginning of a line
        self._body: memoryview | None = None  # memory of the message that is arriving, its CRLF included
        self._filled_bytes = 0
        self._header_bytes = 0
        self._subject = ""
        self._skip_bytes = 0  # what is left of a message that is too large
        self._stopped = False

    @property
    def is_between_lines(self) -> bool:
        """Whether nothing has come of what the hub says next."""
        return not self._line and self._body is None and not self._skip_bytes

    def stop(self) -> None:
        """Tell nothing more."""
        self._stopped = True

    def window(self) -> memoryview | None:
        """Where the next bytes may be put directly; None: hand them to `feed`."""
        if self._body is None or len(self._body) - self._filled_bytes < LEAST_WINDOW_BYTES:
            return None
        return self._body[self._filled_bytes :]

    def filled(self, num_bytes: int) -> None:
        """So many bytes were put into the window."""
        assert self._body is not None, "there was a window"
        self._filled_bytes += num_bytes
        if self._filled_bytes == len(self._body):
            self._finish_message()

    def feed(self, data: bytes | bytearray, start: int, end: int) -> None:
        """The next bytes are data[start:end]; they may be overwritten afterwards."""
        while start < end and not self._stopped:
            if self._skip_bytes:
                start = self._skip(data, start, end)
            elif self._body is not None:
                start = self._take_body(self._body, data, start, end)
            else:
                start = self._take_line(data, start, end)

    def _take_body(self, body: memoryview, data: bytes | bytearray, start: int, end: int) -> int:
        size = min(end - start, len(body) - self._filled_bytes)
        body[self._filled_bytes : self._filled_bytes + size] = memoryview(data)[start : start + size]
        self.filled(size)
        return start + size

    def _skip(self, data: bytes | bytearray, start: int, end: int) -> int:
        size = min(end - start, self._skip_bytes)
        self._skip_bytes -= size
        if self._skip_bytes == 0 and data[start + size - 1] != CRLF[1]:
            raise ProtocolError("a message of the hub does not end where its size says")
        return start + size

    def _take_line(self, data: bytes | bytearray, start: int, end: int) -> int:
        newline = data.find(b"\n", start, end)
        stop = end if newline < 0 else newline
        if len(self._line) + stop - start > MAX_LINE_BYTES:
            raise ProtocolError(f"the hub sent a line of more than {MAX_LINE_BYTES} bytes")
        if newline < 0:
            self._line += data[start:end]
            return end
        if self._line:
            self._line += data[start:newline]
            line = bytes(self._line)
            self._line.clear()
        else:
            line = bytes(data[start:newline])
        if not line.endswith(b"\r"):
            raise ProtocolError("the hub sent a line that does not end in CR LF")
        self._read_line(line[:-1])
        return newline + 1

    def _read_line(self, line: bytes) -> None:
        if line.startswith(b"MSG "):
            self._begin_message(line, line.split()[1:], with_header=False)
        elif line.startswith(b"HMSG "):
            self._begin_message(line, line.split()[1:], with_header=True)
        elif line == b"PING":
            self._speech.said_ping()
        elif line == b"PONG":
            self._speech.said_pong()
        elif line.startswith(b"INFO "):
            self._speech.said_info(_read_info(line[5:]))
        elif line.startswith(b"-ERR"):
            self._speech.said_error(line[4:].strip().strip(b"'").decode("ascii", "replace"))
        elif line != b"+OK":
            raise ProtocolError(f"the hub sent a line that is not NATS: {line[:40]!r}")

    def _begin_message(self, line: bytes, fields: Sequence[bytes], *, with_header: bool) -> None:
        num_sizes = 2 if with_header else 1
        if not 2 + num_sizes <= len(fields) <= 3 + num_sizes or not self._is_subscription(fields[1]):
            raise ProtocolError(f"the hub announced a message in a way that is not NATS: {line[:80]!r}")
        size = _read_size(fields[-1])
        self._header_bytes = _read_size(fields[-2]) if with_header else 0
        if self._header_bytes > size or size > max(self.hub_limit_bytes, self._max_message_bytes):
            raise ProtocolError(f"the hub announced a message of {size} bytes, against its own limits")
        try:
            self._subject = fields[0].decode("ascii")
        except UnicodeDecodeError as error:
            raise ProtocolError(f"the hub sent a subject that is not ASCII: {fields[0][:80]!r}") from error
        if size > self._max_message_bytes:
            self._skip_bytes = size + len(CRLF)
            self._speech.said_too_much(self._subject, size)
            return
        # Not a bytearray: that would be filled with zeros first, which costs as much as a copy.
        self._body = np.empty(size + len(CRLF), np.uint8).data
        self._filled_bytes = 0

    def _is_subscription(self, field: bytes) -> bool:
        return _is_number(field) and 1 <= int(field) <= self.last_subscription

    def _finish_message(self) -> None:
        body, self._body = self._body, None
        assert body is not None, "a message was arriving"
        end = len(body) - len(CRLF)
        if body[end:] != CRLF:
            raise ProtocolError("a message of the hub does not end where its size says")
        if not self._stopped:
            self._speech.said_message(self._subject, body[self._header_bytes : end])


def _read_size(field: bytes) -> int:
    if not _is_number(field):
        raise ProtocolError(f"the hub sent a size that is not a number: {field[:40]!r}")
    return int(field)


def _is_number(field: bytes) -> bool:
    return field.isdigit() and len(field) <= MAX_NUMBER_DIGITS


def _read_info(text: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"the hub's INFO cannot be read: {error}") from error


def subscribing(subject: str, number: int) -> bytes:
    """Listen to a subject from now on; the number is ours to choose."""
    return b"SUB %b %d\r\n" % (subject.encode(), number)


def unsubscribing(number: int) -> bytes:
    """Listen no more to what has that number."""
    return b"UNSUB %d\r\n" % number


def greeting(signer: Signer, nonce: str, *, name: str, token: str, subscriptions: bytes) -> bytes:
    """All that we say at first: who we are, what we listen to, and a PING, so that a PONG says that it worked."""
    options: dict[str, Any] = {
        "verbose": False,
        "pedantic": False,
        "echo": False,
        "headers": False,
        "no_responders": False,
        "protocol": 1,
        "lang": "python-potluck",
        "version": "1",
        "name": name,
    }
    if nonce:
        options["nkey"] = signer.public_key
        options["sig"] = base64.urlsafe_b64encode(signer.sign(nonce.encode())).rstrip(b"=").decode("ascii")
    if token:
        options["auth_token"] = token
    return b"CONNECT %b\r\n%b%b" % (msgspec.json.encode(options), subscriptions, PING)


def publication(
    subject: str, parts: Sequence[Buffer], *, frame: Callable[[int], bytes] | None = None
) -> tuple[list[Buffer], int]:
    """The pieces of a PUB, to be written in this order, and how long its payload is.

    The last part may be large and is not copied, but for its two ends: they go with what stands before and after, so
    that under TLS all records but the last are full ones. `frame` gives the bytes that announce so many more.
    """
    size = sum(map(len, parts))
    line = b"PUB %b %d\r\n" % (subject.encode(), size)
    start = (frame(len(line) + size + len(CRLF)) if frame is not None else b"") + line
    if size <= 2 * RECORD_BYTES:
        return [b"".join((start, *parts, CRLF))], size
    large = memoryview(parts[-1])
    begin = start + b"".join(parts[:-1])
    with_begin = min(-len(begin) % RECORD_BYTES, len(large))
    whole = (len(large) - with_begin) // RECORD_BYTES * RECORD_BYTES
    end = with_begin + whole
    return [b"".join((begin, large[:with_begin])), large[with_begin:end], b"".join((large[end:], CRLF))], size
