"""The tensor work on one chunk: own values count as decoded ones, and who cannot be used is named."""

from __future__ import annotations

import math

import pytest
import torch

from potluck.errors import NotFiniteError
from potluck.peer.identity import Identity
from potluck.round.aggregators import AggregatorSpec, aggregator_for
from potluck.round.audit.merkle import NOTHING, is_under
from potluck.round.audit.seals import Notary, Sealer, sealed_hash
from potluck.round.codecs import CODEC_NAMES, CodecChoice, CodecSpec
from potluck.round.member.heldaverages import hash_of
from potluck.round.member.lane import Letter
from potluck.round.member.reduction import Own, encode_values, reduce_chunk
from potluck.round.member.tensorwork import SealedWork
from potluck.round.plan.chunks import Chunk, ChunkGrid
from potluck.round.plan.layout import FlatTensors, Layout
from potluck.round.plan.messages import RoundKey
from potluck.round.plan.specs import CodecSpan

MEAN = aggregator_for(AggregatorSpec())
ELEMENTS = 3000
KEY = RoundKey(epoch=1, token=1, attempt=0)


def tensors_of(seed: int, codec: str = "float16") -> FlatTensors:
    return bound({"w": torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed))}, codec)


def spoilt_at(position: int, value: float) -> FlatTensors:
    values = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    values[position] = value
    return bound({"w": values}, "float16")


def bound(values: dict[str, torch.Tensor], codec: str) -> FlatTensors:
    return Layout.of(values, CodecChoice.everything(codec), "gradient").bind(values)


def chunk_of(codec: str) -> Chunk:
    [chunk] = ChunkGrid(runs=[CodecSpan(codec=CodecSpec(name=codec), elements=ELEMENTS)]).chunks
    return chunk


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_the_average_does_not_depend_on_who_reduces(codec: str) -> None:
    chunk = chunk_of(codec)
    tensors = {peer: tensors_of(seed, codec) for seed, peer in enumerate(("a", "b", "c"))}
    frames = {peer: encode_values(chunk, given) for peer, given in tensors.items()}
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    from_frames = reduce_chunk(chunk, MEAN, frames, weights, None)
    assert from_frames.frame is not None
    assert from_frames.frame_hash == hash_of(from_frames.frame)
    for reducer in tensors:
        others = {peer: frame for peer, frame in frames.items() if peer != reducer}
        reduced = reduce_chunk(chunk, MEAN, others, weights, Own(peer=reducer, tensors=tensors[reducer]))
        assert bytes(reduced.frame or b"") == bytes(from_frames.frame)
        assert reduced.frame_hash == from_frames.frame_hash
        assert reduced.refused == {}


def test_weights_count() -> None:
    chunk = chunk_of("float32")
    frames = {peer: encode_values(chunk, tensors_of(seed)) for seed, peer in enumerate(("a", "b"))}
    reduced = reduce_chunk(chunk, MEAN, frames, {"a": 1.0, "b": 3.0}, None)
    found = torch.frombuffer(bytearray(reduced.frame or b""), dtype=torch.float32)
    values = [tensors_of(seed).gather() for seed in range(2)]
    torch.testing.assert_close(found, (values[0] + 3 * values[1]) / 4)


def test_our_own_values_that_are_not_finite_are_left_out_and_named() -> None:
    chunk = chunk_of("float16")
    spoilt = spoilt_at(7, math.nan)
    with pytest.raises(NotFiniteError):
        encode_values(chunk, spoilt)
    frame = encode_values(chunk, tensors_of(1))
    reduced = reduce_chunk(chunk, MEAN, {"b": frame}, {"a": 9.0, "b": 1.0}, Own(peer="a", tensors=spoilt))
    assert reduced.refused.keys() == {"a"}
    assert bytes(reduced.frame or b"") == bytes(frame)


def test_others_values_that_cannot_be_used_are_left_out_and_named() -> None:
    chunk = chunk_of("float16")
    frame = encode_values(chunk, tensors_of(1))
    reduced = reduce_chunk(chunk, MEAN, {"b": frame, "c": bytes(3)}, {"b": 1.0, "c": 1.0}, None)
    assert reduced.refused.keys() == {"c"}
    assert bytes(reduced.frame or b"") == bytes(frame)


def test_where_nobodys_values_can_be_used_everybody_is_named() -> None:
    chunk = chunk_of("float16")
    spoilt = spoilt_at(0, math.inf)
    reduced = reduce_chunk(chunk, MEAN, {"b": bytes(3)}, {"a": 1.0, "b": 1.0}, Own(peer="a", tensors=spoilt))
    assert reduced.frame is None
    assert reduced.refused.keys() == {"a", "b"}


# The same in an audited round


class Sealed:
    """A reducer and two senders, with keys."""

    def __init__(self) -> None:
        self.chunk = chunk_of("float16")
        self.identities = sorted((Identity.temporary() for _ in range(3)), key=lambda identity: identity.peer_id)
        self.notary = Notary("kitchen", KEY)
        self.works = [SealedWork(Sealer(i, "kitchen", KEY), self.notary) for i in self.identities]
        self.tensors = [tensors_of(seed) for seed in range(3)]
        self.peers = [i.peer_id for i in self.identities]
        self.frames = {self.peers[i]: self.works[i].encode(self.chunk, self.tensors[i]) for i in (1, 2)}
        self.weights = dict.fromkeys(self.peers, 1.0)

    def seal(self, member: int) -> bytes:
        return self.works[member].seal_of(Letter(0, 0, b"", is_average=False))


def test_sealed_work_reaches_the_same_bits_and_keeps_what_an_audit_asks_for() -> None:
    there = Sealed()
    work = there.works[0]
    for member in (1, 2):
        work.received(0, there.peers[member], there.seal(member))
    own = Own(peer=there.peers[0], tensors=there.tensors[0])
    reduced = work.reduce(there.chunk, 4, MEAN, there.frames, there.weights, own)
    plain = reduce_chunk(there.chunk, MEAN, there.frames, there.weights, own)
    assert reduced.frame is not None
    assert plain.frame is not None
    assert bytes(reduced.frame) == bytes(plain.frame)
    assert reduced.frame_hash == sealed_hash(reduced.frame)
    assert work.inputs[0, 4].keys() == set(there.peers)
    for peer, given in work.inputs[0, 4].items():
        assert there.notary.is_contribution(peer, 0, given.frame_hash, given.seal)
    seal = work.seal_of(Letter(0, 4, reduced.frame, is_average=True))
    receiver = there.works[1]
    assert receiver.check(there.chunk, 4, there.peers[0], reduced.frame, seal) == reduced.frame_hash
    root = bytes.fromhex(work.commit(1))
    assert is_under(root, 1, 0, sealed_hash(encode_values(there.chunk, there.tensors[0])), ())
    assert bytes.fromhex(work.commit(2)) != root
    assert work.committed[1] == NOTHING


def test_frames_without_a_good_seal_are_left_out_and_named() -> None:
    there = Sealed()
    work = there.works[0]
    work.received(0, there.peers[1], there.seal(2))  # somebody else's
    work.received(0, there.peers[2], there.seal(2))
    reduced = work.reduce(there.chunk, 0, MEAN, there.frames, there.weights, None)
    assert reduced.refused.keys() == {there.peers[1]}
    assert bytes(reduced.frame or b"") == bytes(there.frames[there.peers[2]])
    nobody = there.works[1].reduce(
        there.chunk, 0, MEAN, {there.peers[2]: there.frames[there.peers[2]]}, there.weights, None
    )
    assert nobody.frame is None
    assert nobody.refused.keys() == {there.peers[2]}
