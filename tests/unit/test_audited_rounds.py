"""Rounds with strangers among the reducers, in memory and in virtual time: liars are found, named, and done without."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from liars import LIES, Altering, BadlySealed, Deluded, Liar, LyingWork, TwoFaced, partial_to
from roundlab import SMALL_CHUNKS, Lab, Member, assert_same_average, at_point, lab, mean_of
from test_audit import make_plan

from potluck.errors import ProtocolError, RoundFailedError
from potluck.messages import Message
from potluck.round.aggregators import AGGREGATOR_NAMES, AggregatorSpec
from potluck.round.audit import auditor as auditor_module
from potluck.round.audit import testimony
from potluck.round.audit.auditcore import AuditConfig
from potluck.round.codecs import CODEC_NAMES, CodecChoice
from potluck.round.coordinator.director import OTHER_DIGEST
from potluck.round.coordinator.gathering import GatherConfig
from potluck.round.plan.messages import Report
from potluck.sim.virtualloop import in_virtual_time

EVERY_CHUNK = AuditConfig(chunks_per_reducer=10_000)


@asynccontextmanager
async def strangers(num_strangers: int, *, audit: AuditConfig = EVERY_CHUNK, **options: Any) -> AsyncIterator[Lab]:
    """A trusted member that coordinates, and others that nobody vouches for."""
    options.setdefault("gather", GatherConfig(audit=audit, partition=SMALL_CHUNKS))
    async with lab(1, **options) as there:
        for _ in range(num_strangers):
            await there.join(trusted=False)
        yield there


def statistics(there: Lab) -> dict[str, int]:
    return there.members[0].averager.statistics()


# Honest rounds


@in_virtual_time
async def test_honest_rounds_pass_the_audit() -> None:
    async with strangers(3) as there:
        for epoch in (1, 2):
            results = await there.average()
            assert_same_average(there.members, mean_of(there.members))
            commit = results[0].commit
            assert (commit.epoch, commit.left_out, commit.excluded, commit.revisions) == (epoch, {}, {}, 0)
            assert commit.audited >= 8
        assert statistics(there)["coordinator_audits"] == 2
        assert "coordinator_liars" not in statistics(there)


@in_virtual_time
async def test_an_audit_recomputes_with_the_weights_that_the_plan_gives() -> None:
    async with strangers(2) as there:
        weights = {0: 1.0, 1: 2.0, 2: 5.0}
        tasks = [task for m in there.members for task in there.start([m], weight=weights[m.number])]
        results = await asyncio.gather(*tasks)
        assert_same_average(there.members, mean_of(there.members, weights))
        assert results[0].commit.excluded == {}
        assert results[0].commit.audited > 0


@in_virtual_time
async def test_an_audit_looks_at_so_many_chunks_of_each_reducer() -> None:
    async with strangers(3, audit=AuditConfig(chunks_per_reducer=2)) as there:
        results = await there.average()
        assert sum(result.role == "reducer" for result in results) == 4
        assert results[0].commit.audited == 8


@pytest.mark.parametrize("codec", CODEC_NAMES)
@in_virtual_time
async def test_with_every_codec_the_same_bits_are_recomputed(codec: str) -> None:
    async with strangers(2, choice=CodecChoice.everything(codec)) as there:
        results = await there.average()
        assert_same_average(there.members)
        assert results[0].commit.audited > 0
        assert results[0].commit.revisions == 0


@pytest.mark.parametrize("name", AGGREGATOR_NAMES)
@in_virtual_time
async def test_with_every_aggregator_the_same_bits_are_recomputed(name: str) -> None:
    gather = GatherConfig(audit=EVERY_CHUNK, aggregator=AggregatorSpec(name=name))
    async with strangers(2, gather=gather) as there:
        results = await there.average()
        assert_same_average(there.members)
        assert results[0].commit.audited > 0
        assert results[0].commit.revisions == 0


@in_virtual_time
async def test_among_trusted_reducers_nothing_is_sealed_or_audited() -> None:
    async with lab(3) as there:
        results = await there.average()
        assert results[0].commit.audited == 0
        assert "coordinator_audits" not in statistics(there)


@in_virtual_time
async def test_the_audit_can_be_turned_off() -> None:
    async with strangers(2, audit=AuditConfig(chunks_per_reducer=0)) as there:
        results = await there.average()
        assert results[0].commit.audited == 0
        assert "coordinator_audits" not in statistics(there)


# Liars


async def average_with_liar(there: Lab, liar: Liar) -> None:
    """One round; the liar lies, is found, named, excluded, and the others hold the right average."""
    guilty = liar.member
    honest = [member for member in there.members if member is not guilty]
    results = dict(zip(there.members, await there.average(), strict=True))
    assert liar.lies, "it never lied"
    commit = results[honest[0]].commit
    assert all(results[member].holds for member in honest)
    assert set(commit.holders) == {member.id for member in honest}
    assert commit.left_out.keys() == {guilty.id}
    assert commit.excluded.keys() == {guilty.id}
    assert commit.excluded[guilty.id].reason == commit.left_out[guilty.id]
    assert commit.audited > 0
    assert_same_average(honest, mean_of([m for m in honest if not m.is_aux]))
    assert results[guilty].left_behind is not None
    assert statistics(there)["coordinator_liars"] == 1


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("seed", range(2))
@in_virtual_time
async def test_a_liar_is_found_named_and_excluded_and_its_work_done_again(lie: type[LyingWork], seed: int) -> None:
    async with strangers(3) as there:
        await there.average()
        guilty = there.members[1 + random.Random(seed).randrange(3)]
        liar = Liar(guilty, lie)
        await average_with_liar(there, liar)
        head = there.members[0].averager.lineage.head
        assert head is not None
        assert lie.named_for in head.excluded[guilty.id].reason


@in_virtual_time
async def test_a_liar_takes_part_in_nothing_more_until_its_time_is_over() -> None:
    audit = replace(EVERY_CHUNK, exclusion_seconds=100.0)
    async with strangers(3, audit=audit) as there:
        liar = Liar(there.members[3], Altering)
        honest = there.members[:3]
        await average_with_liar(there, liar)
        lies = len(liar.lies)
        started = asyncio.get_running_loop().time()
        results = await there.average()
        assert asyncio.get_running_loop().time() - started < 0.5, "nobody waits for it"
        assert_same_average(honest, mean_of(honest))
        assert len(liar.lies) == lies, "it had no part"
        assert results[3].left_behind is not None
        assert "is excluded for another" in results[3].left_behind.reason
        assert results[0].commit.excluded.keys() == {liar.member.id}
        await asyncio.sleep(100.0)
        liar.repent()
        results = await there.average()
        assert_same_average(there.members, mean_of(there.members))
        assert results[0].commit.excluded == {}


@in_virtual_time
async def test_a_liar_that_is_ready_too_late_learns_why_it_has_no_part_all_the_same() -> None:
    async with strangers(3) as there:
        liar = Liar(there.members[3], Altering)
        await average_with_liar(there, liar)
        [result, *_] = await there.average(there.members[:3])
        assert liar.member.id not in result.commit.left_out
        late = await liar.member.average(epoch=result.commit.epoch)
        assert late.left_behind is not None
        assert "is excluded for another" in late.left_behind.reason


@in_virtual_time
async def test_the_next_coordinator_knows_who_lied() -> None:
    async with strangers(3) as there:
        heir = await there.join(coordinates=True)
        liar = Liar(there.members[3], Altering)
        await average_with_liar(there, liar)
        await there.kill(there.members[0])
        honest = [member for member in there.members if member is not liar.member]
        results = dict(zip(there.members, await there.average(), strict=True))
        assert heir.averager.lease.is_held
        assert not results[liar.member].holds
        assert_same_average(honest, mean_of(honest))
        assert results[heir].commit.excluded.keys() == {liar.member.id}


@in_virtual_time
async def test_two_liars_in_one_round_are_both_found() -> None:
    async with strangers(4) as there:
        liars = [Liar(there.members[2], Altering), Liar(there.members[4], TwoFaced)]
        results = await there.average()
        assert all(liar.lies for liar in liars)
        guilty = {liar.member.id for liar in liars}
        honest = [member for member in there.members if member.id not in guilty]
        assert results[0].commit.excluded.keys() == guilty
        assert_same_average(honest, mean_of(honest))


@in_virtual_time
async def test_an_honest_member_without_anybody_who_could_reduce_goes_on_alone() -> None:
    async with lab() as there:
        await there.join(is_client=True)
        liar = Liar(await there.join(trusted=False), Altering)
        results = await there.average()
        assert liar.lies
        assert results[0].holds
        assert results[0].commit.excluded.keys() == {liar.member.id}
        assert_same_average(there.members[:1], mean_of(there.members[:1]))
        assert statistics(there)["coordinator_aborts"] == 1


@in_virtual_time
async def test_of_a_liar_that_contributes_nothing_only_its_own_parts_are_done_again() -> None:
    async with strangers(2) as there:
        aux = await there.join(role="aux", trusted=False)
        liar = Liar(aux, Altering)
        results = await there.average()
        assert liar.lies
        commit = results[0].commit
        assert commit.excluded.keys() == {aux.id}
        trainers = there.members[:3]
        assert_same_average(trainers, mean_of(trainers))
        again = {m.peer: m.sent_bytes for m in commit.members}
        assert max(again[m.id] for m in trainers) < 2 * there.members[1].values.nbytes * 1.5


@in_virtual_time
async def test_a_reducer_that_gives_one_member_something_else_is_found_though_most_agree() -> None:
    async with strangers(4, audit=AuditConfig(chunks_per_reducer=1)) as there:
        guilty, victim = there.members[2], there.members[4]
        liar = Liar(guilty, Altering, most_chunks=0)
        partial_to(guilty, victim, liar.lies)
        # The victim hears of no revision, so that it can still show what it was given when the others are done again.
        deaf = [lambda: setattr(victim.averager._participation, "_weigh", lambda heard: None)]
        with at_point("round.complete", lambda: deaf.pop()(), peer=victim.id) as reached:
            tasks = there.start()
            results = await asyncio.gather(*tasks)
        assert reached
        del victim.averager._participation._weigh
        assert liar.lies
        commit = results[0].commit
        assert commit.excluded.keys() == {guilty.id}
        assert "two different averages" in commit.excluded[guilty.id].reason
        assert commit.left_out.keys() == {guilty.id, victim.id}
        honest = [there.members[0], there.members[1], there.members[3]]
        assert_same_average(honest, mean_of(honest))
        results = await there.average()
        assert results[4].holds, "the victim is in again"


@in_virtual_time
async def test_a_member_that_holds_what_nobody_gave_it_is_found() -> None:
    async with strangers(3) as there:
        liar = Liar(there.members[3], Deluded)
        results = await there.average()
        assert liar.lies
        assert results[0].commit.excluded.keys() == {there.members[3].id}
        assert Deluded.named_for in results[0].commit.excluded[there.members[3].id].reason
        assert_same_average(there.members[:3], mean_of(there.members[:3]))


@in_virtual_time
async def test_a_reducer_that_spoils_a_single_chunk_is_found_within_some_rounds() -> None:
    async with lab(gather=GatherConfig(audit=AuditConfig(chunks_per_reducer=1), partition=SMALL_CHUNKS)) as there:
        await there.join(is_client=True)
        for _ in range(2):
            await there.join(trusted=False)
        auditor = there.members[0].averager._coordinator._auditor
        auditor._rng = random.Random(7)
        liar = Liar(there.members[2], Altering, most_chunks=1)
        num_spoilt = 0
        for _ in range(50):  # of six or seven chunks each: found in a round with odds of 1 in 7
            liar.lies.clear()
            results = await there.average()
            assert liar.lies
            if results[0].commit.excluded:
                break
            num_spoilt += 1
        assert num_spoilt, "with this seed it gets away with it for a while, as the odds say"
        assert results[0].commit.excluded.keys() == {liar.member.id}
        honest = there.members[:2]
        assert_same_average(honest, mean_of(honest))


# Members that only fail


@in_virtual_time
async def test_values_that_do_not_match_their_seal_are_left_out_and_nobody_is_excluded() -> None:
    async with strangers(3) as there:
        guilty = await there.join(trusted=False, is_client=True)
        liar = Liar(guilty, BadlySealed)
        results = await there.average()
        assert liar.lies
        assert_same_average(there.members, mean_of(there.members[:4]))
        assert results[0].commit.excluded == {}, "it is one's word against the other's"


# Those who do not testify


class Mute:
    """A member that takes part in everything, and in an audit refuses to answer, or just does not."""

    def __init__(self, member: Member, *, refuses: bool = True) -> None:
        self.member = member
        self._witness = member.averager._participation._witness
        self._refuses = refuses
        self._testify = self._witness._testify
        self._witness._testify = self._keep_silent  # type: ignore[method-assign]

    async def _keep_silent(self, *_: Any) -> Any:
        if not self._refuses:
            await asyncio.sleep(1000.0)
        raise ProtocolError("I would rather not")

    def speak(self) -> None:
        self._witness._testify = self._testify  # type: ignore[method-assign]


@in_virtual_time
async def test_who_does_not_testify_is_left_out_for_a_minute() -> None:
    async with strangers(3) as there:
        mute = Mute(there.members[2])
        results = await there.average()
        honest = [member for member in there.members if member is not mute.member]
        assert_same_average(honest, mean_of(honest))
        commit = results[0].commit
        assert "did not testify" in commit.left_out[mute.member.id]
        assert "did not testify" in commit.excluded[mute.member.id].reason
        assert 50.0 < commit.excluded[mute.member.id].until - commit.committed_at <= 60.0
        assert statistics(there)["coordinator_unanswered_audits"] == 1
        assert "coordinator_liars" not in statistics(there)
        started = asyncio.get_running_loop().time()
        results = await there.average()
        assert asyncio.get_running_loop().time() - started < 0.5, "nobody waits for it again"
        assert results[2].left_behind is not None
        assert "it did not testify" in results[2].left_behind.reason
        await asyncio.sleep(60.0)
        mute.speak()
        results = await there.average()
        assert_same_average(there.members, mean_of(there.members))
        assert results[0].commit.excluded == {}


@pytest.mark.parametrize("refuses", [True, False])
@in_virtual_time
async def test_of_two_members_one_that_does_not_testify_cannot_hold_up_the_other(refuses: bool) -> None:
    async with strangers(1) as there:
        mute = Mute(there.members[1], refuses=refuses)
        started = asyncio.get_running_loop().time()
        results = await there.average()
        seconds = asyncio.get_running_loop().time() - started
        assert seconds < (0.0 if refuses else EVERY_CHUNK.answer_seconds) + 2.0
        assert results[0].holds
        assert results[1].left_behind is not None
        assert "it did not testify" in results[1].left_behind.reason
        assert results[0].commit.excluded.keys() == {mute.member.id}
        assert statistics(there)["coordinator_aborts"] == 1


@in_virtual_time
async def test_when_most_do_not_testify_nobody_is_blamed() -> None:
    async with strangers(3) as there:
        mutes = [Mute(member) for member in there.members[1:]]
        failures = await asyncio.gather(*there.start(timeout_seconds=20.0), return_exceptions=True)
        assert all(isinstance(failure, RoundFailedError) for failure in failures)
        assert "did not testify" in str(failures[0])
        assert there.members[0].averager.epoch == 0
        for mute in mutes:
            mute.speak()
        results = await there.average()
        assert_same_average(there.members, mean_of(there.members))
        assert results[0].commit.excluded == {}


# What organisers may do about it


@in_virtual_time
async def test_an_organiser_may_lift_an_exclusion_early_and_it_holds_for_what_was_found_until_then() -> None:
    async with strangers(3) as there:
        heir = await there.join(coordinates=True)
        liar = Liar(there.members[3], Altering)
        await average_with_liar(there, liar)
        await asyncio.sleep(1.0)
        await there.run.pardon(liar.member.id)
        liar.repent()
        results = await there.average()
        assert_same_average(there.members, mean_of(there.members))
        assert results[0].commit.excluded == {}
        await asyncio.sleep(1.0)
        again = Liar(liar.member, Altering)
        results = await there.average()
        assert again.lies
        assert results[0].commit.excluded.keys() == {liar.member.id}
        await asyncio.sleep(1.0)
        await there.run.pardon(liar.member.id)
        again.repent()
        await there.kill(there.members[0])
        results = await there.average()
        assert heir.averager.lease.is_held, "the next coordinator knows of the pardon too"
        assert_same_average(there.members, mean_of(there.members))
        assert results[0].commit.excluded == {}


@pytest.mark.parametrize("point", ["planned", "half_sent", "all_sent", "half_averages_sent", "complete", "reported"])
@in_virtual_time
async def test_a_member_that_dies_at_any_point_leaves_nothing_unaudited(point: str) -> None:
    async with strangers(3) as there:
        await there.average()
        victim = there.members[3]
        deaths: list[asyncio.Task[None]] = []

        def die() -> None:
            there.sever(victim)
            deaths.append(asyncio.create_task(there.kill(victim)))

        survivors = there.members[:3]
        with at_point(f"round.{point}", die, peer=victim.id) as reached:
            tasks = there.start()
            results = await asyncio.gather(*tasks[:3])
            await asyncio.gather(*tasks, return_exceptions=True)
        assert reached
        await asyncio.gather(*deaths)
        assert all(result.holds for result in results)
        assert results[0].commit.audited > 0
        assert results[0].commit.excluded == {}
        assert_same_average(survivors)
        if results[0].commit.left_out:
            assert_same_average(survivors, mean_of(survivors))


@in_virtual_time
async def test_an_auditor_that_dies_is_replaced_and_what_it_had_not_audited_is_done_again() -> None:
    async with strangers(3) as there:
        await there.join(coordinates=True)
        await there.average()
        victim = there.coordinator()
        survivors = [member for member in there.members if member is not victim]
        deaths: list[asyncio.Task[None]] = []

        def die() -> None:
            there.sever(victim)
            deaths.append(asyncio.create_task(there.kill(victim)))

        with at_point("round.auditing", die, peer=victim.id) as reached:
            tasks = dict(zip(there.members, there.start(), strict=True))
            results = await asyncio.gather(*(tasks[member] for member in survivors))
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert reached
        await asyncio.gather(*deaths)
        assert all(result.holds and result.commit.audited > 0 for result in results)
        assert_same_average(survivors, mean_of(survivors))


@in_virtual_time
async def test_a_reducer_cannot_have_a_member_excluded_by_giving_it_averages_without_a_seal() -> None:
    async with strangers(3) as there:
        guilty, victim = there.members[1], there.members[2]
        lies: list[int] = []
        partial_to(guilty, victim, lies, seals=False)
        results = await there.average()
        assert lies
        commit = results[0].commit
        assert victim.id not in commit.excluded, "it would hold what it cannot show to be given"
        holders = [member for member, result in zip(there.members, results, strict=True) if result.holds]
        assert_same_average(holders)


@in_virtual_time
async def test_nobody_testifies_to_another_round_than_it_is_in() -> None:
    async with strangers(2) as there:
        auditor, asked = there.members[0], there.members[1]
        answers: list[asyncio.Task[Any]] = []

        def ask() -> None:
            key = asked.averager._participation._round.round_work.key  # type: ignore[union-attr]
            other = testimony.Challenge(
                key=msgspec.structs.replace(key, attempt=key.attempt + 1), chunk=0, generation=0
            )
            request = auditor.peer.links.request(asked.id, other, reply=testimony.Testimony, timeout_seconds=5)
            answers.append(asyncio.create_task(request))

        with at_point("round.auditing", ask) as reached:
            results = await there.average()
        assert reached
        with pytest.raises(ProtocolError, match="not a round in which"):
            await answers[0]
        assert results[0].commit.excluded == {}


async def refusal(
    there: Lab, point: str, asked: Member, make: Callable[[Any], Message], reply: type[Message] = testimony.Testimony
) -> str:
    """Why a member does not answer its coordinator at some point of a round, which goes well."""
    coordinator = there.members[0]
    answers: list[asyncio.Task[Any]] = []

    def ask() -> None:
        question = make(asked.averager._participation._round.round_work)  # type: ignore[union-attr]
        request = coordinator.peer.links.request(asked.id, question, reply=reply, timeout_seconds=5)
        answers.append(asyncio.create_task(request))

    with at_point(point, ask, peer=coordinator.id if point == "round.auditing" else asked.id) as reached:
        results = await there.average()
    assert reached
    assert results[0].commit.excluded == {}
    with pytest.raises(ProtocolError) as refused:
        await answers[0]
    return str(refused.value)


@pytest.mark.parametrize("what", ["another generation", "a chunk that is not there"])
@in_virtual_time
async def test_a_witness_says_nothing_of_averages_that_it_does_not_hold(what: str) -> None:
    def make(round_work: Any) -> Message:
        last, is_late = len(round_work.grid) - 1, what == "another generation"
        return testimony.Challenge(key=round_work.key, chunk=last + (not is_late), generation=int(is_late))

    async with strangers(2) as there:
        assert "not one that this peer can testify to" in await refusal(there, "round.auditing", there.members[1], make)


@in_virtual_time
async def test_a_witness_that_lacks_averages_says_so() -> None:
    def make(round_work: Any) -> Message:
        return testimony.Challenge(key=round_work.key, chunk=0, generation=0)

    async with strangers(2) as there:
        assert "lacks averages" in await refusal(there, "round.planned", there.members[1], make)


@in_virtual_time
async def test_in_a_round_that_is_not_audited_nobody_testifies() -> None:
    def challenge(round_work: Any) -> Message:
        return testimony.Challenge(key=round_work.key, chunk=0, generation=0)

    def inventory(round_work: Any) -> Message:
        return testimony.HoldingsRequest(key=round_work.key)

    async with lab(2) as there:
        asked = there.members[1]
        assert "can testify to" in await refusal(there, "round.complete", asked, challenge)
        assert "is not audited" in await refusal(there, "round.complete", asked, inventory, testimony.Holdings)


def dissent(*, trouble: str = OTHER_DIGEST, revision: int = 4, digest: str = "other") -> bool:
    plan = msgspec.structs.replace(make_plan(1, 1), revision=5)
    plan = msgspec.structs.replace(plan, members=(msgspec.structs.replace(plan.members[0], trouble=trouble),))
    return auditor_module._dissents(plan, 0, Report(key=plan.key, revision=revision, digest=digest), "agreed")


def test_who_was_left_out_for_its_digest_under_the_newest_plan_is_asked_why() -> None:
    assert dissent()
    assert dissent(revision=5)
    assert not dissent(revision=3), "its averages are of another plan"
    assert not dissent(digest="agreed")
    assert not dissent(digest=""), "it lacks averages"
    assert not dissent(trouble="dead"), "nobody doubts its averages"


@in_virtual_time
async def test_only_the_coordinator_may_ask() -> None:
    async with strangers(2) as there:
        curious, asked = there.members[1:]
        answers: list[asyncio.Task[Any]] = []

        def ask() -> None:
            key = asked.averager._participation._round.round_work.key  # type: ignore[union-attr]
            challenge = testimony.Challenge(key=key, chunk=0, generation=0)
            request = curious.peer.links.request(asked.id, challenge, reply=testimony.Testimony, timeout_seconds=5)
            answers.append(asyncio.create_task(request))

        with at_point("round.auditing", ask) as reached:
            await there.average()
        assert reached
        with pytest.raises(ProtocolError, match="not a round in which"):
            await answers[0]
        assert asked.averager.statistics()["foreign_challenges"] == 1


# Who reduces


@in_virtual_time
async def test_where_only_trusted_peers_reduce_strangers_have_no_part_and_nothing_is_audited() -> None:
    async with strangers(2, gather=GatherConfig(trusted_reducers=True)) as there:
        await there.join()
        results = await there.average()
        assert [result.role for result in results] == ["reducer", "sender", "sender", "reducer"]
        assert results[0].commit.audited == 0
        assert_same_average(there.members, mean_of(there.members))


@in_virtual_time
async def test_a_stranger_does_not_take_over_from_a_trusted_reducer_that_dies() -> None:
    async with strangers(2, gather=GatherConfig(trusted_reducers=True)) as there:
        other = await there.join()
        await there.average()
        deaths: list[asyncio.Task[None]] = []

        def die() -> None:
            there.sever(other)
            deaths.append(asyncio.create_task(there.kill(other)))

        with at_point("round.first_reduced", die, peer=other.id) as reached:
            tasks = there.start()
            results = await asyncio.gather(*tasks[:3])
            await asyncio.gather(*tasks, return_exceptions=True)
        assert reached
        await asyncio.gather(*deaths)
        assert [result.role for result in results] == ["reducer", "sender", "sender"]
        assert_same_average(there.members)


@in_virtual_time
async def test_without_a_trusted_peer_everybody_learns_why_there_is_no_round() -> None:
    async with lab(gather=GatherConfig(trusted_reducers=True)) as there:
        for _ in range(2):
            await there.join(trusted=False)
        results = await asyncio.gather(*there.start(timeout_seconds=5.0), return_exceptions=True)
        assert all(isinstance(result, RoundFailedError) and "--trusted" in str(result) for result in results)
