"""Peers whose fetch takes longer than an epoch, and peers that end in the middle of a round: a run in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from trainlab import PATIENCE_SECONDS, MemoryStates, TrainLab, loss_of, make_batch, make_model, together, train_lab

from potluck.errors import RetryableError
from potluck.optim import driver
from potluck.optim.diloco import DiLoCo
from potluck.optim.method import RunState
from potluck.optim.methods.outer import Nesterov
from potluck.optim.optimizer import Optimizer
from potluck.round.codecs import CodecChoice
from potluck.testing.polling import poll_until_sync

EPOCHS_PER_FETCH = 2


class SlowStates(MemoryStates):
    """Whatever is fetched is two epochs old when it comes."""

    async def fetch(self, *, at_least_epoch: int, base: Mapping[str, Tensor], timeout_seconds: float) -> RunState:
        snapshot = await super().fetch(at_least_epoch=at_least_epoch, base=base, timeout_seconds=timeout_seconds)
        end = asyncio.get_running_loop().time() + timeout_seconds
        while asyncio.get_running_loop().time() < end:
            assert self.newest is not None
            if self.newest.epoch >= snapshot.epoch + EPOCHS_PER_FETCH:
                return snapshot
            await asyncio.sleep(0.005)
        raise RetryableError("the run stands still")


class Peer:
    """One peer's model, optimizer and training loop."""

    def __init__(
        self, lab: TrainLab, number: int, kind: type, *, seed: int = 0, warms_up: bool = False, **options: Any
    ) -> None:
        self.number = number
        self.run = lab.join(f"peer {number}")
        self.model = make_model(seed)
        inner = torch.optim.SGD(self.model.named_parameters(), lr=0.05, momentum=0.9 if kind is Optimizer else 0.0)
        self.set_rate = lambda epoch: inner.param_groups[0].update(lr=0.005 * (epoch + 1)) if warms_up else None
        options["hyperparameters"] = self.set_rate
        if kind is DiLoCo:
            options["outer"] = Nesterov(0.7, 0.5)
        own = {"source": lab.states, "num_threads": 1, "codecs": CodecChoice(), "load_state_timeout_seconds": 60.0}
        self.optimizer = kind(self.run, inner, **own, **options)
        self.position = 0

    @property
    def shared(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.optimizer.method.tensors().items()}

    def step(self) -> None:
        loss_of(self.model, make_batch(1000 * self.number + self.position)).backward()
        self.position += 1
        self.set_rate(self.optimizer.epoch)  # as a loop does that follows the run's settings
        self.optimizer.step(batch_size=4)
        self.optimizer.zero_grad()


SYNC = {"target_batch_size": 8, "matchmaking_seconds": 30.0}
LAZY = {"inner_steps": 2, "grace_seconds": 30.0}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Optimizer, {**SYNC, "scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.9)}),
        (Optimizer, {**SYNC, "average_state_every": 2, "average_opt_statistics": ("momentum_buffer",)}),
        (Optimizer, {**SYNC, "warms_up": True}),
        (DiLoCo, LAZY),
        (DiLoCo, {**LAZY, "warms_up": True}),
    ],
    ids=["sync", "averaged states", "sync, rate by epoch", "diloco", "diloco, rate by epoch"],
)
def test_who_fetches_for_longer_than_an_epoch_gets_in(kind: type, options: dict[str, Any]) -> None:
    with train_lab() as lab:
        lab.states = SlowStates()
        peers = [Peer(lab, number, kind, **options) for number in range(2)]
        last_epoch = 10**6
        has_begun = threading.Event()

        def train(peer: Peer) -> None:
            while peer.optimizer.epoch < last_epoch:
                peer.step()
                if peer.optimizer.epoch >= 1:
                    has_begun.set()

        def come_late() -> None:
            nonlocal last_epoch
            has_begun.wait()
            try:
                late = Peer(lab, 2, kind, seed=9, **options)
                peers.append(late)
                while late.optimizer.statistics().get("epochs", 0) < 2:  # that it has contributed to
                    late.step()
                last_epoch = late.optimizer.epoch + 2
            except BaseException:
                last_epoch = 0
                raise
            train(late)

        together(*(lambda p=p: train(p) for p in peers), come_late)
        late = peers[2]
        statistics = late.optimizer.statistics()
        assert statistics.get("replayed", 0) + statistics.get("heard_late", 0) >= EPOCHS_PER_FETCH
        assert {peer.optimizer.epoch for peer in peers} == {last_epoch}
        wanted = peers[0].shared
        for peer in peers[1:]:
            assert peer.optimizer.method.metadata() == peers[0].optimizer.method.metadata()
            assert all(torch.equal(wanted[name], tensor) for name, tensor in peer.shared.items())


