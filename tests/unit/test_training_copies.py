"""Published states are copied by a worker while training goes on, and what changes them waits for that."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from keptlab import Trainer
from torch import Tensor
from trainlab import TrainLab, train_lab

from potluck.optim import recovery
from potluck.optim.diloco import DiLoCo
from potluck.optim.optimizer import Optimizer
from potluck.state.backups import BackupConfig, Backups
from potluck.state.chunkpool import Chunk, ChunkPool
from potluck.state.config import StateConfig
from potluck.state.keeper import StateKeeper
from potluck.state.publishing import Publication, Publisher

PATIENCE_SECONDS = 60.0
SYNC = {"target_batch_size": 4}
DELAYED = {"offload_optimizer": True, "delay_grad_averaging": True, "delay_optimizer_step": True}
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "sync": (Optimizer, SYNC),
    "delayed step": (Optimizer, {**SYNC, **DELAYED}),
    "local updates": (Optimizer, {"target_batch_size": 8, "use_local_updates": True}),
    "diloco": (DiLoCo, {"inner_steps": 1}),
    "overlapping diloco": (DiLoCo, {"inner_steps": 2, "overlap_steps": 1}),
}


class Hold:
    """Holds the workers' copies up, until somebody waits for one, or the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun = threading.Event()
        self.gate = threading.Event()
        self.waited: list[Publication] = []
        self.published: dict[int, dict[str, Tensor]] = {}
        taking, waiting, publishing = ChunkPool.take, Publication.wait_until_copied, StateKeeper.publish

        def take(pool: ChunkPool, num_bytes: int) -> Chunk:
            if threading.current_thread().name.startswith("potluck-tensors"):
                self.has_begun.set()
                assert self.gate.wait(PATIENCE_SECONDS)
            return taking(pool, num_bytes)

        def wait(publication: Publication) -> None:
            if not publication.is_copied:
                self.until_begun()
                self.waited.append(publication)
                self.gate.set()
            waiting(publication)

        def publish(keeper: StateKeeper, tensors: dict[str, Tensor], metadata: Any, epoch: int, **options: Any) -> Any:
            self.published[epoch] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            return publishing(keeper, tensors, metadata, epoch, **options)

        monkeypatch.setattr(ChunkPool, "take", take)
        monkeypatch.setattr(Publication, "wait_until_copied", wait)
        monkeypatch.setattr(StateKeeper, "publish", publish)

    def until_begun(self) -> None:
        assert self.has_begun.wait(PATIENCE_SECONDS)


def keeper_of(trainer: Trainer) -> StateKeeper:
    keeper = trainer.optimizer.collaboration.keeper
    assert keeper is not None
    return keeper


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.optimizer.method.tensors().items()}


def on_shelf(lab: TrainLab, trainer: Trainer, epoch: int) -> dict[str, Tensor] | None:
    async def look() -> dict[str, Tensor] | None:
        found = [held.snapshot for held in keeper_of(trainer).shelf if held.epoch == epoch]
        return found[0].tensors() if found else None

    return lab.loop.call(look())


def until_idle(lab: TrainLab, trainer: Trainer) -> None:
    lab.loop.call(keeper_of(trainer)._publisher.until_idle())


def same(one: dict[str, Tensor] | None, other: dict[str, Tensor]) -> bool:
    return one is not None and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS.keys())
def test_no_bit_of_a_later_step_gets_into_a_state(
    kind: type, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = torch.zeros(3)
    with train_lab() as lab:
        options = {**options, "extra_tensors": {"running": running}, "state": StateConfig(keep="always", num_kept=4)}
        trainer = Trainer(lab, 0, kind=kind, **options)
        trainer.train(1)
        trainer.optimizer.driver.land()
        until_idle(lab, trainer)
        hold = Hold(monkeypatch)
        epoch = trainer.optimizer.epoch
        while trainer.optimizer.epoch == epoch:
            trainer.step()
        hold.until_begun()
        running += 1.0  # as a forward pass would, without waiting for anybody
        trainer.train(epoch + 2)
        assert hold.waited, "the step did not wait for the copy"
        assert hold.waited[0].epoch == epoch + 1
        until_idle(lab, trainer)
        assert same(on_shelf(lab, trainer, epoch + 1), hold.published[epoch + 1])
        assert "publish_torn" not in keeper_of(trainer).statistics()


def test_parameters_that_are_changed_by_hand_meanwhile_are_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with train_lab() as lab:
        trainer = Trainer(lab, 0, **SYNC, state=StateConfig(keep="always", num_kept=4))
        trainer.train(1)
        until_idle(lab, trainer)
        hold = Hold(monkeypatch)
        trainer.train(2)
        hold.until_begun()
        with torch.no_grad(), caplog.at_level(logging.WARNING, "potluck"):
            for parameter in trainer.model.parameters():
                parameter.mul_(0.5)
            hold.gate.set()
            until_idle(lab, trainer)
        assert keeper_of(trainer).statistics()["publish_torn"] == 1
        assert "changed while it was copied" in caplog.text
        assert on_shelf(lab, trainer, 2) is None
        trainer.train(3)
        wanted = state_of(trainer)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(0.5)
        until_idle(lab, trainer)
        assert same(on_shelf(lab, trainer, 3), wanted)
        assert keeper_of(trainer).statistics()["publish_torn"] == 1


def test_a_state_that_is_rolled_back_to_is_the_copy_that_was_published(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recovery, "ELSEWHERE_SECONDS", 0.01)  # nobody else is there
    with train_lab() as lab:
        trainer = Trainer(lab, 0, **SYNC)
        trainer.train(2)
        wanted = state_of(trainer)
        for group in trainer.optimizer.param_groups:
            group["lr"] = float("inf")
        with caplog.at_level(logging.ERROR, "potluck"):
            trainer.train(3)
        assert trainer.statistics["rolled_back"] == 1
        assert "own state of epoch 2" in caplog.text
        assert same(state_of(trainer), wanted)


def test_leaving_while_a_state_is_copied_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = StateConfig(keep="always", folder=tmp_path, backups=BackupConfig(every_epochs=1))
    with train_lab() as lab:
        trainer = Trainer(lab, 0, **SYNC, state=config)
        trainer.train(1)
        until_idle(lab, trainer)
        hold = Hold(monkeypatch)
        trainer.train(2)
        wanted = state_of(trainer)
        hold.until_begun()
        waiting = Publisher.until_idle

        async def until_closed(publisher: Publisher) -> None:
            hold.gate.set()
            await waiting(publisher)

        monkeypatch.setattr(Publisher, "until_idle", until_closed)
        assert not hold.gate.is_set()
        trainer.optimizer.run.close()
        assert hold.gate.is_set()
    subjects = lab.memory.hub.subjects
    restored = Backups(tmp_path / "backups", BackupConfig(), run=subjects.run, pool=ChunkPool()).restore()
    assert restored is not None
    assert restored.info.epoch == 2
    assert same(restored.snapshot.tensors(), wanted)
