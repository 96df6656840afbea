"""Whole rounds, in memory and in virtual time: what members hold, what they are told, whoever fails."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

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
from potluck.round.aggregators import AggregatorSpec
from potluck.round.codecs import CodecChoice
from potluck.round.coordinator.gathering import GatherConfig
from potluck.round.member import roundwork as round_work_module
from potluck.round.member.lateaverages import KEPT_EPOCHS
from potluck.round.plan.messages import Average, Contribution, Participant, Plan, Ready, RoundKey
from potluck.round.plan.signing import sign_word
from potluck.sim.virtualloop import in_virtual_time

pytestmark = pytest.mark.usefixtures("each_group")


def now() -> float:
    return asyncio.get_running_loop().time()


# Rounds without trouble


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
async def test_rounds_leave_nothing_for_the_garbage_collector() -> None:
    async with lab(3) as there:
        seen: list[weakref.ref[Any]] = []
        original = round_work_module.HeldAverages

        def watched(*args: Any) -> Any:
            averages = original(*args)
            seen.append(weakref.ref(averages))
            return averages

        gc.collect()
        gc.disable()
        round_work_module.HeldAverages = watched  # type: ignore[assignment, misc]
        try:
            for _ in range(KEPT_EPOCHS + 1):
                await there.average()
            await asyncio.sleep(1.0)
            assert len(seen) == 3 * (KEPT_EPOCHS + 1)
            assert [ref() for ref in seen[:3]] == [None] * 3
            assert all(ref() is not None for ref in seen[3:])  # for peers that missed an epoch
        finally:
            round_work_module.HeldAverages = original  # type: ignore[misc]
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
        with pytest.raises(RoundFailedError, match=r"and nothing moved for 5 s: gathering; nobody coordin"):
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
        await sender.links.send(victim.id, message, [b"x"], timeout_seconds=1.0, bulk=True)
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
        lost = there.run.hub.drop(there.subjects.plan("*"), count=1)
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
        hub, subjects = liar.peer.session.hub, there.subjects
        signed = sign_word(plan, liar.peer.identity, subjects.scope)
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
        slow = there.run.hub.hold(there.changes_of("lease"))
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
                            await attacker.links.send(target.id, message, frames, timeout_seconds=1.0, bulk=True)

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
        hub, subjects = there.members[1].peer.session.hub, there.subjects
        await hub.publish(subjects.news(there.members[1].id, "ready"), b"\xc1")
        await hub.publish(subjects.news("NOBODY", "ready"), encode(Ready(session="s", epoch=1)))
        await asyncio.sleep(0.1)
        statistics = there.members[0].averager.statistics()
        assert statistics["coordinator_bad_readies"] == 1
        assert statistics["coordinator_readies_of_strangers"] == 1
        await there.average()
