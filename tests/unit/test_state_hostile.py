"""Joiners and keepers that do not keep to the rules: they gain nothing, and nobody is harmed."""

from __future__ import annotations

import asyncio
import hashlib
import zlib

import pytest
from statelab import MIB, Keeping, StateLab, model, same, state_lab

from potluck.errors import PeerError, RetryableError, StateUnavailableError
from potluck.link.links import Incoming, Stream
from potluck.sim.virtualloop import in_virtual_time
from potluck.state.serving import NUMBER, PACKED, AskInventory, FetchChunks, InventoryAnswer

TIMEOUT_SECONDS = 120.0


async def kept(lab: StateLab, megabytes: int = 8) -> tuple[Keeping, str]:
    keeper = await lab.join("keeper")
    lab.commit(1, keeper)
    return keeper, await keeper.publish(model(1, megabytes), 1)


@pytest.mark.parametrize(
    "ask",
    [
        [b""] * 2,
        [b"\0"],
        [b"\xff" * 4],
        [NUMBER.pack(9)],
        [NUMBER.pack(0) * 17],
        [NUMBER.pack(0), b"unpacked"],
        [NUMBER.pack(0), PACKED, PACKED],
        [PACKED],
        [],
    ],
)
@in_virtual_time
async def test_a_joiner_that_asks_nonsense_is_sent_away(ask: list[bytes]) -> None:
    async with state_lab() as lab:
        keeper, digest = await kept(lab)
        rude = await lab.join("rude")
        stream = await rude.peer.links.open_stream(keeper.id, FetchChunks(digest=digest), timeout_seconds=5)
        await stream.send(ask, timeout_seconds=5)
        with pytest.raises(PeerError, match="asks"):
            await stream.receive(timeout_seconds=5)
        assert keeper.served == 0


@in_virtual_time
async def test_a_state_that_is_not_kept_is_not_served() -> None:
    async with state_lab() as lab:
        keeper, _ = await kept(lab)
        asker = await lab.join("asker")
        with pytest.raises(RetryableError, match="not kept here"):
            await asker.peer.links.request(
                keeper.id, AskInventory(digest="0" * 64), reply=InventoryAnswer, timeout_seconds=5
            )
        stream = await asker.peer.links.open_stream(keeper.id, FetchChunks(digest="0" * 64), timeout_seconds=5)
        with pytest.raises(PeerError, match="not kept here"):
            await stream.receive(timeout_seconds=5)


@in_virtual_time
async def test_who_does_not_read_holds_up_nobody_else_and_costs_little() -> None:
    async with state_lab() as lab:
        keeper, digest = await kept(lab, 32)
        idle, joiner = await lab.join("idle"), await lab.join("joiner")
        stream = await idle.peer.links.open_stream(keeper.id, FetchChunks(digest=digest), timeout_seconds=5)
        for start in (0, 16):
            asks = b"".join(NUMBER.pack(number) for number in range(start, start + 16))
            await stream.send([asks], timeout_seconds=5)
        await asyncio.sleep(5.0)
        assert keeper.served <= 8, "a stream's credit"
        with await joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) as fetched:
            assert same(fetched.tensors(), model(1, 32))
        await asyncio.sleep(120.0)
        assert keeper.keeper._serving._services == [], "it was given up in the end"


@in_virtual_time
async def test_one_peer_cannot_take_all_places() -> None:
    async with state_lab() as lab:
        keeper, digest = await kept(lab)
        greedy = await lab.join("greedy")
        streams = [
            await greedy.peer.links.open_stream(keeper.id, FetchChunks(digest=digest), timeout_seconds=5)
            for _ in range(5)
        ]
        await asyncio.sleep(1.0)
        assert len(keeper.keeper._serving._services) == 2
        for stream in streams:
            await stream.cancel("enough")


