"""A whole pipeline in one process equals one process with the large batch, also when servers and feeders are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipelinelab import assert_close, build, pipeline, reference
from potluck import faultpoints
from potluck.errors import RoundFailedError
from potluck.link.carrier import Buffer
from potluck.pipeline.compute import StageCompute
from potluck.pipeline.computethread import ComputeThread
from potluck.pipeline.conducting import ConductorConfig
from potluck.pipeline.cuts import CutShelf
from potluck.pipeline.member import Part
from potluck.pipeline.messages import Forward
from potluck.pipeline.serving import ServerConfig
from potluck.pipeline.stepping import StepConfig
from potluck.testing.polling import poll_until

STEPS = [[2, 3, 2, 1, 2, 2], [3, 3, 1, 2], [2, 2, 2, 2, 2]]
PATIENT = ConductorConfig(step=StepConfig(stall_seconds=60.0, fence_seconds=60.0), lost_seconds=30.0)
QUICK = ConductorConfig(step=PATIENT.step, gather_seconds=0.0, lost_seconds=0.2)


def flat(blocks: list) -> list:
    return [parameter.detach() for block in blocks for parameter in block.parameters()]


@pytest.mark.parametrize(
    ("num_stages", "replicas", "tied", "dropout", "max_norm"),
    [(1, 1, False, 0.0, 0.0), (2, 2, False, 0.3, 0.0), (3, 2, True, 0.0, 0.5), (4, 1, True, 0.2, 0.0)],
)
def test_steps_equal_one_process(num_stages: int, replicas: int, tied: bool, dropout: float, max_norm: float) -> None:
    async def case() -> None:
        async with pipeline(num_stages, lambda: build(tied=tied, dropout=dropout), max_norm=max_norm) as made:
            for stage in range(num_stages):
                for replica in range(replicas):
                    await made.serve(f"s{stage}.{replica}", stage)
            await made.feed("f0")
            await made.feed("f1")
            outcomes = [await made.step(samples) for samples in STEPS]
            expected = build(tied=tied, dropout=dropout)
            losses = reference(expected, STEPS, max_norm=max_norm)
            await made.settled()
            assert_close(made.weights(), flat(expected))
            assert [outcome.loss for outcome in outcomes] == pytest.approx(losses, rel=1e-5)
            assert all(outcome.attempts == 1 for outcome in outcomes)

    asyncio.run(case())


def test_micro_batches_of_other_shapes_are_work_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a long one would be computed on the event loop, since the short ones before it were done at once."""
    kinds: set[Hashable] = set()
    run_often = ComputeThread.run_often

    async def noted(thread: ComputeThread, kind: Hashable, work: Callable[[], Any]) -> Any:
        kinds.add(kind)
        return await run_often(thread, kind, work)

    monkeypatch.setattr(ComputeThread, "run_often", noted)

    async def case() -> None:
        async with pipeline(2) as made:
            await made.serve("first", 0)
            await made.serve("last", 1)
            await made.feed("f")
            await made.step([1, 3, 1, 3])

    asyncio.run(case())
    assert len(kinds) == 8, "forward and backward of two stages and two shapes"


def test_one_machine_may_serve_several_consecutive_stages() -> None:
    async def case() -> None:
        async with pipeline(4) as made:
            await made.serve("large", 0, 1, 2)
            await made.serve("small", 3)
            await made.serve("other", 2, 3)
            await made.feed("f")
            for samples in STEPS:
                await made.step(samples)
            expected = build()
            reference(expected, STEPS)
            await made.settled()
            assert_close(made.weights(), flat(expected))

    asyncio.run(case())


@pytest.mark.parametrize("codec", ["float16", "bfloat16", "blockwise8"])
def test_activations_may_travel_by_a_codec(codec: str) -> None:
    async def case() -> None:
        async with pipeline(3) as made:
            for stage in range(3):
                await made.serve(f"s{stage}", stage, config=ServerConfig(codec=codec))
            await made.feed("f")
            outcomes = [await made.step(samples) for samples in STEPS]
            losses = reference(build(), STEPS)
            assert [outcome.loss for outcome in outcomes] == pytest.approx(losses, rel=0.02)
            assert [outcome.loss for outcome in outcomes] != losses

    asyncio.run(case())


