"""Whole rounds in which members, links or the hub fail, in memory and in virtual time.

Every fault at every point of a round is in test_round_points.py; here is what takes more than one, or a closer look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from roundlab import assert_same_average, at_point, lab, mean_of

from potluck.errors import RoundFailedError
from potluck.round.audit.exclusions import PATIENT_ATTEMPTS
from potluck.round.coordinator.trigger import Quorum
from potluck.round.member import roundwork as round_work_module
from potluck.round.plan.messages import Report
from potluck.sim.memorycarrier import Conditions
from potluck.sim.memoryhub import MemoryRule
from potluck.sim.virtualloop import in_virtual_time

pytestmark = pytest.mark.usefixtures("each_group")


def now() -> float:
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_a_round_that_was_complete_is_committed_by_the_next_coordinator_as_it_is() -> None:
    async with lab(3, all_coordinate=True) as there:
        victim = there.coordinator()
        survivors = [member for member in there.members if member is not victim]
        deaths: list[asyncio.Task[None]] = []

        def die() -> None:
            there.sever(victim)
            deaths.append(asyncio.create_task(there.kill(victim)))

        everybody = list(there.members)
        with at_point("round.committing", die, peer=victim.id) as reached:
            tasks = there.start()
            results = await asyncio.gather(*tasks[1:])
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*deaths)
        assert reached
        assert_same_average(survivors, mean_of(everybody))
        assert sum(m.averager.statistics().get("coordinator_adoptions", 0) for m in survivors) == 1
        assert all(result.commit.term > result.commit.key.token for result in results)
        assert victim.id in results[0].commit.left_out


@in_virtual_time
async def test_a_member_that_only_the_roster_misses_is_left_out_and_learns_it() -> None:
    async with lab(3) as there:
        await there.average()
        silent = there.members[2]
        with at_point("round.planned", lambda: there.sever(silent), peer=silent.id) as reached:
            tasks = there.start()
            results = await asyncio.gather(*tasks[:2])
        assert reached
        assert_same_average(there.members[:2], mean_of(there.members[:2]))
        assert "no report" in results[0].commit.left_out[silent.id]
        there.run.reunite(silent.peer)
        result = await tasks[2]
        assert result.left_behind is not None
        assert set(result.left_behind.holders) == {m.id for m in there.members[:2]}
        assert result.contributed == 0.0
        await there.average()
        assert_same_average(there.members, mean_of(there.members))


@in_virtual_time
async def test_who_is_left_out_after_it_gave_its_values_knows_that_they_count() -> None:
    async with lab(3) as there:
        await there.average()
        silent = there.members[2]
        with at_point("round.all_sent", lambda: there.sever(silent), peer=silent.id) as reached:
            tasks = there.start()
            await asyncio.gather(*tasks[:2])
        assert reached
        there.run.reunite(silent.peer)
        result = await tasks[2]
        assert not result.holds
        assert 0.5 < result.contributed <= 1.0


@in_virtual_time
async def test_a_cut_between_two_members_costs_a_contribution_and_not_the_round() -> None:
    async with lab(4) as there:
        await there.average()
        one, other = there.members[2:]
        with at_point("round.planned", lambda: there.run.cut(one.peer, other.peer), peer=one.id) as reached:
            results = await there.average()
        assert reached
        holders = [m for m, result in zip(there.members, results, strict=True) if result.holds]
        assert there.members[0] in holders
        assert there.members[1] in holders
        assert_same_average(holders)
        there.run.mend(one.peer, other.peer)
        await there.average()
        assert_same_average(there.members, mean_of(there.members))


@in_virtual_time
async def test_the_hub_may_stay_away_longer_than_a_lease_lasts() -> None:
    async with lab(3, all_coordinate=True) as there:
        await there.average()
        with at_point("round.committing", there.run.hub.disconnect) as reached:
            tasks = there.start()
            await asyncio.sleep(10.0)
            assert not any(task.done() for task in tasks)
            there.run.hub.reconnect()
            results = await asyncio.gather(*tasks)
        assert reached
        assert all(result.holds for result in results)
        assert_same_average(there.members, mean_of(there.members))


@pytest.mark.parametrize("point", ["plan_published", "half_sent", "committing"])
@in_virtual_time
async def test_after_an_outage_of_the_hub_those_who_come_back_last_are_waited_for(point: str) -> None:
    async with lab(4, all_coordinate=True) as there:
        await there.average()
        await asyncio.sleep(1.0)
        members = [there.coordinator(), *(m for m in there.members if m is not there.coordinator())]
        with at_point(f"round.{point}", there.run.hub.disconnect) as reached:
            tasks = there.start()
            await asyncio.sleep(6.0)
        assert reached
        there.run.hub.reconnect("GUARD")
        for member in members:
            there.run.hub.reconnect(member.id)
            await asyncio.sleep(2.0)  # longer than the grace that a trigger gives
        results = await asyncio.gather(*tasks)
        assert all(result.holds for result in results)
        assert_same_average(there.members, mean_of(there.members))


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("cuts", [[(0, 1), (0, 2)], [(0, 1), (2, 3)], [(0, 2), (1, 3)]])
@in_virtual_time
async def test_two_broken_links_of_four_members_leave_out_one_at_most(
    cuts: list[tuple[int, int]], is_told: bool
) -> None:
    """Also where the coordinator does not reach two of them: it hears their reports by way of the hub."""
    async with lab(4, all_coordinate=True) as there:
        await there.average()
        await asyncio.sleep(1.0)
        coordinator = there.coordinator()
        members = [coordinator, *(m for m in there.members if m is not coordinator)]

        def sever() -> None:
            for one, other in cuts:
                pair = members[one].peer, members[other].peer
                if is_told:
                    there.run.cut(*pair)
                else:
                    there.run.muffle(*pair)
                    there.run.muffle(*pair[::-1])

        with at_point("round.planned", sever, peer=coordinator.id) as reached:
            results = await there.average()
        assert reached
        assert results[0].commit.epoch == 2
        holders = [member for member, result in zip(there.members, results, strict=True) if result.holds]
        assert len(holders) >= 3
        assert_same_average(holders)
        if len({member for pair in cuts for member in pair}) < 4:
            assert coordinator.averager.statistics()["coordinator_reports_by_hub"] > 0
        for result in results:
            assert result.holds or (result.left_behind and len(result.left_behind.holders) == len(holders))


@in_virtual_time
async def test_a_coordinator_that_reaches_nobody_leaves_itself_out() -> None:
    async with lab(5, all_coordinate=True) as there:
        await there.average()
        await asyncio.sleep(1.0)
        lonely = there.coordinator()
        others = [member for member in there.members if member is not lonely]

        def cut_all() -> None:
            for other in others:
                there.run.cut(lonely.peer, other.peer)

        with at_point("round.planned", cut_all, peer=lonely.id) as reached:
            results = await there.average()
        assert reached
        assert [member for member, result in zip(there.members, results, strict=True) if result.holds] == others
        assert_same_average(others)
        assert "nothing gets through" in results[0].commit.left_out[lonely.id]


@pytest.mark.parametrize("seconds", [1.0, 4.0, 12.0])
@pytest.mark.parametrize("point", ["plan_published", "committing"])
@in_virtual_time
async def test_a_coordinator_that_freezes_for_a_while_does_no_harm(point: str, seconds: float) -> None:
    async with lab(4, all_coordinate=True) as there:
        await there.average()
        await asyncio.sleep(1.0)
        victim = there.coordinator()
        others = [member for member in there.members if member is not victim]
        with at_point(f"round.{point}", lambda: there.freeze(victim), peer=victim.id) as reached:
            tasks = there.start()
            await asyncio.sleep(seconds)
            there.thaw(victim)
            results = await asyncio.gather(*tasks)
        assert reached
        assert len({result.commit.digest for result in results}) == 1
        assert {result.commit.epoch for result in results} == {2}
        holders = [member for member, result in zip(there.members, results, strict=True) if result.holds]
        assert set(holders) >= set(others)
        assert_same_average(holders)
        results = await there.average()
        assert all(result.holds for result in results)


@pytest.mark.parametrize("number", [0, 2])
@in_virtual_time
async def test_who_reports_another_digest_is_left_out(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    async with lab(4) as there:
        liar = there.members[number]
        report = round_work_module.RoundWork.report
        lies: list[str] = []

        def lie(round_work: round_work_module.RoundWork) -> Report:
            told = report(round_work)
            if round_work.peer != liar.id or not told.digest:
                return told
            lies.append(told.digest)
            return msgspec.structs.replace(told, digest="f" * 32)

        monkeypatch.setattr(round_work_module.RoundWork, "report", lie)
        results = await there.average()
        assert lies
        assert_same_average(there.members, mean_of(there.members))
        assert results[0].commit.left_out == {liar.id: "its averages have another digest"}
        assert liar.id not in results[0].commit.holders


@in_virtual_time
async def test_a_slow_line_is_given_its_time() -> None:
    async with lab(3) as there:
        await there.average()
        slow = there.members[2]
        for other in there.members[:2]:
            conditions = Conditions(bytes_per_second=50_000.0, delay_seconds=0.1)
            there.run.network.set_conditions(conditions, kind="direct", sender=slow.id, receiver=other.id)
        for member in there.members:
            speed = 50_000.0 if member is slow else 1e8
            member.peer.session.update_card(upload_bytes_per_second=speed, download_bytes_per_second=1e8)
        await asyncio.sleep(1.0)
        started = now()
        results = await there.average()
        assert now() - started > 2.0, "it was slow indeed"
        assert all(result.holds for result in results)
        assert_same_average(there.members, mean_of(there.members))


@in_virtual_time
async def test_a_commit_that_reaches_the_hub_late_is_refused() -> None:
    """A coordinator freezes while its commit is under way. When it arrives, the epoch is long agreed on, otherwise."""
    async with lab(4, all_coordinate=True) as there:
        await there.average()
        await asyncio.sleep(1.0)
        old = there.coordinator()
        others = [member for member in there.members if member is not old]
        table = there.run.hub.table("lineage")
        write = there.writes_of("lineage")
        held: list[MemoryRule] = []

        def delay() -> None:
            held.append(there.run.hub.hold(write, count=1))
            there.freeze(old)

        with at_point("round.committing", delay, peer=old.id):
            tasks = dict(zip(there.members, there.start(), strict=True))
            results = await asyncio.gather(*(tasks[member] for member in others))
        [rule] = held
        assert rule.num_caught == 1
        head = table.version("head")
        rule.release()
        there.thaw(old)
        late = await tasks[old]
        assert table.version("head") is head, "the late commit changed nothing"
        assert {result.commit.term for result in results} == {late.commit.term}
        assert late.commit.term > late.commit.key.token
        await there.average()
        assert_same_average(there.members, mean_of(there.members))


@in_virtual_time
async def test_of_two_who_think_that_they_coordinate_one_commits() -> None:
    """The news of a new lease do not reach the old holder: it goes on, and nobody listens to it."""
    async with lab(4, all_coordinate=True) as there:
        await there.average()
        await asyncio.sleep(1.0)
        old = there.coordinator()
        others = [member for member in there.members if member is not old]
        lease = old.averager.lease
        assert lease._task is not None
        lease._task.cancel()  # its renewals hang
        heartbeat = old.peer.session.heartbeat  # of which the lease of a named group lives
        if heartbeat._task is not None:
            heartbeat._task.cancel()
        table, news = there.run.hub.table("groups" if heartbeat._task is not None else "lease"), lease._watch
        for watch in (news, heartbeat._watch):
            table.leave(watch)  # type: ignore[arg-type]
        there.freeze(old)
        await there.average(others)
        new = next(member for member in others if member.averager.lease.is_held)
        lease._valid_until = now() + 60.0  # its clock stood still: it believes in its lease
        there.thaw(old)
        await asyncio.sleep(0.5)
        [waiting] = there.start([old], epoch=2)  # the next, for all that it knows
        results = dict(zip(others, await there.average(others, epoch=3), strict=True))
        await asyncio.sleep(1.0)
        assert lease.is_held
        assert old.averager.statistics()["coordinator_rounds"] > 1, "it went on"
        assert all(member.averager.statistics()["foreign_words"] > 0 for member in others)
        assert {result.commit.coordinator for result in results.values()} == {new.id}
        assert all(result.holds for result in results.values())
        assert_same_average(others, mean_of(others))
        assert not waiting.done(), "epochs of a lease that it has not heard of are not believed yet"
        table.follow(news)  # type: ignore[arg-type]
        news.sync()  # type: ignore[union-attr]
        assert not (await waiting).holds
        results = dict(zip(there.members, await there.average(), strict=True))
        assert not lease.is_held
        assert all(result.holds for result in results.values())
        assert [member.averager.epoch for member in there.members] == [4] * 4


@in_virtual_time
async def test_a_member_that_says_good_bye_in_the_middle_of_a_round_is_not_waited_for() -> None:
    """It is known to be gone, and not only silent: half of a run that leaves does not cost an attempt."""
    async with lab(2) as there:
        leaver = there.members[1]
        leaving: list[asyncio.Task[None]] = []

        def leave() -> None:
            there.sever(leaver)
            leaving.append(asyncio.create_task(there.run.tell(leaver.id, "left", "it has left")))

        tasks = there.start()
        with at_point("round.planned", leave, peer=leaver.id) as reached:
            result = await tasks[0]
        assert reached
        await asyncio.gather(*leaving)
        assert result.commit.key.attempt == 0
        assert result.commit.left_out == {leaver.id: "it has left"}
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@in_virtual_time
async def test_the_end_of_a_peers_former_life_does_not_cost_the_present_one_its_part() -> None:
    """The roster's word of a death may come when the same peer is back and in a plan."""
    async with lab(3) as there:
        coordinator, member = there.members[0].averager._coordinator, there.members[2]

        def tell() -> None:
            coordinator._member_gone(member.id, "its former session", "it died")

        with at_point("round.plan_published", tell) as reached:
            results = await there.average()
        assert reached
        assert results[0].commit.left_out == {}
        assert results[0].commit.revisions == 0


