"""Every kind of member fails in every way at every point of a round, in virtual time; the others agree all the same.

Three trainers that listen and may coordinate, a client, and an aux peer that only reduces. The same with real processes
is in tests/integration/test_round_faults.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import pytest
from roundlab import Lab, Member, assert_same_average, at_point, contributors_in, lab, mean_of

from potluck.round.audit.auditcore import AuditConfig
from potluck.round.outcome import RoundResult
from potluck.sim.virtualloop import in_virtual_time

Victim = Literal["client", "reducer", "aux", "coordinator"]

FREEZE_SECONDS = 2.5  # longer than the director's patience with silence
LONG_SECONDS = 5.0  # longer than a lease lasts
KILL_SECONDS = 5.0  # in which the others are done
SHORT_SECONDS = 1.0

SENDS = ["first_sent", "half_sent", "all_sent"]
REDUCES = ["first_reduced", "half_averages_sent"]
OWN_POINTS = ["ready", "planned", *SENDS, *REDUCES, "complete", "reported", "applying"]
COORDINATOR_POINTS = ["plan_published", "revision_published", "auditing", "committing", "committed"]
NEVER_REACHED: dict[Victim, list[str]] = {"client": REDUCES, "reducer": [], "aux": SENDS, "coordinator": []}

Case = tuple[Victim, str]
CASES: list[Case] = [
    (who, point)
    for who, never in NEVER_REACHED.items()
    for point in [*OWN_POINTS, *COORDINATOR_POINTS]
    if point not in never
]
CUTS: list[Case] = [(who, point) for who, point in CASES if who != "aux"]
OUTAGES: list[Case] = [(who, point) for who, point in CUTS if point in OWN_POINTS or who == "coordinator"]


@dataclass
class Scene:
    """A round in which somebody fails at some point."""

    there: Lab
    victim: Member
    coordinator: Member
    other: Member  # whose link to the victim may break
    third: Member  # dies before, where the point is in a repair
    point: str
    fired: asyncio.Event = field(default_factory=asyncio.Event)
    deaths: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def is_repaired(self) -> bool:
        return self.point == "revision_published"

    def all_but(self, *members: Member) -> list[Member]:
        """Those who must hold the epoch."""
        out = {*members, self.third} if self.is_repaired else {*members}
        return [member for member in self.there.members if member not in out]

    @contextmanager
    def armed(self, fail: Callable[[], None]) -> Iterator[None]:
        """Let somebody fail when the point is reached: the victim's own, or one of the coordinator."""

        def strike() -> None:
            self.fired.set()
            fail()

        def die_first() -> None:
            if self.is_repaired:
                self.kill(self.third)

        whose = self.coordinator if self.point in COORDINATOR_POINTS else self.victim
        with (
            at_point(f"round.{self.point}", strike, peer=whose.id),
            at_point("round.half_sent", die_first, peer=self.third.id),
        ):
            yield

    def kill(self, member: Member) -> None:
        self.there.sever(member)
        self.deaths.append(asyncio.create_task(self.there.kill(member)))

    async def begin(self) -> dict[Member, asyncio.Task[RoundResult]]:
        """Everybody takes part; returns once somebody has failed."""
        tasks = dict(zip(list(self.there.members), self.there.start(), strict=True))
        async with asyncio.timeout(30.0):
            await self.fired.wait()
        return tasks

    async def check_agreement(self, tasks: dict[Member, asyncio.Task[RoundResult]], holders: list[Member]) -> None:
        """These hold the epoch: their own values are in it, and perhaps those of others that took part."""
        results = [await tasks[member] for member in holders]
        assert all(result.holds for result in results), [result.left_behind for result in results]
        assert len({result.commit.digest for result in results}) == 1
        assert {result.commit.epoch for result in results} == {1}
        trainers = trainers_among(holders)
        assert_same_average(trainers)
        required, allowed = {member.number for member in trainers}, {member.number for member in trainers_among(tasks)}
        for found in contributors_in(trainers[0].values):
            assert required <= found <= allowed

    async def finish(self, tasks: dict[Member, asyncio.Task[RoundResult]]) -> None:
        """Nothing is left of the fault."""
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        await asyncio.gather(*self.deaths)
        if self.point == "auditing":
            await asyncio.sleep(
                AuditConfig().silence_seconds
            )  # who could not testify takes part in nothing for so long
        results = await self.there.average()
        assert all(result.holds for result in results), [result.left_behind for result in results]
        assert {result.commit.epoch for result in results} == {2}
        trainers = trainers_among(self.there.members)
        assert_same_average(trainers, mean_of(trainers))


