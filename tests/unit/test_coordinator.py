"""The coordinator's driver without members: it is told what they would say, and what it publishes is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from gatheringroom import presence, ready

from potluck.errors import RetryableError
from potluck.hub.connection import Delivery
from potluck.link.dispatch import Incoming
from potluck.messages import encode
from potluck.peer.identity import Identity
from potluck.peer.lease import LeaseView
from potluck.peer.roster import Roster
from potluck.round.audit.auditcore import AuditResult
from potluck.round.coordinator.coordinator import COMPLAIN_EVERY_SECONDS, Coordinator, CoordinatorConfig
from potluck.round.coordinator.director import DirectorTimeouts
from potluck.round.coordinator.gathering import GatherConfig
from potluck.round.lineage import Lineage
from potluck.round.plan.messages import Abort, Plan, Report, Restoration, RoundKey, bitmap
from potluck.round.plan.signing import read_word
from potluck.sim.memoryconnection import MemoryConnection
from potluck.sim.memoryhub import MemoryHub
from potluck.sim.virtualloop import LoopClock, in_virtual_time

IDENTITY = Identity.temporary()
MOMENT_SECONDS = 0.05
LONG_SECONDS = 3.0  # past any patience with silence


class HeldLease:
    """A lease that somebody else says who holds."""

    def __init__(self) -> None:
        self.token = 7
        self.view = LeaseView()


class HostSession:
    """The session of a peer that coordinates, on a hub in memory."""

    def __init__(self, hub: MemoryHub, connection: MemoryConnection, roster: Roster, clock: LoopClock) -> None:
        self.hub, self.roster, self.clock, self.subjects = connection, roster, clock, hub.subjects
        self.identity, self.peer_id = IDENTITY, IDENTITY.peer_id
        self.changed: Callable[[str], None] = lambda _change: None

    def now(self) -> float:
        """Of the hub."""
        return self.clock.wall()

    def listen(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """To the hub's coming and going."""
        self.changed = listener
        return lambda: None


class Chair:
    """A coordinator with everything around it; made in a running loop."""

    def __init__(self, **gather: Any) -> None:
        self.hub = MemoryHub("run")
        self.clock = LoopClock()
        self.roster = Roster()
        self.words: list[Plan | Abort] = []
        self.reported: Callable[[Any], None] = lambda _incoming: None
        self.lease = HeldLease()
        self.others = self.hub.connect("OTHERS")
        connection = self.hub.connect(IDENTITY.peer_id)
        self.session = HostSession(self.hub, connection, self.roster, self.clock)
        self.lineage = Lineage(connection.store("lineage"), "run", lambda commit: self.coordinator.committed(commit))
        config = CoordinatorConfig(gather=GatherConfig(**gather))
        self.coordinator = Coordinator(self, self.session, self.lease, self.lineage, None, config)  # type: ignore[arg-type]

    def handle(self, _kind: type, handler: Callable[[Any], None]) -> None:
        self.reported = handler

    def heard(self, delivery: Delivery) -> None:
        self.words.append(read_word(delivery.payload, IDENTITY.peer_id, "run"))

    @property
    def plan(self) -> Plan:
        """The newest."""
        plans = [word for word in self.words if isinstance(word, Plan)]
        assert plans
        return plans[-1]

    @property
    def aborts(self) -> list[Abort]:
        return [word for word in self.words if isinstance(word, Abort)]

    async def tell(self, peer: str, topic: str, payload: bytes) -> None:
        await self.others.publish(self.hub.subjects.news(peer, topic), payload)

    async def are_ready(self, *peers: str, **changes: Any) -> None:
        for peer in peers:
            if peer not in self.roster:
                self.roster.apply(presence(peer, trusted=True))
            await self.tell(peer, "ready", encode(ready(peer, **{"token": self.lease.token, **changes})))
        await asyncio.sleep(MOMENT_SECONDS)

    def report(self, *peers: str, plan: Plan | None = None, digest: str = "") -> None:
        """These members answer the plan, by link."""
        plan = plan or self.plan
        held = bitmap(range(plan.num_chunks)) if digest else b""
        for peer in peers:
            said = Report(key=plan.key, revision=plan.revision, held=held, digest=digest)
            self.reported(Incoming(peer, said, []))

    async def finish(self, *peers: str) -> None:
        self.report(*peers, digest="d")
        await asyncio.sleep(MOMENT_SECONDS)


