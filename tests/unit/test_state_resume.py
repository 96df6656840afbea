"""How a run goes on after everybody had stopped: from the newest state of anyone, with the lineage unbroken."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from roundlab import lab
from statelab import MIB, Keeping, StateLab, model, same, state_lab

from potluck.errors import StateUnavailableError
from potluck.round.averager import Averager
from potluck.sim.inlineworkers import InlineWorkers
from potluck.sim.memoryrun import MemoryPeer
from potluck.sim.virtualloop import in_virtual_time
from potluck.state.announcement import Verdict
from potluck.state.backups import BackupConfig
from potluck.state.config import StateConfig
from potluck.state.keeper import StateKeeper
from potluck.state.resumechoice import BEGINNER_SECONDS, Beginner, Situation, Step, next_step

TIMEOUT_SECONDS = 120.0
EVERY = BackupConfig(every_epochs=1)


def offer(made_at: int, *, is_trusted: bool = True) -> Verdict:
    return Verdict(epoch=made_at, digest="0" * 64, num_bytes=1, made_at=made_at, keepers=("k",), is_trusted=is_trusted)


def step(
    head: int,
    *offers: Verdict,
    present: Verdict | None = None,
    live: Verdict | None = None,
    alone: bool = False,
    begins: bool | None = None,
    leads: bool = True,
    waited: float = 0.0,
) -> str:
    situation = Situation(
        head_epoch=head,
        present=present,
        offers=offers,
        live=live,
        is_alone=alone,
        begins=begins,
        is_coordinator=leads,
        waited_seconds=waited,
    )
    taken = next_step(situation, grace_seconds=10.0)
    return taken.kind


def test_the_state_of_the_present_epoch_is_taken_at_once() -> None:
    assert step(5, offer(9), present=offer(5), leads=False) == "fetch"


def by_cut(cut_offer: Verdict | None, *offers: Verdict, coordinates: bool = True, waited: float = 0.0) -> Step:
    situation = Situation(
        head_epoch=30,
        present=None,
        offers=offers,
        cut=4,
        cut_offer=cut_offer,
        is_coordinator=coordinates,
        waited_seconds=waited,
    )
    return next_step(situation, grace_seconds=10.0)


def test_a_run_with_several_groups_goes_back_to_its_cut_though_there_is_a_newer_backup() -> None:
    part, newer, live = replace(offer(20), is_backup=True), replace(offer(28), is_backup=True), offer(29)
    taken = by_cut(part, newer)
    assert (taken.kind, taken.verdict, taken.cut) == ("adopt", part, 4)
    assert "goes back to cut 4" in taken.reason
    assert "updates since epoch 20 are lost" in taken.reason
    assert by_cut(part, newer, coordinates=False).kind == "wait", "that is for the coordinator"
    assert by_cut(part, live, newer).kind == "wait", "somebody is up: the newest state may only be late"
    assert by_cut(part, live, newer, waited=11.0).verdict == part
    assert by_cut(None, newer).kind == "wait", "whoever saved the part may be late"
    fallback = by_cut(None, newer, waited=11.0)
    assert (fallback.kind, fallback.verdict, fallback.cut) == ("adopt", newer, 0), "better than nothing"


def test_a_new_run_begins_at_once_where_nobody_else_trains() -> None:
    assert step(0, alone=True, begins=True, leads=False) == "begin"
    assert step(0, begins=True) == "wait"
    assert step(0, begins=True, waited=1.0) == "begin"
    assert step(3, alone=True, waited=100.0) == "wait"
    assert step(3, begins=True) == "begin anew"


def test_who_is_not_chosen_to_begin_waits_for_the_state_of_whoever_is() -> None:
    assert step(0, begins=False, alone=True, waited=100.0) == "wait"
    assert step(0, begins=False, present=offer(0)) == "fetch"


def test_where_nobody_coordinates_a_run_is_begun_in_the_end() -> None:
    assert step(0, alone=True, waited=9.9) == "wait"
    assert step(0, waited=10.0) == "begin"


def test_the_first_who_asks_begins_and_another_when_it_is_gone_or_does_not() -> None:
    present = {"ann", "bob"}
    beginner = Beginner()
    assert beginner.asked_by("ann", 0.0, present.__contains__)
    assert not beginner.asked_by("bob", 1.0, present.__contains__)
    assert not beginner.asked_by("ann", 2.0, present.__contains__)
    assert beginner.peer == "ann"
    present.remove("ann")
    assert beginner.asked_by("bob", 3.0, present.__contains__)
    present.add("ann")
    assert not beginner.asked_by("bob", 3.0 + BEGINNER_SECONDS, present.__contains__)
    assert beginner.asked_by("ann", 3.0 + BEGINNER_SECONDS, present.__contains__)


@in_virtual_time
@pytest.mark.parametrize("leader", ["aux", "first", "last"])
async def test_trainers_that_start_at_the_same_moment_take_the_state_of_one(leader: str) -> None:
    async with state_lab() as there:
        trainers = [await there.join(f"t{number}", keep="never") for number in range(4)]
        aux = await there.join("aux", role="aux", keep="never")
        there.elect({"aux": aux, "first": trainers[0], "last": trainers[-1]}[leader])

        async def start(trainer: Keeping, number: int) -> int:
            """With weights of its own; which of them it goes on with."""
            fetched = await trainer.keeper.resume(timeout_seconds=TIMEOUT_SECONDS)
            if fetched is None:
                await asyncio.sleep(5.0)  # hashing takes its time
                await trainer.publish(model(number, 2), 0)
                return number
            with fetched:
                return next(n for n in range(4) if same(fetched.tensors(), model(n, 2)))

        begun = await asyncio.gather(*(start(trainer, number) for number, trainer in enumerate(trainers)))
        assert len(set(begun)) == 1, begun


def test_who_joins_a_run_that_moves_on_takes_what_it_gets() -> None:
    assert step(8, offer(7), live=offer(7), leads=False) == "join"
    assert step(8, offer(7), live=offer(7), leads=True) == "join"
    assert step(8, live=offer(7), present=offer(8)) == "fetch"


def test_only_the_coordinator_chooses() -> None:
    assert step(5, offer(5), leads=False, waited=100.0) == "wait"
    assert step(5, offer(5)) == "adopt"


def test_an_older_state_is_taken_only_when_nobody_brought_a_newer_one() -> None:
    assert step(5, offer(3)) == "wait"
    assert step(5, offer(3), waited=10.0) == "adopt"
    situation = Situation(
        head_epoch=9, present=None, offers=[offer(2), offer(4)], is_coordinator=True, waited_seconds=99.0
    )
    taken = next_step(situation, 10.0)
    assert taken.verdict == offer(4)
    assert "epochs 5 to 9 are lost" in taken.reason


def test_that_the_hub_forgot_is_believed_of_trusted_peers_only() -> None:
    assert step(0, offer(120), waited=10.0) == "adopt"
    assert step(0, offer(120, is_trusted=False), alone=True, begins=True) == "begin"
    assert step(3, offer(120, is_trusted=False), waited=100.0) == "wait"


async def train(there: StateLab, folders: list[Path], epochs: dict[int, int]) -> None:
    """Peers publish and save so many epochs each, then all of them stop."""
    peers = [await there.join(f"p{number}", folder=folder) for number, folder in enumerate(folders)]
    for epoch in range(1, max(epochs.values()) + 1):
        there.commit(epoch, *peers)
        for number, peer in enumerate(peers):
            if epoch <= epochs[number]:
                await peer.publish(model(epoch, 2), epoch)
    for peer in peers:
        await there.leave(peer)


@in_virtual_time
async def test_all_stop_and_go_on_from_the_newest_backup_of_anyone(tmp_path: Path) -> None:
    async with state_lab(backups=EVERY) as there:
        folders = [tmp_path / "0", tmp_path / "1"]
        await train(there, folders, {0: 3, 1: 5})
        assert there.chain.epoch == 5
        leader = await there.join("p0", folder=folders[0])
        other = await there.join("p1", folder=folders[1])
        leader.epochs.lease.is_held = True
        fetched = await asyncio.gather(
            *(peer.keeper.resume(timeout_seconds=TIMEOUT_SECONDS) for peer in (leader, other))
        )
        for state in fetched:
            assert state is not None
            assert (state.epoch, state.made_at) == (5, 5)
            assert same(state.tensors(), model(5, 2))
            state.release()
        assert [peer.keeper.deviation for peer in (leader, other)] == [None, None]


@in_virtual_time
async def test_when_the_hub_is_newer_than_any_backup_it_is_said_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with state_lab(backups=EVERY) as there:
        folders = [tmp_path / "0", tmp_path / "1"]
        await train(there, folders, {0: 3, 1: 4})
        there.commit(7)  # three more epochs were committed, and nobody saved them
        leader, other = [await there.join(f"p{n}", folder=folder) for n, folder in enumerate(folders)]
        late = await there.join("late")
        leader.epochs.lease.is_held = True
        peers = (leader, other, late)
        fetched = await asyncio.gather(*(p.keeper.resume(timeout_seconds=TIMEOUT_SECONDS) for p in peers))
        for state in fetched:
            assert state is not None
            assert (state.epoch, state.made_at) == (7, 4)
            assert same(state.tensors(), model(4, 2))
            state.release()
        assert "the updates of epochs 5 to 7 are lost" in caplog.text
        there.commit(8, *peers)
        for peer in peers:
            await peer.publish(model(8, 2), 8)
        assert [peer.keeper.deviation for peer in peers] == [None] * 3
        for peer in peers:
            await there.leave(peer)
        again = await there.join("p0", folder=folders[0])
        again.epochs.lease.is_held = True
        state = await again.keeper.resume(timeout_seconds=TIMEOUT_SECONDS)
        assert state is not None
        assert (state.epoch, state.made_at) == (8, 8)
        state.release()


@in_virtual_time
async def test_when_the_hub_has_lost_its_memory_the_work_is_not_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with state_lab(backups=EVERY) as there:
        await train(there, [tmp_path], {0: 3})
        there.chain.epoch, there.chain.head = 0, None
        peer = await there.join("p0", folder=tmp_path)
        peer.epochs.lease.is_held = True
        state = await peer.keeper.resume(timeout_seconds=TIMEOUT_SECONDS)
        assert state is not None
        assert (state.epoch, state.made_at) == (0, 3)
        assert same(state.tensors(), model(3, 2))
        state.release()
        assert "the hub has lost its memory" in caplog.text
        there.commit(1, peer)
        await peer.publish(model(1, 2), 1)
        await there.leave(peer)
        again = await there.join("p0", folder=tmp_path)
        again.epochs.lease.is_held = True
        state = await again.keeper.resume(timeout_seconds=TIMEOUT_SECONDS)
        assert state is not None
        assert (state.epoch, state.made_at) == (1, 1), "the backups of the lineage before are put aside"
        state.release()


@in_virtual_time
async def test_a_torn_backup_is_passed_over_by_all(tmp_path: Path) -> None:
    async with state_lab(backups=EVERY) as there:
        await train(there, [tmp_path], {0: 3})
        [newest] = (tmp_path / "backups").glob("epoch-00000003-*.safetensors")
        newest.write_bytes(newest.read_bytes()[:-1])
        peer = await there.join("p0", folder=tmp_path)
        peer.epochs.lease.is_held = True
        state = await peer.keeper.resume(timeout_seconds=TIMEOUT_SECONDS)
        assert state is not None
        assert (state.epoch, state.made_at) == (3, 2)
        state.release()


@in_virtual_time
async def test_a_returning_peer_needs_only_what_is_not_in_its_backup(tmp_path: Path) -> None:
    async with state_lab(backups=EVERY) as there:
        tensors = model(1, 16)
        stayed, left = await there.join("stayed"), await there.join("left", folder=tmp_path)
        there.commit(1, stayed, left)
        for peer in (stayed, left):
            await peer.publish(tensors, 1)
        await there.kill(left)
        tensors["weight"][0] += 1
        there.commit(2, stayed)
        await stayed.publish(tensors, 2)
        back = await there.join("left", folder=tmp_path, identity=left.peer.identity)
        state = await back.keeper.resume(timeout_seconds=TIMEOUT_SECONDS)
        assert state is not None
        assert same(state.tensors(), tensors)
        assert state.report.fetched_bytes <= 2 * MIB
        state.release()
        assert int(back.keeper.statistics()["chunk_bytes_used"]) == 17 * MIB, "the backup has left the memory"


@in_virtual_time
async def test_without_any_state_the_run_cannot_go_on_and_says_so() -> None:
    async with state_lab() as there:
        peer = await there.join("p")
        peer.epochs.lease.is_held = True
        there.commit(4)
        with pytest.raises(StateUnavailableError, match="the run is at epoch 4"):
            await peer.keeper.resume(timeout_seconds=30.0)


@in_virtual_time
async def test_when_the_only_trainer_dies_before_a_first_backup_the_run_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with state_lab(backups=EVERY) as there:
        aux = await there.join("aux", role="aux", folder=tmp_path)
        dead = await there.join("dead", coordinates=False)
        there.elect(aux)
        there.commit(4, dead)
        await there.kill(dead)
        trainers = [await there.join(f"t{number}", coordinates=False) for number in range(2)]
        there.elect(aux)
        began = [trainer.keeper.resume(base=model(n, 2), timeout_seconds=600.0) for n, trainer in enumerate(trainers)]
        states = [state for state in await asyncio.gather(*began) if state is not None]
        assert [(state.epoch, state.made_at) for state in states] == [(4, 0), (4, 0)]
        assert any(same(states[0].tensors(), model(number, 2)) for number in range(2))
        assert same(states[0].tensors(), states[1].tensors()), "one has begun, and the other has its state"
        assert "epochs 1 to 4 are lost" in caplog.text
        for state in states:
            state.release()


@in_virtual_time
async def test_nothing_begins_anew_where_there_is_a_backup_that_cannot_be_read(tmp_path: Path) -> None:
    """Somebody should look at it first: the disk may only be away."""
    async with state_lab(backups=EVERY) as there:
        await train(there, [tmp_path / "0"], {0: 2})
        for path in (tmp_path / "0" / "backups").glob("*.safetensors"):
            path.write_bytes(b"torn")
        aux = await there.join("aux", role="aux", folder=tmp_path / "0")
        trainer = await there.join("t", coordinates=False)
        there.elect(aux)
        there.commit(4)
        with pytest.raises(StateUnavailableError, match="the run is at epoch 4"):
            await trainer.keeper.resume(base=model(1, 2), timeout_seconds=600.0)


@in_virtual_time
async def test_a_backup_that_is_newer_than_what_the_run_goes_on_from_is_regretted_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with state_lab(backups=EVERY) as there:
        await train(there, [tmp_path / "0", tmp_path / "1"], {0: 2, 1: 6})
        there.commit(7)
        leader = await there.join("leader", folder=tmp_path / "0")
        leader.epochs.lease.is_held = True
        first = await leader.keeper.resume(timeout_seconds=TIMEOUT_SECONDS)
        assert first is not None
        assert (first.epoch, first.made_at) == (7, 2)
        first.release()
        late = await there.join("late", folder=tmp_path / "1")
        state = await late.keeper.resume(timeout_seconds=TIMEOUT_SECONDS)
        assert state is not None
        assert (state.epoch, state.made_at) == (7, 2), "all go on from the same"
        state.release()
        assert "this peer has a backup of epoch 6" in caplog.text


async def keep(peer: MemoryPeer, averager: Averager, folder: Path) -> StateKeeper:
    config = StateConfig(keep="always", folder=folder, backups=EVERY, grace_seconds=2.0)
    keeper = StateKeeper(peer, averager, config, workers=InlineWorkers())
    await keeper.start()
    return keeper


@in_virtual_time
async def test_with_real_rounds_the_lineage_goes_on_after_all_have_stopped(tmp_path: Path) -> None:
    """Rounds, states and backups; everybody stops; everybody comes back; the next commit names the last as parent."""
    async with lab(2) as there:
        keepers = [await keep(m.peer, m.averager, tmp_path / str(m.number)) for m in there.members]
        for epoch in (1, 2, 3):
            await there.average()
            for member, keeper in zip(there.members, keepers, strict=True):
                await asyncio.wrap_future(keeper.publish({"w": member.values}, {"epoch": epoch}, epoch))
                await asyncio.sleep(1.0)
        last = there.members[0].averager.lineage
        parent, values = last.parent_digest(), there.members[0].values.clone()
        for member, keeper in zip(list(there.members), keepers, strict=True):
            await keeper.close()
            await there.kill(member)
        await asyncio.sleep(5.0)
        members = [await there.join(number=number, coordinates=number == 0) for number in (0, 1)]
        keepers = [await keep(m.peer, m.averager, tmp_path / str(m.number)) for m in members]
        resumed = await asyncio.gather(*(k.resume(timeout_seconds=TIMEOUT_SECONDS) for k in keepers))
        for member, state in zip(members, resumed, strict=True):
            assert state is not None
            assert (state.epoch, state.made_at) == (3, 3)
            with state:
                state.write_into({"w": member.values})
            assert torch.equal(member.values, values)
        results = await there.average()
        assert {result.commit.epoch for result in results} == {4}
        assert {result.commit.parent for result in results} == {parent}
        for keeper in keepers:
            await keeper.close()
