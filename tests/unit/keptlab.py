"""Trainers of a run in memory whose states go by way of real keepers."""

from __future__ import annotations

from typing import Any

import torch
from trainlab import TrainLab, loss_of, make_batch, make_model, together

from potluck.optim.optimizer import Optimizer
from potluck.round.codecs import CodecChoice

EXACT = CodecChoice.everything("float32")


class Trainer:
    """A peer whose states go by way of the run's keepers."""

    def __init__(
        self, lab: TrainLab, number: int, *, seed: int = 0, kind: type = Optimizer, run: Any = None, **options: Any
    ) -> None:
        self.number = number
        self.model = make_model(seed)
        self.position = 0
        inner = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5 if kind is Optimizer else 0.0)
        if kind is Optimizer:
            options = {"target_batch_size": 16, "matchmaking_seconds": 10.0, **options}
        else:
            options = {"inner_steps": 2, "grace_seconds": 10.0, **options}
        joined = lab.join(f"trainer {number}", **(run or {}))
        self.optimizer = kind(joined, inner, codecs=EXACT, num_threads=1, **options)

    @property
    def statistics(self) -> dict[str, int]:
        return self.optimizer.statistics()

    @property
    def deviates(self) -> bool:
        return self.optimizer.driver._recovery._source.deviates()

    def step(self) -> None:
        loss_of(self.model, make_batch(1000 * self.number + self.position)).backward()
        self.position += 1
        self.optimizer.step(batch_size=4)
        self.optimizer.zero_grad()

    def train(self, num_epochs: int) -> None:
        while self.optimizer.epoch < num_epochs:
            self.step()


def train_all(trainers: list[Trainer], num_epochs: int) -> None:
    together(*(lambda t=t: t.train(num_epochs) for t in trainers))


def shared_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All that peers hold alike."""
    return {name: tensor.detach().clone() for name, tensor in trainer.optimizer.method.tensors().items()}


def assert_alike(trainers: list[Trainer]) -> None:
    first = shared_of(trainers[0])
    for trainer in trainers[1:]:
        other = shared_of(trainer)
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)