def until_it_listens(coordinator: Peer, newcomer: Peer) -> None:
    """Wait until the newcomer is in the next round: nobody waits for it, and epochs follow each other at once here."""
    waiting = coordinator.optimizer.collaboration.averager._coordinator._convener._gathering
    peer_id, epoch = newcomer.run.peer_id, coordinator.optimizer.epoch + 1

    def is_ready() -> bool:
        found = waiting._waiting.get(peer_id)
        return found is not None and found.ready.epoch == epoch

    poll_until_sync(is_ready, PATIENCE_SECONDS, f"{peer_id} listens for epoch {epoch}")


def test_epochs_that_pass_while_a_newcomer_computes_its_first_batch_cost_no_second_state() -> None:
    with train_lab() as lab:
        alone = {"target_batch_size": 4, "matchmaking_seconds": 0.0}
        first = Peer(lab, 0, Optimizer, **alone)
        for _ in range(2):
            first.step()
        late = Peer(lab, 1, Optimizer, seed=9, **alone)
        assert (late.optimizer.epoch, lab.states.num_fetched) == (2, 1)
        for _ in range(3):  # while the other is at its first batch
            until_it_listens(first, late)
            first.step()
        late.step()
        statistics = late.optimizer.statistics()
        assert (statistics["replayed"], statistics["outdated_batches"], lab.states.num_fetched) == (3, 1, 1)
        assert late.optimizer.epoch == first.optimizer.epoch == 5
        assert all(torch.equal(first.shared[name], tensor) for name, tensor in late.shared.items())
        late.step()
        assert late.optimizer.statistics()["epochs"] == 1, "it contributes from then on"


def test_a_newcomer_that_never_takes_a_step_leaves_at_once() -> None:
    with train_lab() as lab:
        alone = {"target_batch_size": 4, "matchmaking_seconds": 0.0}
        first = Peer(lab, 0, Optimizer, **alone)
        first.step()
        late = Peer(lab, 1, Optimizer, seed=9, **alone)
        first.step()
        late.run.close()
        first.step()
        assert first.optimizer.epoch == 3


def test_a_round_that_is_under_way_when_all_peers_end_leaves_its_state() -> None:
    with train_lab() as lab:
        peers = [Peer(lab, number, DiLoCo, overlap_steps=1, **LAZY) for number in range(2)]
        together(*(lambda p=p: [p.step() for _ in range(2)] for p in peers))
        assert all(peer.optimizer.driver.is_busy for peer in peers)
        together(*(peer.run.close for peer in peers))
        assert [peer.optimizer.epoch for peer in peers] == [1, 1]
        assert lab.states.newest is not None
        assert lab.states.newest.epoch == 1


def test_who_is_interrupted_does_not_wait_for_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LAST_ROUND_SECONDS", 3600.0)  # the test would not end
    with train_lab() as lab:
        peer, _idle = (Peer(lab, number, DiLoCo, overlap_steps=1, **{**LAZY, "min_peers": 2}) for number in range(2))
        peer.step()
        peer.step()
        assert peer.optimizer.driver.is_busy
        with pytest.raises(KeyboardInterrupt), peer.run:
            raise KeyboardInterrupt
        assert not peer.optimizer.driver.is_busy
        assert peer.optimizer.epoch == 0
