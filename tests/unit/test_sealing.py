"""Packets sealed and opened: what arrives is what was sent, in order, or nothing; and buffers are used again."""

from __future__ import annotations

import gc

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.errors import ProtocolError
from potluck.link.direct.loopsocket import Outgoing
from potluck.link.direct.noise import TAG_BYTES, Cipher
from potluck.link.direct.sealing import LARGE_BYTES, SHARED_BUFFER_BYTES, Clear, Sealed, Slabs

# pyzmq starts one thread per process, for good, with the first frame that it does not copy: here, before a test counts.
zmq.Frame(bytes(1), copy=False)

KEYS = bytes(32), bytes(31) + b"\x01"


def slabs(**options: int) -> Slabs:
    return Slabs(**{"slab_bytes": 256 * 1024, "most_kept": 4, **options})


def pair() -> tuple[Sealed, Sealed]:
    return Sealed(Cipher(KEYS[0]), Cipher(KEYS[1]), slabs()), Sealed(Cipher(KEYS[1]), Cipher(KEYS[0]), slabs())


def received(parts: list[Outgoing]) -> list[zmq.Frame]:
    """As ZeroMQ would show them: in memory that may be written to."""
    return [zmq.Frame(bytes(part), copy=True) for part in parts]


SIZES = [0, 1, 255, 4096, SHARED_BUFFER_BYTES, SHARED_BUFFER_BYTES + 1, LARGE_BYTES - 1, LARGE_BYTES, 256 * 1024, 10**6]


@pytest.mark.parametrize("size", SIZES)
def test_packets_of_all_sizes_arrive_both_ways(size: int) -> None:
    here, there = pair()
    payload = bytes(number % 251 for number in range(size))
    for sender, receiver in ((here, there), (there, here), (here, there)):
        for sent in ((b"\0header", None), (b"\0header", payload), (payload, None), (payload, b"")):
            view = memoryview(sent[1]) if sent[1] is not None else None
            parts = sender.wrap(sent[0], view)
            assert [len(part) for part in parts] == [len(each) + TAG_BYTES for each in sent if each is not None]
            frame, opened = receiver.unwrap(received(parts), 0)
            assert (bytes(frame), bytes(opened) if opened is not None else None) == sent


def test_sealing_leaves_the_payload_alone() -> None:
    here, _ = pair()
    payload = bytearray(b"x" * LARGE_BYTES)
    here.wrap(b"\0", memoryview(payload))
    assert payload == b"x" * LARGE_BYTES


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_changed_bit_anywhere_is_noticed(data: st.DataObject) -> None:
    here, there = pair()
    size = data.draw(st.sampled_from([0, 10, SHARED_BUFFER_BYTES + 100]))
    parts = [bytearray(part) for part in here.wrap(b"\0header", memoryview(bytes(size)))]
    part = data.draw(st.sampled_from(parts))
    part[data.draw(st.integers(0, len(part) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ProtocolError):
        there.unwrap(received(list(parts)), 0)


def test_a_message_of_too_many_parts_or_none_is_refused() -> None:
    here, there = pair()
    parts = received(here.wrap(b"\0header", memoryview(b"x")))
    with pytest.raises(ProtocolError, match="3 parts"):
        there.unwrap(parts, 1)
    with pytest.raises(ProtocolError, match="0 parts"):
        there.unwrap([], 0)
    assert Clear().unwrap(parts, 1) == (b"", None)
    assert Clear().unwrap([], 0) == (b"", None)


def test_in_the_clear_packets_are_what_they_are() -> None:
    clear = Clear()
    assert clear.wrap(b"frame", None) == [b"frame"]
    assert clear.wrap(b"frame", memoryview(b"x")) == [b"frame", b"x"]
    assert clear.unwrap(received([b"frame", b"x"]), 0) == (b"frame", b"x")


def test_what_is_kept_of_a_small_part_keeps_no_shared_buffer() -> None:
    here, there = pair()
    for wrapping, parts in ((Clear(), [b"frame", b"x"]), (there, here.wrap(b"frame", memoryview(b"x")))):
        for opened in wrapping.unwrap(received(list(parts)), 0):
            assert opened is not None
            assert isinstance(opened.obj, bytes)


def test_slabs_are_used_again_once_nobody_has_them() -> None:
    pool = slabs(most_kept=2)
    first = pool.take(1000)
    first[:3] = b"abc"
    second = pool.take(1000)
    assert bytes(second[:3]) != b"abc" or first.obj is not second.obj
    owner = first.obj
    assert second.obj is not owner
    del first
    gc.collect()
    third = pool.take(256 * 1024)
    assert third.obj is owner
    assert len(third) == 256 * 1024
    more = [pool.take(10) for _ in range(5)]
    assert len(pool._in_use) == 7
    more.clear()
    del second, third
    gc.collect()
    assert not pool._in_use
    assert len(pool._free) == 2


def test_what_is_larger_than_a_slab_gets_memory_of_its_own() -> None:
    pool = slabs(slab_bytes=1000)
    assert len(pool.take(1001)) == 1001
    assert not pool._in_use


def test_a_slab_is_not_used_again_while_zeromq_has_it() -> None:
    pool = slabs(most_kept=1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://slabs")
        other.connect("inproc://slabs")
        view = pool.take(200_000)
        owner = view.obj
        view[:] = b"x" * 200_000
        one.send(view, copy=False)
        del view
        gc.collect()
        waiting = pool.take(200_000)
        assert waiting.obj is not owner
        assert other.recv() == b"x" * 200_000
    context.term()
