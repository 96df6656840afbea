"""Trainers are killed at random, the coordinator too, and come back: the survivors end alike, and as well as ever.

The long one: `scripts/test tests/integration/test_training_kills.py -m soak -s`; POTLUCK_SOAK_SEED chooses the kills.
"""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path

import pytest
from traincompany import PATIENCE_SECONDS, Company, house_with_link

from potluck.testing.polling import poll_until
from potluck.testing.processes import Children

logger = logging.getLogger(__name__)

# So large that runs on other samples end within 1% of each other (six of them did): killing may cost 2%.
BATCHES = {"batch_size": 256, "target": 4096, "lr": 0.05, "matchmaking_seconds": 3.0}
MOST_LOSS = 1.02


def epoch_of(company: Company) -> int:
    """The newest epoch that anybody has told of."""
    return max((told["done"] for n in range(len(company.processes)) for told in company.told(n, "done")), default=0)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def undisturbed(folder: Path, children: Children, num_epochs: int) -> float:
    """The loss that two trainers reach whom nobody kills."""
    async with house_with_link(folder) as (_, link):
        company = Company(children, link, folder, num_epochs, "sync")
        await company.start(2, **BATCHES)
        results = await company.finish([0, 1])
    return float(results[0]["loss"])


async def kill_and_rejoin(
    folder: Path, children: Children, *, num_trainers: int, num_epochs: int, num_kills: int, pause: float, seed: int
) -> list[float]:
    """The losses of all trainers, of whom so many were killed on the way; they must hold the same bits."""
    randomness = random.Random(seed)
    everybody = list(range(num_trainers))
    async with house_with_link(folder) as (_, link):
        company = Company(children, link, folder, num_epochs, "sync")
        await company.start(num_trainers, pause_seconds=pause, **BATCHES)
        for kill in range(1, num_kills + 1):
            due = kill * num_epochs // (num_kills + 2) + randomness.randrange(2)
            await poll_until(lambda due=due: epoch_of(company) >= due, 3 * PATIENCE_SECONDS, f"epoch {due}")  # type: ignore[misc]
            victim = randomness.choice(everybody)
            is_in = bool(company.told(victim, "done"))
            company.restart(victim, first_batch=10_000 * kill, pause_seconds=pause, **BATCHES)
            logger.info("killed trainer %d at epoch %d (%s)", victim, due, "training" if is_in else "still joining")
        results = await company.finish(everybody)
    statistics = [result["statistics"] for result in results]
    logger.info("caught up %s", [each.get("caught_up", 0) + each.get("resumed", 0) for each in statistics])
    assert len({result["digest"] for result in results}) == 1  # parameters and the optimizer's statistics, to the bit
    assert any(each.get("caught_up", 0) + each.get("resumed", 0) for each in statistics)
    assert all(each["local_epoch"] == num_epochs for each in statistics)
    return [result["loss"] for result in results]


@pytest.mark.timeout(300)
async def test_two_of_three_trainers_are_killed_and_come_back(tmp_path: Path, children: Children) -> None:
    losses = await kill_and_rejoin(
        made(tmp_path / "killed"), children, num_trainers=3, num_epochs=20, num_kills=2, pause=0.1, seed=3
    )
    assert len(set(losses)) == 1


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_kills_through_a_hundred_epochs(tmp_path: Path, children: Children) -> None:
    seed = int(os.environ.get("POTLUCK_SOAK_SEED", "1"))
    wanted = await undisturbed(made(tmp_path / "undisturbed"), children, 100)
    losses = await kill_and_rejoin(
        made(tmp_path / "killed"), children, num_trainers=4, num_epochs=100, num_kills=16, pause=0.3, seed=seed
    )
    logger.info("seed %d: loss %.6f, undisturbed %.6f, ratio %.4f", seed, losses[0], wanted, losses[0] / wanted)
    assert losses[0] <= MOST_LOSS * wanted
