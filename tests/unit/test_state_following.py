"""An aux peer keeps the trainers' state, and sees that a run goes on whose trainers all come back from disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from statelab import MIB, Keeping, StateLab, model, same, state_lab

from potluck.sim.memorycarrier import Conditions
from potluck.sim.virtualloop import in_virtual_time
from potluck.state.backups import BackupConfig
from potluck.state.following import Follower

TIMEOUT_SECONDS = 120.0
EVERY = BackupConfig(every_epochs=1)


@asynccontextmanager
async def following(lab: StateLab, aux: Keeping, num_training: int) -> AsyncIterator[Follower]:
    session = aux.peer.session
    follower = Follower(aux.keeper, aux.epochs, session.roster, session.clock, num_training=lambda: num_training)
    follower.start()
    try:
        yield follower
    finally:
        await follower.close()


def set_line(lab: StateLab, sender: Keeping, receiver: Keeping, *, seconds: float) -> None:
    """Have 2 MiB take so long from one to the other."""
    line = Conditions(bytes_per_second=2 * MIB / seconds)
    lab.run.network.set_conditions(line, kind="direct", sender=sender.id, receiver=receiver.id)


@in_virtual_time
async def test_where_epochs_are_long_it_has_the_newest_state_for_newcomers(tmp_path: Path) -> None:
    async with state_lab() as lab:
        aux = await lab.join("aux", role="aux", folder=tmp_path, backups=BackupConfig(every_epochs=5))
        trainer = await lab.join("trainer", coordinates=False)
        set_line(lab, trainer, aux, seconds=1.0)
        async with following(lab, aux, num_training=1):
            for epoch in range(1, 5):
                lab.commit(epoch, trainer)
                await trainer.publish(model(epoch, 2), epoch)
                await asyncio.sleep(30.0)
                assert aux.keeper.kept_epoch == epoch
            assert aux.keeper.backups is not None
            assert aux.keeper.backups.epochs() == [1], "it saves as often as it was told"
            newcomer = await lab.join("newcomer", coordinates=False)
            with await newcomer.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS) as fetched:
                assert fetched.report.given[aux.id] > 0
            assert trainer.served < 4 * 3 + 3, "the trainer gave each epoch once, and the newcomer not all of it"


@in_virtual_time
async def test_it_takes_over_a_state_every_so_many_epochs_and_saves_it(tmp_path: Path) -> None:
    async with state_lab() as lab:
        aux = await lab.join("aux", role="aux", folder=tmp_path, backups=BackupConfig(every_epochs=5))
        trainer = await lab.join("trainer", coordinates=False)
        set_line(lab, trainer, aux, seconds=9.3)  # a newer one than is due would take too much of the time
        async with following(lab, aux, num_training=1) as follower:
            for epoch in range(1, 12):
                lab.commit(epoch, trainer)
                await trainer.publish(model(epoch, 2), epoch)
                await asyncio.sleep(30.0)
            assert follower.counts["followed"] == 3
        assert aux.keeper.kept_epoch == 11
        assert aux.keeper.backups is not None
        assert aux.keeper.backups.epochs() == [11, 6, 1]
        heard, roster = trainer.keeper.directory.announcements, trainer.peer.session.roster
        assert heard.on_disk().epochs(roster, backups=True) == [11, 6, 1]
        assert heard.epochs(roster, backups=True) == [], "what is on disk is no offer"
        await lab.kill(aux)
        await lab.join("aux", role="aux", folder=tmp_path, backups=BackupConfig(every_epochs=5))
        await asyncio.sleep(30.0)
        assert heard.on_disk().epochs(roster, backups=True) == [11, 6, 1], "also of one that was started again"


@in_virtual_time
async def test_it_takes_over_what_only_who_leaves_has(tmp_path: Path) -> None:
    async with state_lab() as lab:
        aux = await lab.join("aux", role="aux", folder=tmp_path, backups=BackupConfig(every_epochs=10))
        trainer = await lab.join("trainer", coordinates=False)
        set_line(lab, trainer, aux, seconds=9.3)  # a newer one than is due would take too much of the time
        async with following(lab, aux, num_training=1):
            for epoch in range(1, 6):
                lab.commit(epoch, trainer)
                await trainer.publish(model(epoch, 2), epoch)
                await asyncio.sleep(30.0)
            assert aux.keeper.kept_epoch == 1
            assert await trainer.keeper.hand_over(timeout_seconds=30.0)
            assert aux.keeper.kept_epoch == 5


@in_virtual_time
async def test_who_leaves_waits_for_nobody_where_another_trains_on_and_in_vain_where_nobody_keeps() -> None:
    async with state_lab() as lab:
        ada, grace = [await lab.join(name, coordinates=False) for name in ("Ada", "Grace")]
        lab.commit(1, ada, grace)
        for each in (ada, grace):
            await each.publish(model(1, 1), 1)
        assert await ada.keeper.hand_over(timeout_seconds=10.0), "nobody is there to keep it"
        await lab.join("aux", role="aux", coordinates=False)  # which follows nobody
        assert await ada.keeper.hand_over(timeout_seconds=10.0), "Grace trains on"
        assert not await grace.keeper.hand_over(timeout_seconds=10.0), "Ada has said that she leaves"


@in_virtual_time
async def test_where_all_leave_at_once_nobody_waits() -> None:
    async with state_lab() as lab:
        ada, grace = [await lab.join(name, coordinates=False) for name in ("Ada", "Grace")]
        lab.commit(1, ada, grace)
        for each in (ada, grace):
            await each.publish(model(1, 1), 1)
        began = lab.run.clock.monotonic()
        leaving = [each.keeper.hand_over(timeout_seconds=10.0) for each in (ada, grace)]
        assert await asyncio.gather(*leaving) == [False, False]
        assert lab.run.clock.monotonic() - began < 2.0


@in_virtual_time
async def test_who_leaves_waits_for_a_newcomer_that_is_being_given_the_state() -> None:
    async with state_lab() as lab:
        ada = await lab.join("Ada", coordinates=False)
        lab.commit(1, ada)
        await ada.publish(model(1, 16), 1)
        lin = await lab.join("Lin", coordinates=False)
        set_line(lab, ada, lin, seconds=2.0)
        loading = asyncio.create_task(lin.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS))
        await asyncio.sleep(1.0)
        assert await ada.keeper.hand_over(timeout_seconds=10.0, most_seconds=30.0), "it comes, if slowly"
        with await loading as fetched:
            assert fetched.epoch == 1


@in_virtual_time
async def test_who_leaves_waits_for_a_keeper_under_suspicion(tmp_path: Path) -> None:
    async with state_lab() as lab:
        aux = await lab.join("aux", role="aux", folder=tmp_path)
        ada = await lab.join("Ada", coordinates=False)
        async with following(lab, aux, num_training=1):
            lab.commit(1, ada)
            await ada.publish(model(1, 2), 1)
            await lab.run.tell(aux.id, "suspect")
            await asyncio.sleep(0.1)
            assert [presence.peer for presence in ada.peer.session.roster.alive()] == [ada.id]
            assert await ada.keeper.hand_over(timeout_seconds=30.0)
            assert aux.keeper.kept_epoch == 1


@in_virtual_time
async def test_it_chooses_what_to_go_on_from_when_nobody_trains(tmp_path: Path) -> None:
    async with state_lab(backups=EVERY) as lab:
        trainer = await lab.join("trainer", folder=tmp_path)
        for epoch in (1, 2):
            lab.commit(epoch, trainer)
            await trainer.publish(model(epoch, 2), epoch)
        await lab.leave(trainer)
        lab.commit(3)  # and nobody saved that
        aux = await lab.join("aux", role="aux")
        aux.epochs.lease.is_held = True
        async with following(lab, aux, num_training=0):
            await asyncio.sleep(100.0)
            assert aux.keeper.kept_epoch is None, "it waits for those who have something"
            returned = await lab.join("trainer", folder=tmp_path, coordinates=True)
            fetched = await returned.keeper.resume(timeout_seconds=TIMEOUT_SECONDS)
            assert fetched is not None
            with fetched:
                assert (fetched.epoch, fetched.made_at) == (3, 2)
                assert same(fetched.tensors(), model(2, 2))
        assert aux.keeper.kept_epoch == 3


@in_virtual_time
async def test_it_takes_no_older_state_while_trainers_are_about_to_have_the_present_one(tmp_path: Path) -> None:
    async with state_lab() as lab:
        aux = await lab.join("aux", role="aux", folder=tmp_path, backups=EVERY)
        aux.epochs.lease.is_held = True
        trainer = await lab.join("trainer", coordinates=False)
        async with following(lab, aux, num_training=0):
            for epoch in (1, 2):
                lab.commit(epoch, trainer)
                await asyncio.sleep(200.0)  # as a step of a large model takes, or DiLoCo in the background
                assert aux.keeper.kept_epoch == (epoch - 1 or None), "nothing is taken for the state of the epoch"
                await trainer.publish(model(epoch, 2), epoch)
                await asyncio.sleep(30.0)
                assert aux.keeper.kept_epoch == epoch
            lab.commit(3, trainer)
            await lab.kill(trainer)  # with what it had
            await lab.join("trainer", identity=trainer.peer.identity, coordinates=False)
            await asyncio.sleep(100.0)
            assert aux.keeper.kept_epoch == 2, "the one who came back might have it"
            returned = lab.there[-1]
            fetched = await returned.keeper.resume(timeout_seconds=TIMEOUT_SECONDS)
            assert fetched is not None
            with fetched:
                assert (fetched.epoch, fetched.made_at) == (3, 2)


@in_virtual_time
async def test_who_leaves_saves_what_was_not_due(tmp_path: Path) -> None:
    async with state_lab(backups=BackupConfig(every_epochs=100)) as lab:
        trainer = await lab.join("trainer", folder=tmp_path, keep="never")
        for epoch in (1, 2, 3):
            lab.commit(epoch, trainer)
            await trainer.publish(model(epoch, 1), epoch)
        assert trainer.keeper.backups is not None
        assert trainer.keeper.backups.epochs() == [1]
        await lab.leave(trainer)
        assert trainer.keeper.backups.epochs() == [3, 1]


@pytest.mark.parametrize(("load_seconds", "has_failed"), [(20.0, True), (600.0, False)])
@in_virtual_time
async def test_a_load_in_which_nothing_comes_fails_when_the_run_says(load_seconds: float, has_failed: bool) -> None:
    async with state_lab() as lab:
        aux = await lab.join("aux", role="aux")
        ada = await lab.join("Ada", coordinates=False)
        set_line(lab, ada, aux, seconds=1e5)
        async with following(lab, aux, num_training=1) as follower:
            follower.load_seconds = load_seconds
            lab.commit(1, ada)
            await ada.publish(model(1, 2), 1)
            await asyncio.sleep(100.0)
            assert (follower.counts["failed"] > 0) == has_failed
            assert aux.keeper.kept_epoch is None


@in_virtual_time
async def test_who_was_told_to_leave_takes_no_longer_though_the_state_is_being_fetched() -> None:
    async with state_lab() as lab:
        ada = await lab.join("Ada", coordinates=False)
        lab.commit(1, ada)
        await ada.publish(model(1, 16), 1)
        lin = await lab.join("Lin", coordinates=False)
        set_line(lab, ada, lin, seconds=2.0)
        loading = asyncio.create_task(lin.keeper.fetch(timeout_seconds=TIMEOUT_SECONDS))
        await asyncio.sleep(1.0)
        began = lab.run.clock.monotonic()
        assert not await ada.keeper.hand_over(timeout_seconds=1.0, most_seconds=2.0), "it takes 16 s"
        assert lab.run.clock.monotonic() - began < 3.0
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