@in_virtual_time
async def test_a_peer_that_comes_back_as_another_life_is_a_new_member() -> None:
    async with lab(3) as there:
        await there.average()
        old = there.members[2]
        await there.kill(old)
        await there.join(identity=old.peer.identity, number=2, coordinates=False)
        await there.average()
        assert_same_average(there.members, mean_of(there.members))


@in_virtual_time
async def test_a_deadline_names_the_peers_and_the_phase() -> None:
    async with lab(3) as there:
        deaf = there.members[2]
        with at_point("round.planned", lambda: there.sever(deaf), peer=deaf.id) as reached:
            tasks = there.start(timeout_seconds=4.0)
            await asyncio.gather(*tasks[:2])
            with pytest.raises(RoundFailedError) as failure:
                await tasks[2]
        assert reached
        assert "exchanging epoch 1" in str(failure.value)
        assert "averages are missing from" in str(failure.value)
        assert there.members[0].id in str(failure.value)


@in_virtual_time
async def test_an_error_in_any_phase_names_it_and_the_peers() -> None:
    async with lab(2) as there:
        coordinator, other = there.members
        rules: list[MemoryRule] = []
        await there.average()

        async def failure_of_other(point: str, trouble: Callable[[], None]) -> str:
            with at_point(f"round.{point}", trouble) as reached:
                tasks = there.start(timeout_seconds=2.0)
                with pytest.raises(RoundFailedError) as failure:
                    await tasks[1]
            assert reached
            await asyncio.gather(*tasks, return_exceptions=True)
            return str(failure.value)

        def break_link() -> None:
            there.run.cut(coordinator.peer, other.peer)

        text = await failure_of_other("planned", break_link)
        token = coordinator.averager.lease.token
        assert f"exchanging epoch 2 (attempt {token}.0); averages are missing from" in text
        assert coordinator.id in text  # averages or contributions: who reduces depends on the ids
        there.run.mend(coordinator.peer, other.peer)
        await asyncio.sleep(5.0)
        writes = there.writes_of("lineage")
        text = await failure_of_other("committing", lambda: rules.append(there.run.hub.hold(writes)))
        assert f"coordinator {coordinator.id} has not committed it" in text
        assert "committing epoch 2" in text
        rules[0].release()
        await asyncio.sleep(5.0)
        there.freeze(coordinator)
        await asyncio.sleep(5.0)
        [task] = there.start([other], timeout_seconds=2.0)
        with pytest.raises(RoundFailedError, match=f"gathering; coordinator {coordinator.id} has made no plan"):
            await task
        there.thaw(coordinator)


