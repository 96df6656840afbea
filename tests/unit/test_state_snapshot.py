"""Snapshots: every tensor comes back bit for bit, equal states have equal digests, chunks are shared and freed."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from potluck.errors import ConfigurationError, ProtocolError
from potluck.state.chunkpool import ChunkPool
from potluck.state.inventory import (
    Inventory,
    Piece,
    TensorSpec,
    cut,
    decode_metadata,
    encode_metadata,
    read_inventory,
)
from potluck.state.snapshot import DTYPES, Snapshot, stage

names = st.text(min_size=0, max_size=12)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
dtypes = st.sampled_from(sorted(DTYPES))


def some_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Arbitrary bits, NaNs and all, except where not every byte is a value."""
    spec = TensorSpec(name=name, dtype=dtype, shape=shape)
    seed = int.from_bytes(hashlib.sha256(repr(spec).encode()).digest()[:4], "big")
    data = torch.randint(0, 256, (spec.num_bytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    if dtype == "bool":
        data %= 2
    if dtype.startswith("complex"):
        real = torch.float32 if dtype == "complex64" else torch.float64
        return torch.view_as_complex(data.view(real).view(*shape, 2))
    return data.view(DTYPES[dtype]).view(shape)


states = st.dictionaries(names, st.tuples(dtypes, shapes), max_size=8).map(
    lambda specs: {name: some_tensor(name, *spec) for name, spec in specs.items()}
)


def bits(tensor: Tensor) -> bytes:
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return bytes(plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def snap(tensors: dict[str, Tensor], pool: ChunkPool, previous: Snapshot | None = None, **metadata: Any) -> Snapshot:
    return stage(tensors, metadata, pool).hashed(previous)


@given(states, st.sampled_from([1, 3, 16, 64, 1024]))
@settings(max_examples=60)
def test_every_bit_comes_back(tensors: dict[str, Tensor], chunk_bytes: int) -> None:
    pool = ChunkPool(chunk_bytes)
    snapshot = snap(tensors, pool)
    made = snapshot.tensors()
    assert {name: (t.dtype, t.shape, bits(t)) for name, t in made.items()} == {
        name: (t.dtype, t.shape, bits(t)) for name, t in tensors.items()
    }
    again = snap(dict(reversed(tensors.items())), pool)
    assert again.digest == snapshot.digest
    assert read_inventory(snapshot.inventory.encoded, snapshot.digest) == snapshot.inventory
    snapshot.release()
    again.release()
    assert pool.statistics()["chunk_bytes_used"] == 0


@given(
    st.lists(st.tuples(dtypes, shapes), max_size=10).map(
        lambda specs: tuple(
            sorted(
                (TensorSpec(name=str(n), dtype=d, shape=s) for n, (d, s) in enumerate(specs)),
                key=lambda spec: spec.order,
            )
        )
    ),
    st.integers(1, 300),
)
def test_pieces_cover_the_space_once(specs: tuple[TensorSpec, ...], chunk_bytes: int) -> None:
    pieces = list(cut(specs, chunk_bytes))
    covered = [byte for p in pieces for byte in range(p.chunk * chunk_bytes + p.chunk_start, _end(p, chunk_bytes))]
    assert covered == list(range(sum(spec.num_bytes for spec in specs)))
    for index, spec in enumerate(specs):
        starts = [(p.tensor_start, p.num_bytes) for p in pieces if p.tensor == index]
        assert sum(length for _, length in starts) == spec.num_bytes


def _end(piece: Piece, chunk_bytes: int) -> int:
    return piece.chunk * chunk_bytes + piece.chunk_start + piece.num_bytes


def test_tensors_are_aligned_to_their_elements() -> None:
    tensors = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(5), "c": torch.zeros(2, dtype=torch.float64)}
    specs = snap(tensors, ChunkPool()).inventory.tensors
    position = 0
    for spec in specs:
        assert position % DTYPES[spec.dtype].itemsize == 0
        position += spec.num_bytes


def test_odd_tensors_are_read_and_written_in_place() -> None:
    pool = ChunkPool(64)
    parameter = torch.nn.Parameter(torch.randn(6, 4).t())
    strided = torch.randn(20)[::2]
    conjugate = torch.randn(7, dtype=torch.complex64).conj()
    tensors: dict[str, Tensor] = {"p": parameter, "s": strided, "c": conjugate, "0": torch.tensor(3.5)}
    wanted = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    snapshot = snap(tensors, pool)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    snapshot.write_into(tensors)
    assert all(torch.equal(tensors[name], wanted[name]) for name in tensors)
    assert parameter.requires_grad


def test_only_the_named_chunks_are_written() -> None:
    pool = ChunkPool(64)
    values = torch.arange(64.0)
    snapshot = snap({"w": values}, pool)
    target = torch.zeros(64)
    snapshot.write_into({"w": target}, {1})
    assert torch.equal(target[16:32], values[16:32])
    assert not target[:16].any()
    assert not target[32:].any()


def test_any_change_changes_the_digest() -> None:
    pool = ChunkPool(64)
    base = {"w": torch.arange(64.0), "n": torch.tensor(1)}
    digest = snap(base, pool, epoch=1).digest
    changed = base["w"].clone()
    changed[63] += 1e-5
    assert snap({**base, "w": changed}, pool, epoch=1).digest != digest
    assert snap(base, pool, epoch=2).digest != digest
    assert snap({**base, "w": base["w"].view(8, 8)}, pool, epoch=1).digest != digest
    assert snap({**base, "w": base["w"].view(torch.int32)}, pool, epoch=1).digest != digest
    assert snap({"v": base["w"], "n": base["n"]}, pool, epoch=1).digest != digest
    assert snap(base, pool, epoch=1).digest == digest


def test_what_is_each_peers_own_is_not_compared() -> None:
    def snapshot(weight: float, mean: float, names: tuple[str, ...] = ("mean",), **metadata: Any) -> Snapshot:
        tensors = {"weight": torch.full((5,), weight), "mean": torch.full((3,), mean)}
        return stage(tensors, metadata, ChunkPool(16), own=names).hashed()

    one = snapshot(1.0, 2.0, epoch=1, own={"steps": 3})
    assert one.common_digest == snapshot(1.0, 4.0, epoch=1, own={"steps": 5}).common_digest != one.digest
    for other in (snapshot(1.5, 2.0, epoch=1), snapshot(1.0, 2.0, epoch=2), snapshot(1.0, 2.0, (), epoch=1)):
        assert other.common_digest != one.common_digest
    assert one.inventory.own_names == {"mean"}
    assert read_inventory(one.inventory.encoded, one.digest) == one.inventory
    whole = snapshot(1.0, 2.0, (), epoch=1)
    assert whole.common_digest == whole.digest


def test_a_digest_is_what_it_was_before_there_were_own_parts() -> None:
    inventory = stage({"weight": torch.ones(5)}, {"epoch": 1}, ChunkPool(16)).hashed().inventory
    assert inventory.encoded == msgspec.msgpack.encode([inventory.tensors, 16, inventory.hashes, inventory.metadata])


def test_chunks_that_did_not_change_are_shared_with_the_epoch_before() -> None:
    pool = ChunkPool(1024)
    frozen, trained = torch.randn(25_600), torch.randn(2_560)
    first = snap({"frozen": frozen, "trained": trained}, pool)
    trained += 1
    second = snap({"frozen": frozen, "trained": trained}, pool, first)
    assert pool.statistics()["chunk_bytes_used"] == (110 + 10) * 1024
    first.release()
    assert pool.statistics()["chunk_bytes_used"] == 110 * 1024
    assert torch.equal(second.tensors()["frozen"], frozen)
    second.release()
    assert pool.statistics()["chunk_bytes_used"] == 0


def test_zeros_are_held_once() -> None:
    pool = ChunkPool(1024)
    snapshot = snap({"exp_avg": torch.zeros(25_600)}, pool)
    assert pool.statistics()["chunk_bytes_used"] == 1024
    assert not snapshot.tensors()["exp_avg"].any()


def test_memory_is_used_again() -> None:
    pool = ChunkPool(1024)
    values = torch.randn(2_560)
    previous = snap({"w": values}, pool)
    for _ in range(5):
        values += 1
        following = snap({"w": values}, pool, previous)
        previous.release()
        previous = following
    statistics = pool.statistics()
    assert statistics["chunk_bytes_used"] + statistics["chunk_bytes_free"] == 20 * 1024
    pool.trim()
    assert pool.statistics()["chunk_bytes_free"] == 0


def test_a_snapshot_that_somebody_holds_stays_as_it_is() -> None:
    pool = ChunkPool(1024)
    values = torch.randn(2_560)
    before = values.clone()
    held = snap({"w": values}, pool)
    held.hold()
    held.release()
    values.zero_()
    for _ in range(3):
        snap({"w": values}, pool).release()
    assert torch.equal(held.tensors()["w"], before)


def test_the_copy_is_done_when_stage_returns_and_hashing_is_for_any_thread() -> None:
    pool = ChunkPool()
    values = torch.randn(1_000_000)
    before = values.clone()
    staged = stage({"w": values}, {}, pool)
    values.zero_()
    made: list[Snapshot] = []
    thread = threading.Thread(target=lambda: made.append(staged.hashed()))
    thread.start()
    thread.join()
    assert torch.equal(made[0].tensors()["w"], before)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(3, device="meta"),
        torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (3,), check_invariants=True),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(tensor: Tensor) -> None:
    with pytest.raises(ConfigurationError, match="embedding"):
        stage({"embedding": tensor}, {}, ChunkPool())


def test_other_tensors_than_the_state_has_are_refused_by_name() -> None:
    snapshot = snap({"w": torch.zeros(3), "v": torch.zeros(3)}, ChunkPool())
    for wrong in ({"w": torch.zeros(3)}, {"w": torch.zeros(4), "v": torch.zeros(3)}):
        with pytest.raises(ConfigurationError, match=r"'[vw]'"):
            snapshot.write_into(wrong)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"epoch": 3, "lr": [0.1, float("inf")], "deep": {"a": None, "b": True, "c": "ü"}},
        {"best": float("-inf"), "seed": -(2**62)},
    ],
)
def test_metadata_comes_back_whatever_its_order(metadata: dict[str, Any]) -> None:
    assert decode_metadata(encode_metadata(metadata)) == metadata
    assert encode_metadata(dict(reversed(metadata.items()))) == encode_metadata(metadata)