@asynccontextmanager
async def chair(**gather: Any) -> AsyncIterator[Chair]:
    made = Chair(**gather)
    await made.lineage.start()
    await made.others.subscribe(made.hub.subjects.plan(IDENTITY.peer_id), made.heard)
    await made.coordinator.start()
    try:
        yield made
    finally:
        await made.coordinator.close()
        await made.lineage.close()


@in_virtual_time
async def test_who_is_ready_gets_a_plan_and_who_holds_the_averages_a_commit() -> None:
    async with chair() as there:
        await there.are_ready("A", "B")
        assert [member.peer for member in there.plan.members] == ["A", "B"]
        assert there.plan.key == RoundKey(epoch=1, token=7, attempt=0)
        there.coordinator._auditor._exclusions.add("Z", "it lied", there.clock.wall(), 100.0)
        await there.finish("A", "B")
        assert there.lineage.head is not None
        assert (there.lineage.epoch, there.lineage.head.digest) == (1, "d")
        assert there.lineage.head.excluded.keys() == {"Z"}
        assert there.coordinator.counts["commits"] == 1
        await there.are_ready("A", "B", epoch=2)
        assert there.plan.key == RoundKey(epoch=2, token=7, attempt=0)  # attempts count by epoch


@in_virtual_time
async def test_what_cannot_be_read_or_comes_from_strangers_or_too_late_is_counted() -> None:
    async with chair() as there:
        await there.tell("A", "ready", b"x")
        await there.tell("A", "report", b"x")
        await there.tell("stranger", "ready", encode(ready("stranger", token=7)))
        await asyncio.sleep(MOMENT_SECONDS)
        assert there.words == []
        await there.are_ready("A", "B")
        other = msgspec.structs.replace(there.plan, key=RoundKey(epoch=1, token=7, attempt=9))
        there.report("A", "B", plan=other, digest="d")
        there.report("C", digest="d")
        await asyncio.sleep(MOMENT_SECONDS)
        counts = there.coordinator.counts
        assert (counts["bad_readies"], counts["bad_reports"], counts["readies_of_strangers"]) == (1, 1, 1)
        assert counts["late_reports"] == 3
        assert there.lineage.epoch == 0


@in_virtual_time
async def test_reports_by_way_of_the_hub_count_like_those_by_link() -> None:
    async with chair() as there:
        await there.are_ready("A", "B")
        there.report("A", digest="d")
        held = bitmap(range(there.plan.num_chunks))
        await there.tell("B", "report", encode(Report(key=there.plan.key, revision=0, held=held, digest="d")))
        await asyncio.sleep(MOMENT_SECONDS)
        assert there.lineage.epoch == 1
        assert there.coordinator.counts["reports_by_hub"] == 1


@in_virtual_time
@pytest.mark.parametrize("how", ["withdrawn", "dead", "left"])
async def test_who_goes_in_the_middle_of_a_round_is_taken_out_of_the_plan_at_once(how: str) -> None:
    async with chair() as there:
        await there.are_ready("A", "B", "C")
        if how == "withdrawn":
            await there.are_ready("C", withdrawn=True)
        else:
            there.roster.apply(presence("C", state=how))
            await asyncio.sleep(MOMENT_SECONDS)
        assert there.plan.revision == 1
        assert [member.receives for member in there.plan.members] == [True, True, False]


@in_virtual_time
async def test_the_end_of_a_former_life_changes_nothing() -> None:
    async with chair() as there:
        await there.are_ready("A", "B")
        await there.are_ready("B", withdrawn=True, session="former")
        assert there.plan.revision == 0


@in_virtual_time
@pytest.mark.parametrize("state", ["dead", "left"])
async def test_who_has_gone_is_not_ready_when_it_comes_back(state: str) -> None:
    async with chair() as there:
        there.roster.apply(presence("B", trusted=True))  # is waited for
        await there.are_ready("A")
        there.roster.apply(presence("A", state=state))
        there.roster.apply(presence("A", trusted=True))
        await there.are_ready("B")
        assert there.words == []
        await there.are_ready("A")
        assert len(there.plan.members) == 2