@in_virtual_time
async def test_many_epochs_in_use_do_not_fill_the_memory() -> None:
    async with state_lab(num_kept=1) as lab:
        keeper = await lab.join("keeper")
        joiners = [await lab.join(f"j{number}", keep="never") for number in range(7)]
        streams = []
        for epoch, joiner in enumerate(joiners, start=1):
            lab.commit(epoch, keeper)
            digest = await keeper.publish(model(epoch, 4), epoch)
            links = joiner.peer.links
            streams.append(await links.open_stream(keeper.id, FetchChunks(digest=digest), timeout_seconds=5))
            await asyncio.sleep(1.0)
        used = int(keeper.keeper.statistics()["chunk_bytes_used"])
        assert used <= (4 + 1) * 5 * MIB, "four that are being served, and the newest"
        with pytest.raises(PeerError, match="too old"):
            await streams[0].receive(timeout_seconds=5)
        for stream in streams:
            await stream.cancel("enough")


def bomb(num_bytes: int) -> bytes:
    """A packed chunk of that size, each plane of which would become 64 MiB."""
    deflating = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    plane = b"".join(deflating.compress(bytes(MIB)) for _ in range(64)) + deflating.flush()
    assert len(plane) < num_bytes // 4
    return b"\x04" + len(plane).to_bytes(4, "big") * 4 + plane * 4


class FalseKeeper:
    """Serves, under a good digest, whatever the test wants."""

    def __init__(self, keeping: Keeping, chunks: list[list[bytes]]) -> None:
        self._chunks = chunks
        keeping.peer.links.unhandle(FetchChunks)
        keeping.peer.links.handle_stream(FetchChunks, self._serve)

    async def _serve(self, stream: Stream) -> None:
        await stream.receive(timeout_seconds=5)
        for frames in self._chunks:
            await stream.send(frames, timeout_seconds=5)
        await asyncio.sleep(3600.0)


@pytest.mark.parametrize(
    "chunks",
    [
        [[b""]],
        [[NUMBER.pack(0)]],
        [[NUMBER.pack(0), b"x"]],
        [[NUMBER.pack(7), b"x" * MIB]],
        [[NUMBER.pack(2**32 - 1), b"x"]],
        [[b"\0" * 9, b"x", b"y"]],
        [[NUMBER.pack(0), b"x", b"y"]],
        [[NUMBER.pack(0), b"", PACKED]],
        [[NUMBER.pack(0), b"\x04" + bytes(16) + b"x", PACKED]],
        [[NUMBER.pack(0), bomb(MIB), PACKED]],
    ],
)
@in_virtual_time
async def test_a_keeper_that_sends_nonsense_is_named_and_left(chunks: list[list[bytes]]) -> None:
    async with state_lab() as lab:
        good, _ = await kept(lab)
        bad = await lab.join("bad")
        await bad.publish(model(1), 1)
        FalseKeeper(bad, chunks)
        joiner = await lab.join("joiner")
        await asyncio.sleep(6.0)
        with await joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) as fetched:
            assert same(fetched.tensors(), model(1))
            assert set(fetched.report.liars) == {bad.id}
            assert set(fetched.report.given) == {good.id, bad.id}


@in_virtual_time
async def test_a_vouched_digest_of_something_that_is_no_inventory_does_no_harm() -> None:
    async with state_lab() as lab:
        liar, joiner = await lab.join("liar"), await lab.join("joiner")
        lab.commit(1, liar)
        await liar.publish(model(1), 1)
        held = liar.keeper.shelf.get(1)
        assert held is not None
        nonsense = b"\x00" * 100
        held.snapshot.inventory.__dict__["encoded"] = nonsense
        held.snapshot.inventory.__dict__["digest"] = hashlib.sha256(nonsense).hexdigest()
        liar.keeper.directory.announce()
        await asyncio.sleep(6.0)
        with pytest.raises(StateUnavailableError):
            await joiner.keeper.fetch(timeout_seconds=30.0)


@in_virtual_time
async def test_what_is_not_an_answer_is_not_taken_for_one() -> None:
    async with state_lab() as lab:
        liar, joiner = await lab.join("liar"), await lab.join("joiner")
        lab.commit(1, liar)
        await liar.publish(model(1), 1)

        def answer(_: Incoming[AskInventory]) -> tuple[InventoryAnswer, list[bytes]]:
            return InventoryAnswer(), [b"a", b"b"]

        liar.peer.links.unhandle(AskInventory)
        liar.peer.links.handle(AskInventory, answer)
        with pytest.raises(StateUnavailableError):
            await joiner.keeper.fetch(timeout_seconds=30.0)
