"""The Noise handshake: published vectors, and what must not work."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.errors import ProtocolError
from potluck.link.direct.noise import MESSAGE_BYTES, Cipher, Handshake

# The vectors of the cacophony project for Noise_KK_25519_AESGCM_SHA256, which other implementations are tested with.
PROLOGUE = bytes.fromhex("4a6f686e2047616c74")
STATIC = (
    "e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1",
    "4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893",
)
EPHEMERAL = (
    "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a",
    "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b",
)
HASH = "c03693acd830588fac76dd414c9e100e8c601d27511de855100239f7705fa3f2"
EXCHANGE = (  # what is said, and the message that says it
    (
        b"Ludwig von Mises",
        "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
        "8564738a841228e693caeec4c497a8bd562231c3e51a1f03c4fd45dfe3a67870",
    ),
    (
        b"Murray Rothbard",
        "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
        "b94504c4d83506f5dd2568b68490eba8ed6f9cf2cca194a273c56d7ae3c558",
    ),
    (b"F. A. Hayek", "6a5c10a201d4e3a08f79f64949e55731f774913a4d949bda3fcebf"),
    (b"Carl Menger", "4e8a1bf06926fdd74e2f516e2b0c11cc1dc3387fadeb75389d4342"),
    (b"Jean-Baptiste Say", "c1df7194ca8ea51d4dd99059bc9b90288112d47237d8481f1773fb26a31629a05c"),
    (b"Eugen B\xf6hm von Bawerk", "3edba4feaf590ee88dd8f5fba51db4bee651cf41afd410fe476c524ac9b1db24252fc55ff8"),
)


def private(text: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(text))


def public(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def pair(prologues: tuple[bytes, bytes] = (b"", b"")) -> tuple[Handshake, Handshake]:
    ours, theirs = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    return (
        Handshake(dials=True, static=ours, remote=public(theirs), prologue=prologues[0]),
        Handshake(dials=False, static=theirs, remote=public(ours), prologue=prologues[1]),
    )


def test_the_published_vectors() -> None:
    statics = [private(text) for text in STATIC]
    dialler, listener = (
        Handshake(
            dials=number == 0,
            static=statics[number],
            remote=public(statics[1 - number]),
            prologue=PROLOGUE,
            ephemeral=private(EPHEMERAL[number]),
        )
        for number in (0, 1)
    )
    for (payload, message), writer, reader in zip(EXCHANGE, (dialler, listener), (listener, dialler), strict=False):
        assert writer.write(payload).hex() == message
        assert reader.read(bytes.fromhex(message)) == payload
    assert dialler.hash.hex() == listener.hash.hex() == HASH
    (dials_out, dials_in), (listens_out, listens_in) = dialler.split(), listener.split()
    for number, (payload, message) in enumerate(EXCHANGE[2:]):
        sealing, opening = (dials_out, listens_in) if number % 2 == 0 else (listens_out, dials_in)
        assert sealing.seal(payload).hex() == message
        assert opening.open(bytes.fromhex(message)) == payload


def test_no_two_handshakes_have_the_same_keys() -> None:
    ours, theirs = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    sealed = set()
    for _ in range(3):
        dialler = Handshake(dials=True, static=ours, remote=public(theirs), prologue=b"")
        listener = Handshake(dials=False, static=theirs, remote=public(ours), prologue=b"")
        listener.read(dialler.write())
        dialler.read(listener.write())
        out, back = dialler.split()
        sealed |= {out.seal(b"x"), back.seal(b"x")}
    assert len(sealed) == 6


@settings(max_examples=100)
@given(st.integers(0, 2 * MESSAGE_BYTES - 1), st.integers(1, 255))
def test_a_changed_byte_anywhere_is_refused(position: int, change: int) -> None:
    dialler, listener = pair()

    def changed(message: bytes, at: int) -> bytes:
        return message[:at] + bytes([message[at] ^ change]) + message[at + 1 :]

    first = dialler.write()
    if position < MESSAGE_BYTES:
        # The highest bit of a Curve25519 point means nothing, and is hashed nevertheless.
        with pytest.raises(ProtocolError):
            listener.read(changed(first, position))
        return
    listener.read(first)
    with pytest.raises(ProtocolError):
        dialler.read(changed(listener.write(), position - MESSAGE_BYTES))


@pytest.mark.parametrize("who", ["dialler", "listener"])
def test_another_static_key_proves_nothing(who: str) -> None:
    ours, theirs, other = (X25519PrivateKey.generate() for _ in range(3))
    dialler = Handshake(dials=True, static=other if who == "dialler" else ours, remote=public(theirs), prologue=b"")
    listener = Handshake(dials=False, static=other if who == "listener" else theirs, remote=public(ours), prologue=b"")
    with pytest.raises(ProtocolError):
        listener.read(dialler.write())


def test_a_listener_that_only_knows_public_keys_cannot_answer() -> None:
    ours, theirs, other = (X25519PrivateKey.generate() for _ in range(3))
    dialler = Handshake(dials=True, static=ours, remote=public(theirs), prologue=b"")
    dialler.write()
    mallory = Handshake(dials=False, static=other, remote=public(ours), prologue=b"")
    mallory.read(Handshake(dials=True, static=ours, remote=public(other), prologue=b"").write())
    with pytest.raises(ProtocolError):
        dialler.read(mallory.write())


def test_who_repeats_a_first_message_cannot_go_on() -> None:
    ours, theirs = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    dialler = Handshake(dials=True, static=ours, remote=public(theirs), prologue=b"")
    first = dialler.write()
    listeners = [Handshake(dials=False, static=theirs, remote=public(ours), prologue=b"") for _ in range(2)]
    for listener in listeners:
        listener.read(first)  # by itself the message looks as good as new
    dialler.read(listeners[0].write())
    listeners[1].write()
    sealed = dialler.split()[0].seal(b"ready")
    assert listeners[0].split()[1].open(sealed) == b"ready"
    with pytest.raises(ProtocolError):
        listeners[1].split()[1].open(sealed)


def test_both_must_mean_the_same() -> None:
    dialler, listener = pair((b"version 1", b"version 2"))
    with pytest.raises(ProtocolError):
        listener.read(dialler.write())


@pytest.mark.parametrize("size", [0, 1, 31, 32, 47])
def test_what_is_cut_off_is_refused(size: int) -> None:
    dialler, listener = pair()
    with pytest.raises(ProtocolError):
        listener.read(dialler.write()[:size])


def test_a_point_of_small_order_is_refused() -> None:
    _, listener = pair()
    with pytest.raises(ProtocolError, match="no secret"):
        listener.read(bytes(MESSAGE_BYTES))


def test_messages_open_once_in_order_and_unchanged() -> None:
    key = bytes(range(32))
    sealing = Cipher(key)
    messages = [sealing.seal(bytes([number])) for number in range(4)]
    assert len(set(messages)) == 4
    opening = Cipher(key)
    assert opening.open(messages[0]) == b"\0"
    for wrong in (messages[0], messages[2], b"", messages[1][:-1], messages[1] + b"\0"):
        opening.number = 1
        with pytest.raises(ProtocolError):
            opening.open(wrong)
    opening.number = 1
    with pytest.raises(ProtocolError):
        opening.open(messages[1], b"said to be something else")
