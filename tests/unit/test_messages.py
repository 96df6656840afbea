"""The boundary: whatever comes from the network is either a valid message or a ProtocolError."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ProtocolError
from potluck.hub.access.application import Answer, Application
from potluck.hub.presence import Beacon, Card, Presence
from potluck.messages import MAX_MESSAGE_BYTES, Message, decode, encode, kind_name

KINDS = (Beacon, Card, Presence, Application, Answer)


class Tagged(Message, frozen=True, kw_only=True, tag="one"):
    number: int
    text: str = ""


class Other(Message, frozen=True, kw_only=True, tag="other"):
    number: int


def test_what_was_encoded_is_decoded() -> None:
    beacon = Beacon(session="s", epoch=3, samples_per_second=1.5)
    assert decode(Beacon, encode(beacon)) == beacon
    assert decode(Beacon, memoryview(bytearray(encode(beacon)))) == beacon
    assert decode(float, encode(12.5)) == 12.5
    either: Tagged | Other = decode(Tagged | Other, encode(Other(number=1)))  # type: ignore[arg-type]
    assert either == Other(number=1)


def test_messages_cannot_be_changed_and_are_built_by_keyword() -> None:
    beacon = Beacon(session="s")
    with pytest.raises(AttributeError):
        beacon.epoch = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        Beacon("s")  # type: ignore[misc]


def test_the_size_is_looked_at_before_the_bytes() -> None:
    text = "x" * 100
    data = encode(text)
    assert decode(str, data, limit_bytes=len(data)) == text
    with pytest.raises(ProtocolError, match=f"{len(data)} bytes exceeds the limit of {len(data) - 1}"):
        decode(str, data, limit_bytes=len(data) - 1)
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        decode(Beacon, b"\xc1" * (MAX_MESSAGE_BYTES + 1))  # not msgpack at all: it is too large first


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"not msgpack",
        encode({"session": 1}),
        encode({"epoch": 1}),
        encode({"session": "s", "epoch": "many"}),
        encode({"session": "s", "epoch": 2**64 - 1, "leaving": 1}),
        encode([]),
        encode(None),
        encode({"session": "s"})[:-1],
        encode({"session": "s"}) + b"\x00",
        b"\x81\xa7session\xa2\xff\xfe",  # a text that is not UTF-8
        b"\x91" * 2000,  # nested deeper than Python may go
        b"\xdd\xff\xff\xff\xff",  # says that four thousand million entries follow
        b"\x81\xa7session\xdb\xff\xff\xff\xff",
    ],
)
def test_garbage_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a valid Beacon"):
        decode(Beacon, data)


def test_a_rule_of_the_message_itself_is_a_protocol_error() -> None:
    fields = {"role": "trainer", "name": "n" * 10_000}
    with pytest.raises(ProtocolError, match="name has more than"):
        decode(Application, encode(fields))


def test_a_message_of_another_kind_is_refused_by_its_tag() -> None:
    with pytest.raises(ProtocolError, match="not a valid Tagged"):
        decode(Tagged, encode(Other(number=1)))


def test_unknown_fields_are_those_of_a_later_version() -> None:
    assert decode(Beacon, encode({"session": "s", "colour": "blue"})) == Beacon(session="s")


def test_kinds_have_names() -> None:
    assert kind_name(Beacon) == "Beacon"
    assert "Tagged" in kind_name(Tagged | Other)


def decoded_or_refused(kind: type[Message], data: bytes | bytearray) -> bool:
    """Whether it is a message of that kind; any error but ProtocolError fails the test."""
    try:
        message = decode(kind, data)
    except ProtocolError:
        return False
    return isinstance(message, kind)


@given(st.binary(max_size=400), st.sampled_from(KINDS))
def test_no_bytes_do_anything_but_decode_or_be_refused(data: bytes, kind: type[Message]) -> None:
    decoded_or_refused(kind, data)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.sampled_from(KINDS))
def test_no_valid_msgpack_does_anything_but_decode_or_be_refused(value: object, kind: type[Message]) -> None:
    if decoded_or_refused(kind, encode(value)):
        assert isinstance(value, dict)


BEACONS = st.builds(
    Beacon,
    session=st.text(max_size=64),
    epoch=st.integers(0, 2**63),
    samples=st.integers(0, 2**63),
    samples_per_second=st.floats(),
    leaving=st.booleans(),
)


@given(BEACONS)
def test_every_beacon_survives_the_way(beacon: Beacon) -> None:
    again = decode(Beacon, encode(beacon))
    if math.isnan(beacon.samples_per_second):
        assert math.isnan(again.samples_per_second)
        beacon, again = (msgspec.structs.replace(each, samples_per_second=0.0) for each in (beacon, again))
    assert again == beacon


@given(BEACONS, st.data())
def test_a_cut_or_changed_beacon_is_another_beacon_or_refused(beacon: Beacon, data: st.DataObject) -> None:
    encoded = bytearray(encode(beacon))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    decoded_or_refused(Beacon, encoded)
    with pytest.raises(ProtocolError):
        decode(Beacon, encode(beacon)[: data.draw(st.integers(0, len(encoded) - 1))])