POINTS = ["queued", "forwarded", "between", "backward", "added", "averaging", "averaged"]


@pytest.mark.parametrize("point", POINTS)
def test_a_server_that_dies_at_any_point_changes_nothing(point: str) -> None:
    """The victim's links and session end at the point, in step 1; the weights are those of one process."""

    async def case() -> None:
        async with pipeline(3, lambda: build(tied=True, dropout=0.1), PATIENT) as made:
            for stage in range(3):
                for replica in range(2):
                    await made.serve(f"s{stage}.{replica}", stage)
            await made.feed("f0")
            await made.feed("f1")
            await made.step(STEPS[0])
            fired: list[str] = []

            def hook(name: str, labels: Mapping[str, object]) -> None:
                if name == f"pipeline.{point}" and labels["stage"] == 1 and not fired:
                    fired.append(name)
                    victims.put_nowait("s1.0")

            victims: asyncio.Queue[str] = asyncio.Queue()
            before = faultpoints.install(hook)
            try:
                running = asyncio.create_task(made.step(STEPS[1]))
                await made.kill(await asyncio.wait_for(victims.get(), 60))
                outcome = await asyncio.wait_for(running, 60)
            finally:
                faultpoints.install(before)
            assert fired
            assert outcome.attempts >= 1
            await made.step(STEPS[2])
            expected = build(tied=True, dropout=0.1)
            reference(expected, STEPS)
            await made.settled()
            assert_close(made.weights(), flat(expected))

    asyncio.run(case())


def test_a_step_that_lost_a_stage_is_taken_again_with_the_same_servers() -> None:
    """The only server of a stage is given up in the middle of a step, wrongly: it lives, and has heard of attempts."""

    async def case() -> None:
        async with pipeline(2, lambda: build(dropout=0.1), PATIENT) as made:
            await made.serve("s0", 0)
            await made.serve("s1", 1)
            await made.feed("f")
            await made.step(STEPS[0])
            given_up: list[str] = []

            def hook(name: str, labels: Mapping[str, object]) -> None:
                if name == "pipeline.added" and not given_up:
                    given_up.append(made.peers["s1"].peer_id)
                    made.conductor._runner.gone(given_up[0], "it is taken for dead")

            before = faultpoints.install(hook)
            try:
                await asyncio.wait_for(made.step(STEPS[1]), 60)
            finally:
                faultpoints.install(before)
            assert given_up
            await made.step(STEPS[2])
            expected = build(dropout=0.1)
            reference(expected, STEPS)
            await made.settled()
            assert_close(made.weights(), flat(expected))

    asyncio.run(case())


def test_what_an_old_attempt_leaves_behind_does_not_take_the_answers_of_the_next() -> None:
    """A hand-over that is broken off takes a while to end; by then the same micro-batch is under way again."""

    async def case() -> None:
        endless = ConductorConfig(step=StepConfig(stall_seconds=1e6, fence_seconds=60.0), lost_seconds=30.0)
        async with pipeline(2, config=endless) as made:
            await made.serve("s0")
            await made.serve("s1")
            feeder = (await made.feed("f")).feeder
            assert feeder is not None
            push, broken_off = feeder._pusher.push, []

            async def slow_to_end(message: Forward, frames: Sequence[Buffer]) -> str | None:
                try:
                    return await push(message, frames)
                except asyncio.CancelledError:
                    broken_off.append(message.id)
                    for _ in range(20):
                        await asyncio.sleep(0)
                    raise

            feeder._pusher.push = slow_to_end  # type: ignore[method-assign]

            def hook(name: str, labels: Mapping[str, object]) -> None:
                running = made.conductor._runner._running
                if name == "pipeline.queued" and running is not None and running.ledger.num_attempts == 1:
                    running.events.put_nowait(running.ledger.stalled)

            before = faultpoints.install(hook)
            try:
                await asyncio.wait_for(made.step(STEPS[0]), 60)
            finally:
                faultpoints.install(before)
            assert broken_off

    asyncio.run(case())


