"""A whole pipeline in one process equals one process with the large batch, also when servers and feeders are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from pipelinelab import assert_close, build, pipeline, reference
from potluck import faultpoints
from potluck.errors import RoundFailedError
from potluck.pipeline.conducting import ConductorConfig, StageLostError
from potluck.pipeline.serving import ServerConfig

STEPS = [[2, 3, 2, 1, 2, 2], [3, 3, 1, 2], [2, 2, 2, 2, 2]]
PATIENT = ConductorConfig(stall_seconds=60.0, fence_seconds=60.0)


def flat(blocks: list) -> list:
    return [parameter.detach() for block in blocks for parameter in block.parameters()]


@pytest.mark.parametrize(
    ("num_stages", "replicas", "tied", "dropout", "max_norm"),
    [(1, 1, False, 0.0, 0.0), (2, 2, False, 0.3, 0.0), (3, 2, True, 0.0, 0.5), (4, 1, True, 0.2, 0.0)],
)
def test_steps_equal_one_process(num_stages: int, replicas: int, tied: bool, dropout: float, max_norm: float) -> None:
    async def case() -> None:
        config = ConductorConfig(max_norm=max_norm)
        async with pipeline(num_stages, lambda: build(tied=tied, dropout=dropout), config) as made:
            for stage in range(num_stages):
                for replica in range(replicas):
                    await made.serve(f"s{stage}.{replica}", stage)
            await made.feed("f0")
            await made.feed("f1")
            outcomes = [await made.conductor.run_step(step, samples) for step, samples in enumerate(STEPS)]
            expected = build(tied=tied, dropout=dropout)
            losses = reference(expected, STEPS, max_norm=max_norm)
            assert_close(made.weights(), flat(expected))
            assert [outcome.loss for outcome in outcomes] == pytest.approx(losses, rel=1e-5)
            assert all(outcome.attempts == 1 for outcome in outcomes)

    asyncio.run(case())


def test_one_machine_may_serve_several_consecutive_stages() -> None:
    async def case() -> None:
        async with pipeline(4) as made:
            await made.serve("large", 0, 1, 2)
            await made.serve("small", 3)
            await made.serve("other", 2, 3)
            await made.feed("f")
            for step, samples in enumerate(STEPS):
                await made.conductor.run_step(step, samples)
            expected = build()
            reference(expected, STEPS)
            assert_close(made.weights(), flat(expected))

    asyncio.run(case())


@pytest.mark.parametrize("codec", ["float16", "bfloat16", "blockwise8"])
def test_activations_may_travel_by_a_codec(codec: str) -> None:
    async def case() -> None:
        async with pipeline(3) as made:
            for stage in range(3):
                await made.serve(f"s{stage}", stage, config=ServerConfig(codec=codec))
            await made.feed("f")
            outcomes = [await made.conductor.run_step(step, samples) for step, samples in enumerate(STEPS)]
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
            await made.conductor.run_step(0, STEPS[0])
            fired: list[str] = []

            def hook(name: str, labels: Mapping[str, object]) -> None:
                if name == f"pipeline.{point}" and labels["stage"] == 1 and not fired:
                    fired.append(name)
                    victims.put_nowait("s1.0")

            victims: asyncio.Queue[str] = asyncio.Queue()
            before = faultpoints.install(hook)
            try:
                running = asyncio.create_task(made.conductor.run_step(1, STEPS[1]))
                await made.kill(await asyncio.wait_for(victims.get(), 60))
                outcome = await asyncio.wait_for(running, 60)
            finally:
                faultpoints.install(before)
            assert fired
            assert outcome.attempts >= 1
            await made.conductor.run_step(2, STEPS[2])
            expected = build(tied=True, dropout=0.1)
            reference(expected, STEPS)
            assert_close(made.weights(), flat(expected))

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
                running = asyncio.create_task(made.conductor.run_step(0, STEPS[0]))
                await asyncio.wait_for(died.wait(), 60)
                await made.kill("f0")
                await asyncio.wait_for(running, 60)
            finally:
                faultpoints.install(before)
            expected = build()
            reference(expected, STEPS[:1])
            assert_close(made.weights(), flat(expected))

    asyncio.run(case())


def test_a_stage_with_one_server_and_a_listener_loses_the_server_and_goes_on() -> None:
    async def case() -> None:
        async with pipeline(2, config=PATIENT) as made:
            await made.serve("s0", 0)
            await made.serve("s1", 1)
            await made.serve("listener", 1, listens=True)
            await made.feed("f")
            await made.conductor.run_step(0, STEPS[0])
            assert made.servers["listener"].num_computed == 0
            assert made.servers["listener"].at_step == 1
            await made.kill("s1")
            await made.conductor.run_step(1, STEPS[1])
            assert made.servers["listener"].num_computed == len(STEPS[1])
            expected = build()
            reference(expected, STEPS[:2])
            assert_close(made.weights(), flat(expected))

    asyncio.run(case())


def test_a_stage_without_anybody_stops_the_step_and_says_so() -> None:
    async def case() -> None:
        async with pipeline(2, config=PATIENT) as made:
            await made.serve("s0", 0)
            await made.feed("f")
            with pytest.raises(StageLostError, match="nobody is left who holds stage 1"):
                await made.conductor.run_step(0, STEPS[0])

    asyncio.run(case())


def test_a_model_that_fails_everywhere_is_given_up_with_its_error() -> None:
    async def case() -> None:
        config = ConductorConfig(max_attempts=3)
        async with pipeline(2, config=config) as made:
            for stage in range(2):
                await made.serve(f"s{stage}", stage)
            await made.feed("f")

            def fail(*_: object) -> None:
                raise RuntimeError("shapes do not fit")

            made.computes["s1"][1].forward = fail  # type: ignore[method-assign,assignment]
            with pytest.raises(RoundFailedError, match=r"failed 3 times.*shapes do not fit"):
                await made.conductor.run_step(0, STEPS[0])

    asyncio.run(case())
