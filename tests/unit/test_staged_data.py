"""A pipeline's data: one order for the whole run, whoever feeds and in whichever micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from potluck.pipeline.messages import Place
from potluck.recipes.recipe import Recipe, RecipeConfig
from potluck.recipes.reference import RecipeRef
from potluck.training.manifest.manifest import Manifest, PipelineSpec, Settings, SyncSettings
from potluck.training.staged.course import ManifestCourse
from potluck.training.staged.data import RecipeSource

LENGTHS = [5, 0, 7, 3]


class Numbers(Recipe[RecipeConfig]):
    num_shards = len(LENGTHS)

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def samples(self, shard: int, generator: torch.Generator) -> Iterator[tuple[Tensor]]:
        for place in torch.randperm(LENGTHS[shard], generator=generator).tolist():
            yield (torch.tensor([100.0 * shard + place]),)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(batch[0]).mean()


def manifest(**settings: object) -> Manifest:
    entry = Settings(training=SyncSettings(target_batch_size=6), **settings)  # type: ignore[arg-type]
    return Manifest(run="r", recipe=RecipeRef(name="numbers"), settings=(entry,), pipeline=PipelineSpec())


def source() -> RecipeSource:
    return RecipeSource(Numbers(RecipeConfig()), manifest)


def step_of(feeder: RecipeSource, step: int, place: Place, sizes: list[int]) -> list[float]:
    found: list[float] = []
    for size in sizes:
        found += feeder.batch(step, place, len(found), size)[0].reshape(-1).tolist()
    return found


def test_a_pass_has_each_sample_once_and_feeders_may_change() -> None:
    one, seen, place = source(), [], Place()
    for step in range(5):
        feeder = one if step % 2 else source()  # a new one has to find its place
        found = step_of(feeder, step, place, [4, 2] if step < 3 else [1] * 6)
        assert found == step_of(source(), step, place, [6])
        seen += found
        assert feeder.after(step, place, 6) == source().after(step, place, 6)
        place = feeder.after(step, place, 6)
    assert sorted(seen[:15]) == sorted(100.0 * shard + n for shard, length in enumerate(LENGTHS) for n in range(length))
    assert len(set(seen[15:30])) == 15, "the second turn is whole too"
    assert seen[:15] != seen[15:30], "in another order"


def test_the_course_is_what_the_manifest_says() -> None:
    course = ManifestCourse(lambda: manifest(end_epoch=3), PipelineSpec(micro_batch=4))
    assert course.sizes(0, 2) == (4, 2)
    assert sum(ManifestCourse(manifest, PipelineSpec()).sizes(0, 2)) == 6
    assert course.stands_still(2) == ""
    assert "over" in course.stands_still(3)
    assert "paused" in ManifestCourse(lambda: manifest(paused=True), PipelineSpec()).stands_still(0)
