"""Packets sealed and opened: what arrives is what was sent, in order, or nothing; and buffers are used again."""

from __future__ import annotations

import gc
import itertools
import random

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.errors import ProtocolError
from potluck.link.direct.noise import TAG_BYTES, Cipher
from potluck.link.direct.records import OversizedError, RecordReader
from potluck.link.direct.sealing import HEAD, HEAD_BYTES, JOINED_BYTES, Clear, Sealed, Slabs, Wrapping

KEYS = bytes(32), bytes(31) + b"\x01"
MAX_FRAME_BYTES = 600_000
MAX_PAYLOAD_BYTES = 1_000_000

Packet = tuple[bytes, bytes | None]


def slabs(**options: int) -> Slabs:
    return Slabs(**{"slab_bytes": 256 * 1024, "most_kept": 4, **options})


def pair(*, plain: bool = False) -> tuple[Wrapping, Wrapping]:
    if plain:
        return Clear(), Clear()
    return Sealed(Cipher(KEYS[0]), Cipher(KEYS[1]), slabs()), Sealed(Cipher(KEYS[1]), Cipher(KEYS[0]), slabs())


def reader_of(wrapping: Wrapping, **limits: int) -> RecordReader:
    limits = {"max_frame_bytes": MAX_FRAME_BYTES, "max_payload_bytes": MAX_PAYLOAD_BYTES, **limits}
    return RecordReader(wrapping, slabs(), **limits)


def record(wrapping: Wrapping, frame: bytes, payload: bytes | None) -> bytes:
    view = memoryview(payload) if payload is not None else None
    return b"".join(bytes(part) for part in wrapping.wrap(frame, view))


def read(reader: RecordReader, pieces: list[bytes], packets: list[Packet] | None = None) -> list[Packet]:
    """As a connection does: a rest is given again with what comes next, and large parts are filled in their place."""
    packets = packets if packets is not None else []

    def take(data: bytes) -> bytes:
        for frame, payload in reader.packets(memoryview(data)):
            packets.append((bytes(frame), bytes(payload) if payload is not None else None))
        return data[reader.position :]

    rest = b""
    for piece in pieces:
        target = reader.target
        if target is not None:
            assert not rest
            in_place, piece = piece[: len(target)], piece[len(target) :]
            target[: len(in_place)] = in_place
            reader.filled(len(in_place))
            take(b"")
        rest = take(rest + piece)
        assert len(rest) < reader.largest_rest_bytes
    assert not rest
    return packets


SIZES = [0, 1, 255, JOINED_BYTES - 7, JOINED_BYTES - 6, JOINED_BYTES, JOINED_BYTES + 1, 100_000, 256 * 1024, 500_000]


@pytest.mark.parametrize("plain", [False, True], ids=["sealed", "plain"])
@pytest.mark.parametrize("size", SIZES)
def test_packets_of_all_sizes_arrive_both_ways(size: int, plain: bool) -> None:
    here, there = pair(plain=plain)
    reader_here, reader_there = reader_of(here), reader_of(there)
    payload = bytes(number % 251 for number in range(size))
    for sender, reader in ((here, reader_there), (there, reader_here), (here, reader_there)):
        for sent in ((b"\0header", None), (b"\0header", payload), (payload, None), (payload, b""), (payload, payload)):
            text = record(sender, *sent)
            total = sum(len(each) for each in sent if each is not None)
            num_parts = 2 if sent[1] is not None and total > JOINED_BYTES else 1
            assert len(text) == HEAD_BYTES + total + num_parts * sender.tag_bytes
            assert read(reader, [text]) == [sent]


@settings(max_examples=60)
@given(st.data())
def test_packets_arrive_however_their_bytes_are_cut(data: st.DataObject) -> None:
    plain = data.draw(st.booleans())
    here, there = pair(plain=plain)
    source = random.Random(data.draw(st.integers(0, 2**32)))
    sizes = [None, 0, 1, 100, JOINED_BYTES - 10, JOINED_BYTES + 10, 70_000, 200_000]
    packets: list[Packet] = []
    for _ in range(data.draw(st.integers(1, 12))):
        payload_bytes = source.choice(sizes)
        frame = source.randbytes(source.choice(sizes[1:-1]) or 0)
        packets.append((frame, source.randbytes(payload_bytes) if payload_bytes is not None else None))
    text = b"".join(record(here, *packet) for packet in packets)
    cuts = sorted(source.randrange(len(text)) for _ in range(data.draw(st.integers(0, 60))))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    assert read(reader_of(there), pieces) == packets


