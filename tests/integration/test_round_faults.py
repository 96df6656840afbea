"""Members, coordinators and the hub fail at every point of a round, in real processes; the others agree all the same.

All cases share a cluster: three trainers that listen and may coordinate, and one client. Each case is one epoch in
which one fault fires, then everybody is whole again and one more epoch shows that nothing is left of it.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Coroutine, Iterator
from typing import Any, Literal, TypeVar

import pytest
from roundcluster import (
    PATIENCE_SECONDS,
    ROUND_SECONDS,
    Answer,
    ChildMember,
    Cluster,
    check_agreement,
    open_cluster,
)

from potluck.testing.faults import Faults, FiredFault
from potluck.testing.polling import poll_until

# Real processes under every fault, some minutes: `scripts/test -m soak tests/integration/test_round_faults.py`.
pytestmark = pytest.mark.soak

T = TypeVar("T")
Victim = Literal["sender", "reducer", "coordinator"]

STOP_SECONDS = 2.5  # longer than the director's patience with silence
LONG_STOP_SECONDS = 4.0  # longer than a lease lasts

SENDER_POINTS = ["planned", "first_sent", "half_sent", "all_sent", "complete", "reported"]
REDUCER_POINTS = ["planned", "half_sent", "first_reduced", "half_averages_sent", "complete", "reported"]
COORDINATOR_POINTS = ["plan_published", "half_sent", "first_reduced", "complete", "committing", "committed"]
ALL_POINTS: list[tuple[Victim, str]] = [
    *(("sender", point) for point in SENDER_POINTS),
    *(("reducer", point) for point in REDUCER_POINTS),
    *(("coordinator", point) for point in COORDINATOR_POINTS),
]


class Stage:
    """The cluster, and the event loop it lives on between tests."""

    def __init__(self, runner: asyncio.Runner, cluster: Cluster) -> None:
        self._runner = runner
        self.cluster = cluster

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def victim(self, who: Victim) -> ChildMember:
        coordinator = await self.cluster.coordinator()
        if who == "coordinator":
            return coordinator
        if who == "sender":
            return self.cluster.members[-1]
        return next(m for m in self.cluster.members if m is not coordinator and not m.is_client)

    async def arm(self, victim: ChildMember, point: str, action: str, **details: Any) -> None:
        """Let the victim fail at that point of the next epoch."""
        fault = {"point": f"round.{point}", "action": action, "epoch": self.cluster.epoch + 1, **details}
        await victim.ask("arm", faults=[fault])

    def fired(self) -> list[FiredFault]:
        """What fired in this epoch."""
        return [f for f in Faults(self.cluster.fired_path).fired() if f.labels["epoch"] == str(self.cluster.epoch)]

    async def until_fired(self) -> FiredFault:
        return (await poll_until(self.fired, PATIENCE_SECONDS, "the fault to fire"))[0]

    async def finish(self) -> None:
        """The cluster is whole again, and nothing is left of the fault."""
        await self.cluster.repair()
        await self.cluster.round()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("rounds")
    with asyncio.Runner() as runner:
        opening = open_cluster(folder, num_full=3, num_clients=1)
        cluster = runner.run(opening.__aenter__())
        try:
            yield Stage(runner, cluster)
        finally:
            runner.run(opening.__aexit__(None, None, None))


@pytest.mark.parametrize(("who", "point"), ALL_POINTS)
def test_a_process_is_killed(stage: Stage, who: Victim, point: str) -> None:
    async def case() -> None:
        cluster = stage.cluster
        victim = await stage.victim(who)
        survivors = [member for member in cluster.members if member is not victim]
        await stage.arm(victim, point, "kill")
        started = time.monotonic()
        patterns = cluster.begin()
        await stage.until_fired()
        answers = await cluster.answers(patterns, survivors)
        seconds = time.monotonic() - started
        assert victim.process.wait(PATIENCE_SECONDS) == -9
        numbers = [member.number for member in survivors]
        check_agreement(answers, must_contribute=numbers, may_contribute=[victim.number])
        assert {answer["head"] for answer in answers} == {cluster.epoch}
        assert seconds < 30.0, "it should take a second or two; even a busy machine must not need its timeouts"
        await stage.finish()

    stage.run(case())


@pytest.mark.parametrize(("who", "point"), ALL_POINTS)
def test_a_process_freezes_for_a_while(stage: Stage, who: Victim, point: str) -> None:
    async def case() -> None:
        cluster = stage.cluster
        victim = await stage.victim(who)
        survivors = [member for member in cluster.members if member is not victim]
        seconds = LONG_STOP_SECONDS if who == "coordinator" else STOP_SECONDS
        await stage.arm(victim, point, f"stop:{seconds}")
        patterns = cluster.begin()
        await stage.until_fired()
        answers = await cluster.answers(patterns, survivors)
        numbers = [member.number for member in survivors]
        check_agreement(answers, must_contribute=numbers, may_contribute=[victim.number])
        [late] = await cluster.answers(patterns, [victim])
        assert "failed" not in late, late
        assert late["head"] == cluster.epoch
        check_agreement([*answers, late], must_contribute=numbers, may_contribute=[victim.number], must_hold=False)
        await stage.finish()

    stage.run(case())


@pytest.mark.parametrize(
    ("who", "point"),
    [
        ("sender", "planned"),
        ("sender", "half_sent"),
        ("reducer", "planned"),
        ("reducer", "half_sent"),
        ("reducer", "half_averages_sent"),
        ("coordinator", "plan_published"),
        ("coordinator", "half_sent"),
        ("coordinator", "complete"),
    ],
)
def test_a_link_is_cut(stage: Stage, who: Victim, point: str) -> None:
    """Nothing gets through any more between the victim and one reducer; the hub, and all others, still hear both."""

    async def case() -> None:
        cluster = stage.cluster
        victim = await stage.victim(who)
        other = next(m for m in cluster.members if m is not victim and not m.is_client)
        bystanders = [member for member in cluster.members if member not in (victim, other)]
        await stage.arm(victim, point, "note", cut=[other.id])
        patterns = cluster.begin()
        await stage.until_fired()
        answers = await cluster.answers(patterns, cluster.members)
        numbers = [member.number for member in bystanders]
        check_agreement(answers, must_contribute=numbers, may_contribute=[victim.number, other.number], must_hold=False)
        by_member = dict(zip(cluster.members, answers, strict=True))
        assert all(by_member[member]["holds"] for member in bystanders), answers
        assert by_member[victim]["holds"] or by_member[other]["holds"], answers
        await stage.finish()

    stage.run(case())


@pytest.mark.parametrize(
    ("who", "point"),
    [
        ("sender", "planned"),
        ("sender", "half_sent"),
        ("reducer", "first_reduced"),
        ("reducer", "complete"),
        ("coordinator", "plan_published"),
        ("coordinator", "committing"),
    ],
)
def test_the_hub_restarts(stage: Stage, who: Victim, point: str) -> None:
    async def case() -> None:
        cluster = stage.cluster
        victim = await stage.victim(who)
        await stage.arm(victim, point, "delay:0.7")  # so that the hub is away before the round goes on
        patterns = cluster.begin()
        await stage.until_fired()
        await cluster.restart_hub()
        answers = await cluster.answers(patterns, cluster.members)
        numbers = [member.number for member in cluster.members]
        check_agreement(answers, must_contribute=[], may_contribute=numbers, must_hold=False)
        assert {answer["head"] for answer in answers} == {cluster.epoch}
        assert sum(answer["holds"] for answer in answers) >= 3, answers
        await stage.finish()

    stage.run(case())


# Chaos


class Chaos:
    """Random kills, freezes and cuts, and a record of what was agreed on."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage = stage
        self.cluster = stage.cluster
        self.rng = random.Random(seed)
        self.log: list[str] = []
        self.num_held = 0

    async def epoch(self) -> None:
        """One epoch with up to two faults at random points."""
        troubled: dict[ChildMember, str] = {}
        members = list(self.cluster.members)
        for victim in self.rng.sample(members, self.rng.choice([0, 1, 1, 2])):
            kind = self.rng.choice(["kill", "stop", "cut"])
            point = self.rng.choice([*SENDER_POINTS, "first_reduced", "half_averages_sent", "committing"])
            others = [member.id for member in members if member is not victim]
            detail = {"cut": [self.rng.choice(others)]} if kind == "cut" else {}
            action = {"kill": "kill", "stop": f"stop:{self.rng.choice([0.5, 2.5, 5.0])}", "cut": "note"}[kind]
            await self.stage.arm(victim, point, action, **detail)
            troubled[victim] = kind
            self.log.append(f"epoch {self.cluster.epoch + 1}: {kind} {victim.number} at {point} {detail}")
        patterns = self.cluster.begin()
        answers = await self._answers(patterns, troubled)
        self._check(answers, troubled)
        await self._repair(troubled)

    async def _answers(self, patterns: dict[ChildMember, str], troubled: dict[ChildMember, str]) -> list[Answer]:
        answers = []
        for member, pattern in patterns.items():

            def answered_or_dead(member: ChildMember = member, pattern: str = pattern) -> bool:
                return bool(member.process.find_line(pattern)) or not member.is_running

            await poll_until(answered_or_dead, ROUND_SECONDS + PATIENCE_SECONDS, f"member {member.number} to answer")
            if member.process.find_line(pattern):
                answers.append(await member.answer(pattern))
            else:
                assert troubled.get(member) == "kill", f"member {member.number} died by itself"
        return answers

    def _check(self, answers: list[Answer], troubled: dict[ChildMember, str]) -> None:
        everybody = [member.number for member in self.cluster.members]
        check_agreement(answers, must_contribute=[], may_contribute=everybody, must_hold=False)
        assert {answer["head"] for answer in answers} == {self.cluster.epoch}
        holders = sum(answer["holds"] for answer in answers)
        self.log.append(f"epoch {self.cluster.epoch}: {holders} of {len(answers)} hold it")
        self.num_held += holders
        assert holders >= (1 if troubled else len(everybody))

    async def _repair(self, troubled: dict[ChildMember, str]) -> None:
        for victim in troubled:
            if victim.is_running:
                await victim.ask("arm", faults=[])
        if troubled:
            await self.cluster.repair()


def run_chaos(stage: Stage, num_epochs: int) -> None:
    seed = int(os.environ.get("POTLUCK_SEED") or random.SystemRandom().randrange(10**6))
    print(f"POTLUCK_SEED={seed}")
    chaos = Chaos(stage, seed)

    async def case() -> None:
        for _ in range(num_epochs):
            await chaos.epoch()
        await stage.finish()

    try:
        stage.run(case())
    except BaseException:
        print(*chaos.log, sep="\n")
        raise
    assert chaos.num_held >= 2 * num_epochs


def test_a_few_epochs_of_trouble(stage: Stage) -> None:
    run_chaos(stage, 6)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_epochs_of_trouble(stage: Stage) -> None:
    run_chaos(stage, 200)
