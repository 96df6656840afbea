from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ProtocolError
from potluck.link.channel.packet import (
    ACK_NOW,
    BULK,
    GAP,
    HEADER_BYTES,
    HUB_PAYLOAD_BYTES,
    LOADED,
    MAX_BODY_BYTES,
    MAX_FRAMES,
    MAX_INLINE_BYTES,
    PACKET_BYTES,
    SMALL_FRAME_BYTES,
    SMALL_FRAMES_BYTES,
    VERSION,
    Kind,
    decode,
    decode_manifest,
    encode_header,
    encode_manifest,
    session_tag,
)


def header(
    kind: int = Kind.ACK, flags: int = 0, generation: int = 1, inline: bytes = b"", payload_bytes: int = 0
) -> bytes:
    return encode_header(kind, flags, generation, 11, 12, 13, 14, 15, 0.25, inline, payload_bytes)


def test_all_fields_survive() -> None:
    inline, _ = encode_manifest(b"body", [])
    data = encode_header(Kind.MESSAGE, ACK_NOW | BULK | LOADED | GAP, 7, 2**64 - 1, 2, 2**63, 4, 5, 0.125, inline, 3)
    packet = decode(memoryview(data), memoryview(b"abc"))
    assert (packet.kind, packet.flags, packet.generation) == (Kind.MESSAGE, 15, 7)
    assert (packet.sender_tag, packet.receiver_tag) == (2**64 - 1, 2)
    assert (packet.sequence, packet.ack, packet.credit) == (2**63, 4, 5)
    assert packet.ack_age_seconds == 0.125
    assert bytes(packet.inline) == inline
    assert bytes(packet.payload) == b"abc"


def test_the_payload_is_a_view_of_the_carriers_buffer() -> None:
    buffer = bytearray(b"abc")
    packet = decode(memoryview(header(Kind.FRAGMENT, payload_bytes=3)), memoryview(buffer))
    buffer[0] = ord("x")
    assert bytes(packet.payload) == b"xbc"


def test_a_very_old_acknowledgement_does_not_overflow() -> None:
    data = encode_header(Kind.ACK, 0, 1, 1, 2, 3, 4, 5, 1e9, b"", 0)
    assert decode(memoryview(data), None).ack_age_seconds == pytest.approx(4294.967295)


def test_the_largest_packet_fits_through_a_hub() -> None:
    assert HEADER_BYTES + MAX_INLINE_BYTES + PACKET_BYTES < HUB_PAYLOAD_BYTES
    frames = [memoryview(bytes(SMALL_FRAME_BYTES))] * 20 + [memoryview(b"")] * (MAX_FRAMES - 20)
    inline, large = encode_manifest(bytes(MAX_BODY_BYTES), frames)
    assert len(inline) <= MAX_INLINE_BYTES
    assert len(large) == 20 - SMALL_FRAMES_BYTES // SMALL_FRAME_BYTES
    decode(memoryview(header(Kind.MESSAGE, inline=inline, payload_bytes=PACKET_BYTES)), memoryview(bytes(PACKET_BYTES)))


@pytest.mark.parametrize(
    ("data", "payload", "complaint"),
    [
        (b"", None, "cut off"),
        (header()[:-1], None, "cut off"),
        (b"\x00" + header()[1:], None, "not ours"),
        (header()[:1] + bytes([VERSION + 1]) + header()[2:], None, "update the older"),
        (header(kind=0), None, "unknown kind"),
        (header(kind=7), None, "unknown kind"),
        (header(flags=32), None, "unknown kind"),
        (header(generation=0), None, "generation 0"),
        (header() + b"x", None, "announces"),
        (header(), b"x", "announces"),
        (header(Kind.FRAGMENT, payload_bytes=2), b"x", "announces"),
        (header(Kind.FRAGMENT), None, "cannot have"),
        (header(Kind.FRAGMENT, inline=b"x", payload_bytes=1), b"x", "cannot have"),
        (header(Kind.ACK, payload_bytes=1), b"x", "cannot have"),
        (header(Kind.PROBE, inline=b"x"), None, "cannot have"),
        (header(Kind.MESSAGE, inline=b"x"), None, "cannot have"),
        (header(Kind.RESET, inline=bytes(201)), None, "cannot have"),
        (header(Kind.FRAGMENT, payload_bytes=PACKET_BYTES + 1), bytes(PACKET_BYTES + 1), "exceeds"),
        (header(Kind.MESSAGE, inline=bytes(MAX_INLINE_BYTES + 1)), None, "exceeds"),
    ],
)
def test_whatever_is_odd_is_refused(data: bytes, payload: bytes | None, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        decode(memoryview(data), memoryview(payload) if payload is not None else None)


@given(
    body=st.binary(max_size=100),
    sizes=st.lists(st.sampled_from((0, 1, 100, SMALL_FRAME_BYTES, SMALL_FRAME_BYTES + 1, 100_000)), max_size=20),
)
def test_a_manifest_tells_what_is_here_and_what_follows(body: bytes, sizes: list[int]) -> None:
    frames = [memoryview(bytes([index % 256]) * size) for index, size in enumerate(sizes)]
    inline, large = encode_manifest(body, frames)
    manifest = decode_manifest(memoryview(inline))
    assert bytes(manifest.body) == body
    assert manifest.sizes == sizes
    assert manifest.total_bytes == len(body) + sum(sizes)
    assert [frame for frame, seen in zip(frames, manifest.frames, strict=True) if seen is None] == large
    assert all(seen is None or seen == frame for frame, seen in zip(frames, manifest.frames, strict=True))
    assert all(len(frame) > SMALL_FRAME_BYTES or sum(sizes) > SMALL_FRAMES_BYTES for frame in large)


@pytest.mark.parametrize(
    ("inline", "complaint"),
    [
        (struct.pack("<IH", 5, 0) + b"four", "cut off"),
        (struct.pack("<IH", 0, 3) + bytes(16), "cut off"),
        (struct.pack("<IH", MAX_BODY_BYTES + 1, 0), "exceeds"),
        (struct.pack("<IH", 0, MAX_FRAMES + 1), "exceeds"),
        (struct.pack("<IHQ", 0, 1, 0), "empty frame"),
        (struct.pack("<IHQ", 0, 1, 10 << 1 | 1) + b"short", "add up"),
        (struct.pack("<IHQ", 0, 1, 2 << 1 | 1) + b"longer", "add up"),
    ],
)
def test_a_manifest_that_lies_is_refused(inline: bytes, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        decode_manifest(memoryview(inline))


def test_every_life_of_a_peer_has_its_own_tag() -> None:
    tags = {session_tag(peer, session) for peer in ("a", "b", "ab") for session in ("", "1", "2", "b1")}
    assert len(tags) == 12
    assert all(0 <= tag < 2**64 for tag in tags)
