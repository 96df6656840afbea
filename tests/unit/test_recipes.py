"""Recipes: what is built in learns; a file of one's own is pinned and checked before it is executed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from potluck.errors import ConfigurationError
from potluck.recipes import Recipe, RecipeConfig, Sample
from potluck.recipes.catalogue import open_recipe, refer_to
from potluck.recipes.recipe import data_of
from potluck.recipes.reference import RecipeRef
from potluck.training.manifest.skeleton import files_of_a_run
from potluck.training.trainer import batchsize
from potluck.training.trainer.batchsize import BatchSearch
from potluck.training.trainer.feed import Feed, RandomShards

SMALL = {"stdlib-lm": {"layers": 1, "width": 16, "heads": 2, "context": 16}, "digits": {"width": 32}}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def samples_of(recipe: Recipe[Any], count: int) -> list[Sample]:
    every = (sample for shard in range(recipe.num_shards) for sample in recipe.samples(shard, seeded()))
    return list(itertools.islice(every, count))


# Built in


@pytest.mark.parametrize("name", SMALL)
def test_a_recipe_that_is_built_in_learns(name: str, tmp_path: Path) -> None:
    if name == "digits":
        pytest.importorskip("sklearn")
    torch.manual_seed(0)
    recipe = open_recipe(refer_to(name, tmp_path), SMALL[name])
    model = recipe.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    batch = recipe.collate(samples_of(recipe, 64))
    losses = []
    for _ in range(12):
        loss = recipe.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    model.eval()
    with torch.no_grad():
        assert 0 < recipe.evaluate(model)["evaluation_loss"] < 10
        assert len(recipe.preview(model)) > 20


def test_shards_of_the_standard_library_do_not_overlap(tmp_path: Path) -> None:
    recipe = open_recipe(refer_to("stdlib-lm", tmp_path), {})
    shards = recipe._shards  # type: ignore[attr-defined]
    files = [path for shard in shards for path in shard]
    assert len(files) == len(set(files)) > 300
    assert all(shards)
    assert not set(files) & set(recipe._files[::20])  # type: ignore[attr-defined]


def test_the_language_model_reads_as_much_at_once_as_its_data_say(tmp_path: Path) -> None:
    recipe = open_recipe(refer_to("stdlib-lm", tmp_path), {"context": 64, "layers": 1, "width": 16, "heads": 2})
    model = recipe.model()
    for context, length in ((0, 65), (16, 17), (64, 65)):
        recipe.data = data_of(recipe, {"context": context})
        samples = samples_of(recipe, 2)
        assert {len(sample[0]) for sample in samples} == {length}
        assert recipe.loss(model, recipe.collate(samples)).isfinite()
    for wrong in ({"context": 65}, {"context": -1}, {"width": 3}):
        with pytest.raises(ConfigurationError, match="context"):
            data_of(recipe, wrong)


def test_the_same_shard_in_another_order(tmp_path: Path) -> None:
    recipe = open_recipe(refer_to("stdlib-lm", tmp_path), {"context": 64})
    one, again, other = (
        [bytes(text.tolist()) for (text,) in itertools.islice(recipe.samples(3, generator), 20)]
        for generator in (seeded(), seeded(), torch.Generator().manual_seed(8))
    )
    assert one == again != other


@pytest.mark.parametrize("options", [{"layer": 1}, {"layers": "two"}, {"layers": 0}, {"heads": 3}])
def test_options_that_a_recipe_cannot_use(options: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"layer|heads"):
        open_recipe(refer_to("stdlib-lm", tmp_path), options)


def test_a_recipe_of_a_later_version() -> None:
    with pytest.raises(ConfigurationError, match="install"):
        open_recipe(RecipeRef(name="clairvoyance", version="9.0"), {})


# One's own


def own_file(folder: Path) -> Path:
    path = folder / "recipe.py"
    path.write_text(files_of_a_run("bakery", "own")["recipe.py"])
    return path


def test_a_recipe_of_ones_own_is_pinned_by_its_digest(tmp_path: Path) -> None:
    path = own_file(tmp_path)
    ref = refer_to("recipe.py", tmp_path)
    recipe = open_recipe(ref, {"width": 8}, path)
    assert recipe.loss(recipe.model(), recipe.collate(samples_of(recipe, 5))).item() > 0
    path.write_text(path.read_text().replace("0.05", "0.06"))
    with pytest.raises(ConfigurationError, match="not the recipe of this run"):
        open_recipe(ref, {}, path)
    with pytest.raises(ConfigurationError, match="--recipe"):
        open_recipe(ref, {})


def test_line_ends_do_not_count(tmp_path: Path) -> None:
    path = own_file(tmp_path)
    ref = refer_to("recipe.py", tmp_path)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert refer_to("recipe.py", tmp_path) == ref


def test_what_does_not_match_is_never_executed(tmp_path: Path) -> None:
    path = own_file(tmp_path)
    ref = refer_to("recipe.py", tmp_path)
    trap = tmp_path / "executed"
    path.write_text(f"open({str(trap)!r}, 'w').close()\n" + path.read_text())
    with pytest.raises(ConfigurationError):
        open_recipe(ref, {}, path)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def", "SyntaxError"),
        ("x = 1", "one subclass.*it has none$"),
        ("from potluck.recipes import Recipe\nclass Half(Recipe):\n    pass", r"it has none \(Half lacks .*samples"),
        ("#" * 1100000, "small file"),
    ],
    ids=["raises", "ends", "no python", "no recipe", "half a recipe", "too large"],
)
def test_a_file_that_is_no_recipe(source: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.py"
    path.write_text(source)
    with pytest.raises(ConfigurationError, match=words):
        open_recipe(refer_to("recipe.py", tmp_path), {}, path)


# What trainers do with them


class Numbers(Recipe[RecipeConfig]):
    """Shard n has n samples."""

    num_shards = 4

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def samples(self, shard: int, generator: torch.Generator) -> Iterator[Sample]:
        for number in range(shard):
            yield (torch.tensor([float(10 * shard + number)]),)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        loss: Tensor = model(batch[0]).mean()
        return loss


class InOrder:
    """Shard after shard, once each; then the last for ever."""

    def __init__(self, *shards: int) -> None:
        self.left = list(shards)

    def take(self) -> int:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


def test_a_feed_goes_through_shards_and_fills_batches_across_them() -> None:
    feed = Feed(Numbers(RecipeConfig()), [InOrder(2, 0, 3)], batch_size=2, seed=0)
    try:
        assert [feed.next()[0].flatten().tolist() for _ in range(4)] == [[20, 21], [30, 31], [32, 30], [31, 32]]
    finally:
        feed.close()


def test_batches_of_another_size_go_on_where_the_last_one_ended() -> None:
    shards = InOrder(3, 2, 3)
    feed = Feed(Numbers(RecipeConfig()), [shards], batch_size=1, seed=0, ahead_batches=0)
    try:
        assert feed.next()[0].flatten().tolist() == [30]
        feed.resize(4, ahead_batches=0)
        assert feed.next()[0].flatten().tolist() == [31, 32, 20, 21]
        assert shards.left == [3], "a shard is taken when it is needed"
        feed.resize(2)
        assert [feed.next()[0].flatten().tolist() for _ in range(2)] == [[30, 31], [32, 30]]
    finally:
        feed.close()


def test_what_was_read_ahead_in_another_size_is_left_out() -> None:
    feed = Feed(Numbers(RecipeConfig()), [InOrder(3)], batch_size=3, seed=0)
    try:
        assert len(feed.next()[0]) == 3
        feed.resize(2)
        assert [len(feed.next()[0]) for _ in range(8)] == [2] * 8
    finally:
        feed.close()


def test_a_feed_without_data_says_so() -> None:
    feed = Feed(Numbers(RecipeConfig()), [InOrder(0)], batch_size=2, seed=0)
    try:
        with pytest.raises(ConfigurationError, match="no data"):
            feed.next()
    finally:
        feed.close()


def test_an_error_in_reading_reaches_the_trainer() -> None:
    class Broken(Numbers):
        def samples(self, shard: int, generator: torch.Generator) -> Iterator[Sample]:
            raise OSError("the disk is gone")

    feed = Feed(Broken(RecipeConfig()), [InOrder(1)], batch_size=2, seed=0)
    try:
        with pytest.raises(OSError, match="disk"):
            feed.next()
    finally:
        feed.close()


def test_a_feed_that_nobody_reads_can_be_closed() -> None:
    feed = Feed(Numbers(RecipeConfig()), [RandomShards(4, 0)], batch_size=1, seed=0)
    closing = threading.Thread(target=feed.close)
    closing.start()
    closing.join(30.0)
    assert not closing.is_alive()


def test_several_readers_feed_one_training() -> None:
    feed = Feed(Numbers(RecipeConfig()), [InOrder(2), InOrder(3)], batch_size=1, seed=0)
    wanted, seen = {20.0, 21.0, 30.0, 31.0, 32.0}, set()
    try:
        for _ in range(100_000):  # on a busy machine one of the threads may wait long for its turn
            seen.add(feed.next()[0].item())
            if seen == wanted:
                break
    finally:
        feed.close()
    assert seen == wanted


@pytest.mark.parametrize(
    ("seconds", "largest", "found"),
    [
        (lambda size: 1e-3, 64, 64),  # samples are free: as many as there are
        (lambda size: 1e-3, 48, 32),  # and no more
        (lambda size: 1e-3 * size, 64, 1),  # none gets cheaper
        (lambda size: 1e-3 + 1e-4 * size, 1024, 256),  # until they do not get 10 % cheaper by doubling
        (lambda size: 1e-3 if size <= 8 else None, 64, 8),  # memory ends
        (lambda size: 5e-3 if size == 4 else 1e-3, 64, 64),  # one slow size does not end the search
        (lambda size: 1.5 + 0.1 * size, 1024, 16),  # a slow machine, and each doubling pays: more time is taken
        (lambda size: 0.2 + 0.8 * size, 1024, 2),  # they hardly do
        (lambda size: 20.0, 1024, 1),  # so slow that one try takes all the time there is
    ],
)
def test_the_batch_size_is_found_by_trial(seconds: Any, largest: int, found: int) -> None:
    search = BatchSearch(largest)
    while not search.is_over:
        taken = seconds(search.size)
        if taken is None:
            search.refuse()
        else:
            search.observe(taken)
    assert search.size == search.found == found


def test_the_quickest_of_a_few_quick_steps_counts() -> None:
    search = BatchSearch(2)
    tried = []
    for seconds in (9e-3, 1e-3, 9e-3, 1.5e-3, 9e-3, 9e-3):  # a moment's disturbance hits most of them
        tried.append(search.size)
        search.observe(seconds)
    assert tried == [1, 1, 1, 2, 2, 2]
    assert (search.is_over, search.size) == (True, 2)
    slow = BatchSearch(2)
    slow.observe(1.0)
    assert slow.size == 2, "and a slow one by itself"


def test_a_batch_is_of_one_sample_at_least() -> None:
    search = BatchSearch(64)
    search.refuse()
    assert (search.is_over, search.size, search.found) == (True, 1, 0)


def test_a_trial_leaves_no_gradients() -> None:
    recipe = Numbers(RecipeConfig())
    model = recipe.model()
    size = batchsize.find_batch_size(recipe, model, torch.device("cpu"), 4)
    assert 1 <= size <= 4
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_trial_that_needs_too_much_memory_does_not_count() -> None:
    tried: list[bool] = []

    def fits() -> bool:
        tried.append(True)
        return len(tried) <= batchsize.TRIES

    recipe = Numbers(RecipeConfig())
    assert batchsize.find_batch_size(recipe, recipe.model(), torch.device("cpu"), 4, fits) == 1
    with pytest.raises(ConfigurationError, match="memory"):
        batchsize.find_batch_size(recipe, recipe.model(), torch.device("cpu"), 4, lambda: False)
