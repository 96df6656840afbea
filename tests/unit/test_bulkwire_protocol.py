"""The bulk wire's protocol: the same events however the bytes are cut, and no harm from any bytes."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.errors import ProtocolError
from potluck.hub.bulk import protocol as bulkprotocol
from potluck.hub.bulk import websocket as websocketframes
from potluck.hub.bulk.protocol import (
    LEAST_WINDOW_BYTES,
    MAX_LINE_BYTES,
    RECORD_BYTES,
    HubReader,
    publication,
    subscribing,
)
from potluck.hub.bulk.websocket import ByteStream, FrameReader, UpgradeReader
from potluck.hub.keys import Signer, new_seed, verify

LIMIT_BYTES = 64 * 1024
Event = tuple[Any, ...]


class Listener:
    """Writes down what the hub says."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def said_info(self, fields: Mapping[str, Any]) -> None:
        self.events.append(("info", dict(fields)))

    def said_message(self, subject: str, payload: memoryview) -> None:
        self.events.append(("message", subject, payload))

    def said_too_much(self, subject: str, num_bytes: int) -> None:
        self.events.append(("too much", subject, num_bytes))

    def said_ping(self) -> None:
        self.events.append(("ping",))

    def said_pong(self) -> None:
        self.events.append(("pong",))

    def said_error(self, text: str) -> None:
        self.events.append(("error", text))


def frozen(events: Sequence[Event]) -> list[Event]:
    return [tuple(bytes(part) if isinstance(part, memoryview) else part for part in event) for event in events]


def deliver(reader: ByteStream, data: bytes, sizes: Sequence[int]) -> None:
    """Hand bytes over as the event loop does: into the window where there is one, else through a used buffer."""
    staging = bytearray(4096)
    turn = position = 0
    while position < len(data):
        wanted = max(1, sizes[turn % len(sizes)])
        turn += 1
        window = reader.window()
        if window is not None:
            piece = data[position : position + min(wanted, len(window))]
            window[: len(piece)] = piece
            reader.filled(len(piece))
        else:
            piece = data[position : position + min(wanted, len(staging))]
            staging[:] = b"?" * len(staging)
            staging[: len(piece)] = piece
            reader.feed(staging, 0, len(piece))
        position += len(piece)


def read_all(data: bytes, sizes: Sequence[int] = (1 << 20,), limit: int = LIMIT_BYTES) -> list[Event]:
    listener = Listener()
    deliver(HubReader(listener, max_message_bytes=limit), data, sizes)
    return frozen(listener.events)


# What the hub may say, each with the events that it is


def as_message(payload: bytes, reply: bool, header: bytes | None) -> tuple[bytes, list[Event]]:
    name = "p.run.relay.TO.FROM"
    to = " reply.to" if reply else ""
    event = ("message", name, payload)
    if header is None:
        return f"MSG {name} 1{to} {len(payload)}\r\n".encode() + payload + b"\r\n", [event]
    sizes = f"{len(header)} {len(header) + len(payload)}"
    return f"HMSG {name} 1{to} {sizes}\r\n".encode() + header + payload + b"\r\n", [event]


