"""Whole rounds, in memory and in virtual time: what members hold, what they are told, whoever fails."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from roundlab import (
    ELEMENTS,
    assert_same_average,
    at_point,
    contributors_of,
    lab,
    mean_of,
)

from potluck.errors import BannedError, ConfigurationError, RoundFailedError
from potluck.messages import encode
from potluck.round import exchanger as exchanger_module
from potluck.round.aggregators import AggregatorSpec
from potluck.round.codecs import CodecChoice
from potluck.round.exclusions import PATIENT_ATTEMPTS
from potluck.round.gathering import GatherConfig
from potluck.round.plan import Average, Contribution, Participant, Plan, Ready, Report, RoundKey
from potluck.round.signing import sign_word
from potluck.round.trigger import Quorum
from potluck.testing.memorycarrier import Conditions
from potluck.testing.memoryhub import MemoryRule
from potluck.testing.virtualloop import in_virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


# Rounds without trouble


@pytest.mark.parametrize("num_members", [1, 2, 3, 5])
@in_virtual_time
async def test_all_hold_the_mean(num_members: int) -> None:
    async with lab(num_members) as there:
        for epoch in (1, 2, 3):
            results = await there.average()
            assert_same_average(there.members, mean_of(there.members))
            assert all(result.holds and result.commit.epoch == epoch for result in results)
            assert len({result.commit.digest for result in results}) == 1
            assert set(results[0].commit.holders) == {member.id for member in there.members}
            assert results[0].commit.left_out == {}
        assert [member.averager.epoch for member in there.members] == [3] * num_members


@in_virtual_time
async def test_sixty_four_members_agree_and_lose_some_on_the_way() -> None:
    async with lab(64) as there:
        results = await there.average()
        assert all(result.holds for result in results)
        assert_same_average(there.members)
        expected = sum(2.0**number for number in range(64)) / 64
        assert float(there.members[0].values[0]) == pytest.approx(expected, rel=1e-6)
        killed = there.members[10:60:10]
        deaths: list[asyncio.Task[None]] = []

        def die() -> None:
            for victim in killed:
                there.sever(victim)
                deaths.append(asyncio.create_task(there.kill(victim)))

        survivors = [member for member in there.members if member not in killed]
        with at_point("round.half_sent", die, peer=there.members[5].id) as reached:
            tasks = dict(zip(there.members, there.start(), strict=True))
            results = await asyncio.gather(*(tasks[member] for member in survivors))
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        await asyncio.gather(*deaths)
        assert reached
        assert all(result.holds for result in results)
        assert_same_average(survivors)


@in_virtual_time
async def test_weights_count() -> None:
    async with lab(3) as there:
        weights = {0: 1.0, 1: 2.0, 2: 5.0}
        tasks = [task for m in there.members for task in there.start([m], weight=weights[m.number])]
        results = await asyncio.gather(*tasks)
        assert_same_average(there.members, mean_of(there.members, weights))
        assert {m.peer: m.weight for m in results[0].commit.members} == {m.id: weights[m.number] for m in there.members}


@pytest.mark.parametrize("codec", ["float32", "float16", "bfloat16", "uniform8", "blockwise8"])
@in_virtual_time
async def test_every_codec_gives_all_the_same_bits(codec: str) -> None:
    async with lab(3, choice=CodecChoice.everything(codec)) as there:
        await there.average()
        assert_same_average(there.members)
        torch.testing.assert_close(there.members[0].values.double(), mean_of(there.members), rtol=0.05, atol=0.1)


@in_virtual_time
async def test_aux_peers_reduce_for_clients_and_get_no_weight() -> None:
    async with lab() as there:
        aux = await there.join(role="aux", coordinates=True)
        clients = [await there.join(is_client=True) for _ in range(3)]
        results = await there.average()
        assert_same_average(clients, mean_of(clients))
        assert [result.role for result in results] == ["reducer", "sender", "sender", "sender"]
        assert results[0].holds
        assert next(m.weight for m in results[0].commit.members if m.peer == aux.id) == 0.0


@in_virtual_time
async def test_who_is_alone_among_trainers_keeps_its_values_to_the_last_bit() -> None:
    async with lab(choice=CodecChoice.everything("uniform8")) as there:
        await there.join(role="aux", coordinates=True)
        trainer = await there.join()
        trainer.values = torch.randn(ELEMENTS)
        before = trainer.values.clone()
        task = asyncio.create_task(there.members[0].average())
        result = await trainer.average(weight=3.0)
        assert (result.holds, result.alone) == (True, True)
        assert torch.equal(trainer.values, before)
        assert not (await task).alone
        await there.join()
        results = await there.average()
        assert not any(result.alone for result in results)
        assert_same_average(there.members[1:])


@in_virtual_time
async def test_a_peer_may_receive_without_contributing() -> None:
    async with lab(3) as there:
        observer = there.members[2]
        tasks = there.start(there.members[:2]) + there.start([observer], weight=0.0)
        await asyncio.gather(*tasks)
        assert_same_average(there.members, mean_of(there.members[:2]))


@in_virtual_time
async def test_robust_aggregators_can_be_chosen() -> None:
    async with lab(3, gather=GatherConfig(aggregator=AggregatorSpec(name="median"))) as there:
        await there.average()
        assert_same_average(there.members)
        middle = torch.arange(ELEMENTS) % 7 + 2.0
        assert torch.equal(there.members[0].values, middle)


@in_virtual_time
async def test_tensors_of_all_kinds_come_back_in_place() -> None:
    async with lab(2, choice=CodecChoice()) as there:
        given = [
            {
                "matrix": torch.full((300, 200), float(n)).t(),
                "half": torch.full((70_000,), float(n), dtype=torch.bfloat16),
                "scalar": torch.tensor(float(n)),
                "empty": torch.empty(0, 4),
                "count": torch.tensor([10 * n]),
                "parameter": torch.nn.Parameter(torch.full((5,), float(n))),
            }
            for n in (1, 3)
        ]
        await asyncio.gather(
            *(
                member.averager.average(tensors, weight=1.0, timeout_seconds=10)
                for member, tensors in zip(there.members, given, strict=True)
            )
        )
        for tensors in given:
            for name in ("matrix", "half", "scalar", "parameter"):
                assert bool((tensors[name] == 2).all()), name
            assert tensors["count"].tolist() == [20]


@in_virtual_time
async def test_nothing_to_average_is_agreed_on_too() -> None:
    async with lab(2) as there:
        results = await asyncio.gather(
            *(member.averager.average({}, weight=1.0, timeout_seconds=10) for member in there.members)
        )
        assert all(result.holds for result in results)


@in_virtual_time
async def test_who_comes_late_is_waited_for_a_while_and_then_not() -> None:
    async with lab(3) as there:
        *early, late = there.members
        tasks = there.start(early)
        await asyncio.sleep(0.2)
        tasks += there.start([late])
        await asyncio.gather(*tasks)
        assert_same_average(there.members, mean_of(there.members))
        tasks = there.start(early)
        await asyncio.gather(*tasks)
        assert_same_average(early, mean_of(early))
        [result] = await there.average([late], epoch=2)
        assert not result.holds
        assert result.left_behind is not None
        assert (result.left_behind.head_epoch, set(result.left_behind.holders)) == (2, {m.id for m in early})


@in_virtual_time
async def test_a_newcomer_takes_part_in_the_next_epoch() -> None:
    async with lab(2) as there:
        await there.average()
        await there.join()
        results = await there.average()
        assert {result.commit.epoch for result in results} == {2}
        assert_same_average(there.members, mean_of(there.members))


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
async def test_rounds_leave_nothing_for_the_garbage_collector() -> None:
    async with lab(3) as there:
        seen: list[weakref.ref[Any]] = []
        original = exchanger_module.HeldAverages

        def watched(*args: Any) -> Any:
            averages = original(*args)
            seen.append(weakref.ref(averages))
            return averages

        gc.collect()
        gc.disable()
        exchanger_module.HeldAverages = watched  # type: ignore[assignment, misc]
        try:
            await there.average()
            await asyncio.sleep(1.0)
            assert len(seen) == 3
            assert [ref() for ref in seen] == [None] * 3
        finally:
            exchanger_module.HeldAverages = original  # type: ignore[misc]
            gc.enable()


# Misuse


@in_virtual_time
async def test_two_rounds_at_once_are_refused() -> None:
    async with lab(1) as there:
        task = there.start()[0]
        await asyncio.sleep(0)
        with pytest.raises(ConfigurationError, match="already"):
            await there.members[0].average()
        await task


@pytest.mark.parametrize("wrong", [{"weight": -1.0}, {"weight": float("nan")}, {"timeout_seconds": 0.0}])
@in_virtual_time
async def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    async with lab(1) as there:
        with pytest.raises(ConfigurationError):
            await there.members[0].average(**wrong)


@in_virtual_time
async def test_without_a_coordinator_the_error_says_so_and_the_peer_can_try_again() -> None:
    async with lab() as there:
        lonely = await there.join(coordinates=False)
        lonely.fill()
        with pytest.raises(RoundFailedError, match=r"epoch 1 was not committed within 5 s: gathering; nobody coordin"):
            await lonely.average(timeout_seconds=5.0)
        await there.join(coordinates=True)
        await there.average()
        assert_same_average(there.members, mean_of(there.members))


@in_virtual_time
async def test_when_nobody_can_reduce_the_members_learn_why() -> None:
    async with lab() as there:
        await there.join(is_client=True)
        await there.join(is_client=True)
        results = await asyncio.gather(*there.start(timeout_seconds=5.0), return_exceptions=True)
        for result in results:
            assert isinstance(result, RoundFailedError)
            assert "accept no connections" in str(result)


@in_virtual_time
async def test_other_tensors_than_most_are_left_out_and_the_owner_learns_why() -> None:
    async with lab(3) as there:
        odd = there.members[2]
        tasks = there.start(there.members[:2])
        alone = asyncio.create_task(odd.averager.average({"other": torch.zeros(5)}, weight=1.0, timeout_seconds=20))
        await asyncio.gather(*tasks)
        result = await alone
        assert result.left_behind is not None
        assert "other tensors" in result.left_behind.reason
        assert_same_average(there.members[:2], mean_of(there.members[:2]))


@in_virtual_time
async def test_closing_in_the_middle_of_a_round_ends_the_call() -> None:
    async with lab(2) as there:
        [task] = there.start(there.members[:1])
        await asyncio.sleep(0.1)
        await there.members[0].averager.close()
        with pytest.raises(RoundFailedError, match="closed"):
            await task


@in_virtual_time
async def test_who_is_thrown_out_in_the_middle_of_a_round_learns_why_at_once() -> None:
    async with lab(2) as there:
        [task] = there.start(there.members[:1])
        await asyncio.sleep(0.1)
        there.members[0].peer.session._end(BannedError("banned by an organiser"))
        with pytest.raises(BannedError):
            await asyncio.wait_for(task, 1.0)


@in_virtual_time
async def test_a_caller_that_gives_up_is_not_waited_for() -> None:
    async with lab(3) as there:
        quitter = there.members[2]
        tasks = there.start()
        with at_point("round.planned", lambda: tasks[2].cancel(), peer=quitter.id) as reached:
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert reached
        assert isinstance(results[2], asyncio.CancelledError)
        assert_same_average(there.members[:2])
        assert "stopped waiting" in results[0].commit.left_out[quitter.id]  # type: ignore[union-attr]


# Values that cannot be used


@in_virtual_time
async def test_values_that_are_not_finite_are_left_out_named_and_counted() -> None:
    async with lab(3) as there:
        poisoned = there.members[1]
        tasks = there.start()
        poisoned.values[:] = float("nan")
        results = await asyncio.gather(*tasks)
        others = [there.members[0], there.members[2]]
        assert_same_average(there.members, mean_of(others))
        assert all(result.holds for result in results)
        trouble = next(m for m in results[0].commit.members if m.peer == poisoned.id)
        assert trouble.holds


@in_virtual_time
async def test_one_bad_chunk_spoils_only_that_chunk() -> None:
    async with lab(3) as there:
        tasks = there.start()
        there.members[1].values[0] = float("inf")
        await asyncio.gather(*tasks)
        assert_same_average(there.members)
        values = there.members[0].values
        assert contributors_of(float(values[0])) == {0, 2}
        assert contributors_of(float(values[-1]) - (ELEMENTS - 1) % 7) >= {0, 2}


@in_virtual_time
async def test_when_everybodys_values_are_bad_the_round_fails_and_says_why() -> None:
    async with lab(2) as there:
        tasks = there.start(timeout_seconds=5.0)
        for member in there.members:
            member.values[:] = float("nan")
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, RoundFailedError)
            assert "NaN or infinity" in str(result)
        assert there.members[0].averager.epoch == 0


# Messages that are early, late, foreign or lost


@in_virtual_time
async def test_messages_that_are_ahead_of_the_plan_wait_for_it() -> None:
    async with lab(3) as there:
        late = there.members[2]
        tasks = there.start([late])
        await asyncio.sleep(0.1)
        there.run.hub.disconnect(late.id)  # the plan does not reach it; what the others send does
        tasks += there.start(there.members[:2])
        await asyncio.sleep(0.1)
        assert late.averager.statistics()["early_messages"] > 0
        there.run.hub.reconnect(late.id)
        await asyncio.gather(*tasks)
        assert_same_average(there.members, mean_of(there.members))
        assert late.averager.statistics().get("late_messages", 0) == 0


@in_virtual_time
async def test_messages_whose_plan_never_comes_are_dropped_after_a_while() -> None:
    async with lab(2) as there:
        victim, sender = there.members
        tasks = there.start([victim], timeout_seconds=30.0)
        message = Contribution(key=RoundKey(epoch=1, token=99, attempt=0), chunk=0, generation=0)
        await sender.peer.links.send(victim.id, message, [b"x"], timeout_seconds=1.0, bulk=True)
        await asyncio.sleep(0.1)
        assert victim.averager.statistics()["early_messages"] == 1
        tasks += there.start([sender])
        await asyncio.gather(*tasks)
        await asyncio.sleep(10.0)
        assert victim.averager.statistics()["late_messages"] == 1


@in_virtual_time
async def test_a_plan_that_the_hub_lost_is_said_again() -> None:
    async with lab(3) as there:
        await asyncio.sleep(1.0)
        lost = there.run.hub.drop(there.run.hub.subjects.plan("*"), count=1)
        started = now()
        await there.average()
        assert lost.num_caught == 1
        assert 0.4 < now() - started < 1.4
        assert_same_average(there.members, mean_of(there.members))


@in_virtual_time
async def test_words_of_others_than_the_coordinator_are_ignored_and_counted() -> None:
    async with lab(2) as there:
        await there.average()
        victim, liar = there.members
        key = RoundKey(epoch=2, token=victim.averager.lease.view.token, attempt=9)
        members = (Participant(peer=victim.id, session=victim.peer.session.card.session, weight=1.0),)
        plan = Plan(key=key, members=members, parts=(), layout="", deadline=1e12)
        hub, subjects = liar.peer.session.hub, liar.peer.session.subjects
        signed = sign_word(plan, liar.peer.identity, subjects.run)
        await hub.publish(subjects.plan(liar.id), signed)  # it does not hold the lease
        await hub.publish(subjects.plan(victim.id), signed)  # it is not who it says it is
        await hub.publish(subjects.plan(liar.id), b"\xc1")
        await asyncio.sleep(0.1)
        statistics = victim.averager.statistics()
        assert (statistics["foreign_words"], statistics["bad_words"]) == (1, 2)
        await there.average()
        assert_same_average(there.members, mean_of(there.members))


@in_virtual_time
async def test_a_word_may_come_before_the_news_of_its_lease() -> None:
    async with lab(3, all_coordinate=True) as there:
        first = there.coordinator()
        others = [member for member in there.members if member is not first]
        await asyncio.sleep(1.0)
        slow = there.run.hub.hold(there.run.hub.subjects.store_change("lease", ">"))
        await there.kill(first)
        tasks = there.start(others)
        await asyncio.sleep(0.2)
        slow.release()
        await asyncio.gather(*tasks)
        assert_same_average(others, mean_of(others))


@in_virtual_time
async def test_what_strangers_and_hostile_members_send_changes_nothing() -> None:
    async with lab(3) as there:
        attacker, *_ = others = [there.members[2], *there.members[:2]]
        tasks = there.start()

        async def attack() -> None:
            for target in others[1:]:
                for epoch in (0, 1, 2):
                    for chunk in (0, 1, 5, 1 << 20):
                        key = RoundKey(epoch=epoch, token=1, attempt=0)
                        for kind in (Average, Contribution):
                            message = kind(key=key, chunk=chunk, generation=chunk % 3)
                            frames = [b"x" * 10] if chunk % 2 else []
                            await attacker.peer.links.send(target.id, message, frames, timeout_seconds=1.0, bulk=True)

        attacks: list[asyncio.Task[None]] = []
        with at_point("round.planned", lambda: attacks.append(asyncio.create_task(attack())), peer=attacker.id):
            results = await asyncio.gather(*tasks)
        await asyncio.gather(*attacks)
        assert attacks
        honest = there.members[:2]
        assert_same_average(honest)
        assert all(result.commit.digest == results[0].commit.digest for result in results)


@in_virtual_time
async def test_garbage_from_those_who_are_ready_is_counted() -> None:
    async with lab(2) as there:
        hub, subjects = there.members[1].peer.session.hub, there.members[1].peer.session.subjects
        await hub.publish(subjects.news(there.members[1].id, "ready"), b"\xc1")
        await hub.publish(subjects.news("NOBODY", "ready"), encode(Ready(session="s", epoch=1)))
        await asyncio.sleep(0.1)
        statistics = there.members[0].averager.statistics()
        assert statistics["coordinator_bad_readies"] == 1
        assert statistics["coordinator_readies_of_strangers"] == 1
        await there.average()


# Members that die

POINTS = [
    "planned",
    "first_sent",
    "half_sent",
    "all_sent",
    "first_reduced",
    "half_averages_sent",
    "complete",
    "reported",
]


@pytest.mark.parametrize("point", POINTS)
@in_virtual_time
async def test_a_member_that_dies_at_any_point_delays_the_others_little(point: str) -> None:
    async with lab(4) as there:
        await there.average()
        victim = there.members[3]
        deaths: list[asyncio.Task[None]] = []

        def die() -> None:
            there.sever(victim)
            deaths.append(asyncio.create_task(there.kill(victim)))

        survivors = there.members[:3]
        started = now()
        with at_point(f"round.{point}", die, peer=victim.id) as reached:
            tasks = there.start()
            results = await asyncio.gather(*tasks[:3])
            await asyncio.gather(*tasks, return_exceptions=True)
        assert reached
        await asyncio.gather(*deaths)
        assert_same_average(survivors)
        for value in survivors[0].values[:: ELEMENTS // 50]:
            index = int((survivors[0].values == value).nonzero()[0])
            assert contributors_of(float(value) - index % 7) >= {0, 1, 2}
        assert all(result.holds for result in results)
        assert now() - started < 3.0
        await there.average()
        assert_same_average(survivors, mean_of(survivors))


@pytest.mark.parametrize("point", [*POINTS, "plan_published", "committing", "committed"])
@in_virtual_time
async def test_a_coordinator_that_dies_at_any_point_is_replaced_and_nothing_is_lost(point: str) -> None:
    async with lab(4, all_coordinate=True) as there:
        await there.average()
        await asyncio.sleep(1.0)
        victim = there.coordinator()
        survivors = [member for member in there.members if member is not victim]
        deaths: list[asyncio.Task[None]] = []

        def die() -> None:
            there.sever(victim)
            deaths.append(asyncio.create_task(there.kill(victim)))

        started = now()
        with at_point(f"round.{point}", die, peer=victim.id) as reached:
            tasks = dict(zip(there.members, there.start(), strict=True))
            results = await asyncio.gather(*(tasks[member] for member in survivors))
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert reached
        await asyncio.gather(*deaths)
        assert_same_average(survivors)
        assert {result.commit.epoch for result in results} == {2}
        assert all(result.holds for result in results)
        assert now() - started < 5.0
        await there.average()
        assert_same_average(survivors, mean_of(survivors))
        assert survivors[0].averager.epoch == 3


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
async def test_the_hub_may_go_away_in_the_middle_of_a_round() -> None:
    async with lab(3) as there:
        await there.average()
        with at_point("round.half_sent", there.run.hub.disconnect, peer=there.members[1].id) as reached:
            tasks = there.start()
            await asyncio.sleep(1.0)
            there.run.hub.reconnect()
            results = await asyncio.gather(*tasks)
        assert reached
        assert all(result.holds for result in results)
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


@pytest.mark.parametrize("seconds", [1.0, 2.5, 4.0, 12.0])
@pytest.mark.parametrize("point", ["plan_published", "half_sent", "complete", "committing", "committed"])
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
        report = exchanger_module.Exchanger.report
        lies: list[str] = []

        def lie(exchanger: exchanger_module.Exchanger) -> Report:
            told = report(exchanger)
            if exchanger.peer != liar.id or not told.digest:
                return told
            lies.append(told.digest)
            return msgspec.structs.replace(told, digest="f" * 32)

        monkeypatch.setattr(exchanger_module.Exchanger, "report", lie)
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
        write = there.run.hub.subjects.store_write("lineage", ">")
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
        there.freeze(old)
        tasks = there.start(others)
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in tasks)
        await asyncio.gather(*tasks)
        new = next(member for member in others if member.averager.lease.is_held)
        old.averager.lease._valid_until = now() + 60.0  # its clock stood still: it believes in its lease
        there.thaw(old)
        results = await there.average()
        assert {result.commit.coordinator for result in results} == {new.id}
        assert all(result.holds for result in results)
        assert [member.averager.epoch for member in there.members] == [3] * 4


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
        assert "exchanging epoch 2 (attempt 1.0); averages are missing from" in text
        assert coordinator.id in text  # averages or contributions: who reduces depends on the ids
        there.run.mend(coordinator.peer, other.peer)
        await asyncio.sleep(5.0)
        writes = there.run.hub.subjects.store_write("lineage", ">")
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
            assert one.id in str(result)
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
