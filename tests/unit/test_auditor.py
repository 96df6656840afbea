"""The auditor's driver with members that do not answer, or cannot show what they say that they hold."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest
from gatheringroom import Room, presence

from potluck.errors import DeadlineExceededError, PeerUnreachableError
from potluck.hub.subjects import Subjects
from potluck.link.dispatch import Incoming
from potluck.peer.roster import Roster
from potluck.round.audit import auditor as module
from potluck.round.audit.auditcore import AuditConfig, AuditResult
from potluck.round.audit.auditor import Auditor
from potluck.round.audit.disputes import UNPROVEN
from potluck.round.audit.testimony import Holdings, HoldingsRequest
from potluck.round.coordinator.director import OTHER_DIGEST, Director, DirectorTimeouts
from potluck.round.plan.messages import Plan, Report
from potluck.sim.inlineworkers import InlineWorkers
from potluck.sim.virtualclock import VirtualClock
from potluck.sim.virtualloop import in_virtual_time

CONFIG = AuditConfig(answer_seconds=5.0, silence_seconds=60.0, exclusion_seconds=3600.0)
MEMBERS = "ABCDE"


class Hearing:
    """An auditor, a round that is complete, and links to members of whom some answer."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.roster = Roster()
        self.counts: Counter[str] = Counter()
        self.timeouts: list[float] = []
        self.inventoried: list[str] = []
        self.slow = ""  # they let their time pass
        self.hides = ""  # they do not show what they hold
        room = Room()
        for peer in MEMBERS:
            room.add(peer, card={"addresses": ()} if peer == "E" else None)  # E reduces nothing
            self.roster.apply(presence(peer))
        plan = msgspec.structs.replace(room.plan(), deadline=self.clock.wall() + 100.0)
        assert plan.audit
        self.director = Director(plan, DirectorTimeouts(), self.clock.monotonic())
        self.peer_id, self.subjects = "host", Subjects("run")
        self.auditor = Auditor(self, self, InlineWorkers(), CONFIG, self.counts)  # type: ignore[arg-type]

    def now(self) -> float:
        """Of the hub."""
        return self.clock.wall()

    async def request(self, peer: str, question: object, *, timeout_seconds: float, **_options: Any) -> Any:
        self.timeouts.append(timeout_seconds)
        if isinstance(question, HoldingsRequest):
            self.inventoried.append(peer)
            if peer in self.hides:
                self.clock.advance(timeout_seconds)
                raise DeadlineExceededError(f"{peer} does not answer")
            return Incoming(peer, Holdings(), [memoryview(peer.encode())])
        if peer in self.slow:
            await asyncio.sleep(timeout_seconds)
            raise DeadlineExceededError(f"{peer} does not answer")
        raise PeerUnreachableError(f"{peer} does not answer")

    def report(self, *peers: str, digest: str = "d") -> None:
        plan = self.director.plan
        for peer in peers:
            index = plan.index_of(peer)
            assert index is not None
            report = Report(key=plan.key, revision=plan.revision, digest=digest)
            self.director.report_arrived(index, report, self.clock.monotonic())

    async def audit(self) -> AuditResult:
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
    assert set(verdict.missing) == {0, 1, 2, 3}
    assert hearing.counts["unanswered_audits"] == 4
    [(excluded, given)] = hearing.auditor.excluded(None).items()
    assert (excluded, given.until) == ("D", hearing.clock.wall() + CONFIG.silence_seconds)
    assert hearing.auditor.barred(None).keys() == {"D"}
    hearing.clock.advance(CONFIG.silence_seconds)
    assert hearing.auditor.excluded(None) == {}


async def test_if_most_are_silent_it_may_be_us() -> None:
    hearing = Hearing()
    hearing.report(*MEMBERS)
    hearing.roster.apply(presence("A", state="dead"))
    await hearing.audit()
    assert hearing.auditor.excluded(None) == {}


@in_virtual_time
async def test_who_is_not_needed_is_not_waited_for() -> None:
    """Of a chunk whose reducer says nothing, nothing can be told, whatever others say of it."""
    hearing = Hearing()
    hearing.report(*MEMBERS)
    hearing.slow = "E"
    clock = asyncio.get_running_loop().time
    began = clock()
    verdict = await hearing.audit()
    assert set(verdict.missing) == {0, 1, 2, 3}
    assert clock() - began < CONFIG.answer_seconds / 2


