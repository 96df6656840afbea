"""The auditor's driver with members that do not answer, or cannot show what they say that they hold."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
from test_gathering import Room, presence

from potluck.errors import PeerUnreachableError
from potluck.hub.subjects import Subjects
from potluck.peer.roster import Roster
from potluck.round.audit import AuditConfig, Verdict
from potluck.round.auditor import Auditor
from potluck.round.director import OTHER_DIGEST, Director, Patience
from potluck.round.plan import Report
from potluck.round.testimony import Holdings, Inventory
from potluck.testing.virtualclock import VirtualClock

CONFIG = AuditConfig(answer_seconds=5.0, silence_seconds=60.0, exclusion_seconds=3600.0)
MEMBERS = "ABCDE"


class Hearing:
    """An auditor, a round that is complete, and members of whom some answer."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.roster = Roster()
        self.counts: Counter[str] = Counter()
        self.timeouts: list[float] = []
        room = Room()
        for peer in MEMBERS:
            room.add(peer)
            self.roster.apply(presence(peer))
        plan = msgspec.structs.replace(room.plan(), deadline=self.clock.wall() + 100.0)
        assert plan.audit
        self.director = Director(plan, Patience(), self.clock.monotonic())
        session = SimpleNamespace(
            peer_id="host", roster=self.roster, now=self.clock.wall, subjects=Subjects("run"), clock=self.clock
        )
        links: Any = SimpleNamespace(request=self._request)
        workers: Any = SimpleNamespace(run=self._work)
        self.auditor = Auditor(links, session, workers, CONFIG, self.counts)  # type: ignore[arg-type]

    async def _request(self, peer: str, question: object, *, timeout_seconds: float, **_options: Any) -> Any:
        self.timeouts.append(timeout_seconds)
        if isinstance(question, Inventory) and peer == "E":
            return SimpleNamespace(message=Holdings(), frames=[])
        raise PeerUnreachableError(f"{peer} does not answer")

    async def _work(self, work: Any) -> Any:
        return work()

    def report(self, *peers: str, digest: str = "d") -> None:
        plan = self.director.plan
        for peer in peers:
            index = plan.index_of(peer)
            assert index is not None
            report = Report(key=plan.key, revision=plan.revision, digest=digest)
            self.director.report_arrived(index, report, self.clock.monotonic())

    async def audit(self) -> Verdict:
        return await self.auditor.audit(self.director, "d", tuple(range(len(self.director.plan.members))))


async def test_nobody_is_waited_for_beyond_the_rounds_deadline() -> None:
    hearing = Hearing()
    hearing.report(*MEMBERS)
    await hearing.audit()
    assert set(hearing.timeouts) == {CONFIG.answer_seconds}
    hearing.timeouts.clear()
    hearing.clock.advance(98.0)
    await hearing.audit()
    assert set(hearing.timeouts) == {2.0}
    hearing.timeouts.clear()
    hearing.clock.advance(98.0)
    await hearing.audit()
    assert set(hearing.timeouts) == {0.0}


async def test_who_is_silent_sits_out_for_a_little_only_if_it_is_known_to_live_as_in_the_plan() -> None:
    hearing = Hearing()
    hearing.report(*MEMBERS)
    hearing.roster.apply(presence("A", state="dead"))
    hearing.roster.apply(presence("B", state="suspect"))
    hearing.roster.apply(presence("C", session="another life"))
    verdict = await hearing.audit()
    assert set(verdict.missing) == {0, 1, 2, 3, 4}
    assert hearing.counts["unanswered_audits"] == 5
    excluded = hearing.auditor.excluded(None)
    assert excluded.keys() == {"D", "E"}
    assert {each.until for each in excluded.values()} == {hearing.clock.wall() + CONFIG.silence_seconds}
    assert hearing.auditor.barred(None).keys() == {"D", "E"}
    hearing.clock.advance(CONFIG.silence_seconds)
    assert hearing.auditor.excluded(None) == {}


async def test_if_most_are_silent_it_may_be_us() -> None:
    hearing = Hearing()
    hearing.report(*MEMBERS)
    hearing.roster.apply(presence("A", state="dead"))
    hearing.roster.apply(presence("B", state="dead"))
    await hearing.audit()
    assert hearing.auditor.excluded(None) == {}


async def test_who_cannot_show_what_it_says_that_it_holds_is_excluded_for_long() -> None:
    hearing = Hearing()
    plan = hearing.director.plan
    members = (*plan.members[:-1], msgspec.structs.replace(plan.members[-1], trouble=OTHER_DIGEST))
    hearing.director.plan = msgspec.structs.replace(plan, members=members)
    hearing.report(*MEMBERS[:-1])
    hearing.report("E", digest="other")
    for peer in MEMBERS[:-1]:
        hearing.roster.apply(presence(peer, state="dead"))
    verdict = await hearing.auditor.audit(hearing.director, "d", (0, 1, 2, 3))
    assert set(verdict.liars) == {4}
    assert hearing.counts["liars"] == 1
    excluded = hearing.auditor.excluded(None)
    assert {peer: each.until for peer, each in excluded.items()} == {
        "E": hearing.clock.wall() + CONFIG.exclusion_seconds
    }
