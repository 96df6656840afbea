"""Ordinary training loops in processes of their own, around a real hub."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from roundhouse import ANYTHING
from runhouse import RunHouse, open_run
from trainchild import loss_of, make_inner, make_model, values_of

from potluck.hub.joinlink import JoinLink
from potluck.optim.helper import Helper
from potluck.testing.processes import Children, ManagedProcess

PROGRAM = Path(__file__).with_name("trainchild.py")
PATIENCE_SECONDS = 100.0


@asynccontextmanager
async def house_with_link(folder: Path) -> AsyncIterator[tuple[RunHouse, JoinLink]]:
    """A host without a peer of its own, and a link for trainers who may coordinate."""
    async with open_run(folder, peer=None) as house:
        organiser = await house.organiser()
        _, secret = await organiser.create_invite(scopes=ANYTHING, uses=None)
        yield house, replace(house.host.link, invite=secret)


class Company:
    """Trainers in processes."""

    def __init__(self, children: Children, link: JoinLink, folder: Path, num_epochs: int, kind: str) -> None:
        self.processes: list[ManagedProcess] = []
        self._children = children
        self._arguments = (link, folder, num_epochs, kind)

    async def start(self, num_trainers: int) -> None:
        """Some more trainers, who begin when all of them are there."""
        link, folder, num_epochs, kind = self._arguments
        there = len(self.processes)
        for number in range(there, there + num_trainers):
            argv = [sys.executable, str(PROGRAM), str(number), str(link), str(folder / f"{number}.nkey")]
            self.processes.append(
                self._children.spawn([*argv, str(num_epochs), kind], name=f"trainer-{number}", stdin=True)
            )
        for process in self.processes[there:]:
            await process.until_line(r'"joined"', PATIENCE_SECONDS)
        for process in self.processes[there:]:
            process.send_line("go")

    def told(self, number: int, key: str) -> list[dict[str, Any]]:
        """What a trainer has said so far, of one kind."""
        lines = re.findall(rf'^\{{"{key}":.*\}}$', self.processes[number].output(), re.MULTILINE)
        return [json.loads(line) for line in lines]

    async def finish(self, numbers: list[int]) -> list[dict[str, Any]]:
        for number in numbers:
            await self.processes[number].until_line(r'"finished"', PATIENCE_SECONDS)
        results = [self.told(number, "finished")[0] for number in numbers]
        for number in numbers:
            self.processes[number].send_line("leave")
        for number in numbers:
            assert await self.processes[number].until_exit(PATIENCE_SECONDS) == 0
            assert self.told(number, "left")
        return results


def replay(company: Company, num_epochs: int, batches_of: dict[int, list[int]]) -> list[float]:
    """What one process makes of the same batches."""
    torch.set_num_threads(1)
    model = make_model()
    optimizer = make_inner(model)
    for epoch in range(1, num_epochs + 1):
        optimizer.zero_grad()
        for number in batches_of[epoch]:
            (loss_of(model, number) / len(batches_of[epoch])).backward()
        optimizer.step()
    return values_of(model)


@pytest.mark.timeout(300)
async def test_processes_equal_one_process_with_the_large_batch(tmp_path: Path, children: Children) -> None:
    num_epochs = 8
    async with open_run(tmp_path) as house:
        helper = await Helper.of(house.own_peer, num_threads=1)  # as `potluck host` does: it coordinates
        try:
            company = Company(children, house.host.link, tmp_path, num_epochs, "sync")
            await company.start(2)
            one, other = await company.finish([0, 1])
        finally:
            await helper.close()
    assert one["values"] == other["values"]
    used: dict[int, list[int]] = {}
    for number in range(2):
        for told in company.told(number, "batch"):
            used.setdefault(told["epoch"], []).append(told["batch"])
    wanted = torch.tensor(replay(company, num_epochs, used))
    torch.testing.assert_close(torch.tensor(one["values"]), wanted, rtol=1e-4, atol=1e-5)
    assert one["statistics"]["epochs"] == num_epochs


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["sync", "diloco"])
async def test_of_three_trainers_one_is_killed_and_two_go_on_alike(
    tmp_path: Path, children: Children, kind: str
) -> None:
    num_epochs, victim = 12, 2
    async with house_with_link(tmp_path) as (_, link):
        company = Company(children, link, tmp_path, num_epochs, kind)
        await company.start(3)
        await company.processes[victim].until_line(r'"done": 3', PATIENCE_SECONDS)
        company.processes[victim].kill()
        results = await company.finish([0, 1])
    assert results[0]["values"] == results[1]["values"]
    assert len(company.told(victim, "done")) < num_epochs  # it did die on the way
    digests = [{told["done"]: told["digest"] for told in company.told(number, "done")} for number in (0, 1)]
    assert digests[0] == digests[1]  # after every epoch, not only at the end
    assert sorted(digests[0]) == list(range(1, num_epochs + 1))
    assert all(value == value for value in results[0]["values"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["sync", "diloco"])
async def test_who_comes_late_fetches_the_state_and_goes_on_with_the_others(
    tmp_path: Path, children: Children, kind: str
) -> None:
    num_epochs, late = 400, 2  # far more than pass until the third is in
    async with house_with_link(tmp_path) as (_, link):
        company = Company(children, link, tmp_path, num_epochs, kind)
        await company.start(2)
        await company.processes[0].until_line(r'"done": 3', PATIENCE_SECONDS)
        await company.start(1)
        await company.processes[late].until_line(r'"done": \d+', PATIENCE_SECONDS)
        first = company.told(late, "done")[0]["done"]
        for number in range(3):
            await company.processes[number].until_line(rf'"done": {first + 5},', PATIENCE_SECONDS)
    digests = [{told["done"]: told["digest"] for told in company.told(number, "done")} for number in range(3)]
    assert first > 3  # it had something to catch up with
    common = set(digests[0]) & set(digests[1]) & set(digests[late])
    assert len(common) >= 3
    for epoch in sorted(common):
        assert len({each[epoch] for each in digests}) == 1, f"epoch {epoch}"