def test_a_feeder_that_dies_is_replaced_by_another() -> None:
    async def case() -> None:
        async with pipeline(2, config=PATIENT) as made:
            for stage in range(2):
                await made.serve(f"s{stage}", stage)
            await made.feed("f0")
            await made.feed("f1")
            died = asyncio.Event()

            def hook(name: str, labels: Mapping[str, object]) -> None:
                if name == "pipeline.backward":
                    died.set()

            before = faultpoints.install(hook)
            try:
                running = asyncio.create_task(made.step(STEPS[0]))
                await asyncio.wait_for(died.wait(), 60)
                await made.kill("f0")
                await asyncio.wait_for(running, 60)
            finally:
                faultpoints.install(before)
            expected = build()
            reference(expected, STEPS[:1])
            await made.settled()
            assert_close(made.weights(), flat(expected))

    asyncio.run(case())


def test_a_stage_with_one_server_and_a_listener_loses_the_server_and_goes_on() -> None:
    async def case() -> None:
        async with pipeline(2, config=PATIENT) as made:
            await made.serve("s0", 0)
            await made.serve("s1", 1)
            listener = await made.listen("listener", Part(listens=True, feeds=True))
            await made.step(STEPS[0])
            await made.settled()
            assert listener.server.num_computed == 0
            assert listener.server.at_step == 1
            await made.kill("s1")
            await made.step(STEPS[1])
            assert listener.server.num_computed > 0
            expected = build()
            reference(expected, STEPS[:2])
            await made.settled()
            assert_close(made.weights(), flat(expected))

    asyncio.run(case())


def test_a_newcomer_loads_while_the_run_goes_on_and_then_serves() -> None:
    async def case() -> None:
        async with pipeline(2, lambda: build(tied=True), PATIENT) as made:
            await made.serve("s0")
            await made.serve("s1")
            await made.feed("f")
            for _ in range(2):
                await made.step(STEPS[0])
            newcomer = await made.join("s2", Part(serves=True))
            for _ in range(300):
                await made.step(STEPS[0])
                if newcomer.server.num_computed:
                    break
            assert newcomer.server.num_computed
            assert newcomer.bytes_loaded
            assert len(newcomer.holding.blocks) == 3, "one stage of two"
            left_out = [about["excluded"] for event, about in made.events if event == "step" and about["excluded"]]
            assert not left_out, "nobody is counted on before it stands, and then left out"
            expected = build(tied=True)
            reference(expected, [STEPS[0]] * made.conductor.record.step)
            await made.settled()
            assert_close(made.weights(), flat(expected))

    asyncio.run(case())


SHAPES = [(1, 1), (2, 2), (4, 1), (1, 3), (3, 2)]


def test_morphs_lose_no_sample_and_train_none_twice() -> None:
    """1×1 → 2×2 → 4×1 → 1×3 → 3×2, at boundaries while it trains; the weights are those of one process."""

    async def case() -> None:
        async with pipeline(1, lambda: build(tied=True, dropout=0.1), PATIENT) as made:
            await made.feed("f")
            num_servers = 0
            for num_stages, replicas in SHAPES:
                made.num_stages = num_stages
                wanted = num_stages * replicas
                while num_servers < wanted:
                    await made.join(f"s{num_servers}", Part(serves=True))
                    num_servers += 1
                while num_servers > wanted:
                    num_servers -= 1
                    assert await made.leave(f"s{num_servers}", STEPS[0])
                for _ in range(60):
                    await made.step(STEPS[0])
                    if made.shape() == (num_stages, replicas):
                        break
                assert made.shape() == (num_stages, replicas)
                await made.step(STEPS[1])
            steps = made.course.steps
            assert made.conductor.record.step == len(steps)
            expected = build(tied=True, dropout=0.1)
            reference(expected, steps)
            await made.settled()
            assert_close(made.weights(), flat(expected), relative=2e-5 * len(steps) ** 0.5)

    asyncio.run(case())


