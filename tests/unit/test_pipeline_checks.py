"""Spot checks in a whole pipeline: honest servers pass, one that lies is excluded, and its lie never counts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from pipelinelab import Pipeline, assert_close, build, pipeline, reference
from potluck.errors import PotluckError
from potluck.pipeline.compute import StageCompute
from potluck.pipeline.conducting import ConductorConfig
from potluck.pipeline.judging import Judge, Tolerances
from potluck.pipeline.member import Part, PipelineMember
from potluck.pipeline.serving import ServerConfig
from potluck.pipeline.stepping import StepConfig
from potluck.testing.polling import poll_until

STEPS = [[2, 3, 2, 1, 2, 2], [3, 3, 1, 2], [2, 2, 2, 2, 2]]
PATIENT = ConductorConfig(step=StepConfig(stall_seconds=60.0, fence_seconds=60.0), lost_seconds=30.0)


def flat(blocks: list) -> list:
    return [parameter.detach() for block in blocks for parameter in block.parameters()]


@pytest.mark.parametrize(
    ("num_stages", "codec", "spans"),
    [(3, "raw", [(0,), (0,), (1,), (1,), (2,), (2,)]), (4, "float16", [(), ()])],
)
def test_honest_servers_pass_every_check(num_stages: int, codec: str, spans: list[tuple[int, ...]]) -> None:
    """Also one that hands on to itself, with dropout and a shared parameter."""

    async def case() -> None:
        judge = Judge(rate=1.0, tolerances=Tolerances(codec))
        async with pipeline(num_stages, lambda: build(tied=True, dropout=0.1), PATIENT, judge=judge) as made:
            for number, stages in enumerate(spans):
                await made.serve(f"s{number}", *stages, config=ServerConfig(codec=codec))
            if spans[0] == ():
                await made.listen("listener")
            await made.feed("f")
            outcomes = [await made.step(samples) for samples in STEPS]
            assert all(outcome.attempts == 1 for outcome in outcomes)
            assert judge.num_checks >= 3, "one in each step at least"
            assert judge.num_failed == 0
            limits = judge.tolerances.table()
            assert {kind for _, _, kind, _ in limits} == {"output", "gradient", "sum"}
            if codec == "raw":
                expected = build(tied=True, dropout=0.1)
                reference(expected, STEPS)
                await made.settled()
                assert_close(made.weights(), flat(expected))

    asyncio.run(case())


def lie_with(member: PipelineMember, lie: Callable[[StageCompute], None]) -> None:
    serve = member.server._serve

    def lying(begin: Any) -> None:
        serve(begin)
        for compute in member.server._computes.values():
            if "is_lying" not in compute.__dict__:
                compute.__dict__["is_lying"] = True
                lie(compute)

    member.server._serve = lying  # type: ignore[method-assign]


def false_output(compute: StageCompute) -> None:
    honest = compute.forward

    def forward(*given: Any) -> Any:
        outputs = honest(*given)
        return outputs and tuple(o * 1.5 if o.is_floating_point() else o for o in outputs)

    compute.forward = forward  # type: ignore[method-assign]


def false_gradient(compute: StageCompute) -> None:
    honest = compute.backward

    def backward(*given: Any, **named: Any) -> Any:
        found = honest(*given, **named)
        return found and tuple(-gradient for gradient in found)

    compute.backward = backward  # type: ignore[method-assign]


def false_sum(compute: StageCompute) -> None:
    honest = compute.contribution

    def contribution(unit: int) -> Any:
        total, ids = honest(unit)
        return torch.full_like(total, 3.0), ids

    compute.contribution = contribution  # type: ignore[method-assign]


async def with_a_liar(made: Pipeline, lie: Callable[[StageCompute], None]) -> tuple[str, list[PotluckError]]:
    for stage in range(3):
        for replica in range(3 if stage == 1 else 1):
            await made.serve(f"s{stage}.{replica}", stage)
    await made.join("listener", Part(listens=True))
    await made.feed("f")
    liar = made.members["s1.1"]
    refusals: list[PotluckError] = []
    liar.on_refused = refusals.append
    lie_with(liar, lie)
    return made.peers["s1.1"].peer_id, refusals


@pytest.mark.parametrize("lie", [false_output, false_gradient, false_sum])
def test_a_server_that_lies_is_excluded_and_its_lie_never_counts(lie: Callable[[StageCompute], None]) -> None:
    async def case() -> None:
        judge = Judge(rate=1.0)
        async with pipeline(3, lambda: build(tied=True, dropout=0.1), PATIENT, judge=judge) as made:
            liar, refusals = await with_a_liar(made, lie)
            steps = []
            for _ in range(8):
                steps.append(STEPS[len(steps) % 3])
                await made.step(steps[-1])
                if judge.excluded:
                    break
            assert set(judge.excluded) == {liar}
            assert [about["peer"] for event, about in made.events if event == "excluded"] == [liar]
            await poll_until(lambda: refusals, 30, "the liar to be refused")
            steps.append(STEPS[0])
            outcome = await made.step(steps[-1])
            assert liar not in outcome.members
            assert made.conductor.record.excluded[0][0] == liar
            del made.members["s1.1"]
            expected = build(tied=True, dropout=0.1)
            reference(expected, steps)
            await made.settled()
            assert_close(made.weights(), flat(expected))

    asyncio.run(case())


@pytest.mark.parametrize("squared_norm", [0.0, 1e6, math.inf])
def test_a_server_that_reports_a_false_norm_is_excluded_at_once(squared_norm: float) -> None:
    """Clipping uses the total norm: a false one would shrink every step, or let none be clipped."""

    async def case() -> None:
        async with pipeline(2, lambda: build(tied=True), PATIENT, max_norm=0.5) as made:
            for stage, replica in [(0, 0), (1, 0), (1, 1), (1, 2)]:
                await made.serve(f"s{stage}.{replica}", stage)
            await made.feed("f")
            await made.step(STEPS[0])
            liar, group = made.peers["s1.1"].peer_id, made.members["s1.1"].end._group
            honest = group.average

            async def average(*given: Any, **named: Any) -> Any:
                found, report = await honest(*given, **named)
                return found, msgspec.structs.replace(report, squared_norm=squared_norm)

            group.average = average  # type: ignore[method-assign]
            outcome = await made.step(STEPS[1])
            assert outcome.excluded == (liar,)
            assert set(made.conductor.judge.excluded) == {liar}
            del made.members["s1.1"]
            await made.step(STEPS[2])
            expected = build(tied=True)
            reference(expected, STEPS, max_norm=0.5)
            await made.settled()
            assert_close(made.weights(), flat(expected))

    asyncio.run(case())


def test_a_neighbour_cannot_frame_a_server() -> None:
    """It tells verifiers false inputs: in the end it goes itself, and not those who got them."""

    async def case() -> None:
        judge = Judge(rate=1.0)
        async with pipeline(3, build, PATIENT, judge=judge) as made:
            for stage in range(3):
                for replica in range(3):
                    await made.serve(f"s{stage}.{replica}", stage)
            await made.feed("f")
            framer = made.members["s1.1"]
            honest = framer.witness.testify

            def testify(kind: Any, *given: Any, **named: Any) -> None:
                *others, frames = given if len(given) == 6 else (*given, ())
                honest(kind, *others, [bytes(len(frame)) for frame in frames], **named)

            framer.witness.testify = testify  # type: ignore[method-assign]
            for _ in range(12):
                await made.step(STEPS[0])
                if judge.excluded:
                    break
            assert set(judge.excluded) == {made.peers["s1.1"].peer_id}

    asyncio.run(case())