def payloads() -> st.SearchStrategy[bytes]:
    large = st.integers(0, LIMIT_BYTES - 100).map(lambda size: bytes(range(256)) * (size // 256) + b"\r\n"[: size % 3])
    return st.one_of(st.binary(max_size=200), large)


utterances = st.one_of(
    st.just((b"PING\r\n", [("ping",)])),
    st.just((b"PONG\r\n", [("pong",)])),
    st.just((b"+OK\r\n", [])),
    st.just((b"-ERR 'Slow Consumer'\r\n", [("error", "Slow Consumer")])),
    st.just((b'INFO {"nonce":"abc","max_payload":1048576}\r\n', [("info", {"nonce": "abc", "max_payload": 1048576})])),
    st.builds(as_message, payloads(), st.booleans(), st.one_of(st.none(), st.just(b"NATS/1.0\r\nA: b\r\n\r\n"))),
)
conversations = st.lists(utterances, max_size=12)
cuts = st.lists(st.integers(1, 40_000), min_size=1, max_size=20)


@given(conversations, cuts)
def test_any_split_gives_the_same_events(said: list[tuple[bytes, list[Event]]], sizes: list[int]) -> None:
    data = b"".join(text for text, _ in said)
    expected = [event for _, events in said for event in events]
    assert read_all(data, sizes) == expected
    assert read_all(data) == expected


@given(conversations, cuts, cuts)
def test_any_framing_gives_the_same_events(
    said: list[tuple[bytes, list[Event]]], frame_sizes: list[int], sizes: list[int]
) -> None:
    data = b"".join(text for text, _ in said)
    framed, position, turn = b"", 0, 0
    while position < len(data):
        piece = data[position : position + frame_sizes[turn % len(frame_sizes)]]
        framed += server_frame(piece) + server_frame(b"hi", websocketframes.PING)
        position += len(piece)
        turn += 1
    listener, control = Listener(), []
    reader = FrameReader(
        HubReader(listener, max_message_bytes=LIMIT_BYTES), control=lambda op, body: control.append((op, body))
    )
    deliver(reader, framed, sizes)
    assert frozen(listener.events) == [event for _, events in said for event in events]
    assert control == [(websocketframes.PING, b"hi")] * turn


def server_frame(body: bytes, opcode: int = websocketframes.BINARY) -> bytes:
    masked = websocketframes.frame_header(len(body), b"")
    return bytes((0x80 | opcode, masked[1] & 0x7F)) + masked[2:] + body


@given(st.lists(st.one_of(st.binary(max_size=300), utterances.map(lambda said: said[0])), max_size=8), cuts)
@settings(max_examples=300)
def test_garbage_is_refused_in_the_same_way_however_it_is_cut(parts: list[bytes], sizes: list[int]) -> None:
    data = b"".join(parts)

    def outcome(split: Sequence[int]) -> tuple[list[Event], str]:
        listener = Listener()
        try:
            deliver(HubReader(listener, max_message_bytes=LIMIT_BYTES), data, split)
        except ProtocolError as error:
            return frozen(listener.events), str(error)
        return frozen(listener.events), ""

    events, error = outcome(sizes)
    whole_events, whole_error = outcome((1 << 20,))
    assert events == whole_events
    assert bool(error) == bool(whole_error)


@given(st.binary(max_size=2000), cuts)
@settings(max_examples=300)
def test_garbage_in_frames_is_refused_or_read(data: bytes, sizes: list[int]) -> None:
    reader = FrameReader(HubReader(Listener(), max_message_bytes=LIMIT_BYTES), control=lambda _, body: None)
    try:
        deliver(reader, data, sizes)
    except ProtocolError:
        return


@pytest.mark.parametrize(
    "line",
    [
        b"HELLO\r\n",
        b"PING\n",
        b"MSG\r\n",
        b"MSG a\r\n",
        b"MSG a 1\r\n",
        b"MSG a x 5\r\n",
        b"MSG a 0 5\r\n",
        b"MSG a 2 5\r\n",
        b"MSG a 1 -5\r\n",
        b"MSG a 1 5.0\r\n",
        b"MSG a 1 r x 5\r\n",
        b"MSG a 1 99999999999999999999\r\n",
        b"MSG \xff\xfe 1 5\r\n",
        b"HMSG a 1 9 5\r\nxxxxx\r\n",
        b"HMSG a 1 5\r\n",
        b"INFO {\r\n",
        b"INFO []\r\n",
        b"INFO " + b"[" * 20_000 + b"\r\n",
        b"MSG a 1 2\r\nabc\r\n",
        b"A" * (MAX_LINE_BYTES + 1),
        f"MSG a 1 {LIMIT_BYTES + 1}\r\n".encode(),
        b"\x16\x03\x01\x00\xa5\x01\x00\x00",
        b"\n",
    ],
)
def test_what_is_not_nats_is_refused(line: bytes) -> None:
    if not line.endswith(b"\n"):
        line += b"A" * (MAX_LINE_BYTES + 1)
    with pytest.raises(ProtocolError):
        read_all(line)
    with pytest.raises(ProtocolError):
        read_all(line, (1,))


def test_an_endless_line_is_not_kept() -> None:
    reader = HubReader(Listener(), max_message_bytes=LIMIT_BYTES)
    for _ in range(MAX_LINE_BYTES // 1000):
        reader.feed(b"x" * 1000, 0, 1000)
    with pytest.raises(ProtocolError, match="line of more than"):
        reader.feed(b"x" * 1000, 0, 1000)


def test_a_message_that_is_too_large_is_read_past_if_the_hub_permits_it() -> None:
    listener = Listener()
    reader = HubReader(listener, max_message_bytes=1000)
    reader.hub_limit_bytes = 1 << 20
    data = b"MSG a 1 300000\r\n" + b"x" * 300_000 + b"\r\nMSG a 1 2\r\nok\r\n"
    deliver(reader, data, (777,))
    assert frozen(listener.events) == [("too much", "a", 300_000), ("message", "a", b"ok")]
    with pytest.raises(ProtocolError, match="against its own limits"):
        deliver(reader, b"MSG a 1 1048577\r\n", (100,))


def test_a_large_message_is_received_in_its_own_memory_and_stays_valid() -> None:
    listener = Listener()
    reader = HubReader(listener, max_message_bytes=LIMIT_BYTES)
    messages = [bytes([number]) * 50_000 for number in range(3)]
    windows = 0
    for payload in messages:
        head = b"MSG a 1 50000\r\n" + payload[:100]
        reader.feed(head, 0, len(head))
        while (window := reader.window()) is not None:
            rest = (payload + b"\r\n")[-len(window) :]
            window[:] = rest
            reader.filled(len(rest))
            windows += 1
    assert windows == 3
    assert frozen(listener.events) == [("message", "a", payload) for payload in messages]


def test_a_small_rest_is_not_worth_a_window() -> None:
    reader = HubReader(Listener(), max_message_bytes=LIMIT_BYTES)
    head = f"MSG a 1 {LEAST_WINDOW_BYTES - 10}\r\n".encode()
    reader.feed(head, 0, len(head))
    assert reader.window() is None


def test_after_stop_nothing_is_told() -> None:
    listener = Listener()
    reader = HubReader(listener, max_message_bytes=LIMIT_BYTES)
    listener.said_ping = reader.stop  # type: ignore[method-assign]
    data = b"PING\r\nPONG\r\nMSG a 1 1\r\nx\r\n"
    reader.feed(data, 0, len(data))
    assert listener.events == []


# What we say


@given(
    st.lists(st.binary(max_size=3000), max_size=3),
    st.integers(0, 200_000),
    st.sampled_from([None, websocketframes.plain_frame_header]),
)
def test_a_publication_is_the_same_however_it_is_laid_out(
    parts: list[bytes], size: int, frame: Callable[[int], bytes] | None
) -> None:
    large = bytes(size)
    pieces, total = publication("a.b", [*parts, large], frame=frame)
    assert total == sum(map(len, parts)) + size
    said = b"PUB a.b %d\r\n" % total + b"".join(parts) + large + b"\r\n"
    start = frame(len(said)) if frame is not None else b""
    assert b"".join(pieces) == start + said
    if total > 2 * RECORD_BYTES:
        assert len(pieces[0]) % RECORD_BYTES == 0 or len(pieces[1]) == 0
        assert len(pieces[1]) % RECORD_BYTES == 0


def test_a_large_part_is_not_copied() -> None:
    large = bytearray(500_000)
    pieces, _ = publication("a", [b"header", large])
    large[250_000] = 7
    assert 7 in bytes(pieces[1])


def test_the_greeting_proves_the_key() -> None:
    signer = Signer(new_seed("user"))
    said = bulkprotocol.greeting(
        signer, "nonce", name="bulk", token="secret", subscriptions=subscribing("p.run.relay.ME.*", 1)
    )
    connect, subscribe, ping, rest = said.split(b"\r\n")
    options = json.loads(connect.removeprefix(b"CONNECT "))
    signature = base64.urlsafe_b64decode(options["sig"] + "==")
    assert verify(options["nkey"], b"nonce", signature)
    assert options["nkey"] == signer.public_key
    assert (options["name"], options["auth_token"], options["echo"]) == ("bulk", "secret", False)
    assert (subscribe, ping, rest) == (b"SUB p.run.relay.ME.* 1", b"PING", b"")


# WebSocket


@given(st.lists(st.binary(max_size=70_000), max_size=3))
def test_a_masked_frame_unmasks_to_what_was_said(pieces: list[bytes]) -> None:
    frame = b"".join(websocketframes.masked_frame(pieces))
    said = b"".join(pieces)
    header = websocketframes.frame_header(len(said), b"")
    assert frame[: len(header)] == header
    mask = frame[len(header) : len(header) + 4]
    body = frame[len(header) + 4 :]
    assert bytes(byte ^ mask[at % 4] for at, byte in enumerate(body)) == said


@pytest.mark.parametrize(
    "frame",
    [
        b"\x82\x81abcdx",  # masked by the server
        b"\xc2\x01x",  # compressed
        b"\x81\x01x",  # text
        b"\x83\x01x",  # a kind that does not exist
        b"\x89\x7e\x00\x80",  # a ping that is too large
        b"\x09\x01x",  # a ping in pieces
        b"\x82\x7f\xff\xff\xff\xff\xff\xff\xff\xff",
    ],
)
def test_frames_that_no_server_sends_are_refused(frame: bytes) -> None:
    reader = FrameReader(HubReader(Listener(), max_message_bytes=LIMIT_BYTES), control=lambda _, body: None)
    with pytest.raises(ProtocolError):
        deliver(reader, frame, (1,))


def upgrade_answer(key: str) -> bytes:
    accept = base64.b64encode(hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()).decode()
    return (
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Accept: {accept}\r\n\r\n"
    ).encode()


@given(cuts)
def test_what_follows_the_upgrade_is_read(sizes: list[int]) -> None:
    key = websocketframes.new_key()
    listener = Listener()
    frames = FrameReader(HubReader(listener, max_message_bytes=LIMIT_BYTES), control=lambda _, body: None)
    large = b"MSG a 1 50000\r\n" + b"y" * 50_000 + b"\r\n"
    deliver(UpgradeReader(key, frames), upgrade_answer(key) + server_frame(b"PING\r\n" + large), sizes)
    assert frozen(listener.events) == [("ping",), ("message", "a", b"y" * 50_000)]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 403 Forbidden\r\n\r\n",
        b"HTTP/1.1\r\n\r\n",
        b"\r\n\r\n",
        b"INFO {}\r\n\r\n",
        upgrade_answer("another key"),
        upgrade_answer("key").replace(b"\r\n\r\n", b"\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n"),
        b"HTTP/1.1 101 " + b"x" * 20_000,
    ],
)
def test_a_server_that_does_not_agree_is_refused(answer: bytes) -> None:
    for sizes in ((1,), (1 << 20,)):
        frames = FrameReader(HubReader(Listener(), max_message_bytes=LIMIT_BYTES), control=lambda _, body: None)
        with pytest.raises(ProtocolError):
            deliver(UpgradeReader("key", frames), answer, sizes)
