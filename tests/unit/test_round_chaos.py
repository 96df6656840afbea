"""Peers join, leave, die, freeze and lose each other or the hub, at random, for many epochs; the promises hold.

In memory and in virtual time, so that minutes of trouble take seconds, and the same seed gives the same trouble, to
the last message. The same with real processes is in tests/integration/test_round_faults.py.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from functools import cache
from typing import Any

import pytest
from roundchaos import Chaos
from roundlab import assert_same_average, lab, mean_of

from potluck.round.audit.auditcore import AuditConfig
from potluck.sim.virtualloop import in_virtual_time

SEEDS = 5
FOUND_SEEDS = (123, 152)  # that have found something
TWICE_SEED = 9  # told from itself by the smallest change of order
EPOCHS = 12
SOAK_SEEDS = 200
SOAK_EPOCHS = 200
OTHER_SEEDS = 3
SETTLE_SECONDS = 20.0


FULL: dict[str, Any] = {"coordinates": True}
STRANGER: dict[str, Any] = {"coordinates": True, "trusted": False}
COMPANIES: dict[str, list[dict[str, Any]]] = {
    "trainers": [FULL] * 5,
    "mixed": [*[FULL] * 4, {"is_client": True}, {"role": "aux"}],
    "audited": [FULL, *[STRANGER] * 3, {"is_client": True}],
}
KINDS = ("kill", "freeze", "sever", "muffle", "cut", "lose", "hold", "drop", "at_points")


async def run_chaos(seed: int, num_epochs: int, company: str = "trainers") -> Chaos:
    async with lab(seed=seed) as there:
        for options in COMPANIES[company]:
            await there.join(**options)
            await asyncio.sleep(0.1)
        chaos = Chaos(there, seed)
        try:
            for _ in range(num_epochs):
                await chaos.epoch()
            await chaos.calm()
            await asyncio.sleep(SETTLE_SECONDS if company != "audited" else AuditConfig().silence_seconds)
            results = await there.average(timeout_seconds=60.0)
            assert all(result.holds for result in results)
            trainers = [member for member in there.members if not member.is_aux]
            assert_same_average(trainers, mean_of(trainers))
            assert {member.averager.epoch for member in there.members} == {max(chaos.chain.commits)}
            assert not any(member.averager.statistics().get("errors", 0) for member in there.members)
        except BaseException:
            print(f"POTLUCK_SEED={seed}:", *chaos.log[-60:], sep="\n")
            raise
        finally:
            await chaos.calm()
        return chaos


@cache
def check_seed(seed: int, num_epochs: int, company: str = "trainers") -> Counter[str]:
    """Run one schedule of trouble; what happened in it."""
    counts: Counter[str] = Counter()

    @in_virtual_time
    async def run() -> None:
        chaos = await run_chaos(seed, num_epochs, company)
        assert len(chaos.chain.commits) >= num_epochs + 1
        assert chaos.counts["held"] >= 2 * num_epochs
        assert len(chaos.log) >= num_epochs // 2, "trouble that never happens proves nothing"
        counts.update(chaos.counts)

    run()
    return counts


def seeds() -> list[int]:
    """The same few, and one that nobody has tried; name one to repeat it: POTLUCK_SEED=…"""
    if chosen := os.environ.get("POTLUCK_SEED"):
        return [int(chosen)]
    return [*range(SEEDS), *FOUND_SEEDS, random.SystemRandom().randrange(10**6)]


@pytest.mark.parametrize("number", range(len(seeds())))
def test_whatever_happens_each_epoch_is_agreed_on_once(number: int) -> None:
    seed = seeds()[number]
    print(f"POTLUCK_SEED={seed}")
    check_seed(seed, EPOCHS)


@pytest.mark.parametrize("company", ["mixed", "audited"])
@pytest.mark.parametrize("number", range(OTHER_SEEDS))
def test_so_it_is_among_members_of_every_kind_and_with_audits(number: int, company: str) -> None:
    seed = [*range(OTHER_SEEDS - 1), seeds()[-1]][number]
    print(f"POTLUCK_SEED={seed}")
    check_seed(seed, EPOCHS, company)


def test_trouble_of_every_kind_has_struck() -> None:
    counts = sum((check_seed(seed, EPOCHS) for seed in (*range(SEEDS), *FOUND_SEEDS)), Counter[str]())
    assert min(counts[kind] for kind in KINDS) > 0, counts


def test_the_same_seed_gives_the_same_trouble() -> None:
    logs: list[list[str]] = []

    @in_virtual_time
    async def run() -> None:
        logs.append((await run_chaos(TWICE_SEED, EPOCHS)).log)

    run()
    run()
    assert logs[0] == logs[1]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    """All of them are tried, and each that fails is named at once: this takes long, and may be ended before its end."""
    counts: Counter[str] = Counter()
    failed: dict[int, str] = {}
    first = seeds()[-1]
    for seed in range(first, first + SOAK_SEEDS):
        try:
            counts += check_seed(seed, EPOCHS)
        except Exception as error:  # noqa: BLE001 - the next seed is tried all the same; the test fails below
            failed[seed] = repr(error)
            with capsys.disabled():
                print(f"\nPOTLUCK_SEED={seed} fails: {error!r}", flush=True)
    assert not failed
    # A seed strikes about 18 times, and the rarest kind ("drop") is one strike in 32: 110 are expected of 200 seeds.
    # 89 have been seen; far fewer mean that a kind has gone missing.
    assert min(counts[kind] for kind in KINDS) > SOAK_SEEDS // 4, counts


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_two_hundred_epochs_of_trouble() -> None:
    seed = seeds()[-1]
    print(f"POTLUCK_SEED={seed}")
    check_seed(seed, SOAK_EPOCHS)
