"""Peers of very different speed, in processes of their own, around a real hub: the work of the slow ones counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from runhouse import open_run
from traincompany import PATIENCE_SECONDS, Company

from potluck.optim.auxiliary import AuxiliaryPeer
from potluck.optim.methods.quorum import AdaptiveGrace, AdaptiveQuorum
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.testing.processes import Children

SLOW = 2
STEP_SECONDS = 0.03


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"overlap_steps": 5}, marks=pytest.mark.soak),
        pytest.param({"overlap_steps": 3, "num_fragments": 2}, marks=pytest.mark.soak),
    ],
    ids=str,
)
async def test_a_trainer_at_a_tenth_of_the_speed_contributes_in_nine_of_ten_rounds(
    tmp_path: Path, children: Children, options: dict[str, int]
) -> None:
    num_epochs = 30
    async with open_run(tmp_path) as house:
        trigger = AdaptiveQuorum(grace=AdaptiveGrace(least_seconds=0.5, most_seconds=30.0))  # as by a manifest
        helper = await AuxiliaryPeer.of(house.own_peer, num_threads=1, coordinator=CoordinatorConfig(trigger=trigger))
        try:
            company = Company(children, house.host.link, tmp_path, num_epochs, "diloco")
            await company.start(
                3,
                inner_steps=20,
                **options,
                pause_seconds=lambda number: STEP_SECONDS * (10 if number == SLOW else 1),
                batch_size=lambda number: 32 if number == SLOW else 8,
            )
            await company.processes[0].until_line(rf'"commit": {num_epochs - 1},', 2 * PATIENCE_SECONDS)
        finally:
            await helper.close()
    slow = company.told(SLOW, "joined")[0]["joined"]
    commits = {told["commit"]: told["weights"] for told in company.told(0, "commit")}
    gave = [epoch for epoch, weights in sorted(commits.items()) if weights.get(slow, 0.0) > 0]
    later = [epoch for epoch in commits if epoch > 10]  # it has to be seen first how fast each of them is
    assert len([epoch for epoch in gave if epoch > 10]) >= 0.9 * len(later)