def test_sealing_leaves_the_payload_alone() -> None:
    here, _ = pair()
    payload = bytearray(b"x" * 200_000)
    here.wrap(b"\0", memoryview(payload))
    assert payload == b"x" * 200_000


def test_in_the_clear_a_large_payload_is_not_copied() -> None:
    payload = bytearray(200_000)
    _, part = Clear().wrap(b"\0", memoryview(payload))
    assert isinstance(part, memoryview)
    assert part.obj is payload


@settings(max_examples=80)
@given(st.data())
def test_a_changed_bit_anywhere_is_noticed(data: st.DataObject) -> None:
    here, there = pair()
    size = data.draw(st.sampled_from([0, 10, JOINED_BYTES + 100]))
    text = bytearray(record(here, b"\0header", bytes(size)) + record(here, b"\0next", bytes(2 * JOINED_BYTES)))
    at = data.draw(st.integers(0, HEAD_BYTES + TAG_BYTES + 6 + size))
    text[at] ^= 1 << data.draw(st.integers(0, 7))
    # A head may now announce more than there is: whatever comes then, it does not open.
    pieces = [bytes(text), *([bytes(200_000)] * 10)]
    seen: list[Packet] = []
    with pytest.raises(ProtocolError):
        read(reader_of(there), pieces, seen)
    assert seen == []


@settings(max_examples=200)
@given(st.binary(max_size=4000), st.booleans())
def test_noise_does_no_harm(noise: bytes, plain: bool) -> None:
    reader = reader_of(pair(plain=plain)[1], max_frame_bytes=5000, max_payload_bytes=50_000)
    try:
        for _ in reader.packets(memoryview(noise)):
            assert plain
    except ProtocolError:
        return
    assert reader.position <= len(noise)
    assert reader.target is None or len(reader.target) <= 50_000 + TAG_BYTES


@pytest.mark.parametrize("plain", [False, True], ids=["sealed", "plain"])
@pytest.mark.parametrize("head", [(5001, 0), (0, 6002), (5001, 6002), (2**32 - 1, 0), (0, 2**32 - 1), (2**31, 2**31)])
def test_a_length_above_the_limit_is_refused_before_memory_is_taken(head: tuple[int, int], plain: bool) -> None:
    reader = reader_of(pair(plain=plain)[1], max_frame_bytes=5000, max_payload_bytes=6000)
    with pytest.raises(OversizedError, match="limits"):
        list(reader.packets(memoryview(HEAD.pack(*head))))
    assert reader.target is None


@pytest.mark.parametrize("plain", [False, True], ids=["sealed", "plain"])
def test_as_much_as_may_be_passes(plain: bool) -> None:
    here, there = pair(plain=plain)
    packet = bytes(5000), bytes(6000)
    assert read(reader_of(there, max_frame_bytes=5000, max_payload_bytes=6000), [record(here, *packet)]) == [packet]


@pytest.mark.parametrize("plain", [False, True], ids=["sealed", "plain"])
def test_what_is_kept_of_a_packet_keeps_nothing_else(plain: bool) -> None:
    here, there = pair(plain=plain)
    text = bytearray(record(here, b"frame", b"x") + record(here, b"frame", None))
    kept = [part for packet in reader_of(there).packets(memoryview(text)) for part in packet if part is not None]
    assert all(isinstance(part.obj, bytes) and len(part.obj) <= 6 for part in kept)
    text.clear()  # which it could not be while somebody has a view of it


def test_slabs_are_used_again_once_nobody_has_them() -> None:
    pool = slabs(most_kept=2)
    first = pool.take(200_000)
    second = pool.take(200_000)
    memory = address(first)
    assert address(second) != memory
    part = first[1000:2000]
    del first
    gc.collect()
    waiting = pool.take(200_000)
    assert address(waiting) != memory  # somebody has a slice
    del part
    gc.collect()
    third = pool.take(256 * 1024)
    assert address(third) == memory
    assert len(third) == 256 * 1024
    more = [pool.take(200_000) for _ in range(5)]
    assert len(pool._in_use) == 8
    more.clear()
    del second, third, waiting
    gc.collect()
    assert not pool._in_use
    assert len(pool._free) == 2


@pytest.mark.parametrize("size", [0, 1, 500, 1001, 10_000])
def test_what_is_larger_than_a_slab_or_much_smaller_gets_memory_of_its_own(size: int) -> None:
    pool = slabs(slab_bytes=1000)
    view = pool.take(size)
    assert len(view) == size
    assert not pool._in_use


def address(view: memoryview) -> int:
    return int(numpy.frombuffer(view, numpy.uint8).ctypes.data)
