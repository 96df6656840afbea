"""Trainers whose states differ, in processes of their own: they notice, and repair no more than they must."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from traincompany import PATIENCE_SECONDS, Company, house_with_link

from potluck.testing.processes import Children

WIDE = {"hidden": 200_000, "lr": 1e-7}  # parameters of 6.4 MB: with or without momentum a state of 13 chunks
REPAIRED = r"others hold: repaired, by (\d+) of (\d+) chunks"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["sync", "diloco"])
async def test_other_weights_at_the_start_and_a_flipped_bit_later_are_found_and_repaired(
    tmp_path: Path, children: Children, kind: str
) -> None:
    victim, flip_at, num_epochs = 1, 6, 20
    async with house_with_link(tmp_path) as (_, link):
        company = Company(children, link, tmp_path, num_epochs, kind)
        await company.start(
            3,
            seed=lambda number: number,
            flip_at=lambda number: flip_at if number == victim else 0,
            pause_seconds=0.05,
            min_peers=3,  # who is left behind fetches a whole state, and has nothing to repair
            **WIDE,
        )
        await company.processes[victim].until_line(r"others hold: repaired, by 1 of ", PATIENCE_SECONDS)
        results = await company.finish([0, 1, 2])
    assert len({result["digest"] for result in results}) == 1
    statistics = [result["statistics"] for result in results]
    taken = [each.get("mended", 0) + each.get("resumed", 0) for each in statistics]
    assert sum(map(bool, taken)) >= 2, taken  # all but one took over another's weights

    assert company.told(victim, "flipped")
    digests = [{told["done"]: told["digest"] for told in company.told(number, "done")} for number in range(3)]
    deviant = [epoch for epoch in digests[victim] if len({each.get(epoch) for each in digests}) > 1]
    assert max(deviant) > flip_at, "the bit was flipped, and nobody could tell"
    repairs = re.findall(REPAIRED, company.processes[victim].output())
    assert repairs[-1] == ("1", "13")  # of all chunks, the one with the bit
    assert statistics[victim]["mended"] == len(repairs)
    assert statistics[victim]["mended_chunks"] == sum(int(moved) for moved, _ in repairs)
    for number in {0, 2}:
        late = [told["done"] for told in company.told(number, "done") if told["done"] > flip_at]
        assert late  # the others trained on
        output = company.processes[number].output()
        assert not re.search(REPAIRED, output[output.find(f'"done": {flip_at}') :])  # and had nothing to repair


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_each", [(2, 1), (2, 2)])
async def test_machines_that_compute_differently_fetch_nothing_because_of_rounding_and_repair_damage(
    tmp_path: Path, children: Children, num_each: tuple[int, int]
) -> None:
    """Trainers with and without vector instructions; a high bit is flipped in the last of them."""
    num_trainers, flip_at = sum(num_each), 3
    victim, is_seen = num_trainers - 1, tmp_path / "seen"
    async with house_with_link(tmp_path) as (_, link):
        company = Company(children, link, tmp_path, 1000, "sync")
        await company.start(
            num_trainers,
            environment=lambda number: {"ATEN_CPU_CAPABILITY": "default"} if number >= num_each[0] else {},
            flip_at=lambda number: flip_at if number == victim else 0,
            flipped_bit=30,  # of the exponent
            adam=True,
            lr=1e-3,
            hidden=2000,
            pause_seconds=0.1,
            compare_every_seconds=2.0,
            until=str(is_seen),
        )
        await company.processes[victim].until_line(r"others hold: repaired", PATIENCE_SECONDS)
        is_seen.touch()
        results = await company.finish(list(range(num_trainers)))
    statistics = [result["statistics"] for result in results]
    digests = [
        {told["done"]: told["digest"] for told in company.told(number, "done")} for number in range(num_trainers)
    ]
    common = set.intersection(*(set(each) for each in digests))
    assert any(digests[0][epoch] != digests[victim][epoch] for epoch in common if epoch <= flip_at), "bits were equal"
    assert [each.get("states_rounding_bytes", 0) for each in statistics] == [0] * num_trainers
    assert [each.get("mended", 0) for each in statistics] == [0] * victim + [1]
    assert re.search(r"further from that of .* than rounding explains", company.processes[victim].output())
