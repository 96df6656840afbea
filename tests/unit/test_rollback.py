"""Going back on purpose: every peer takes over the state of an earlier epoch, and the lineage goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from keptlab import Trainer, assert_alike, shared_of, train_all
from statelab import model, same, state_lab
from trainlab import PATIENCE_SECONDS, TrainLab, train_lab

from potluck.errors import StateUnavailableError
from potluck.optim.diloco import DiLoCo
from potluck.optim.optimizer import Optimizer
from potluck.recipes.reference import RecipeRef
from potluck.round.plan.messages import Commit
from potluck.sim.virtualloop import in_virtual_time
from potluck.state.backups import BackupConfig
from potluck.state.config import StateConfig
from potluck.testing.polling import poll_until_sync
from potluck.training.manifest.manifest import Manifest, Rollback
from potluck.training.manifest.rollback import RestorationDesk


class Board:
    """What an organiser has put up."""

    def __init__(self) -> None:
        self.manifest = Manifest(run="run", recipe=RecipeRef(name="digits"))

    def order(self, to_epoch: int, digest: str, *, at: int) -> None:
        before = self.manifest.rollback
        order = Rollback(
            number=before.number + 1 if before is not None else 1, to_epoch=to_epoch, digest=digest, given_at_epoch=at
        )
        self.manifest = Manifest(run="run", recipe=RecipeRef(name="digits"), rollback=order)


@contextmanager
def desks(lab: TrainLab, board: Board, *trainers: Trainer) -> Iterator[list[RestorationDesk]]:
    async def open_all() -> list[RestorationDesk]:
        found = []
        for trainer in trainers:
            collaboration = trainer.optimizer.collaboration
            found.append(
                RestorationDesk(collaboration.averager, collaboration.keeper.restoring, lambda: board.manifest)
            )
        return found

    async def close_all() -> None:
        for desk in opened:
            await desk.close()

    opened = lab.loop.call(open_all())
    try:
        yield opened
    finally:
        lab.loop.call(close_all())


def digest_of(trainer: Trainer, epoch: int) -> str:
    """Of the state that this trainer keeps of an epoch."""
    shelf = trainer.optimizer.collaboration.keeper.shelf
    return str(poll_until_sync(lambda: shelf.get(epoch), PATIENCE_SECONDS, f"epoch {epoch}").snapshot.digest)


def head_of(trainer: Trainer) -> Commit:
    head = trainer.optimizer.collaboration.averager.lineage.head
    assert isinstance(head, Commit)
    return head


@pytest.mark.parametrize("kind", [Optimizer, DiLoCo])
def test_all_go_back_and_train_on(kind: type) -> None:
    with train_lab() as lab:
        board = Board()
        trainers = [Trainer(lab, number, kind=kind) for number in range(2)]
        first = trainers[0]
        with desks(lab, board, *trainers) as [coordinates, helps]:
            train_all(trainers, 2)
            earlier, digest = shared_of(first), digest_of(first, 2)
            train_all(trainers, 3)
            board.order(2, digest, at=3)
            head = poll_until_sync(
                lambda: head_of(first) if head_of(first).num_restored else None, PATIENCE_SECONDS, "an epoch"
            )
            assert (head.epoch, head.restored.epoch, head.restored.digest, head.num_restored) == (4, 2, digest, 1)
            assert coordinates.counts["carried_out"] == 1
            assert helps.counts["carried_out"] == 0
            for trainer in trainers:
                while trainer.optimizer.epoch < 4:
                    trainer.step()
                assert trainer.optimizer.epoch == 4
                assert trainer.statistics["went_back"] == 1
                found = shared_of(trainer)
                assert all(torch.equal(found[name], earlier[name]) for name in earlier)
            train_all(trainers, 7)
            assert_alike(trainers)
            assert head_of(first).num_restored == 1
            assert head_of(first).restored is None
            assert coordinates.counts["carried_out"] == 1


def test_whoever_has_it_on_disk_offers_it_to_the_coordinator(tmp_path: Path) -> None:
    with train_lab() as lab:
        board = Board()
        first = Trainer(lab, 0)
        state = StateConfig(folder=tmp_path, backups=BackupConfig(every_epochs=1, keep_last=9))
        second = Trainer(lab, 1, state=state)
        with desks(lab, board, first, second):
            train_all([first, second], 1)
            backups = second.optimizer.collaboration.keeper.backups
            # Which epochs are saved depends on how busy the disk is; the first that is will do.
            [oldest] = poll_until_sync(backups.infos, PATIENCE_SECONDS, "a backup")[-1:]
            earlier = backups.read(oldest).tensors()
            train_all([first, second], 5)  # by then nobody has it in memory
            board.order(oldest.epoch, oldest.digest, at=5)
            poll_until_sync(lambda: head_of(first).num_restored == 1, PATIENCE_SECONDS, "an epoch")
            assert head_of(first).coordinator == first.optimizer.run.peer_id
            for trainer in (first, second):
                while trainer.optimizer.epoch < 6:
                    trainer.step()
                found = shared_of(trainer)
                assert all(torch.equal(found[name], earlier[name]) for name in earlier)
            train_all([first, second], 8)
            assert_alike([first, second])


@in_virtual_time
async def test_a_keeper_shows_an_earlier_state_as_that_of_a_new_epoch(tmp_path: Path) -> None:
    async with state_lab() as lab:
        host = await lab.join("host", role="aux", folder=tmp_path, backups=BackupConfig(every_epochs=1, keep_last=9))
        ada = await lab.join("Ada", coordinates=False)
        digests: dict[int, str] = {}
        for epoch in range(1, 5):
            lab.commit(epoch, host, ada)
            digests[epoch] = await host.publish(model(epoch, 2), epoch)
            await ada.publish(model(epoch, 2), epoch)
        assert await host.keeper.restoring.bring(1, digests[1])
        lab.commit(5, host)
        assert await host.keeper.restoring.show(5, digests[1])
        with await ada.keeper.fetch(at_least_epoch=5, timeout_seconds=60) as fetched:
            assert (fetched.epoch, fetched.made_at) == (5, 5)
            assert same(fetched.tensors(), model(1, 2))
        backups = host.keeper.backups
        assert backups is not None
        await host.keeper.archive.finish_writing()
        assert backups.infos()[0].digest == digests[1]


@in_virtual_time
async def test_a_state_that_nobody_has_is_not_gone_back_to(tmp_path: Path) -> None:
    async with state_lab() as lab:
        host = await lab.join("host", role="aux", folder=tmp_path)
        lab.commit(1, host)
        digest = await host.publish(model(1, 1), 1)
        unknown: Any = digest[::-1]
        assert not await host.keeper.restoring.bring(1, unknown)
        assert not await host.keeper.restoring.show(2, unknown)
        with pytest.raises(StateUnavailableError, match="nobody who is here"):
            await host.keeper.restoring.fetch(1, unknown, timeout_seconds=5.0)
