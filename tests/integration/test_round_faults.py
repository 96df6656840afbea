"""Members, coordinators and the hub fail at every point of a round, in real processes; the others agree all the same.

All cases share a cluster: three trainers that listen and may coordinate, and one client. Each case is one epoch in
which one fault fires, then everybody is whole again and one more epoch shows that nothing is left of it.

A part of every kind runs by default. In virtual time all of it does, with an aux peer, and with repairs and audits
among the points, in tests/unit/test_round_points.py; here it takes minutes: `scripts/test -m soak tests/integration`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from typing import Any

import pytest
from roundcluster import PATIENCE_SECONDS, check_agreement
from roundstage import ALL_POINTS, Stage, Victim, open_stage, role_of

pytestmark = pytest.mark.timeout(400)  # several waits of a minute each, none of which a healthy machine needs

STOP_SECONDS = 2.5  # longer than the director's patience with silence
LONG_STOP_SECONDS = 4.0  # longer than a lease lasts
LATE_POINTS = ["complete", "reported", "committing", "committed", "applying"]  # when tensors need not move any more

Case = tuple[Victim, str]
KILLS: list[Case] = [
    ("sender", "planned"),
    ("sender", "half_sent"),
    ("sender", "reported"),
    ("reducer", "first_reduced"),
    ("reducer", "half_averages_sent"),
    ("reducer", "complete"),
    ("coordinator", "plan_published"),
    ("coordinator", "half_sent"),
    ("coordinator", "committing"),
    ("coordinator", "committed"),
    ("sender", "ready"),
    ("sender", "applying"),
]
FREEZES: list[Case] = [
    ("sender", "half_sent"),
    ("reducer", "planned"),
    ("reducer", "half_averages_sent"),
    ("coordinator", "plan_published"),
    ("coordinator", "committing"),
]
CUTS: list[Case] = [
    ("sender", "planned"),
    ("sender", "half_sent"),
    ("reducer", "first_reduced"),
    ("coordinator", "plan_published"),
]
RESTARTS: list[Case] = [
    ("sender", "half_sent"),
    ("reducer", "complete"),
    ("coordinator", "plan_published"),
    ("coordinator", "committing"),
]


def cases(by_default: Collection[Case]) -> list[Any]:
    """Every victim at every point; those that are not for every day are marked."""
    return [pytest.param(*case, marks=() if case in by_default else pytest.mark.soak) for case in ALL_POINTS]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with open_stage(tmp_path_factory.mktemp("rounds")) as stage:
        yield stage


@pytest.mark.parametrize(("who", "point"), cases(KILLS))
def test_a_process_is_killed(stage: Stage, who: Victim, point: str) -> None:
    async def case() -> None:
        cluster = stage.cluster
        victim = await stage.victim(who)
        survivors = [member for member in cluster.members if member is not victim]
        await stage.arm(victim, point, "kill", role=role_of(who, point))
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


@pytest.mark.parametrize(("who", "point"), cases(FREEZES))
def test_a_process_freezes_for_a_while(stage: Stage, who: Victim, point: str) -> None:
    async def case() -> None:
        cluster = stage.cluster
        victim = await stage.victim(who)
        survivors = [member for member in cluster.members if member is not victim]
        seconds = LONG_STOP_SECONDS if who == "coordinator" else STOP_SECONDS
        await stage.arm(victim, point, f"stop:{seconds}", role=role_of(who, point))
        patterns = cluster.begin()
        await stage.until_fired()
        answers = await cluster.answers(patterns, survivors)
        numbers = [member.number for member in survivors]
        check_agreement(answers, must_contribute=numbers, may_contribute=[victim.number])
        [late] = await cluster.answers(patterns, [victim])
        assert "failed" not in late, late
        assert late["head"] == cluster.epoch
        assert late["holds"] or len(late["fetch_from"]) == len(survivors), "it knows where to fetch"
        check_agreement([*answers, late], must_contribute=numbers, may_contribute=[victim.number], must_hold=False)
        await stage.finish()

    stage.run(case())


@pytest.mark.parametrize(("who", "point"), cases(CUTS))
def test_a_link_is_cut(stage: Stage, who: Victim, point: str) -> None:
    """Nothing gets through any more between the victim and one reducer; the hub, and all others, still hear both."""

    async def case() -> None:
        cluster = stage.cluster
        victim = await stage.victim(who)
        other = next(m for m in cluster.members if m is not victim and not m.is_client)
        bystanders = [member for member in cluster.members if member not in (victim, other)]
        await stage.arm(victim, point, "note", role=role_of(who, point), cut=[other.id])
        patterns = cluster.begin()
        await stage.until_fired()
        answers = await cluster.answers(patterns, cluster.members)
        numbers = [member.number for member in bystanders]
        check_agreement(answers, must_contribute=numbers, may_contribute=[victim.number, other.number], must_hold=False)
        by_member = dict(zip(cluster.members, answers, strict=True))
        assert all(by_member[member]["holds"] for member in bystanders), answers
        assert by_member[victim]["holds"] or by_member[other]["holds"], answers
        if point not in LATE_POINTS:
            assert (await victim.ask("status"))["lost_packets"] > 0
        await stage.finish()

    stage.run(case())


@pytest.mark.parametrize(("who", "point"), cases(RESTARTS))
def test_the_hub_restarts(stage: Stage, who: Victim, point: str) -> None:
    async def case() -> None:
        cluster = stage.cluster
        victim = await stage.victim(who)
        # The delay is there so that the hub is away before the round goes on.
        await stage.arm(victim, point, "delay:0.7", role=role_of(who, point))
        patterns = cluster.begin()
        await stage.until_fired()
        await cluster.restart_hub()
        answers = await cluster.answers(patterns, cluster.members)
        numbers = [member.number for member in cluster.members]
        check_agreement(answers, must_contribute=numbers, may_contribute=[])
        assert {answer["head"] for answer in answers} == {cluster.epoch}
        await stage.finish()

    stage.run(case())


@pytest.mark.parametrize("who", ["sender", "reducer", "coordinator"])
def test_a_peer_lies_about_its_digest(stage: Stage, who: Victim) -> None:
    """It is left out; whoever tells the truth agrees. (The liar itself holds the right bits, and finds that out.)"""

    async def case() -> None:
        cluster = stage.cluster
        liar = await stage.victim(who)
        honest = [member for member in cluster.members if member is not liar]
        await liar.ask("lie", epoch=cluster.epoch + 1)
        patterns = cluster.begin()
        answers = await cluster.answers(patterns, cluster.members)
        numbers = [member.number for member in cluster.members]
        check_agreement(answers, must_contribute=numbers, may_contribute=[])
        for answer in answers:
            assert answer["left_out"] == {liar.id: "its averages have another digest"}
            assert set(answer["holders"]) == {member.id for member in honest}
        assert (await liar.ask("status"))["lies"] > 0
        await stage.finish()

    stage.run(case())


@pytest.mark.parametrize("who", ["sender", "reducer"])
def test_a_slow_peer_is_waited_for(stage: Stage, who: Victim) -> None:
    """Each piece of its tensor work takes long, but not so long that nothing moves."""

    async def case() -> None:
        cluster = stage.cluster
        slow = await stage.victim(who)
        await slow.ask("slow", seconds=0.1)
        answers = await cluster.round()
        assert all(answer["left_out"] == {} for answer in answers)
        assert (await slow.ask("slow", seconds=0.0))["slowed"] > 0
        await stage.finish()

    stage.run(case())