@in_virtual_time
async def test_who_lets_its_time_pass_costs_that_once_however_many_chunks_are_asked_about_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MEMORY_BYTES", 1)  # one chunk at a time
    hearing = Hearing()
    hearing.report(*MEMBERS)
    hearing.slow = MEMBERS
    clock = asyncio.get_running_loop().time
    began = clock()
    verdict = await hearing.audit()
    assert set(verdict.missing) == {0, 1, 2, 3}
    assert clock() - began == pytest.approx(CONFIG.answer_seconds)


async def test_the_question_who_holds_what_takes_no_longer_than_one_answer_and_leaves_time_for_everybody() -> None:
    hearing = Hearing()
    with_dissenter(hearing)
    hearing.hides = MEMBERS
    began = hearing.clock.wall()
    verdict = await hearing.auditor.audit(hearing.director, "d", (0, 1, 2, 3))
    assert hearing.inventoried == list(MEMBERS)
    assert hearing.timeouts[:5] == pytest.approx([2.5, 1.25, 0.625, 0.3125, 0.15625])
    assert hearing.clock.wall() - began < CONFIG.answer_seconds
    assert set(verdict.missing) >= {0, 1, 2, 3}
    assert "did not show" in verdict.missing[0] or "did not testify" in verdict.missing[0]


@pytest.mark.parametrize("hides", ["", "A"])
async def test_averages_that_others_do_not_have_are_not_committed_unless_somebody_shows_them(
    monkeypatch: pytest.MonkeyPatch, hides: str
) -> None:
    """Nothing speaks against the chunks that are drawn, but who is to hold them shows nothing."""
    monkeypatch.setattr(module, "read_holding", lambda *_words: b"holding")
    monkeypatch.setattr(module, "settle", lambda *_words: {})
    monkeypatch.setattr(module, "draw_chunks", lambda *_words: [])
    hearing = Hearing()
    with_dissenter(hearing)
    hearing.hides = hides
    verdict = await hearing.auditor.audit(hearing.director, "d", (0,))
    assert verdict.is_good == (not hides)
    assert verdict.missing.keys() == ({0} if hides else set())


def with_dissenter(hearing: Hearing) -> None:
    """E says that it holds something else than all others, who have died since."""
    plan = hearing.director.plan
    members = (*plan.members[:-1], msgspec.structs.replace(plan.members[-1], trouble=OTHER_DIGEST))
    hearing.director.plan = msgspec.structs.replace(plan, members=members)
    hearing.report(*MEMBERS[:-1])
    hearing.report("E", digest="other")
    for peer in MEMBERS[:-1]:
        hearing.roster.apply(presence(peer, state="dead"))


async def test_who_cannot_show_what_it_says_that_it_holds_is_excluded_for_long() -> None:
    hearing = Hearing()
    with_dissenter(hearing)
    verdict = await hearing.auditor.audit(hearing.director, "d", (0,))
    assert set(verdict.liars) == {0, 4}
    assert hearing.counts["liars"] == 2
    excluded = hearing.auditor.excluded(None)
    until = hearing.clock.wall() + CONFIG.exclusion_seconds
    assert {peer: each.until for peer, each in excluded.items()} == {"A": until, "E": until}


async def test_what_the_dissenter_holds_is_compared_with_the_first_holder_that_can_show_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(_plan: Plan, _member: int, _digest: str, frames: list[bytes]) -> bytes | None:
        return frames[0] if frames[0] != b"A" else None

    compared: list[tuple[bytes, bytes]] = []

    def compare(_plan: Plan, _notary: object, agreed: bytes, other: bytes) -> dict[int, str]:
        compared.append((agreed, other))
        return {0: "another reason", 3: "it gave out two averages"}

    monkeypatch.setattr(module, "read_holding", read)
    monkeypatch.setattr(module, "settle", compare)
    hearing = Hearing()
    with_dissenter(hearing)
    verdict = await hearing.auditor.audit(hearing.director, "d", (0, 1, 2, 3))
    assert hearing.inventoried == ["A", "B", "E"]
    assert compared == [(b"B", b"E")]
    assert verdict.liars == {0: UNPROVEN, 3: "it gave out two averages"}  # what was found first stays
