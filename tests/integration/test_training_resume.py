"""A whole run is stopped, its host too, and started again later: it goes on from the newest backup of anyone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runhouse import RunHouse, open_run
from traincompany import PATIENCE_SECONDS, Company, house_with_link

from potluck.hub.joinlink import JoinLink
from potluck.optim.auxiliary import AuxiliaryPeer
from potluck.state import following
from potluck.state.backups import BackupConfig
from potluck.state.config import StateConfig
from potluck.testing.polling import poll_until
from potluck.testing.processes import Children

NUM_TRAINERS = 3
ALL = list(range(NUM_TRAINERS))


async def train(
    children: Children, link: JoinLink, home: Path, num_epochs: int, **options: Any
) -> tuple[Company, list[dict[str, Any]]]:
    """Trainers go on from whatever there is, up to an epoch, and leave."""
    company = Company(children, link, home, num_epochs, "sync")
    await company.start(NUM_TRAINERS, **options)
    return company, await company.finish(ALL)


def begun(company: Company) -> set[tuple[int, str]]:
    """Epoch and digest of the state that each began with."""
    return {(told["epoch"], told["digest"]) for number in ALL for told in company.told(number, "joined")}


def digests_of(company: Company, number: int) -> dict[int, str]:
    return {told["done"]: told["digest"] for told in company.told(number, "done")}


async def restart(house: RunHouse, link: JoinLink) -> JoinLink:
    await house.restart()
    return replace(house.host.link, invite=link.invite)


def tear_newest(folder: Path) -> None:
    """As if the power had failed before the disk was done."""
    newest = max((folder / "backups").glob("epoch-*.safetensors"))
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size // 2)


@pytest.mark.timeout(400)
async def test_all_stop_and_the_run_goes_on_from_the_newest_backup_of_anyone(
    tmp_path: Path, children: Children
) -> None:
    def folder(number: int) -> str:
        return str(tmp_path / f"backups-{number}")

    wide = {"hidden": 100_000, "lr": 1e-7, "folder": folder}  # a state that is larger than a log
    async with house_with_link(tmp_path) as (house, link):
        company, results = await train(children, link, tmp_path, 4, **wide)
        (stopped,) = {result["digest"] for result in results}

        link = await restart(house, link)  # one of them cannot save anything from here on
        company, results = await train(children, link, tmp_path, 7, **wide, full_disk=lambda number: number == 2)
        assert begun(company) == {(4, stopped)}
        assert len({result["digest"] for result in results}) == 1
        assert sorted(digests_of(company, 0)) == [5, 6, 7]
        assert results[2]["statistics"]["backups_failed"] >= 1
        assert "Training goes on without backups" in company.processes[2].output()
        before = digests_of(company, 0)

        for number in (0, 1):
            tear_newest(Path(folder(number)))
        link = await restart(house, link)
        company, results = await train(children, link, tmp_path, 9, **wide)
        assert begun(company) == {(7, before[6])}  # the lineage is never turned back; the update of epoch 7 is lost
        assert any("the updates of epoch 7 are lost" in company.processes[number].output() for number in ALL)
        assert any("cannot be used, the one before it is tried" in company.processes[n].output() for n in (0, 1))
        assert len({result["digest"] for result in results}) == 1
        assert sorted(digests_of(company, 0)) == [8, 9]


@pytest.mark.timeout(400)
async def test_the_hosts_own_peer_keeps_the_state_for_trainers_who_have_none(
    tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where a fetch takes seconds, as on a busy machine, the pause after it would be minutes.
    monkeypatch.setattr(following, "PAUSE_FACTOR", 1)
    kept = StateConfig(folder=tmp_path / "kept", backups=BackupConfig(every_epochs=1), grace_seconds=2.0)
    async with open_run(tmp_path) as house:
        helper = await AuxiliaryPeer.of(house.own_peer, num_threads=1, state=kept)
        try:
            company = Company(children, house.host.link, tmp_path, 5, "sync")
            await company.start(NUM_TRAINERS)
            for process in company.processes:
                await process.until_line(r'"finished"', PATIENCE_SECONDS)
            await poll_until(lambda: helper.kept_epoch == 5, PATIENCE_SECONDS, "the helper to have epoch 5")
            results = await company.finish(ALL)
        finally:
            await helper.close()
        await house.restart()
        helper = await AuxiliaryPeer.of(house.own_peer, num_threads=1, state=kept)
        try:
            company, later = await train(children, house.host.link, tmp_path, 7)
        finally:
            await helper.close()
    assert begun(company) == {(5, results[0]["digest"])}
    assert sorted(digests_of(company, 0)) == [6, 7]
    assert len({result["digest"] for result in later}) == 1
