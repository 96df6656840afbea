"""`PotluckCallback` in runs in memory: alone it is the plain Trainer, and with others it is one large batch."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from trainlab import DEVICE, TrainLab, loss_of, make_batch, make_model, parameters_of, together, train_lab
from transformers import Trainer, TrainerCallback, TrainingArguments

from potluck.errors import ConfigurationError
from potluck.integrations.transformers import PotluckCallback
from potluck.round.codecs import CodecChoice
from potluck.run.joined import Joined

EXACT = CodecChoice.everything("float32")
BATCH_SIZE = 4
NUM_STEPS = 6


class Regression(nn.Module):
    """As a model of transformers: takes a batch by name, and gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.net, (inputs, labels))}


def samples(num_batches: int, first: int = 0) -> list[dict[str, Tensor]]:
    found = []
    for number in range(first, first + num_batches):
        inputs, labels = (part.cpu() for part in make_batch(number, BATCH_SIZE))  # as they are read
        found += [{"inputs": inputs[i], "labels": labels[i]} for i in range(BATCH_SIZE)]
    return found


class InOrder(Trainer):
    """The same batches in the same order for everybody."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": BATCH_SIZE,
        "max_grad_norm": 0.05,
        "use_cpu": DEVICE.type == "cpu",  # else accelerate has been told the device (tests/accelerator)
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "remove_unused_columns": False,
    }
    return TrainingArguments(**{**defaults, **options})


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def callback(lab: TrainLab, run: Joined | None = None, **options: Any) -> PotluckCallback:
    defaults = {"target_batch_size": BATCH_SIZE, "codecs": EXACT, "num_threads": 1, "source": lab.states}
    return PotluckCallback(run=run or lab.join("trainer"), **{**defaults, **options})


def train_plain(folder: Path, resume: str | None = None, **options: Any) -> nn.Module:
    model = Regression()
    optimizer = sgd(model)
    trainer = InOrder(
        model,
        arguments(folder, **options),
        train_dataset=samples(NUM_STEPS * 2),  # type: ignore[arg-type]
        optimizers=(optimizer, ExponentialLR(optimizer, 0.9)),  # type: ignore[arg-type]
    )
    trainer.train(resume_from_checkpoint=resume)
    return model


def train_together(together: PotluckCallback, folder: Path, resume: str | None = None, **options: Any) -> InOrder:
    model = Regression()
    trainer = InOrder(
        model,
        arguments(folder, **options),
        train_dataset=samples(NUM_STEPS * 2),  # type: ignore[arg-type]
        callbacks=[together],
        optimizers=together.optimizers(sgd(model), lambda optimizer: ExponentialLR(optimizer, 0.9)),  # type: ignore[arg-type]
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_same(one: nn.Module, other: nn.Module) -> None:
    assert all(torch.equal(a, b) for a, b in zip(parameters_of(one), parameters_of(other), strict=True))


@pytest.mark.parametrize(
    ("options", "num_batches_a_step"),
    [({}, 1), ({"gradient_accumulation_steps": 2}, 2), ({"bf16": True}, 1)],
    ids=["float32", "accumulate", "bf16"],
)
def test_alone_it_is_the_plain_trainer(tmp_path: Path, options: dict[str, Any], num_batches_a_step: int) -> None:
    plain = train_plain(tmp_path, **options)
    with train_lab() as lab:
        trainer = train_together(callback(lab, target_batch_size=BATCH_SIZE * num_batches_a_step), tmp_path, **options)
    assert_same(trainer.model, plain)
    assert not torch.equal(parameters_of(plain)[0], parameters_of(make_model())[0])
    assert trainer.args.max_grad_norm == 0.05  # given back


def test_own_and_global_progress_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with train_lab() as lab, caplog.at_level(logging.INFO, "potluck.integrations.transformers"):
        trainer = train_together(callback(lab), tmp_path)
    told = [entry for entry in trainer.state.log_history if "potluck_epoch" in entry]
    assert [entry["potluck_epoch"] for entry in told[:NUM_STEPS]] == list(range(1, NUM_STEPS + 1))
    assert told[NUM_STEPS - 1]["potluck_own_samples"] == NUM_STEPS * BATCH_SIZE
    assert told[NUM_STEPS - 1]["potluck_peers"] == 1
    assert f"potluck_epoch {NUM_STEPS}" in caplog.text


def test_training_goes_on_from_a_checkpoint_to_the_same_bits(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    plain = train_plain(tmp_path / "plain")
    with train_lab() as lab:
        train_together(callback(lab), tmp_path / "ours", **options)
    with train_lab() as lab:
        resumed = train_together(callback(lab), tmp_path / "ours", str(tmp_path / "ours" / "checkpoint-3"), **options)
    assert_same(resumed.model, plain)
    assert_same(train_plain(tmp_path / "again", str(tmp_path / "ours" / "checkpoint-3"), **options), plain)


def test_two_trainers_make_one_large_batch(tmp_path: Path) -> None:
    models = [Regression(), Regression()]

    class Stop(TrainerCallback):
        def __init__(self, callback: PotluckCallback) -> None:
            self.callback = callback

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = self.callback.epoch >= 4

    with train_lab() as lab:
        runs = [lab.join(f"trainer {number}") for number in range(2)]

        def trainer(number: int) -> Trainer:
            together = callback(lab, runs[number], target_batch_size=4 * BATCH_SIZE, matchmaking_time=20.0)
            return InOrder(
                models[number],
                arguments(tmp_path / str(number), max_steps=1000),
                train_dataset=samples(50, first=1000 * number),  # type: ignore[arg-type]
                callbacks=[together, Stop(together)],
                optimizers=together.optimizers(sgd(models[number])),  # type: ignore[arg-type]
            )

        train_all(trainer(0), trainer(1))
    assert_same(*models)
    assert not torch.equal(parameters_of(models[0])[0], parameters_of(make_model())[0])


def train_all(*trainers: Trainer) -> None:
    """Each in a thread. All are made before the first begins: accelerate's state is one for the whole process."""
    together(*(trainer.train for trainer in trainers))