@in_virtual_time
async def test_without_the_lease_nothing_more_is_said_and_with_a_new_one_a_new_round_begins() -> None:
    async with chair() as there:
        await there.are_ready("A", "B")
        there.lease.token = 0
        there.coordinator.lease_changed()
        num_words = len(there.words)
        await asyncio.sleep(MOMENT_SECONDS)
        await there.finish("A", "B")
        assert len(there.words) == num_words
        assert there.lineage.epoch == 0
        there.lease.token = 8
        there.coordinator.lease_changed()
        await there.are_ready("A", "B")
        assert there.plan.key == RoundKey(epoch=1, token=8, attempt=0)
        assert there.lineage.term == 8


@in_virtual_time
async def test_a_round_past_its_deadline_is_given_up_and_tried_again_after_a_while() -> None:
    async with chair(least_round_seconds=2.0, most_round_seconds=2.0) as there:
        await there.are_ready("A", "B")
        first = there.plan
        for _ in range(8):
            await asyncio.sleep(0.25)
            there.report("A", "B")  # they are not silent: they only do not get on
        [abort] = there.aborts
        assert abort.key == first.key
        await there.are_ready("A", "B")
        assert there.plan == first  # not at once
        await asyncio.sleep(0.5)
        assert there.plan.key == RoundKey(epoch=1, token=7, attempt=1)
        assert there.coordinator.counts["aborts"] == 1


@in_virtual_time
async def test_nobody_is_given_up_for_its_silence_while_the_hub_was_away() -> None:
    async with chair() as there:
        await there.are_ready("A", "B")
        there.report("A", "B")
        there.session.hub.is_connected = False
        await asyncio.sleep(LONG_SECONDS)
        there.session.hub.is_connected = True
        await asyncio.sleep(2 * MOMENT_SECONDS)
        there.report("A", "B")
        await asyncio.sleep(1.0)
        assert there.plan.revision == 0
        assert there.aborts == []


@in_virtual_time
async def test_why_no_plan_is_possible_is_said_now_and_then() -> None:
    async with chair(trusted_reducers=True) as there:
        there.roster.apply(presence("A"))
        there.roster.apply(presence("B"))
        await there.are_ready("A", "B")
        assert len(there.aborts) == 1
        for _ in range(4):
            await asyncio.sleep(COMPLAIN_EVERY_SECONDS / 4)
            await there.are_ready("A", "B")
        assert len(there.aborts) == 2
        assert "trusted" in there.aborts[0].reason


@in_virtual_time
async def test_an_epoch_that_somebody_else_has_committed_ends_the_round() -> None:
    async with chair() as there, chair() as elsewhere:
        await elsewhere.are_ready("A", "B")
        await elsewhere.finish("A", "B")
        assert elsewhere.lineage.head is not None
        await there.are_ready("A", "B")
        there.coordinator.committed(elsewhere.lineage.head)
        num_words = len(there.words)
        await there.finish("A", "B")
        await asyncio.sleep(LONG_SECONDS)
        assert len(there.words) == num_words
        assert there.lineage.epoch == 0