def test_a_conductor_is_replaced_in_the_middle_of_a_step() -> None:
    async def case() -> None:
        async with pipeline(2, lambda: build(dropout=0.1), PATIENT) as made:
            await made.serve("s0")
            await made.serve("s1")
            await made.feed("f")
            await made.step(STEPS[0])
            reached = asyncio.Event()

            def hook(name: str, labels: Mapping[str, object]) -> None:
                if name == "pipeline.added":
                    reached.set()

            before = faultpoints.install(hook)
            try:
                running = asyncio.create_task(made.step(STEPS[1]))
                await asyncio.wait_for(reached.wait(), 60)
                running.cancel()
                await made.conductor.close()
                await made.open(PATIENT)
                await made.step(STEPS[1])
            finally:
                faultpoints.install(before)
            await made.step(STEPS[2])
            expected = build(dropout=0.1)
            reference(expected, STEPS)
            await made.settled()
            assert_close(made.weights(), flat(expected))

    asyncio.run(case())


def test_a_stage_that_all_holders_left_comes_back_from_the_newest_cut(tmp_path: Path) -> None:
    async def case() -> None:
        async with pipeline(2, lambda: build(tied=True), QUICK) as made:
            await made.serve("s0")
            await made.serve("s1")
            cuts = CutShelf(tmp_path)
            await made.join("saver", Part(feeds=True, saves_every=2), cuts=cuts)
            for _ in range(3):
                await made.step(STEPS[0])
            await made.step(STEPS[1])
            await poll_until(lambda: cuts.cuts and cuts.cuts[-1].step == 3, 30, "the second cut on disk")
            await made.kill("s1")
            await made.join("s2", Part(serves=True))
            for _ in range(4):
                await made.step(STEPS[0])
            restored = [about for event, about in made.events if event == "restored"]
            assert [about["to"] for about in restored] == [3], "of the cuts at steps 1 and 3"
            steps = made.course.steps[: made.conductor.record.step]
            expected = build(tied=True)
            reference(expected, steps)
            await made.settled()
            assert_close(made.weights(), flat(expected))

    asyncio.run(case())


def test_a_host_that_stops_saves_the_newest_step(tmp_path: Path) -> None:
    async def case() -> None:
        async with pipeline(2, lambda: build(tied=True), QUICK) as made:
            await made.serve("s0")
            await made.serve("s1")
            cuts = CutShelf(tmp_path)
            saver = await made.join("saver", Part(feeds=True, saves_every=1000), cuts=cuts)
            seen: list[int] = []
            saver.on_saved = seen.append
            for samples in STEPS:
                await made.step(samples)
            saving = asyncio.create_task(made.conductor.save_now(60))
            await asyncio.sleep(0)
            await made.step(STEPS[0])
            assert await saving
            assert cuts.cuts[-1].step == 3 == seen[-1]
            expected = build(tied=True)
            reference(expected, STEPS)
            found = cuts.load(1, 3)
            inner = dict(expected[1].named_parameters())["inner.weight"]
            assert_close([found["parameter/1.inner.weight"]], [inner.detach()])

    asyncio.run(case())


def test_a_model_that_fails_everywhere_is_given_up_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case() -> None:
        config = ConductorConfig(step=StepConfig(max_attempts=3))
        async with pipeline(2, config=config) as made:
            await made.serve("s0")
            await made.serve("s1")
            await made.feed("f")

            def fail(*_: object) -> None:
                raise RuntimeError("shapes do not fit")

            monkeypatch.setattr(StageCompute, "forward", fail)
            with pytest.raises(RoundFailedError, match=r"failed 3 times.*shapes do not fit"):
                await made.step(STEPS[0])

    asyncio.run(case())