class Moody(InOrder):
    """Whose metric gets better or worse, whatever it learns."""

    change = 0.0

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:  # type: ignore[override]
        return {"eval_mood": 10.0 + self.change * self.state.global_step}


def test_peers_whose_metrics_differ_have_the_same_rates(tmp_path: Path) -> None:
    rates: list[dict[int, float]] = [{}, {}]

    class Note(TrainerCallback):
        def __init__(self, callback: PotluckCallback, noted: dict[int, float]) -> None:
            self.callback, self.noted = callback, noted

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.noted[self.callback.epoch] = kwargs["optimizer"].param_groups[0]["lr"]
            control.should_training_stop = self.callback.epoch >= 10

    with train_lab() as lab:
        runs = [lab.join(f"trainer {number}") for number in range(2)]

        def trainer(number: int) -> Moody:
            model = Regression()
            ours = callback(lab, runs[number], target_batch_size=2 * BATCH_SIZE, matchmaking_time=20.0)
            moody = Moody(
                model,
                arguments(
                    tmp_path / str(number),
                    max_steps=1000,
                    eval_strategy="steps",
                    eval_steps=2,
                    metric_for_best_model="mood",
                    greater_is_better=False,
                ),
                train_dataset=samples(50, first=1000 * number),  # type: ignore[arg-type]
                eval_dataset=samples(1),  # type: ignore[arg-type]
                callbacks=[ours, Note(ours, rates[number])],
                optimizers=ours.optimizers(sgd(model), partial(ReduceLROnPlateau, factor=0.5, patience=0)),  # type: ignore[arg-type]
            )
            moody.change = (-2.0, 3.0)[number]
            return moody

        train_all(trainer(0), trainer(1))
    one, other = rates
    common = sorted(one.keys() & other.keys())
    assert len(common) >= 5
    assert [one[epoch] for epoch in common] == [other[epoch] for epoch in common]
    assert one[common[-1]] < 0.1


def test_a_plateau_without_a_metric_is_refused(tmp_path: Path) -> None:
    model = Regression()
    data: Any = samples(2)
    with train_lab() as lab:
        ours = callback(lab)
        optimizers: Any = ours.optimizers(sgd(model), ReduceLROnPlateau)
        trainer = InOrder(model, arguments(tmp_path), train_dataset=data, callbacks=[ours], optimizers=optimizers)
        with pytest.raises(ConfigurationError, match="no metric to follow"):
            trainer.train()


def test_samples_that_wait_at_the_end_are_handed_in(tmp_path: Path) -> None:
    with train_lab() as lab:
        trainer = train_together(callback(lab, target_batch_size=4 * BATCH_SIZE), tmp_path, max_grad_norm=0.0)
    model = make_model()
    optimizer = sgd(model)
    for numbers in ((0, 1, 2, 3), (4, 5)):
        optimizer.zero_grad()
        for number in numbers:
            (loss_of(model, make_batch(number, BATCH_SIZE)) / len(numbers)).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
    for got, wanted in zip(parameters_of(trainer.model), parameters_of(model), strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_trainer_with_an_optimizer_of_its_own_is_refused(tmp_path: Path) -> None:
    with train_lab() as lab, pytest.raises(ConfigurationError, match="give it ours"):
        InOrder(
            Regression(),
            arguments(tmp_path),
            train_dataset=samples(2),  # type: ignore[arg-type]
            callbacks=[callback(lab)],
        ).train()


def test_buffers_that_the_trainer_clears_cannot_be_reused() -> None:
    with pytest.raises(ConfigurationError, match="leave reuse_grad_buffers out"):
        PotluckCallback(target_batch_size=8, reuse_grad_buffers=True)


def test_a_model_without_tensors_needs_its_batch_size_said(tmp_path: Path) -> None:
    class Blind(Regression):
        def forward(self, **_: Any) -> dict[str, Tensor]:  # type: ignore[override]
            return {"loss": loss_of(self.net, make_batch(0))}

    def train(lab: TrainLab, **options: Any) -> int:
        model = Blind()
        with callback(lab, **options) as ours:
            trainer = InOrder(
                model,
                arguments(tmp_path, max_steps=2),
                train_dataset=[{"number": n} for n in range(8)],  # type: ignore[arg-type]
                data_collator=lambda items: {"numbers": items},
                callbacks=[ours],
                optimizers=ours.optimizers(sgd(model)),  # type: ignore[arg-type]
            )
            trainer.train()
            return int(trainer.state.log_history[-1].get("potluck_own_samples", 0))

    with train_lab() as lab, pytest.raises(ConfigurationError, match="batch_size="):
        train(lab)
    with train_lab() as lab:
        assert train(lab, batch_size=BATCH_SIZE) == 2 * BATCH_SIZE
