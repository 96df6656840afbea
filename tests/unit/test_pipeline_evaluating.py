"""Evaluation through a pipeline: the loss is that of one process in evaluation mode, and training does not notice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

import pytest
import torch

from pipelinelab import RUN_SEED, assert_close, batch_of, build, pipeline, reference
from potluck.errors import ConfigurationError
from potluck.pipeline.blocks import State, run_blocks
from potluck.pipeline.conducting import ConductorConfig
from potluck.pipeline.evaluating import Evaluation, LossOf
from potluck.pipeline.member import Part
from potluck.pipeline.stepping import StepConfig
from potluck.recipes.reference import RecipeRef
from potluck.recipes.stdlib_lm import Config, StdlibLM
from potluck.testing.polling import poll_until
from potluck.training.manifest.manifest import Manifest
from potluck.training.staged.heldout import through_pipeline

STEPS = [[2, 3, 2, 1, 2, 2], [3, 3, 1, 2], [2, 2, 2, 2, 2]]
HELD_OUT = batch_of(999, 0, 11)
MANIFEST = Manifest(run="bakery", recipe=RecipeRef(name="stdlib-lm"))
PATIENT = ConductorConfig(step=StepConfig(stall_seconds=60.0, fence_seconds=60.0), lost_seconds=30.0)


def figures(loss_of: LossOf) -> Mapping[str, float]:
    return {"held_out": loss_of(HELD_OUT), "again": loss_of(HELD_OUT)}


def losses_of_one_process() -> list[float]:
    """After no step, one, two and three."""
    found = []
    for count in range(len(STEPS) + 1):
        blocks = build(tied=True, dropout=0.3)
        reference(blocks, STEPS[:count])
        for block in blocks:
            block.eval()
        with torch.no_grad():
            (loss,) = run_blocks(dict(enumerate(blocks)), range(len(blocks)), HELD_OUT, (RUN_SEED, 0, 0))
        found.append(loss.item())
    return found


@pytest.mark.parametrize("stages", [1, 3])
def test_held_out_data_go_through_the_pipeline_while_it_trains(stages: int) -> None:
    async def case() -> None:
        async with pipeline(stages, lambda: build(tied=True, dropout=0.3), PATIENT) as made:
            for stage in range(stages):
                await made.serve(f"s{stage}", stage)
            await made.feed("f")
            found: dict[int, Mapping[str, float]] = {}
            evaluation = Evaluation(figures=figures, every_steps=1, on_figures=found.__setitem__)
            await made.join("host", Part(), evaluation=evaluation)
            host = made.peers["host"].peer_id
            await poll_until(lambda: host in made.conductor.roll.peers, 20, "the host to be enlisted")
            for samples in STEPS:
                await made.step(samples)
            expected = losses_of_one_process()
            assert found.keys() == {1, 2}, "each step but the first, and before its commit"
            for step, each in found.items():
                assert each == pytest.approx({"held_out": expected[step], "again": expected[step]}, rel=1e-5)
            blocks = build(tied=True, dropout=0.3)
            reference(blocks, STEPS)
            await made.settled()
            assert_close(made.weights(), [p.detach() for block in blocks for p in block.parameters()])

    asyncio.run(case())


def test_a_server_that_dies_takes_the_evaluation_along_and_a_later_one_is_made() -> None:
    async def case() -> None:
        async with pipeline(2, lambda: build(tied=True, dropout=0.3), PATIENT) as made:
            for stage, replica in [(0, 0), (1, 0), (1, 1)]:
                await made.serve(f"s{stage}.{replica}", stage)
            await made.feed("f")
            found: dict[int, Mapping[str, float]] = {}
            dying, resume = asyncio.Event(), threading.Event()
            loop = asyncio.get_running_loop()

            def slow(loss_of: LossOf) -> Mapping[str, float]:
                if not dying.is_set():  # the first one never ends by itself
                    loss_of(HELD_OUT)
                    loop.call_soon_threadsafe(dying.set)
                    resume.wait(60)
                return figures(loss_of)

            await made.step(STEPS[0])
            evaluation = Evaluation(figures=slow, every_steps=1, on_figures=found.__setitem__)
            await made.join("host", Part(), evaluation=evaluation)
            host = made.peers["host"].peer_id
            await poll_until(lambda: host in made.conductor.roll.peers, 20, "the host to be enlisted")
            running = asyncio.create_task(made.step(STEPS[1]))
            await asyncio.wait_for(dying.wait(), 60)
            await made.kill("s1.1")
            await asyncio.wait_for(running, 60)
            resume.set()
            await made.step(STEPS[2])
            expected = losses_of_one_process()
            assert found.keys() <= {1, 2}
            assert 2 in found
            for step, each in found.items():
                assert each["held_out"] == pytest.approx(expected[step], rel=1e-5)
            blocks = build(tied=True, dropout=0.3)
            reference(blocks, STEPS)
            await made.settled()
            assert_close(made.weights(), [p.detach() for block in blocks for p in block.parameters()])

    asyncio.run(case())


def test_a_recipes_own_figures_come_from_its_blocks() -> None:
    recipe = StdlibLM(Config(layers=1, width=16, heads=2, context=16))
    blocks = list(recipe.blocks())
    model = recipe.model()
    ours = [p for block in blocks for p in block.parameters()]
    for parameter, values in zip(model.parameters(), ours, strict=True):
        parameter.data = values.data
    with torch.no_grad():
        expected = recipe.evaluate(model)

    def loss_of(batch: State) -> float:
        with torch.no_grad():
            (loss,) = run_blocks(dict(enumerate(blocks)), range(len(blocks)), batch, (0, 0, 0))
        return float(loss)

    assert through_pipeline(recipe, lambda: MANIFEST)(loss_of) == pytest.approx(expected, rel=1e-5)


def test_a_recipe_that_calls_the_model_itself_is_told_what_to_do() -> None:
    recipe = StdlibLM(Config(layers=1, width=16, heads=2, context=16))
    recipe.evaluate = lambda model: {"odds": float(model(torch.zeros(1)))}  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match=r"self\.loss"):
        through_pipeline(recipe, lambda: MANIFEST)(lambda batch: 0.0)
