"""The run's history outlives its hub: stopped in good order, and killed; a newcomer's page shows all of it."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from runhouse import RunHouse, host_config, open_run
from traincompany import PATIENCE_SECONDS, Company

from potluck.monitor.follower import RunFollower
from potluck.monitor.past import Past
from potluck.testing.polling import poll_until
from potluck.testing.processes import Children
from potluck.training.books.history import Points, RoundRecord
from potluck.training.trainer.auxiliarywork import AuxiliaryWork


class Written(NamedTuple):
    """What the history told somebody."""

    points: Points
    rounds: dict[int, RoundRecord]


@asynccontextmanager
async def helping(house: RunHouse) -> AsyncIterator[None]:
    """The host's own peer coordinates, and so writes the history."""
    work = await AuxiliaryWork.start(house.own_peer)
    try:
        yield
    finally:
        await work.close()


async def look(house: RunHouse, wanted_epoch: int) -> Written:
    """What somebody sees who comes now, as soon as the history tells of this epoch, in points and in rounds."""
    peer = await house.join("newcomer", role="observer", client_mode=True)
    follower = await RunFollower.start(peer.session)
    try:
        past = follower.past
        await poll_until(
            lambda: newest_point(past) >= wanted_epoch and newest_round(past) >= wanted_epoch,
            PATIENCE_SECONDS,
            lambda: f"epoch {wanted_epoch} in the history: points {past.points['epoch']}, rounds {newest_round(past)}",
        )
        assert not follower.counts
        return Written(past.points.copy(), {record.epoch: record for record in past.rounds()})
    finally:
        await follower.close()
        await peer.close()


def newest_point(past: Past) -> int:
    return int(past.points["epoch"].max(initial=0))


def newest_round(past: Past) -> int:
    return max((record.epoch for record in past.rounds()), default=0)


def check_kept(before: Written, after: Written) -> None:
    """All that was there is there, point by point and round by round, and something was added."""
    assert after.points[: len(before.points)].tobytes() == before.points.tobytes()
    assert {epoch: after.rounds.get(epoch) for epoch in before.rounds} == before.rounds
    assert len(after.points) > len(before.points)
    assert len(after.rounds) > len(before.rounds)


@pytest.mark.timeout(300)
async def test_a_newcomer_sees_what_was_before_a_stop_and_a_kill_of_the_hub(tmp_path: Path, children: Children) -> None:
    durable = replace(host_config(tmp_path / "run").hub, sync_always=True)  # as in earnest
    async with open_run(tmp_path, hub=durable) as house:
        company = Company(children, house.host.link, tmp_path, 1_000_000, "sync")
        async with helping(house):
            await company.start(1, pause_seconds=0.02)
            first = await look(house, 3)
        await house.restart()  # the trainer comes back by itself
        async with helping(house):
            second = await look(house, max(first.rounds) + 3)
            hub = house.host._hub
            assert hub is not None
            os.kill(hub.pid, signal.SIGKILL)
        await house.restart()
        async with helping(house):
            third = await look(house, max(second.rounds) + 3)
        assert company.processes[0].exit_code is None
    check_kept(first, second)
    check_kept(second, third)