@pytest.mark.parametrize(
    "metadata",
    [{1: 2}, {"t": torch.zeros(1)}, {"s": {1, 2}}, {"x": "y" * 70_000}, {"n": 2**70}, {"b": b"bytes"}],
)
def test_metadata_that_is_not_plain_is_refused(metadata: dict[Any, Any]) -> None:
    with pytest.raises(ConfigurationError):
        encode_metadata(metadata)


def good() -> Inventory:
    return snap({"a": torch.arange(100.0), "b": torch.arange(7)}, ChunkPool(64), epoch=1).inventory


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_no_bytes_pass_for_a_inventory(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_inventory(data, hashlib.sha256(data).hexdigest())


@given(st.data())
@settings(max_examples=200)
def test_a_inventory_that_was_tampered_with_is_refused(data: st.DataObject) -> None:
    encoded = bytearray(good().encoded)
    place = data.draw(st.integers(0, len(encoded) - 1))
    encoded[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ProtocolError):
        read_inventory(bytes(encoded), good().digest)
    try:  # and with its own digest it is either refused or consistent
        inventory = read_inventory(bytes(encoded), hashlib.sha256(encoded).hexdigest())
    except ProtocolError:
        return
    assert len(inventory.hashes) == 32 * inventory.num_chunks


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_bytes": 0},
        {"chunk_bytes": 2**30},
        {"hashes": b""},
        {"tensors": (TensorSpec(name="a", dtype="object", shape=(1,)),)},
        {"tensors": (TensorSpec(name="a", dtype="float32", shape=(2**47, 2**47)),)},
        {"tensors": (TensorSpec(name="b", dtype="int8", shape=()), TensorSpec(name="a", dtype="int8", shape=()))},
        {"tensors": (TensorSpec(name="a", dtype="int8", shape=()), TensorSpec(name="a", dtype="int8", shape=()))},
        {"metadata": b"\xc1"},
        {"metadata": b"\x01"},
        {"own": (1, 0)},
        {"own": (0, 0)},
        {"own": (1_000,)},
        {"own": (-1,)},
    ],
)
def test_inventories_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    fields = {name: getattr(good(), name) for name in good().__struct_fields__}
    values = list({**fields, **changes}.values())
    data = msgspec.msgpack.encode(values if values[-1] else values[:-1])
    with pytest.raises(ProtocolError):
        read_inventory(data, hashlib.sha256(data).hexdigest())
