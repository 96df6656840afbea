"""States fetched from keepers that are killed, slow, frozen or lying; in memory and in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from msgspec import structs
from roundlab import at_point
from statelab import MIB, Keeping, model, same, state_lab

from potluck.errors import ConfigurationError, StateUnavailableError
from potluck.hub.presence import Role
from potluck.messages import encode
from potluck.sim.memorycarrier import Conditions
from potluck.sim.virtualloop import in_virtual_time
from potluck.state.announcement import Kept, KeptState
from potluck.state.fetcher import FetchConfig
from potluck.state.serving import ServingConfig
from potluck.state.source import Packing

TIMEOUT_SECONDS = 120.0


@in_virtual_time
async def test_a_joiner_gets_the_state_from_all_keepers_at_once() -> None:
    async with state_lab() as lab:
        keepers = [await lab.join(f"k{number}") for number in range(3)]
        joiner = await lab.join("joiner")
        lab.commit(5, *keepers)
        for keeper in keepers:
            await keeper.publish(model(5), 5)
        seen: list[tuple[int, int]] = []
        with await joiner.keeper.fetch(
            progress=lambda done, total: seen.append((done, total)), timeout_seconds=TIMEOUT_SECONDS
        ) as fetched:
            assert same(fetched.tensors(), model(5))
            assert (fetched.epoch, fetched.made_at, fetched.metadata) == (5, 5, {"epoch": 5})
            assert set(fetched.report.given) == {keeper.id for keeper in keepers}
            assert all(number > 0 for number in fetched.report.given.values())
            assert sum(fetched.report.given.values()) == 9
            assert seen[0][0] == 0
            assert seen[-1][0] == seen[-1][1] == fetched.snapshot.inventory.num_bytes
            assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@in_virtual_time
async def test_a_joiner_keeps_what_it_has_fetched_and_serves_it() -> None:
    async with state_lab() as lab:
        keeper = await lab.join("k")
        first = await lab.join("first")
        lab.commit(1, keeper)
        await keeper.publish(model(1), 1)
        (await first.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS)).release()
        await asyncio.sleep(1.0)
        await lab.kill(keeper)
        second = await lab.join("second")
        with await second.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) as fetched:
            assert same(fetched.tensors(), model(1))
            assert fetched.report.given == {first.id: 9}


@in_virtual_time
async def test_faster_keepers_give_more() -> None:
    async with state_lab() as lab:
        fast, slow = [await lab.join(name) for name in ("fast", "slow")]
        joiner = await lab.join("joiner")
        lab.run.network.set_conditions(
            Conditions(bytes_per_second=20 * MIB), kind="direct", sender=fast.id, receiver=joiner.id
        )
        lab.run.network.set_conditions(
            Conditions(bytes_per_second=2 * MIB), kind="direct", sender=slow.id, receiver=joiner.id
        )
        lab.commit(1, fast, slow)
        for keeper in (fast, slow):
            await keeper.publish(model(1, 32), 1)
        started = asyncio.get_running_loop().time()
        with await joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) as fetched:
            assert same(fetched.tensors(), model(1, 32))
            assert fetched.report.given[fast.id] > 4 * fetched.report.given[slow.id] > 0
        assert asyncio.get_running_loop().time() - started < 3.0  # the slow one alone would need 16 s


@in_virtual_time
async def test_a_keeper_that_is_killed_half_way_costs_nothing_but_its_share() -> None:
    async with state_lab() as lab:
        first, second = [await lab.join(name) for name in ("first", "second")]
        joiner = await lab.join("joiner")
        lab.commit(1, first, second)
        for keeper in (first, second):
            await keeper.publish(model(1, 32), 1)
        killing: list[asyncio.Task[None]] = []
        with (
            at_point(
                "state.chunk_arrived", lambda: killing.append(asyncio.create_task(lab.kill(first))), missing=17
            ) as reached,
            await joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) as fetched,
        ):
            assert same(fetched.tensors(), model(1, 32))
            assert sum(fetched.report.given.values()) == 33
            assert fetched.report.liars == {}
        assert reached
        await killing[0]


@in_virtual_time
async def test_the_fetch_goes_on_when_the_only_keeper_comes_back() -> None:
    async with state_lab() as lab:
        keeper = await lab.join("keeper")
        joiner = await lab.join("joiner")
        lab.commit(1, keeper)
        await keeper.publish(model(1, 32), 1)
        killing: list[asyncio.Task[None]] = []
        with at_point("state.chunk_arrived", lambda: killing.append(asyncio.create_task(lab.kill(keeper))), missing=17):
            fetching = asyncio.create_task(joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS))
            await asyncio.sleep(30.0)
            await killing[0]
            assert not fetching.done()
            again = await lab.join("keeper", identity=keeper.peer.identity)
            await again.publish(model(1, 32), 1)
            with await fetching as fetched:
                assert same(fetched.tensors(), model(1, 32))
                assert fetched.report.fetched_bytes == fetched.snapshot.inventory.num_bytes
            assert again.served <= 17


@in_virtual_time
async def test_a_frozen_keeper_does_not_hold_up_the_end() -> None:
    async with state_lab() as lab:
        frozen, good = [await lab.join(name) for name in ("frozen", "good")]
        joiner = await lab.join("joiner")
        lab.commit(1, frozen, good)
        for keeper in (frozen, good):
            await keeper.publish(model(1, 32), 1)
        silent = Conditions(is_silent=True)
        with at_point(
            "state.chunk_arrived",
            lambda: lab.run.network.set_conditions(silent, kind="direct", sender=frozen.id, receiver=joiner.id),
            missing=20,
        ) as reached:
            started = asyncio.get_running_loop().time()
            with await joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) as fetched:
                assert same(fetched.tensors(), model(1, 32))
            assert asyncio.get_running_loop().time() - started < 10.0
        assert reached


@in_virtual_time
async def test_a_lying_keeper_is_dropped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    async with state_lab() as lab:
        liar, honest = [await lab.join(name) for name in ("liar", "honest")]
        joiner = await lab.join("joiner")
        lab.commit(1, liar, honest)
        for keeper in (liar, honest):
            await keeper.publish(model(1, 16), 1)
        held = liar.keeper.shelf.get(1)
        assert held is not None
        for chunk in held.snapshot.by_hash().values():
            chunk.data[7] ^= 1
        with await joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) as fetched:
            assert same(fetched.tensors(), model(1, 16))
            assert set(fetched.report.liars) == {liar.id}
            assert fetched.report.given[liar.id] == 0
        assert liar.id in caplog.text


@in_virtual_time
async def test_a_wrong_inventory_is_refused() -> None:
    async with state_lab() as lab:
        liar, honest = [await lab.join(name) for name in ("liar", "honest")]
        joiner = await lab.join("joiner")
        lab.commit(1, liar, honest)
        for keeper in (liar, honest):
            await keeper.publish(model(1), 1)
        held = liar.keeper.shelf.get(1)
        assert held is not None
        held.snapshot.inventory.__dict__["encoded"] = held.snapshot.inventory.encoded[:-1] + b"\x00"
        claims = {"liar": liar.id, "honest": honest.id}
        with await joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) as fetched:
            assert same(fetched.tensors(), model(1))
            asked_first = min(claims.values())
            assert set(fetched.report.liars) == ({liar.id} if asked_first == liar.id else set())


@in_virtual_time
async def test_when_all_lie_the_fetch_fails_and_says_who() -> None:
    async with state_lab() as lab:
        liar = await lab.join("liar")
        joiner = await lab.join("joiner")
        lab.commit(1, liar)
        await liar.publish(model(1), 1)
        held = liar.keeper.shelf.get(1)
        assert held is not None
        for chunk in held.snapshot.by_hash().values():
            chunk.data[0] ^= 1
        with pytest.raises(StateUnavailableError):
            await joiner.keeper.fetch(timeout_seconds=20.0)
        assert joiner.keeper.statistics()["chunk_bytes_used"] == 0


@in_virtual_time
async def test_strangers_need_a_majority_and_a_lie_told_first_is_not_believed() -> None:
    async with state_lab() as lab:
        peers = [await lab.join(f"s{number}", coordinates=False) for number in range(3)]
        liar, *honest = peers
        joiner = await lab.join("joiner", coordinates=False)
        lab.commit(1, *peers)
        for peer in peers:
            await peer.publish(model(1), 1)
        lab.commit(2, *peers)
        await liar.publish(model(666), 2)
        fetching = asyncio.create_task(joiner.keeper.fetch(epoch=2, timeout_seconds=TIMEOUT_SECONDS))
        await asyncio.sleep(20.0)
        assert not fetching.done()
        for peer in honest:
            await peer.publish(model(2), 2)
        with await fetching as fetched:
            assert same(fetched.tensors(), model(2))
        assert liar.keeper.deviation is not None


@in_virtual_time
async def test_an_epoch_that_nobody_committed_is_not_believed() -> None:
    async with state_lab() as lab:
        keeper, liar = await lab.join("keeper"), await lab.join("liar", coordinates=False)
        joiner = await lab.join("joiner")
        lab.commit(3, keeper)
        await keeper.publish(model(3), 3)
        await liar.publish(model(9), 1000)
        with await joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) as fetched:
            assert fetched.epoch == 3
            assert same(fetched.tensors(), model(3))


@in_virtual_time
async def test_only_what_has_changed_is_fetched() -> None:
    async with state_lab() as lab:
        keeper = await lab.join("keeper")
        returning = await lab.join("returning")
        lab.commit(1, keeper)
        tensors = model(1, 32)
        await keeper.publish(tensors, 1)
        (await returning.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS)).release()
        tensors["weight"][0] += 1
        tensors["weight"][-1] += 1
        lab.commit(2, keeper)
        await keeper.publish(tensors, 2)
        with await returning.keeper.fetch(epoch=2, timeout_seconds=TIMEOUT_SECONDS) as fetched:
            assert same(fetched.tensors(), tensors)
            assert fetched.report.fetched_bytes <= 2 * MIB
            assert fetched.report.reused_bytes >= 30 * MIB


@in_virtual_time
async def test_a_deviating_peer_repairs_just_the_chunks_that_differ() -> None:
    async with state_lab() as lab:
        peers = [await lab.join(f"p{number}") for number in range(3)]
        lab.commit(1, *peers)
        states = [model(1, 16) for _ in peers]
        states[2]["weight"][12345] += 1e-7
        for peer, state in zip(peers, states, strict=True):
            await peer.publish(state, 1)
        assert [peer.keeper.deviation is not None for peer in peers] == [False, False, True]
        mine = states[2]
        before = mine["weight"].data_ptr()
        with await peers[2].keeper.fetch(epoch=1, base=mine, timeout_seconds=TIMEOUT_SECONDS) as fetched:
            assert fetched.report.fetched_bytes == MIB
            assert fetched.changed is not None
            assert len(fetched.changed) == 1
            fetched.write_into(mine)
        assert same(mine, states[0])
        assert mine["weight"].data_ptr() == before
        assert peers[2].keeper.deviation is None


@in_virtual_time
async def test_a_repair_takes_what_most_hold_even_if_a_deviant_spoke_first() -> None:
    async with state_lab() as lab:
        peers = [await lab.join(f"p{number}") for number in range(3)]
        states = [model(1, 4) for _ in peers]
        for peer in peers:
            await peer.publish(model(0, 4), 0)
        lab.commit(1, *peers)
        states[2]["weight"][5] += 1
        await peers[2].publish(states[2], 1)
        await peers[1].publish(states[1], 1)
        assert [peer.keeper.deviation for peer in peers] == [None] * 3, "the third has yet to speak"
        await peers[0].publish(states[0], 1)
        assert [peer.keeper.deviation is not None for peer in peers] == [False, False, True]
        assert await peers[0].keeper.repair(states[0], epoch=1, timeout_seconds=TIMEOUT_SECONDS) is None
        repaired = await peers[2].keeper.repair(states[2], epoch=1, timeout_seconds=TIMEOUT_SECONDS)
        assert repaired is not None
        with repaired:
            assert same(repaired.tensors(), states[0])
            assert repaired.report.fetched_bytes == MIB
        assert peers[2].keeper.deviation is None
        assert peers[2].keeper.statistics()["repaired"] == 1


@in_virtual_time
async def test_a_deviation_is_found_though_epochs_pass_faster_than_words() -> None:
    async with state_lab() as lab:
        peers = [await lab.join(f"p{number}") for number in range(3)]
        for epoch in range(6):
            lab.commit(epoch, *peers)
            for number, peer in enumerate(peers):
                state = model(epoch, 1)
                if number == 2 and epoch >= 2:
                    state["weight"][0] += 1
                await asyncio.wrap_future(peer.keeper.publish(state, {"epoch": epoch}, epoch))
        await asyncio.sleep(1.0)
        deviations = [peer.keeper.deviation for peer in peers]
        assert [deviation is not None for deviation in deviations] == [False, False, True]


@in_virtual_time
async def test_states_that_are_each_peers_own_are_not_compared() -> None:
    async with state_lab() as lab:
        peers = [await lab.join(f"p{number}") for number in range(2)]
        for number, peer in enumerate(peers):
            tensors = model(number, 1)
            await asyncio.wrap_future(peer.keeper.publish(tensors, {"own": number}, 0, own=tensors))
        await asyncio.sleep(1.0)
        assert [peer.keeper.deviation for peer in peers] == [None, None]


async def publish_with_own(keeping: Keeping, number: int, *, epoch: int = 1, weight: float = 0.0) -> None:
    """A state that is the same for all but for one tensor, a number, and what is added to a weight."""
    tensors = {**model(epoch, 1), "mean": torch.full((3,), float(number))}
    tensors["weight"][0] += weight
    published = keeping.keeper.publish(tensors, {"epoch": epoch, "own": {"steps": number}}, epoch, own=["mean"])
    await asyncio.wrap_future(published)


@in_virtual_time
async def test_strangers_agree_on_what_they_hold_alike_and_each_gives_its_own_part() -> None:
    async with state_lab() as lab:
        keepers = [await lab.join(f"p{number}", coordinates=False) for number in range(3)]
        joiner = await lab.join("joiner", coordinates=False)
        lab.commit(1, *keepers)
        for number, keeper in enumerate(keepers):
            await publish_with_own(keeper, number)
        with await joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) as fetched:
            tensors = fetched.tensors()
            number = int(tensors.pop("mean")[0])
            assert same(tensors, model(1, 1))
            assert fetched.metadata == {"epoch": 1, "own": {"steps": number}}
            assert fetched.snapshot.inventory.own_names == {"mean"}
            assert list(fetched.report.given) == [keepers[number].id]
        assert [keeping.keeper.deviation for keeping in lab.there] == [None] * 4


@in_virtual_time
async def test_the_common_part_is_compared_and_repaired_where_another_part_is_each_peers_own() -> None:
    async with state_lab() as lab:
        peers = [await lab.join(f"p{number}", coordinates=False) for number in range(3)]
        lab.commit(1, *peers)
        for number, peer in enumerate(peers):
            await publish_with_own(peer, number, weight=0.5 if number == 1 else 0.0)
        await asyncio.sleep(1.0)
        assert [peer.keeper.deviation is not None for peer in peers] == [False, True, False]
        repaired = await peers[1].keeper.repair(
            {**model(1, 1), "mean": torch.ones(3)}, epoch=1, timeout_seconds=TIMEOUT_SECONDS
        )
        assert repaired is not None
        with repaired:
            assert torch.equal(repaired.tensors()["weight"], model(1, 1)["weight"])
        assert peers[1].keeper.deviation is None


@pytest.mark.parametrize("lie", ["another state", "nothing"])
@in_virtual_time
async def test_who_announces_a_common_part_that_it_does_not_have_is_asked_last(lie: str) -> None:
    async with state_lab() as lab:
        peers = [await lab.join(f"p{number}", coordinates=False) for number in range(4)]
        *keepers, joiner = sorted(peers, key=lambda keeping: keeping.id)
        liar = keepers[0]  # the first by id, whom all would ask
        lab.commit(1, *keepers)
        for number, keeper in enumerate(keepers):
            await publish_with_own(keeper, number, weight=5.0 if keeper is liar else 0.0)
        await asyncio.sleep(1.0)
        true = keepers[1].keeper.shelf.newest().announced()  # type: ignore[union-attr]
        said = liar.keeper.shelf.newest().announced()  # type: ignore[union-attr]
        digest = said.digest if lie == "another state" else "0" * 64
        lies = Kept(session=liar.peer.session.card.session, states=(structs.replace(true, digest=digest),))
        liar.keeper.directory._kept = lambda: lies  # type: ignore[method-assign]
        liar.keeper.directory._speak.set()
        await asyncio.sleep(1.0)
        verdict = joiner.keeper.directory.verdict(1)
        assert verdict is not None
        assert (verdict.digest, set(verdict.keepers)) == (digest, {keeper.id for keeper in keepers})
        with await joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) as fetched:
            assert torch.equal(fetched.tensors()["weight"], model(1, 1)["weight"])
        assert joiner.keeper.directory._failures.keys() == {liar.id}


@in_virtual_time
async def test_a_joiner_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    async with state_lab() as lab:
        keeper = await lab.join("keeper")
        joiner = await lab.join("joiner", folder=tmp_path)
        lab.commit(1, keeper)
        await keeper.publish(model(1, 32), 1)
        dying: list[asyncio.Task[None]] = []
        with at_point("state.chunk_arrived", lambda: dying.append(asyncio.create_task(lab.kill(joiner))), missing=13):
            fetching = asyncio.create_task(joiner.keeper.fetch(timeout_seconds=5.0))
            with pytest.raises(StateUnavailableError):
                await fetching
            await dying[0]
        file = tmp_path / "fetching.chunks"
        with file.open("r+b") as torn:
            torn.truncate(file.stat().st_size - 1000)
        again = await lab.join("joiner", identity=joiner.peer.identity, folder=tmp_path)
        with await again.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) as fetched:
            assert same(fetched.tensors(), model(1, 32))
            assert 13 <= fetched.report.fetched_bytes // MIB <= 15
        assert not file.exists()


@in_virtual_time
async def test_a_state_that_is_replaced_meanwhile_is_still_served_to_the_end() -> None:
    async with state_lab(num_kept=1) as lab:
        keeper = await lab.join("keeper")
        joiner = await lab.join("joiner")
        slow = Conditions(bytes_per_second=2 * MIB)
        lab.run.network.set_conditions(slow, kind="direct", sender=keeper.id, receiver=joiner.id)
        lab.commit(1, keeper)
        await keeper.publish(model(1, 16), 1)
        fetching = asyncio.create_task(joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS))
        await asyncio.sleep(2.0)
        lab.commit(2, keeper)
        await keeper.publish(model(2, 16), 2)
        with await fetching as fetched:  # of either epoch, and whole
            assert same(fetched.tensors(), model(fetched.epoch, 16))
        await asyncio.sleep(1.0)
        assert int(keeper.keeper.statistics()["chunk_bytes_used"]) <= 18 * MIB


@in_virtual_time
async def test_a_state_that_is_served_no_more_is_not_waited_for_when_a_newer_one_is() -> None:
    async with state_lab() as lab:
        keeper, joiner = await lab.join("keeper"), await lab.join("joiner")
        lab.run.network.set_conditions(
            Conditions(delay_seconds=4.0), kind="direct", sender=joiner.id, receiver=keeper.id
        )
        lab.commit(1, keeper)
        await keeper.publish(model(1), 1)
        await asyncio.sleep(1.0)
        fetching = asyncio.create_task(joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS))
        await asyncio.sleep(0.1)  # the question is on its way
        for epoch in (2, 3, 4):
            lab.commit(epoch, keeper)
            await keeper.publish(model(epoch), epoch)
        lab.run.network.set_conditions(Conditions(), kind="direct", sender=joiner.id, receiver=keeper.id)
        started = asyncio.get_running_loop().time()
        with await fetching as fetched:
            assert fetched.epoch == 4
        assert asyncio.get_running_loop().time() - started < FetchConfig().gone_seconds


@in_virtual_time
async def test_a_fetch_comes_to_an_end_however_many_epochs_pass() -> None:
    """A keeper holds two epochs, and gives what it was asked for when it has let go of it for everybody else."""
    async with state_lab() as lab:
        keeper = await lab.join("keeper")
        joiner = await lab.join("joiner")
        slow = Conditions(bytes_per_second=2 * MIB)
        lab.run.network.set_conditions(slow, kind="direct", sender=keeper.id, receiver=joiner.id)
        lab.commit(1, keeper)
        await keeper.publish(model(1, 16), 1)
        fetching = asyncio.create_task(joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS))
        epoch = 1
        while not fetching.done():
            epoch += 1
            lab.commit(epoch, keeper)
            await keeper.publish(model(epoch, 16), epoch)  # takes a second
        assert epoch > 6
        with await fetching as fetched:
            assert fetched.epoch == 1
            assert same(fetched.tensors(), model(1, 16))
            assert sum(fetched.report.given.values()) == 17  # each chunk once


@in_virtual_time
async def test_a_keeper_stays_within_its_rate_and_joiners_share_it() -> None:
    async with state_lab() as lab:
        keeper = await lab.join("keeper", serving=_limited(4 * MIB))
        joiners = [await lab.join(f"j{number}", keep="never") for number in range(2)]
        lab.commit(1, keeper)
        await keeper.publish(model(1, 16), 1)
        started = asyncio.get_running_loop().time()
        fetched = await asyncio.gather(*(j.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) for j in joiners))
        seconds = asyncio.get_running_loop().time() - started
        assert 7.0 <= seconds <= 12.0  # 2 × 16 MiB at 4 MiB/s
        for state in fetched:
            assert same(state.tensors(), model(1, 16))
            state.release()


@in_virtual_time
async def test_who_is_one_too_many_waits_for_its_turn() -> None:
    async with state_lab() as lab:
        keeper = await lab.join("keeper", serving=_limited(16 * MIB, max_streams=1))
        joiners = [await lab.join(f"j{number}", keep="never") for number in range(3)]
        lab.commit(1, keeper)
        await keeper.publish(model(1), 1)
        fetched = await asyncio.gather(*(j.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) for j in joiners))
        for state in fetched:
            assert same(state.tensors(), model(1))
            state.release()
        assert keeper.keeper.statistics()["serve_refused"]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x00" * 1000,
        encode(Kept(session="x")),
        encode({"session": "s2", "states": [{"epoch": -1, "digest": "0" * 64, "num_bytes": 1, "made_at": 1}]}),
        encode({"session": "s2", "states": [{"epoch": 1, "digest": "zz", "num_bytes": 1, "made_at": 1}]}),
    ],
)
@in_virtual_time
async def test_nonsense_in_announcements_does_no_harm(payload: bytes) -> None:
    async with state_lab() as lab:
        keeper, liar = await lab.join("keeper"), await lab.join("liar")
        joiner = await lab.join("joiner")
        lab.commit(1, keeper)
        await keeper.publish(model(1), 1)
        session = liar.peer.session
        await session.hub.publish(session.subjects.news(liar.id, "state"), payload)
        with await joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) as fetched:
            assert same(fetched.tensors(), model(1))


@in_virtual_time
async def test_a_keeper_that_announces_what_it_does_not_have_is_not_waited_for() -> None:
    async with state_lab() as lab:
        keeper, boaster = await lab.join("keeper"), await lab.join("boaster")
        joiner = await lab.join("joiner")
        lab.commit(1, keeper)
        digest = await keeper.publish(model(1), 1)
        session = boaster.peer.session
        boast = KeptState(epoch=1, digest=digest, num_bytes=1, made_at=1)
        payload = encode(Kept(session=session.card.session, states=(boast,)))
        await session.hub.publish(session.subjects.news(boaster.id, "state"), payload)
        with await joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) as fetched:
            assert same(fetched.tensors(), model(1))
            assert fetched.report.given.get(keeper.id) == 9


@in_virtual_time
async def test_nothing_is_left_in_memory() -> None:
    async with state_lab(num_kept=2) as lab:
        keeper, joiner = await lab.join("keeper"), await lab.join("joiner", keep="never")
        used = []
        for epoch in range(1, 8):
            lab.commit(epoch, keeper)
            await keeper.publish(model(epoch), epoch)
            (await joiner.keeper.fetch(epoch=epoch, timeout_seconds=TIMEOUT_SECONDS)).release()
            used.append(int(keeper.keeper.statistics()["chunk_bytes_used"]))
            assert joiner.keeper.statistics()["chunk_bytes_used"] == 0
        assert used[1:] == [18 * MIB] * 6
        assert int(keeper.keeper.statistics()["chunk_bytes_free"]) <= 18 * MIB


@in_virtual_time
async def test_on_a_slow_way_chunks_are_packed_and_on_a_fast_one_they_are_not() -> None:
    async with state_lab() as lab:
        slow, fast = [await lab.join(name) for name in ("slow", "fast")]
        joiner = await lab.join("joiner")
        for keeper, speed in ((slow, 4 * MIB), (fast, 64 * MIB)):
            lab.run.network.set_conditions(
                Conditions(bytes_per_second=speed), kind="direct", sender=keeper.id, receiver=joiner.id
            )
        lab.commit(1, slow, fast)
        for keeper in (slow, fast):
            await keeper.publish(model(1, 96), 1)
        with await joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) as fetched:
            assert same(fetched.tensors(), model(1, 96))
            report = fetched.report
            assert report.fetched_bytes == fetched.snapshot.inventory.num_bytes > report.travelled_bytes
        packed = [keeper.keeper.statistics().get("serve_packed_chunks", 0) for keeper in (slow, fast)]
        assert packed[0] > 0
        assert packed[1] == 0


@pytest.mark.parametrize("packing", ["always", "never"])
@in_virtual_time
async def test_packing_is_what_the_joiner_chose(packing: Packing) -> None:
    async with state_lab(fetching=FetchConfig(packing=packing)) as lab:
        keeper, joiner = await lab.join("keeper"), await lab.join("joiner")
        lab.commit(1, keeper)
        await keeper.publish(model(1), 1)
        with await joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) as fetched:
            assert same(fetched.tensors(), model(1))
            saved = 1 - fetched.report.travelled_bytes / fetched.report.fetched_bytes
            assert saved > 0.1 if packing == "always" else saved == 0


def test_a_packing_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="auto, always, never"):
        FetchConfig(packing="zip")  # type: ignore[arg-type]


def _limited(bytes_per_second: float, **options: int) -> ServingConfig:
    return ServingConfig(bytes_per_second=bytes_per_second, **options)


def test_the_tensors_of_the_tests_are_several() -> None:
    assert sum(t.numel() * t.element_size() for t in model(1, 8).values()) > 8 * MIB
    assert torch.equal(model(3)["weight"], model(3)["weight"])


@in_virtual_time
async def test_a_trainer_leaves_its_line_to_the_round_for_part_of_the_time_and_rests_at_no_other() -> None:
    async def seconds_from(role: Role, *, round_seconds: float) -> float:
        async with state_lab(fetching=FetchConfig(packing="never")) as lab:
            keeper = await lab.join("keeper", role=role)
            joiner = await lab.join("joiner")
            conditions = Conditions(bytes_per_second=8 * MIB)
            lab.run.network.set_conditions(conditions, kind="direct", sender=keeper.id, receiver=joiner.id)
            lab.commit(1, keeper)
            await keeper.publish(model(1, 32), 1)
            loop = asyncio.get_running_loop()
            started = loop.time()
            keeper.epochs.is_in_round = round_seconds > 0
            over = loop.call_later(round_seconds, setattr, keeper.epochs, "is_in_round", False)
            (await joiner.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS)).release()
            over.cancel()
            return loop.time() - started

    assert 4.0 <= await seconds_from("aux", round_seconds=60.0) <= 5.0
    assert 7.0 <= await seconds_from("trainer", round_seconds=60.0) <= 10.0
    assert 4.0 <= await seconds_from("trainer", round_seconds=0.0) <= 5.0
    assert 4.4 <= await seconds_from("trainer", round_seconds=1.0) <= 6.0  # the last rest ends with the round


@pytest.mark.parametrize("is_in_round", [False, True])
@in_virtual_time
async def test_a_trainer_rests_while_it_gives_a_state_in_a_round_and_only_then(is_in_round: bool) -> None:
    async with state_lab() as lab:
        ada = await lab.join("Ada", coordinates=False)
        lab.commit(1, ada)
        await ada.publish(model(1, 16), 1)
        lin = await lab.join("Lin", coordinates=False)
        line = Conditions(bytes_per_second=4 * MIB)
        lab.run.network.set_conditions(line, kind="direct", sender=ada.id, receiver=lin.id)
        ada.epochs.is_in_round = is_in_round
        began = lab.run.clock.monotonic()
        with await lin.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) as fetched:
            assert fetched.epoch == 1
        seconds = lab.run.clock.monotonic() - began
        assert ("serve_rests" in ada.keeper.statistics()) == is_in_round
        assert (seconds > 6.0) == is_in_round, "16 MiB take 4 s, and in a round nearly twice as long"
