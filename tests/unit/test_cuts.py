"""Cuts: one committed epoch of each group, held, saved, and gone back to as a whole. In virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from cutlab import CutLab, cut_lab
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from potluck.errors import RetryableError, RevisionConflictError
from potluck.recipes.reference import RecipeRef
from potluck.run import cuts
from potluck.run.cutboard import Cut
from potluck.sim.virtualloop import in_virtual_time
from potluck.state.backups import BackupConfig, Backups, backup_folder
from potluck.training.manifest.manifest import Manifest, Rollback
from potluck.training.manifest.rollback import RestorationDesk

THREE = ("main", "x", "y")


async def three_groups(there: CutLab) -> None:
    await there.join_host(THREE)
    await there.join("ann", ("main", "x"))
    await there.join("bob", ("x", "y"))
    await there.join("cid", ("main", "y"))
    for group in THREE:
        await there.until_epoch(group, 2)


@in_virtual_time
async def test_a_program_has_a_cut_of_all_groups_made_and_saved(tmp_path: Path) -> None:
    async with cut_lab(tmp_path) as there:
        await three_groups(there)
        cut = await cuts.propose(there.peers["ann"], {}, True, 100.0)
        assert cut.parts.keys() == set(THREE)
        assert there.board.latest() == cut
        for group in THREE:
            infos = Backups(backup_folder(tmp_path / "host", group)).infos()
            [saved] = [info for info in infos if cut.number in info.cuts]
            assert (saved.epoch, saved.digest) == (cut.parts[group].epoch, cut.parts[group].digest)


async def all_return(there: CutLab) -> None:
    """The next lives of all peers, on the same disks."""
    await there.join_host(THREE)
    await there.join("ann", ("main", "x"))
    await there.join("bob", ("x", "y"))
    await there.join("cid", ("main", "y"))


@in_virtual_time
async def test_groups_at_different_epochs_resume_at_one_cut_after_all_were_killed(tmp_path: Path) -> None:
    async with cut_lab(tmp_path) as there:
        await three_groups(there)
        cut = await cuts.propose(there.peers["bob"], {}, True, 100.0)
        for group in THREE:
            await there.until_epoch(group, cut.parts[group].epoch + 5)
        heads = {group: there.posts["host"][group].averager.epoch for group in THREE}
        await there.kill("host", "ann", "bob", "cid")
        newest = {group: Backups(backup_folder(tmp_path / "host", group)).epochs()[0] for group in THREE}
        assert all(newest[group] > cut.parts[group].epoch for group in THREE), "there are newer states, all different"
        await all_return(there)
        for group in THREE:
            await there.until_epoch(group, heads[group] + 2)
        for posts in there.posts.values():
            for group, post in posts.items():
                if post.follower is None:
                    assert post.resumed_from == cut.parts[group].epoch, f"{group} goes back to its part of the cut"
        again = await cuts.propose(there.peers["ann"], {}, True, 100.0)
        assert again.number > cut.number
        assert all(again.epochs[group] >= heads[group] for group in THREE), "the lineage is not turned back"


@in_virtual_time
async def test_all_groups_go_back_to_a_cut_once_whoever_coordinates_them(tmp_path: Path) -> None:
    async with cut_lab(tmp_path) as there:
        await three_groups(there)
        cut = await cuts.propose(there.peers["ann"], {}, True, 100.0)
        for group in THREE:
            await there.until_epoch(group, cut.parts[group].epoch + 3)
        with pytest.raises(RetryableError, match="only peers that are trusted or may coordinate"):
            await cuts.ask_to_return(there.peers["ann"], cut.number, 60.0)
        with pytest.raises(RetryableError, match=r"there is no cut 99 any more: there are 1"):
            await cuts.ask_to_return(there.peers["host"], 99, 60.0)
        order = await cuts.ask_to_return(there.peers["host"], cut.number, 60.0)
        for group in THREE:
            await there.until(lambda g=group: there.head(g).num_returned == order, f"{group} to go back")
        for group in THREE:
            await there.until_epoch(group, there.head(group).epoch + 2)
        for name, posts in there.posts.items():
            for group, post in posts.items():
                went = [commit.restored for commit in post.commits if commit.restored is not None]
                expected = (cut.parts[group].epoch, cut.parts[group].digest)
                assert [(each.epoch, each.digest) for each in went] == [expected], f"{name}: {group} went back once"


@in_virtual_time
async def test_a_cut_has_the_epochs_that_a_program_names_also_those_to_come(tmp_path: Path) -> None:
    async with cut_lab(tmp_path) as there:
        await three_groups(there)
        wanted = {group: there.head(group).epoch + 3 for group in ("x", "y")}
        cut = await cuts.propose(there.peers["bob"], wanted, True, 100.0)
        assert {group: cut.epochs[group] for group in wanted} == wanted
        with pytest.raises(RetryableError, match=r"group x is at epoch \d+, and nobody holds the state of epoch 1 any"):
            await cuts.propose(there.peers["bob"], {"x": 1}, False, 100.0)
        with pytest.raises(RetryableError, match=r"the run has no group 'z' now: there are main, x, y"):
            await cuts.propose(there.peers["bob"], {"z": 1}, False, 100.0)


@in_virtual_time
async def test_parts_are_held_until_they_are_on_a_trusted_disk(tmp_path: Path) -> None:
    async with cut_lab(tmp_path) as there:
        await there.join("lea", ("main", "x"), coordinates=True)  # coordinates, and writes nothing
        await there.join("ann", ("main", "x"))
        for group in ("main", "x"):
            await there.until_epoch(group, 2)
        cut = await cuts.propose(there.peers["ann"], {}, False, 100.0)
        for group in ("main", "x"):
            await there.until_epoch(group, cut.epochs[group] + 6)
            held = there.posts["ann"][group].keeper.shelf.of_cut(cut.number)
            assert held is not None
            assert held.snapshot.digest == cut.parts[group].digest
        assert there.board.safe is None
        await there.join_host(("main", "x"))
        assert (await there.until_safe(cut.number)) == cut, "whoever comes later saves it"
        await there.until(
            lambda: all(
                posts[group].keeper.shelf.of_cut(cut.number) is None
                for posts in there.posts.values()
                for group in ("main", "x")
            ),
            "the parts to be let go",
        )


@in_virtual_time
async def test_a_cut_that_was_begun_before_a_group_went_back_does_not_become_safe(tmp_path: Path) -> None:
    async with cut_lab(tmp_path) as there:
        await three_groups(there)
        first = await cuts.propose(there.peers["ann"], {}, True, 100.0)
        begun_at = there.board.safe_revision
        await there.board.note_return(first.number)
        with pytest.raises(RevisionConflictError):
            await there.board.declare_safe(first.number + 1, expected=begun_at)
        latest = there.board.latest()
        assert latest == first


@in_virtual_time
async def test_cuts_go_on_while_coordinators_die(tmp_path: Path) -> None:
    async with cut_lab(tmp_path) as there:
        options = {"cut_every_seconds": 10.0}
        await there.join_host(THREE, **options)
        second = {"folder": tmp_path / "lea", **options}
        await there.join("lea", THREE, coordinates=True, **second)
        await there.join("ann", THREE)
        await there.until_safe(1)
        await there.kill("host")
        before = there.board.last_number
        cut = await there.until_safe(before + 1)
        assert set(cut.epochs) == set(THREE)
        assert cut.coordinator == there.peers["lea"].peer_id


@in_virtual_time
async def test_an_organiser_s_order_has_main_and_the_other_groups_go_back(tmp_path: Path) -> None:
    async with cut_lab(tmp_path) as there:
        await three_groups(there)
        cut = await cuts.propose(there.peers["ann"], {}, True, 100.0)
        await there.until_epoch("main", cut.epochs["main"] + 3)
        part, at_epoch = cut.parts["main"], there.head("main").epoch
        order = Rollback(number=1, to_epoch=part.epoch, digest=part.digest, given_at_epoch=at_epoch, cut=cut.number)
        manifest = Manifest(run="bakery", recipe=RecipeRef(name="digits"), rollback=order)
        host = there.posts["host"]["main"]
        desk = RestorationDesk(host.averager, host.keeper.restoring, lambda: manifest, host.keeper.cut_desk)
        await there.until(lambda: there.head("main").num_restored == 1, "main to go back")
        for group in ("x", "y"):
            await there.until(lambda g=group: there.head(g).num_returned == 1, f"{group} to go back")
        await there.until_epoch("x", there.head("x").epoch + 3)
        await desk.close()
        assert there.head("main").num_returned == 0, "main went back by the manifest's order alone"
        assert there.board.returning is not None
        assert there.board.returning.order == 1


ALL = {"host": THREE, "lea": THREE, "ann": ("main", "x"), "bob": ("x", "y"), "cid": ("main", "y")}


async def come(there: CutLab, name: str) -> None:
    options = {"cut_every_seconds": 7.0, "folder": there.folder / name, "backups": BackupConfig(every_epochs=3)}
    if name == "host":
        await there.join_host(ALL[name], **options)
    else:
        await there.join(name, ALL[name], coordinates=name == "lea", **(options if name == "lea" else {}))


@settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.floats(0.5, 12.0), st.sampled_from(sorted(ALL))), max_size=5))
def test_whoever_dies_when_all_groups_go_back_to_the_newest_safe_cut(troubles: list[tuple[float, str]]) -> None:
    with TemporaryDirectory() as folder:
        in_virtual_time(_live_through)(Path(folder), troubles)


async def _live_through(folder: Path, troubles: list[tuple[float, str]]) -> None:
    async with cut_lab(folder) as there:
        for name in ALL:
            await come(there, name)
        made: dict[int, Cut] = {}
        for pause_seconds, name in troubles:  # who is there is killed, who is gone comes back
            await asyncio.sleep(pause_seconds)
            if name not in there.peers:
                await come(there, name)
            elif len(there.peers) > 1:
                await there.kill(name)
            for number, cut in there.board.made.items():
                assert made.setdefault(number, cut) == cut, "a cut is written once"
        for name in sorted(ALL.keys() - there.peers.keys()):
            await come(there, name)
        before = await there.until_safe(there.board.last_number + 1)
        await asyncio.sleep(3.0)
        await there.kill(*there.peers)
        await come(there, "host")
        latest = there.board.latest()
        for name in sorted(ALL.keys() - {"host"}):
            await come(there, name)
        assert latest is not None
        assert latest.number >= before.number
        assert set(latest.epochs) == set(THREE)
        for group in THREE:
            await there.until(lambda g=group: len(there.resumed_from(g)) == 3, f"all of {group} to go on")
            assert min(there.resumed_from(group)) == latest.epochs[group], f"{group} goes back to {latest.epochs}"