@in_virtual_time
async def test_a_round_that_the_coordinator_gave_up_says_why() -> None:
    """Two members that do not reach each other: neither may go on without the other, and both learn the reason."""
    async with lab(2) as there:
        one, other = there.members
        with at_point("round.planned", lambda: there.run.cut(one.peer, other.peer)) as reached:
            results = await asyncio.gather(*there.start(timeout_seconds=10.0), return_exceptions=True)
        assert reached
        for result in results:
            assert isinstance(result, RoundFailedError)
            assert "too many members were lost" in str(result)
            assert "nothing gets through between it and" in str(result)
            assert one.id[:12] in str(result)
            assert other.id in str(result)


@in_virtual_time
async def test_a_quorum_can_be_required() -> None:
    async with lab(2, trigger=Quorum(min_senders=3)) as there:
        results = await asyncio.gather(*there.start(timeout_seconds=3.0), return_exceptions=True)
        assert all(isinstance(result, RoundFailedError) for result in results)
        await there.join()
        await there.average()
        assert_same_average(there.members, mean_of(there.members))


@pytest.mark.parametrize("num_members", [2, 4])
@in_virtual_time
async def test_half_of_a_run_that_says_it_is_ready_and_takes_no_part_does_not_hold_up_the_rest(
    num_members: int,
) -> None:
    async with lab(num_members) as there:
        active, idle = there.members[: num_members // 2], there.members[num_members // 2 :]
        for member in idle:
            member.averager._participation._enter_round = lambda *_: None  # type: ignore[method-assign]
        results = await there.average()
        assert there.members[0].averager.statistics()["coordinator_aborts"] == PATIENT_ATTEMPTS
        assert_same_average(active, mean_of(active))
        for member, result in zip(there.members, results, strict=True):
            assert result.holds == (member in active)
        assert all("was lost in 3 attempts" in results[0].commit.left_out[member.id] for member in idle)
        assert results[0].commit.excluded == {}, "nobody says that it lied"
        for member in idle:
            del member.averager._participation._enter_round
        await there.average()
        assert_same_average(there.members, mean_of(there.members))


@in_virtual_time
async def test_when_most_of_a_run_takes_no_part_the_epoch_waits_for_them() -> None:
    async with lab(3) as there:
        for member in there.members[1:]:
            member.averager._participation._enter_round = lambda *_: None  # type: ignore[method-assign]
        failures = await asyncio.gather(*there.start(timeout_seconds=30.0), return_exceptions=True)
        assert all(isinstance(failure, RoundFailedError) for failure in failures)
        assert "too many members were lost" in str(failures[0])
        assert there.members[0].averager.epoch == 0
