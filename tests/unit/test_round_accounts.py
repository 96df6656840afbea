"""What is told of a round, in its commit, in the log, and in counts: who was in trouble, what moved, and how long."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest
from roundlab import assert_same_average, at_point, lab, mean_of

from potluck.errors import RoundFailedError
from potluck.round.outcome import PhaseSeconds, RoundResult, describe_slow
from potluck.round.plan.messages import Average, Commit, CommittedMember, Contribution, RoundKey
from potluck.sim.memorycarrier import Conditions
from potluck.sim.virtualloop import in_virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


def make_result(*members: CommittedMember, left_out: dict[str, str] | None = None) -> RoundResult:
    commit = Commit(
        epoch=7,
        key=RoundKey(epoch=7, token=1, attempt=0),
        term=1,
        coordinator="ann",
        members=members,
        digest="d",
        parent="",
        layout="",
        left_out=left_out or {},
    )
    return RoundResult(
        commit=commit, role="reducer", sent_bytes=0, received_bytes=0, seconds=PhaseSeconds(), left_behind=None
    )


# Who was in trouble


@in_virtual_time
async def test_values_that_are_not_finite_are_left_out_named_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with lab(3) as there:
        poisoned = there.members[1]
        others = [there.members[0], there.members[2]]
        tasks = there.start()
        poisoned.values[:] = float("nan")
        with caplog.at_level(logging.INFO, logger="potluck.round.averager"):
            results = await asyncio.gather(*tasks)
        assert_same_average(there.members, mean_of(others))
        assert all(result.holds for result in results)
        by_peer = {member.peer: member for member in results[0].commit.members}
        assert by_peer[poisoned.id].holds
        assert by_peer[poisoned.id].weight == 0.0
        assert "NaN or infinity" in by_peer[poisoned.id].trouble
        assert [by_peer[member.id].trouble for member in others] == ["", ""]
        assert poisoned.averager.statistics()["refused"] == 1
        lines = [record.getMessage() for record in caplog.records if "committed" in record.getMessage()]
        assert len(lines) == 3
        assert all(f"in trouble: {poisoned.id} (" in line and "NaN or infinity" in line for line in lines)


@in_virtual_time
async def test_frames_that_cannot_be_used_and_those_that_nobody_wants_are_counted() -> None:
    async with lab(3) as there:
        victim, liar, _ = there.members
        attacks: list[asyncio.Task[None]] = []

        async def attack() -> None:
            key = victim.averager._participation._round.round_work.key  # type: ignore[union-attr]
            plan = victim.averager._participation._round.round_work.plan  # type: ignore[union-attr]
            for part in plan.parts:
                kind = Contribution if plan.members[part.reducer].peer == victim.id else Average
                message = kind(key=key, chunk=part.stop - 1, generation=0)
                await liar.peer.links.send(victim.id, message, [b"x"], timeout_seconds=1.0, bulk=True)

        # The last chunks of parts: what the liar sends by itself comes after these frames.
        with at_point("round.planned", lambda: attacks.append(asyncio.create_task(attack())), peer=victim.id):
            results = await there.average()
        await asyncio.gather(*attacks)
        assert attacks
        statistics = victim.averager.statistics()
        assert (statistics["refused"], statistics["bad_averages"]) == (1, 1)
        assert statistics["unwanted"] > 0
        [told] = [member for member in results[0].commit.members if member.peer == liar.id]
        assert f"(seen by {victim.id})" in told.trouble


def test_the_line_names_who_was_slow_left_out_or_in_trouble() -> None:
    members = [CommittedMember(peer=name, weight=1.0, holds=True, seconds=0.5) for name in ("ann", "bob", "cat")]
    slow = CommittedMember(peer="dan", weight=1.0, holds=True, seconds=2.25)
    poisoned = CommittedMember(peer="eve", weight=0.0, holds=True, seconds=0.6, trouble="its values hold NaN")
    gone = CommittedMember(peer="fay", weight=1.0, holds=False)
    result = make_result(
        *members, slow, poisoned, gone, left_out={"fay": "its connection closed", "gus": "other tensors"}
    )
    assert result.describe().endswith(
        "; slow: dan (2.25 s); left out: fay (its connection closed), gus (other tensors); "
        "in trouble: eve (its values hold NaN)"
    )
    assert "slow" not in make_result(*members).describe()


def test_slow_is_who_takes_much_longer_than_most_and_the_slowest_comes_first() -> None:
    seconds = {"ann": 1.0, "bob": 1.0, "cat": 1.4, "dan": 1.6, "eve": 3.0, "fay": 9.0}
    members = [
        CommittedMember(peer=peer, weight=1.0, holds=peer != "fay", seconds=taken) for peer, taken in seconds.items()
    ]
    assert describe_slow(make_result(*members).commit) == "eve (3.00 s)"
    quick = [msgspec.structs.replace(member, seconds=member.seconds / 100) for member in members]
    assert describe_slow(make_result(*quick).commit) == "", "hundredths of a second are nothing"
    assert describe_slow(make_result().commit) == ""


# The log


@in_virtual_time
async def test_one_line_a_round_says_it_all(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="potluck.round"):
        async with lab(2) as there:
            await there.average()
    lines = [record.getMessage() for record in caplog.records if record.name == "potluck.round.averager"]
    assert len(lines) == 2
    for part in ("epoch 1 committed", "2 of 2 members", "MB sent", "gathering", "exchanging", "committing", "applying"):
        assert part in lines[0]


@in_virtual_time
async def test_a_round_that_is_given_up_gets_a_line_at_every_member(caplog: pytest.LogCaptureFixture) -> None:
    async with lab(2) as there:
        one, other = there.members
        with (
            caplog.at_level(logging.INFO, logger="potluck.round.member.participation"),
            at_point("round.planned", lambda: there.run.cut(one.peer, other.peer)) as reached,
        ):
            failures = await asyncio.gather(*there.start(timeout_seconds=6.0), return_exceptions=True)
        assert reached
        assert all(isinstance(failure, RoundFailedError) for failure in failures)
        lines = [
            record.getMessage() for record in caplog.records if record.name == "potluck.round.member.participation"
        ]
        first = [line for line in lines if line.startswith("epoch 1 (attempt 1.0)")]
        assert len(first) == 2
        assert all("was given up: too many members were lost" in line for line in first)


# Figures


@in_virtual_time
async def test_the_commit_tells_how_long_the_round_took_and_each_member() -> None:
    async with lab(3) as there:
        slow = there.members[2]
        for other in there.members[:2]:
            conditions = Conditions(delay_seconds=0.25)
            there.run.network.set_conditions(conditions, kind="direct", sender=other.id, receiver=slow.id)
        times: dict[str, float] = {}
        with (
            at_point("round.plan_published", lambda: times.update(began=now())),
            at_point("round.complete", lambda: times.update(done=now()), peer=slow.id),
            at_point("round.committing", lambda: times.update(ended=now())),
        ):
            results = await there.average()
        commit = results[0].commit
        assert commit.seconds == pytest.approx(times["ended"] - times["began"], abs=0.01)
        assert commit.committed_at == pytest.approx(there.run.clock.wall() - (now() - times["ended"]), abs=0.01)
        taken = {member.peer: member.seconds for member in commit.members}
        assert taken[slow.id] == pytest.approx(times["done"] - times["began"], abs=0.01)
        assert taken[slow.id] >= 0.25
        assert all(0.0 <= seconds <= commit.seconds for seconds in taken.values())
        assert max(taken[member.id] for member in there.members[:2]) < taken[slow.id]
        for member, result in zip(there.members, results, strict=True):
            [told] = [each for each in commit.members if each.peer == member.id]
            assert 0 < told.sent_bytes <= result.sent_bytes
            assert 0 < told.received_bytes <= result.received_bytes


@in_virtual_time
async def test_the_phases_of_a_round_are_all_of_its_time() -> None:
    async with lab(2) as there:
        one, other = (member.id for member in there.members)
        for sender, receiver in ((one, other), (other, one)):
            conditions = Conditions(delay_seconds=0.1)
            there.run.network.set_conditions(conditions, kind="direct", sender=sender, receiver=receiver)
        writes = there.run.hub.hold(there.run.hub.subjects.store_write("lineage", ">"))
        started = now()
        tasks = there.start(there.members[:1])
        await asyncio.sleep(0.2)
        tasks += there.start(there.members[1:])
        await asyncio.sleep(1.0)
        writes.release()
        result = (await asyncio.gather(*tasks))[0]
        seconds = result.seconds
        total = seconds.gathering + seconds.exchanging + seconds.committing + seconds.applying
        assert total == pytest.approx(now() - started, abs=0.01)
        assert seconds.gathering >= 0.2
        assert seconds.exchanging >= 0.2, "there and back"
        assert seconds.committing >= 0.3


@in_virtual_time
async def test_statistics_add_up_the_rounds() -> None:
    async with lab(3) as there:
        rounds = [await there.average() for _ in range(3)]
        for number, member in enumerate(there.members):
            mine = [results[number] for results in rounds]
            told = member.averager.statistics()
            assert (told["epoch"], told["committed"], told["members"]) == (3, 3, 3)
            assert told["sent_bytes"] == sum(result.sent_bytes for result in mine) > 0
            assert told["received_bytes"] == sum(result.received_bytes for result in mine) > 0
            for phase in ("gathering", "exchanging", "committing", "applying"):
                assert told[f"{phase}_seconds"] == pytest.approx(sum(getattr(each.seconds, phase) for each in mine))


@in_virtual_time
async def test_what_moved_in_rounds_that_failed_counts_too() -> None:
    async with lab(2) as there:
        one, other = there.members
        with at_point("round.half_sent", lambda: there.run.cut(one.peer, other.peer)) as reached:
            await asyncio.gather(*there.start(timeout_seconds=3.0), return_exceptions=True)
        assert reached
        told = [member.averager.statistics() for member in there.members]
        assert [each["failed"] for each in told] == [1, 1]
        assert max(each["sent_bytes"] for each in told) > 0
        assert [each["exchanging_seconds"] for each in told] == [0.0, 0.0]
