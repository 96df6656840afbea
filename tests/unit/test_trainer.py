"""One peer's training loop, in a run in memory: batches that do not fit, and being told to leave."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from trainlab import TrainLab, train_lab

from potluck.errors import ConfigurationError, HubUnavailableError, StoppedError
from potluck.recipes.downloads import Download
from potluck.recipes.recipe import Batch, Recipe, RecipeConfig
from potluck.recipes.reference import RecipeRef
from potluck.state.config import StateConfig
from potluck.training.manifest.manifest import DiLoCoSettings, Manifest, Settings, SyncSettings
from potluck.training.trainer import computing, machine
from potluck.training.trainer.config import TrainConfig
from potluck.training.trainer.leaving import train_and_hand_in
from potluck.training.trainer.machine import MemoryLimit, find_device, find_devices
from potluck.training.trainer.trainer import Trainer, TrainProgress

MANIFEST = Manifest(
    run="test",
    recipe=RecipeRef(name="tiny"),
    settings=(Settings(training=SyncSettings(target_batch_size=16, matchmaking_seconds=0.1)),),
)


class Tiny(Recipe[RecipeConfig]):
    """A line through the origin; memory ends above so many samples."""

    num_shards = 4
    most_samples = 1 << 30

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def samples(self, shard: int, generator: torch.Generator) -> Iterable[tuple[Tensor, ...]]:
        for _ in range(64):
            inputs = torch.randn(2, generator=generator)
            yield inputs, inputs.sum().view(1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if len(batch[0]) > self.most_samples:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return nn.functional.mse_loss(model(batch[0]), batch[1])


def make_trainer(
    lab: TrainLab, recipe: Tiny, *, on_batch_size: Callable[[int], None] = lambda _size: None, **config: Any
) -> Trainer:
    chosen = TrainConfig(num_threads=1, **config)
    return Trainer(lab.join("Ada"), lambda: MANIFEST, recipe, chosen, on_batch_size=on_batch_size)


def tiny(most_samples: int = 1 << 30) -> Tiny:
    recipe = Tiny(RecipeConfig())
    recipe.most_samples = most_samples
    return recipe


# The batch size


def quick_steps(monkeypatch: pytest.MonkeyPatch, seconds_of: Callable[[int], float]) -> None:
    """Have steps of each size take as long as is said, by the clock that they are timed with."""
    clock = [0.0]

    def loss(self: Tiny, model: nn.Module, batch: Batch) -> Tensor:
        clock[0] += seconds_of(len(batch[0]))
        return LOSS(self, model, batch)

    monkeypatch.setattr(Tiny, "loss", loss)
    monkeypatch.setattr(computing.time, "perf_counter", lambda: clock[0])


LOSS = Tiny.loss
SIZES_TRIED = [1, 1, 1, 2, 2, 2, 4, 4, 4]  # up to a quarter of the target, each while it is quick


def steps_of(monkeypatch: pytest.MonkeyPatch, trainer: Trainer) -> list[int]:
    """The sizes of all batches that are handed in, as they come."""
    sizes: list[int] = []
    step = trainer.optimizer.step

    def handed_in(batch_size: int, **options: Any) -> None:
        sizes.append(batch_size)
        step(batch_size=batch_size, **options)

    monkeypatch.setattr(trainer.optimizer, "step", handed_in)
    return sizes


def test_sizes_are_tried_by_training(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_steps(monkeypatch, lambda size: 1e-3 + 1e-3 * size)  # 2 are by a quarter cheaper than 1, and 4 than 2
    found: list[int] = []
    with train_lab() as lab:
        trainer = make_trainer(lab, tiny(), max_steps=12, on_batch_size=found.append)
        assert (trainer.is_searching, trainer.batch_size) == (True, 1)
        sizes = steps_of(monkeypatch, trainer)
        last = trainer.train(threading.Event())
        unfinished = trainer.unfinished_samples
    assert sizes == [*SIZES_TRIED, 4, 4, 4]
    assert last.samples == sum(sizes)
    assert (last.epoch, unfinished) == (2, 0), "of 17 samples and of 16: all that was tried counts"
    assert (trainer.is_searching, trainer.batch_size, found) == (False, 4, [4])


def test_a_size_that_pays_no_more_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_steps(monkeypatch, lambda size: 1e-3 * max(2, size))
    with train_lab() as lab:
        trainer = make_trainer(lab, tiny(), max_steps=10)
        sizes = steps_of(monkeypatch, trainer)
        trainer.train(threading.Event())
    assert sizes == [*SIZES_TRIED, 2]


def test_where_memory_ends_in_a_trial_the_size_before_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_steps(monkeypatch, lambda _size: 1e-3)
    found: list[int] = []
    with train_lab() as lab:
        trainer = make_trainer(lab, tiny(most_samples=3), max_steps=8, on_batch_size=found.append)
        sizes = steps_of(monkeypatch, trainer)
        last = trainer.train(threading.Event())
    assert sizes == [1, 1, 1, 2, 2, 2, 2, 2], "what did not fit was not counted"
    assert last.samples == sum(sizes)
    assert found == [2]


def test_a_size_that_takes_more_memory_than_allowed_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_steps(monkeypatch, lambda _size: 1e-3)
    with train_lab() as lab:
        trainer = make_trainer(lab, tiny(), max_steps=10)
        monkeypatch.setattr(MemoryLimit, "fits", lambda _self: trainer.batch_size < 4)
        sizes = steps_of(monkeypatch, trainer)
        trainer.train(threading.Event())
    assert sizes == [1, 1, 1, 2, 2, 2, 4, 2, 2, 2]


def test_where_steps_are_what_counts_sizes_are_tried_before() -> None:
    lazy = msgspec.structs.replace(
        MANIFEST, settings=(Settings(training=DiLoCoSettings(inner_steps=1, grace_seconds=0.1)),)
    )
    with train_lab() as lab:
        trainer = Trainer(lab.join("Ada"), lambda: lazy, tiny(most_samples=8), TrainConfig(num_threads=1))
        assert not trainer.is_searching
        assert 1 <= trainer.batch_size <= 8
        assert (trainer.steps, trainer.optimizer.epoch) == (0, 0)


def test_other_data_are_tried_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_steps(monkeypatch, lambda _size: 1e-3)
    with train_lab() as lab:
        trainer = make_trainer(lab, tiny(), max_steps=14)
        sizes = steps_of(monkeypatch, trainer)
        monkeypatch.setattr(trainer, "_data", lambda: RecipeConfig() if len(sizes) < 10 else OtherData())
        trainer.train(threading.Event())
    assert sizes == [*SIZES_TRIED, 4, 1, 1, 1, 2]


class OtherData(RecipeConfig, frozen=True):
    """Not what came before."""

    longer: bool = True


# Precision and compilation


def test_a_compiled_model_trains_under_the_names_of_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []

    def compile_it(model: nn.Module) -> Any:  # without a C++ compiler, which this is not about
        compiled.append(model)
        return torch.compile(model, backend="eager")

    monkeypatch.setattr(computing, "compiled", compile_it)
    with train_lab() as lab:
        trainer = make_trainer(lab, tiny(), batch_size=4, max_steps=8, compile=True)
        assert compiled == [trainer.model]
        assert trainer.computing.module is not trainer.model
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        assert trainer.train(threading.Event()).epoch == 2
        assert not all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
        assert all("_orig_mod" not in name for name in trainer.optimizer.method.tensors())


def test_devices() -> None:
    assert find_devices("cpu") == (torch.device("cpu"),)
    assert find_devices("cpu, cpu") == (torch.device("cpu"),) * 2
    if not torch.accelerator.is_available():
        assert find_devices("") == (torch.device("cpu"),), "one process, where nothing says that there are more"
    with pytest.raises(ConfigurationError, match="--device quantum cannot be used here"):
        find_devices("cpu,quantum")


def test_a_precision_that_there_is_not() -> None:
    with pytest.raises(ConfigurationError, match="choose one of float32, bfloat16, float16"):
        TrainConfig(precision="int8")


# Memory


def test_batches_are_halved_until_they_fit(caplog: pytest.LogCaptureFixture) -> None:
    with train_lab() as lab, caplog.at_level(logging.WARNING):
        trainer = make_trainer(lab, tiny(most_samples=4), batch_size=16, max_steps=8)
        last = trainer.train(threading.Event())
    assert trainer.batch_size == 4
    assert (last.steps, last.samples) == (8, 32)
    assert last.epoch == 2, "what did not fit was not counted"
    assert "needs more than the memory of cpu: batches of 4 from here on" in caplog.text


def test_what_does_not_fit_at_all_is_said() -> None:
    with train_lab() as lab:
        trainer = make_trainer(lab, tiny(most_samples=0), batch_size=2)
        with pytest.raises(ConfigurationError, match="even in batches of 1"):
            trainer.train(threading.Event())
        assert trainer.samples == 0


def test_batches_are_halved_when_more_than_allowed_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True])
    monkeypatch.setattr(MemoryLimit, "is_exceeded", lambda _self: next(answers, False))
    with train_lab() as lab:
        trainer = make_trainer(lab, tiny(), batch_size=4, max_steps=32)
        trainer.train(threading.Event())
    assert trainer.batch_size == 2
    assert trainer.samples == 16 * 4 + 16 * 2


def test_batches_are_tried_beside_what_the_optimizer_will_need(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []
    ones_like = torch.ones_like
    monkeypatch.setattr(machine.torch, "ones_like", lambda each: made.append(ones_like(each)) or made[-1])
    limit = MemoryLimit(1 << 50, torch.device("cpu"))
    with limit.reserved(nn.Linear(2, 1), 3):
        assert sum(each.numel() for each in made) == 3 * 3
    made.clear()
    with MemoryLimit(None, torch.device("cpu")).reserved(nn.Linear(2, 1), 3):
        assert not made, "nothing has to be kept free where nobody set a limit"


def test_a_device_that_is_not_there() -> None:
    assert find_device("cpu") == torch.device("cpu")
    for name in ("cuda:99", "no such thing"):
        with pytest.raises(ConfigurationError, match=f"--device {name} cannot be used"):
            find_device(name)


# Beginning


def test_a_download_that_is_not_here_is_missed_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("POTLUCK_DATA", str(tmp_path))
    monkeypatch.setattr(Tiny, "downloads", (Download(name="x.bin", url="https://example.org/x", sha256="0" * 64),))
    with train_lab() as lab, pytest.raises(ConfigurationError, match="potluck download data"):
        make_trainer(lab, tiny(), batch_size=4)


def test_how_much_of_the_state_is_here_is_told() -> None:
    told: list[tuple[int, int]] = []
    with train_lab() as lab:
        make_trainer(lab, tiny(), batch_size=16, max_steps=1).train(threading.Event())
        state = StateConfig(on_progress=lambda here, of: told.append((here, of)))
        late = make_trainer(lab, tiny(), batch_size=4, state=state)
        assert late.optimizer.epoch == 1
    assert told[-1][0] == told[-1][1] > 0


def test_a_batch_of_an_outdated_state_is_not_given() -> None:
    with train_lab() as lab:
        late = make_trainer(lab, tiny(), batch_size=4, max_steps=2)
        make_trainer(lab, tiny(), batch_size=16, max_steps=1).train(threading.Event())
        last = late.train(threading.Event())
        assert (last.epoch, last.steps, last.samples) == (1, 2, 4)
        assert late.unfinished_samples == 4


# Leaving


def test_who_is_told_to_leave_does_not_wait_for_the_runs_state() -> None:
    with train_lab() as lab:
        first = make_trainer(lab, tiny(), batch_size=16, max_steps=1)
        first.train(threading.Event())
        assert first.optimizer.epoch == 1
        lab.runs[0].close()  # and with it goes the only copy of the state
        run, looks = lab.join("Grace"), itertools.count()
        run.is_leaving = lambda: next(looks) >= 3  # while it waits: two calls began before
        with pytest.raises(StoppedError, match="waits for nobody any more"):
            Trainer(run, lambda: MANIFEST, tiny(), TrainConfig(num_threads=1, batch_size=4))


def test_who_was_told_to_leave_begins_nothing_that_may_take_long() -> None:
    with train_lab() as lab:
        run = lab.join("Ada")
        run.is_leaving = lambda: True
        with pytest.raises(StoppedError):
            Trainer(run, lambda: MANIFEST, tiny(), TrainConfig(num_threads=1, batch_size=4))


def test_whoever_is_stopped_while_it_catches_up_has_trained_nonetheless(monkeypatch: pytest.MonkeyPatch) -> None:
    with train_lab() as lab:
        trainer = make_trainer(lab, tiny(), batch_size=4, max_steps=5)

        def stopped(**_options: object) -> None:
            raise StoppedError("this peer leaves the run")

        monkeypatch.setattr(trainer.optimizer, "step", stopped)
        assert trainer.train(threading.Event()).steps == 0


class AtEpochThree:
    """An optimizer, as far as leaving looks at it."""

    epoch = 3


class Leaving:
    """A trainer with so many samples in hand, for `hand_in` to do something with."""

    unfinished_samples = 8
    optimizer = AtEpochThree()
    given = 32.0

    def __init__(self, handed_in: int | Exception) -> None:
        self._handed_in = handed_in

    def train(self, _stop: threading.Event) -> TrainProgress:
        return TrainProgress(2, 5, 40, 1.0, 10.0)

    def hand_in(self, _seconds: float) -> int:
        if isinstance(self._handed_in, Exception):
            raise self._handed_in
        return self._handed_in


LOST = "8 samples are lost"


@pytest.mark.parametrize(
    ("handed_in", "seconds", "counted", "said"),
    [
        (8, 60.0, 8, [8]),
        (8, 0.0, 0, []),
        (
            0,
            60.0,
            0,
            [8, f"{LOST}: the next epoch is not made within 60 s. (To wait longer for it: --hand-in-seconds)"],
        ),
        (
            HubUnavailableError("the hub is away"),
            60.0,
            0,
            [8, f"{LOST}, since they could not be handed in: the hub is away"],
        ),
    ],
)
def test_what_was_done_is_handed_in(handed_in: int | Exception, seconds: float, counted: int, said: list[Any]) -> None:
    told: list[Any] = []
    leaving: Any = Leaving(handed_in)
    last = train_and_hand_in(leaving, threading.Event(), seconds, on_handing_in=told.append, on_failure=told.append)
    assert (last.handed_in, last.epoch, last.samples) == (counted, 3, 40)
    assert told == said