def audit_by(there: Chair, verdict: AuditResult, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Have rounds audited, with this result."""
    for peer in "ABC":
        there.roster.apply(presence(peer))  # nobody vouches for them

    async def audit(*_round: Any) -> AuditResult:
        meanwhile()
        return verdict

    there.coordinator._auditor.audit = audit  # type: ignore[method-assign]


@in_virtual_time
async def test_what_an_audit_found_good_is_committed() -> None:
    async with chair() as there:
        audit_by(there, AuditResult(num_good=3))
        await there.are_ready("A", "B", "C")
        await there.finish("A", "B", "C")
        assert there.lineage.head is not None
        assert (there.lineage.epoch, there.lineage.head.audited) == (1, 3)


@in_virtual_time
async def test_of_what_an_audit_found_bad_nothing_is_committed_and_the_liar_is_taken_out() -> None:
    async with chair() as there:
        audit_by(there, AuditResult(liars={2: "it lied"}, stale=frozenset({0})))
        await there.are_ready("A", "B", "C")
        await there.finish("A", "B", "C")
        assert there.lineage.epoch == 0
        assert [member.receives for member in there.plan.members] == [True, True, False]
        assert there.plan.members[2].trouble == "it lied"


@in_virtual_time
async def test_an_audit_of_a_round_that_is_over_by_then_means_nothing() -> None:
    async with chair() as there:
        audit_by(there, AuditResult(num_good=3), lambda: there.coordinator._end_round())
        await there.are_ready("A", "B", "C")
        await there.finish("A", "B", "C")
        assert there.lineage.epoch == 0


@in_virtual_time
async def test_a_round_that_cannot_be_finished_is_given_up_and_another_begins() -> None:
    async with chair() as there:

        def fail() -> None:
            raise RetryableError("no audit just now")

        audit_by(there, AuditResult(num_good=3), fail)
        await there.are_ready("A", "B", "C")
        await there.finish("A", "B", "C")
        [abort] = there.aborts
        assert "no audit just now" in abort.reason
        audit_by(there, AuditResult(num_good=3))
        await asyncio.sleep(0.5)
        await there.are_ready("A", "B", "C")
        assert there.plan.key.attempt == 1
        await there.finish("A", "B", "C")
        assert there.lineage.epoch == 1


@in_virtual_time
async def test_of_two_digests_the_coordinators_own_is_committed() -> None:
    async with chair() as there:
        await there.are_ready(IDENTITY.peer_id, "A")
        there.report("A", digest="0" * 32)
        there.report(IDENTITY.peer_id, digest="d" * 32)
        await asyncio.sleep(MOMENT_SECONDS)
        assert there.lineage.head is not None
        assert there.lineage.head.digest == "d" * 32
        assert there.lineage.head.holders == (IDENTITY.peer_id,)


@in_virtual_time
async def test_who_is_lost_in_attempt_after_attempt_is_done_without() -> None:
    async with chair() as there:
        for attempt in range(4):
            while not (there.words and there.plan.key.attempt == attempt):
                await there.are_ready("A", "B")
            if attempt == 3:
                break
            while there.coordinator.counts["aborts"] == attempt:
                there.report("A", digest="d")
                await asyncio.sleep(MOMENT_SECONDS)
        assert [member.peer for member in there.plan.members] == ["A"]
        assert "B" in there.plan.left_out


@in_virtual_time
async def test_only_who_holds_the_lease_restores_a_state_and_each_time_under_a_key_of_its_own() -> None:
    async with chair() as there:
        order = Restoration(order=1, epoch=0, digest="d")
        await there.are_ready("A")
        there.lease.token = 0
        with pytest.raises(RetryableError, match="does not coordinate"):
            await there.coordinator.restore(order)
        there.lease.token = 7
        commit = await there.coordinator.restore(order)
        assert commit.key == RoundKey(epoch=1, token=7, attempt=1)  # the round under way has attempt 0
        assert there.lineage.epoch == 1


@in_virtual_time
async def test_no_round_has_the_key_of_a_restoration_of_which_nobody_knows_whether_it_was_written() -> None:
    async with chair() as there:
        await asyncio.sleep(MOMENT_SECONDS)

        async def get_no_answer(*_commit: Any) -> None:
            raise RetryableError("no answer")

        there.lineage.commit = get_no_answer  # type: ignore[method-assign]
        with pytest.raises(RetryableError, match="no answer"):
            await there.coordinator.restore(Restoration(order=1, epoch=0, digest="d"))
        await there.are_ready("A")
        assert there.plan.key == RoundKey(epoch=1, token=7, attempt=1)


@in_virtual_time
@pytest.mark.parametrize("upload_bytes_per_second", [None, 1e4])
async def test_lines_that_are_known_to_be_slow_get_the_time_that_they_need(
    upload_bytes_per_second: float | None,
) -> None:
    async with chair() as there:
        for peer in "AB":
            there.roster.apply(presence(peer, upload_bytes_per_second=upload_bytes_per_second))
        await there.are_ready("A", "B")
        assert there.coordinator._director is not None
        patience = there.coordinator._director._patience
        if upload_bytes_per_second is None:
            assert patience == DirectorTimeouts()
        else:
            assert patience.expected_seconds > 60.0
            assert patience.stalled_seconds > 2 * DirectorTimeouts().stalled_seconds
