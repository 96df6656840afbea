"""Cuts: one committed epoch of each group, held, saved, and gone back to as a whole. In virtual time."""

from __future__ import annotations

from pathlib import Path

from cutlab import CutLab, cut_lab

from potluck.run import cuts
from potluck.sim.virtualloop import in_virtual_time
from potluck.state.backups import Backups, backup_folder

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
            [saved] = [info for info in infos if info.cut == cut.number]
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
