"""What optimizers do about states that differ: real keepers, a run in memory."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from keptlab import EXACT, Trainer, assert_alike, shared_of, train_all
from trainlab import PATIENCE_SECONDS, parameters_of, train_lab

from potluck.optim.diloco import DiLoCo
from potluck.optim.methods.sparseloco import SparseLoCo
from potluck.optim.optimizer import Optimizer
from potluck.state.backups import BackupConfig, Backups
from potluck.state.config import StateConfig
from potluck.testing.polling import poll_until_sync


def until_deviates(trainers: list[Trainer]) -> list[Trainer]:
    """Those who have found out that they hold something else; others would have by then."""
    poll_until_sync(lambda: any(t.deviates for t in trainers), PATIENCE_SECONDS, "somebody to find out")
    return [trainer for trainer in trainers if trainer.deviates]


@pytest.mark.parametrize("kind", [Optimizer, DiLoCo])
def test_a_newcomer_takes_the_runs_weights_before_anything_is_trained(kind: type) -> None:
    with train_lab() as lab:
        first = Trainer(lab, 0, seed=1, kind=kind)
        before = shared_of(first)
        late = Trainer(lab, 1, seed=2, kind=kind)
        assert_alike([first, late])
        assert all(torch.equal(before[name], tensor) for name, tensor in shared_of(late).items())
        assert late.statistics["resumed"] == 1
        train_all([first, late], 3)
        assert_alike([first, late])
        assert first.statistics.get("mended", 0) == late.statistics.get("mended", 0) == 0


@pytest.mark.parametrize("kind", [Optimizer, DiLoCo])
def test_who_deviates_takes_over_what_the_others_hold(kind: type, caplog: pytest.LogCaptureFixture) -> None:
    with train_lab() as lab:
        trainers = [Trainer(lab, number, kind=kind) for number in range(3)]
        train_all(trainers, 2)
        victim = trainers[1]
        tensor = next(iter(victim.optimizer.method.tensors().values()))
        with torch.no_grad():
            tensor.view(-1)[0] += 0.25
        train_all(trainers, 3)
        assert until_deviates(trainers) == [victim]
        with caplog.at_level(logging.WARNING):
            train_all(trainers, 5)
        assert_alike(trainers)
        assert [trainer.statistics.get("mended", 0) for trainer in trainers] == [0, 1, 0]
        assert victim.statistics["mended_chunks"] == 1
        assert "repaired, by 1 of 1 chunks" in caplog.text


def test_another_learning_rate_is_taken_over_and_no_work_is_lost() -> None:
    with train_lab() as lab:
        trainers = [Trainer(lab, number) for number in range(3)]
        train_all(trainers, 1)
        victim = trainers[2]
        victim.optimizer.param_groups[0]["lr"] = 0.049
        train_all(trainers, 2)
        assert until_deviates(trainers) == [victim]
        victim.step()
        # Its parameters differ too by now, since it stepped at another rate: that is repaired, and the rate with it.
        assert victim.optimizer.param_groups[0]["lr"] == 0.05
        train_all(trainers, 4)
        assert_alike(trainers)


def test_numbers_alone_cost_no_gradients() -> None:
    with train_lab() as lab:
        trainers = [
            Trainer(lab, number, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 100)) for number in (0, 1, 2)
        ]
        train_all(trainers, 1)
        victim = trainers[2]
        victim.optimizer.state_of_model.scheduler.last_epoch = 7
        train_all(trainers, 2)
        assert until_deviates(trainers) == [victim]
        before = victim.optimizer.samples
        victim.step()
        assert victim.optimizer.samples == before + 4
        assert victim.optimizer.state_of_model.scheduler.last_epoch == 2
        assert victim.statistics["mended_numbers"] == 1
        assert victim.statistics.get("mended", 0) == 0
        train_all(trainers, 4)
        assert_alike(trainers)


def test_parameters_that_are_not_finite_on_one_peer_are_fetched_from_another(caplog: pytest.LogCaptureFixture) -> None:
    with train_lab() as lab:
        trainers = [Trainer(lab, number) for number in range(3)]
        train_all(trainers, 2)
        victim = trainers[0]
        with torch.no_grad():
            next(victim.model.parameters()).view(-1)[0] = math.nan
        with caplog.at_level(logging.ERROR):
            train_all(trainers, 4)
        assert "rolled back to another peer's state" in caplog.text
        assert victim.statistics["rolled_back"] == 1
        assert_alike(trainers)
        assert all(parameter.isfinite().all() for parameter in parameters_of(victim.model))


def test_who_deviates_keeps_its_own_tensors() -> None:
    with train_lab() as lab:
        means = [torch.full((3,), float(number)) for number in range(3)]
        trainers = [Trainer(lab, number, extra_tensors={"mean": means[number]}) for number in range(3)]
        for number, mean in enumerate(means):
            mean.fill_(number)  # who came later had taken over that of another
        train_all(trainers, 2)
        victim = trainers[1]
        with torch.no_grad():
            next(victim.model.parameters()).view(-1)[0] += 0.25
        train_all(trainers, 3)
        assert until_deviates(trainers) == [victim]
        train_all(trainers, 5)
        assert [trainer.statistics.get("mended", 0) for trainer in trainers] == [0, 1, 0]
        for number, trainer in enumerate(trainers):
            assert all(map(torch.equal, parameters_of(trainer.model), parameters_of(trainers[0].model)))
            assert torch.equal(means[number], torch.full((3,), float(number)))


@pytest.mark.parametrize(
    "options",
    [{"extra_tensors": True}, {"use_local_updates": True}, {"use_local_updates": True, "delay_state_averaging": True}],
    ids=["extra tensors", "local updates", "delayed local updates"],
)
def test_newcomers_get_in_among_strangers_whose_states_differ_in_what_is_their_own(options: dict[str, Any]) -> None:
    with train_lab() as lab:
        host = lab.join("host", role="aux")
        Optimizer(host, None, auxiliary=True, target_batch_size=16, codecs=EXACT, num_threads=1)

        def stranger(number: int) -> Trainer:
            extra = {"extra_tensors": {"mean": torch.full((3,), float(number))}} if "extra_tensors" in options else {}
            return Trainer(lab, number, run={"trusted": False}, matchmaking_seconds=1.0, **{**options, **extra})

        trainers = [stranger(number) for number in range(2)]
        if "extra_tensors" in options:
            trainers[1].optimizer.state_of_model.extra["mean"].fill_(1.0)
        train_all(trainers, 3)
        for trainer in trainers:
            trainer.optimizer.driver.land()
        late = stranger(2)
        assert late.statistics["resumed"] == 1
        assert late.optimizer.epoch == max(trainer.optimizer.epoch for trainer in trainers)


def test_numbers_cost_nothing_of_what_is_owed() -> None:
    with train_lab() as lab:
        trainers = [
            Trainer(
                lab,
                number,
                kind=DiLoCo,
                transform=SparseLoCo(k=4),
                scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 100),
            )
            for number in (0, 1, 2)
        ]
        train_all(trainers, 1)
        victim = trainers[2]
        method = victim.optimizer.method
        method.state.scheduler.last_epoch += 7
        train_all(trainers, 2)
        assert until_deviates(trainers) == [victim]
        owed = {name: method.transform.error_of(name).clone() for name in method.shared}
        assert any(tensor.any() for tensor in owed.values())
        victim.step()
        assert victim.statistics["mended_numbers"] == 1
        assert all(torch.equal(method.transform.error_of(name), tensor) for name, tensor in owed.items())


def test_backups_are_uploaded_while_it_trains(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    state = StateConfig(
        folder=tmp_path / "state", backups=BackupConfig(every_epochs=1, keep_last=2), upload_to=str(elsewhere)
    )
    with train_lab() as lab:
        trainer = Trainer(lab, 0, state=state)
        trainer.train(4)
        poll_until_sync(lambda: trainer.statistics.get("uploads_uploaded", 0), PATIENCE_SECONDS, "an upload")
        trainer.train(5)
        lab.runs[0].close()  # what was saved last is uploaded too
    found = Backups(elsewhere).restore()
    assert found is not None
    assert found.info.epoch == 5
    assert len(Backups(elsewhere).epochs()) <= 2


def test_local_updates_are_never_repaired() -> None:
    with train_lab() as lab:
        trainers = [Trainer(lab, number, use_local_updates=True) for number in range(2)]
        train_all(trainers, 6)
        assert [trainer.statistics.get("mended", 0) for trainer in trainers] == [0, 0]
        assert not any(trainer.deviates for trainer in trainers)