def trainers_among(members: Iterable[Member]) -> list[Member]:
    return [member for member in members if not member.is_aux]


@asynccontextmanager
async def scene(who: Victim, point: str) -> AsyncIterator[Scene]:
    """Somebody to fail, in a run where nobody has yet; reducers are strangers where the point is in an audit."""
    async with lab() as there:
        for _ in range(3):
            await there.join(coordinates=True, trusted=point != "auditing")
        client = await there.join(is_client=True)
        aux = await there.join(role="aux")
        await asyncio.sleep(0.5)
        coordinator = there.coordinator()
        reducer, third = [member for member in there.members[:3] if member is not coordinator]
        victim = {"client": client, "reducer": reducer, "aux": aux, "coordinator": coordinator}[who]
        yield Scene(there, victim, coordinator, reducer if victim is coordinator else coordinator, third, point)


@pytest.mark.parametrize(("who", "point"), CASES)
@in_virtual_time
async def test_a_member_is_killed(who: Victim, point: str) -> None:
    async with scene(who, point) as those:
        survivors = those.all_but(those.victim)
        started = asyncio.get_running_loop().time()
        with those.armed(lambda: those.kill(those.victim)):
            tasks = await those.begin()
            await those.check_agreement(tasks, survivors)
        assert asyncio.get_running_loop().time() - started < KILL_SECONDS
        await those.finish(tasks)


@pytest.mark.parametrize(("who", "point"), CASES)
@in_virtual_time
async def test_a_member_freezes_for_a_while(who: Victim, point: str) -> None:
    async with scene(who, point) as those:
        others = those.all_but(those.victim)
        with those.armed(lambda: those.there.freeze(those.victim)):
            tasks = await those.begin()
            await asyncio.sleep(LONG_SECONDS if who == "coordinator" else FREEZE_SECONDS)
            those.there.thaw(those.victim)
            await those.check_agreement(tasks, others)
            late = await tasks[those.victim]
        assert late.commit.epoch == 1
        assert late.holds or set(late.commit.holders) == {member.id for member in others}, "it knows where to fetch"
        await those.finish(tasks)


@pytest.mark.parametrize(("who", "point"), CUTS)
@in_virtual_time
async def test_a_link_is_cut(who: Victim, point: str) -> None:
    """Nothing gets through any more between the victim and one reducer, and nobody is told; the hub hears both."""
    async with scene(who, point) as those:
        one, other, run = those.victim, those.other, those.there.run

        def muffle(*, is_silent: bool = True) -> None:
            run.muffle(one.peer, other.peer, is_silent=is_silent)
            run.muffle(other.peer, one.peer, is_silent=is_silent)

        with those.armed(muffle):
            tasks = await those.begin()
            await those.check_agreement(tasks, those.all_but(one, other))
            ends = [await tasks[one], await tasks[other]]
        assert any(end.holds for end in ends)
        assert {end.commit.epoch for end in ends} == {1}
        muffle(is_silent=False)
        await asyncio.sleep(SHORT_SECONDS)
        await those.finish(tasks)


@pytest.mark.parametrize(("who", "point"), OUTAGES)
@in_virtual_time
async def test_the_hub_goes_away_for_a_while(who: Victim, point: str) -> None:
    async with scene(who, point) as those:
        with those.armed(those.there.run.hub.disconnect):
            tasks = await those.begin()
            await asyncio.sleep(LONG_SECONDS if who == "coordinator" else SHORT_SECONDS)
            those.there.run.hub.reconnect()
            await those.check_agreement(tasks, those.all_but())
        await those.finish(tasks)
