"""`potluck.Optimizer` among peers in memory: what they make together is what one process would make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trainlab import TrainLab, loss_of, make_batch, make_model, parameters_of, together, train_lab

from potluck.optim.optimizer import Optimizer
from potluck.round.codecs import CodecChoice

EXACT = CodecChoice.everything("float32")


class Trainer:
    """One peer's model, optimizer and training loop."""

    def __init__(self, lab: TrainLab, number: int, make: Any, *, batch_size: int = 4, **options: Any) -> None:
        run_options = options.pop("run", {})
        self.number = number
        self.run = lab.join(f"trainer {number}", **run_options)
        self.model = make_model()
        options = {"codecs": EXACT, "num_threads": 1, "source": lab.states, **options}
        self.optimizer = Optimizer(self.run, make(self.model.parameters()), **options)
        self.batch_size = batch_size
        self.batches: dict[int, list[int]] = {}  # by the epoch that they helped to make
        self.position = 0

    def step(self) -> None:
        number = 1000 * self.number + self.position
        self.position += 1
        before = self.optimizer.epoch
        loss_of(self.model, make_batch(number, self.batch_size)).backward()
        self.optimizer.step(batch_size=self.batch_size)
        self.optimizer.zero_grad()
        self.batches.setdefault(before + 1, []).append(number)

    def train(self, num_epochs: int) -> None:
        while self.optimizer.epoch < num_epochs:
            self.step()


def plain(trainers: list[Trainer], make: Any, num_epochs: int) -> list[torch.Tensor]:
    """What one process makes of the same batches: one step per epoch on the mean over all samples."""
    model = make_model()
    optimizer = make(model.parameters())
    for epoch in range(1, num_epochs + 1):
        used = [(number, trainer.batch_size) for trainer in trainers for number in trainer.batches.get(epoch, [])]
        total = sum(size for _, size in used)
        optimizer.zero_grad()
        for number, size in used:
            (loss_of(model, make_batch(number, size)) * (size / total)).backward()
        optimizer.step()
    return parameters_of(model)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_two_peers_equal_one_process_with_the_large_batch() -> None:
    with train_lab() as lab:
        trainers = [Trainer(lab, number, sgd, target_batch_size=32) for number in range(2)]
        together(*(lambda t=t: t.train(6) for t in trainers))
        ours = [parameters_of(trainer.model) for trainer in trainers]
        for one, other in zip(*ours, strict=True):
            assert torch.equal(one, other)
        for got, wanted in zip(ours[0], plain(trainers, sgd, 6), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
        assert all(trainer.optimizer.statistics()["epochs"] >= 6 for trainer in trainers)


@pytest.mark.parametrize("codec", ["float32", "float16"])
def test_a_lone_peer_equals_plain_pytorch_bit_for_bit(codec: str) -> None:
    with train_lab() as lab:
        trainer = Trainer(lab, 0, sgd, target_batch_size=4, codecs=CodecChoice.everything(codec))
        trainer.train(10)
        model = make_model()
        optimizer = sgd(model.parameters())
        for number in range(10):
            optimizer.zero_grad()
            loss_of(model, make_batch(number)).backward()
            optimizer.step()
        assert trainer.position == 10
        for got, wanted in zip(parameters_of(trainer.model), parameters_of(model), strict=True):
            assert torch.equal(got, wanted)
