"""Ordinary training loops in processes of their own, around a real hub."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from runhouse import open_run
from trainchild import loss_of, make_inner, make_model, values_of
from traincompany import PATIENCE_SECONDS, Company, house_with_link

from potluck.optim.auxiliary import AuxiliaryPeer
from potluck.testing.processes import Children


def replay(num_epochs: int, batches_of: dict[int, list[int]], **options: bool) -> list[float]:
    """What one process makes of the same batches."""
    torch.set_num_threads(1)
    model = make_model(**options)
    optimizer = make_inner(model)
    for epoch in range(1, num_epochs + 1):
        optimizer.zero_grad()
        for number in batches_of[epoch]:
            (loss_of(model, number) / len(batches_of[epoch])).backward()
        optimizer.step()
    return values_of(model)


def batches_of(company: Company) -> dict[int, list[int]]:
    """The batches of all trainers by the epoch that they went into."""
    used: dict[int, list[int]] = {}
    for number in range(len(company.processes)):
        for told in company.told(number, "batch"):
            used.setdefault(told["epoch"], []).append(told["batch"])
    return used


@pytest.mark.timeout(300)
async def test_processes_equal_one_process_with_the_large_batch(tmp_path: Path, children: Children) -> None:
    num_epochs = 8
    async with open_run(tmp_path) as house:
        helper = await AuxiliaryPeer.of(house.own_peer, num_threads=1)  # as `potluck host` does: it coordinates
        try:
            company = Company(children, house.host.link, tmp_path, num_epochs, "sync")
            await company.start(2)
            one, other = await company.finish([0, 1])
        finally:
            await helper.close()
    assert one["values"] == other["values"]
    wanted = torch.tensor(replay(num_epochs, batches_of(company)))
    torch.testing.assert_close(torch.tensor(one["values"]), wanted, rtol=1e-4, atol=1e-5)
    assert one["statistics"]["epochs"] == num_epochs


@pytest.mark.timeout(300)
async def test_fifty_epochs_of_a_transformer_in_four_processes_equal_one_process(
    tmp_path: Path, children: Children
) -> None:
    num_epochs = 50
    async with house_with_link(tmp_path) as (_, link):
        company = Company(children, link, tmp_path, num_epochs, "sync")
        await company.start(4, transformer=True)
        results = await company.finish([0, 1, 2, 3])
    assert len({result["digest"] for result in results}) == 1
    ours = torch.tensor(results[0]["values"])
    theirs = torch.tensor(replay(num_epochs, batches_of(company), transformer=True))
    start = torch.tensor(values_of(make_model(transformer=True)))
    assert (theirs - start).norm() > 0.1 * start.norm()  # else the test shows nothing
    difference = ((ours - theirs).norm() / theirs.norm()).item()
    logging.getLogger(__name__).info("relative difference %.2e", difference)
    assert difference <= 1e-5


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
