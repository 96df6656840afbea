"""Peers join, leave, die, freeze and lose each other in real processes, at random, for many epochs.

The same seed gives the same trouble, though not the same timing: POTLUCK_SEED=… repeats a failure more or less. The
same in virtual time, and exactly, is in tests/unit/test_round_chaos.py.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from roundcluster import PATIENCE_SECONDS, ROUND_SECONDS, Answer, ChildMember, check_agreement
from roundstage import SENDER_POINTS, Stage, open_stage

from potluck.testing.polling import poll_until
from potluck.testing.processes import ChildError

POINTS = [*SENDER_POINTS, "first_reduced", "half_averages_sent", "plan_published", "committing", "committed"]
STOPS_SECONDS = [0.5, 0.5, 2.5, 5.0]
FEWEST_UNTROUBLED = 2
WHOLE_EVERY = 20


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with open_stage(tmp_path_factory.mktemp("trouble")) as stage:
        yield stage


class Chaos:
    """Random trouble, and a record of what was agreed on."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage = stage
        self.cluster = stage.cluster
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        self.num_fired = 0

    async def epoch(self) -> None:
        """Whoever is there takes part; up to two of them are in trouble; others come back."""
        members = await self._those_here()
        troubled = await self._prepare(members)
        patterns = self.cluster.begin(members)
        self._respawn()
        leavers = [member for member, kind in troubled.items() if kind == "leave"]
        if leavers:
            await asyncio.sleep(self.rng.choice([0.0, 0.05, 0.2]))
        for member in leavers:
            member.order("leave")
        answers = await self._answers(patterns, troubled)
        self._check(answers)
        self.num_fired += len(self.stage.fired())
        for victim, kind in troubled.items():
            if victim.is_running:
                await self._heal(victim, kind)

    async def _heal(self, victim: ChildMember, kind: str) -> None:
        try:
            await victim.ask("arm", faults=[])
            await victim.ask("mend")
        except ChildError:
            assert kind == "kill", f"member {victim.number} died by itself"  # after it had answered

    async def whole(self) -> None:
        """Everybody is back, and holds the mean of all."""
        await self.stage.finish()
        self._note("all are back")

    def _note(self, text: str) -> None:
        self.log.append(f"epoch {self.cluster.epoch}: {text}")

    async def _those_here(self) -> list[ChildMember]:
        """Members that have joined; those who just do are waited for when too few are left."""
        for member in self.cluster.members:
            num_here = sum(other.has_joined for other in self.cluster.members)
            if member.is_running and not member.has_joined and num_here <= FEWEST_UNTROUBLED:
                await member.until_joined()
        return [member for member in self.cluster.members if member.has_joined]

    async def _prepare(self, members: list[ChildMember]) -> dict[ChildMember, str]:
        most = max(0, min(2, len(members) - FEWEST_UNTROUBLED))
        troubled: dict[ChildMember, str] = {}
        for victim in self.rng.sample(members, min(most, self.rng.choice([0, 1, 1, 2]))):
            kind = self.rng.choice(["kill", "stop", "cut", "leave"])
            point = self.rng.choice(POINTS)
            others = [member.id for member in members if member is not victim]
            detail = {"cut": [self.rng.choice(others)]} if kind == "cut" else {}
            actions = {"kill": "kill", "stop": f"stop:{self.rng.choice(STOPS_SECONDS)}", "cut": "note"}
            if kind in actions:
                await self.stage.arm(victim, point, actions[kind], **detail)
            troubled[victim] = kind
            self.counts[kind] += 1
            self._note(f"(next) {kind} {victim.number} at {point} {detail}")
        return troubled

    def _respawn(self) -> None:
        for member in self.cluster.members:
            if not member.is_running and self.rng.random() < 0.7:
                self._note(f"{member.number} joins")
                self.counts["join"] += 1
                member.spawn()

    async def _answers(self, patterns: dict[ChildMember, str], troubled: dict[ChildMember, str]) -> list[Answer]:
        answers = []
        for member, pattern in patterns.items():

            def answered_or_dead(member: ChildMember = member, pattern: str = pattern) -> bool:
                return bool(member.process.find_line(pattern)) or not member.is_running

            await poll_until(answered_or_dead, ROUND_SECONDS + PATIENCE_SECONDS, f"member {member.number} to answer")
            if troubled.get(member) == "leave":
                assert await member.process.until_exit(PATIENCE_SECONDS) == 0
            elif member.process.find_line(pattern):
                answers.append(await member.answer(pattern))
            else:
                assert troubled.get(member) == "kill", f"member {member.number} died by itself"
        return answers

    def _check(self, answers: list[Answer]) -> None:
        everybody = [member.number for member in self.cluster.members]
        check_agreement(answers, must_contribute=[], may_contribute=everybody, must_hold=False)
        assert {answer["head"] for answer in answers} == {self.cluster.epoch}
        holders = sum(answer["holds"] for answer in answers)
        self._note(f"{holders} of {len(answers)} hold it")
        self.counts["held"] += holders
        assert holders >= 1


def run_chaos(stage: Stage, num_epochs: int) -> None:
    seed = int(os.environ.get("POTLUCK_SEED") or random.SystemRandom().randrange(10**6))
    print(f"POTLUCK_SEED={seed}")
    chaos = Chaos(stage, seed)
    fewest_fired = num_epochs // 5

    async def case() -> None:
        number = 0
        # A fault strikes only whoever gets to its point: where chance draws none of those, a few more epochs do.
        while number < num_epochs or (chaos.num_fired < fewest_fired and number < 4 * num_epochs):
            number += 1
            await chaos.epoch()
            if number % WHOLE_EVERY == 0:
                await chaos.whole()
        await chaos.whole()

    try:
        stage.run(case())
    except BaseException:
        print(*chaos.log[-80:], sep="\n")
        raise
    print(dict(chaos.counts))
    assert chaos.counts["held"] >= 2 * num_epochs
    assert chaos.num_fired >= fewest_fired, "trouble that never happens proves nothing"


@pytest.mark.timeout(600)
def test_a_few_epochs_of_trouble(stage: Stage) -> None:
    run_chaos(stage, 8)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_epochs_of_trouble(stage: Stage) -> None:
    run_chaos(stage, 200)
