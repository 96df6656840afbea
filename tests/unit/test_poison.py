"""One of four peers sends poison: real optimizers and rounds, a hub in memory, the recipe digits.

`scripts/bench poison` has the figures, for every aggregator and several seeds; here, that nobody wins.
"""

from __future__ import annotations

import threading

import pytest
import torch
from trainlab import PATIENCE_SECONDS, TrainLab, together, train_lab

from potluck.optim.optimizer import Optimizer
from potluck.recipes.digits import Config, Digits
from potluck.round.aggregators import AggregatorSpec
from potluck.round.coordinator.gathering import GatherConfig
from potluck.training.books.contributions import ContributionBook, added
from potluck.training.books.receipts import receipts_of

EPOCHS = 40
HONEST_SAMPLES = 16
LEARNS = 0.8  # of the held-out digits; a run that withstands gets 0.9, a poisoned one less than 0.7, at random 0.1


class Program:
    """A person's own loop; the first of four multiplies its gradients."""

    def __init__(self, lab: TrainLab, number: int, aggregator: str, all_are_there: threading.Barrier) -> None:
        self.all_are_there = all_are_there
        torch.manual_seed(0)
        self.recipe = Digits(Config())
        self.model = self.recipe.model()
        self.generator = torch.Generator().manual_seed(number)
        self.run = lab.join(f"peer {number}", trusted=number == 3, coordinates=number == 3)
        self.optimizer: Optimizer | None = None
        self.gather = GatherConfig(aggregator=AggregatorSpec(name=aggregator))

    def train(self, *, samples: int, claimed: int, factor: float) -> None:
        inner = torch.optim.AdamW(self.model.named_parameters(), lr=0.01)
        optimizer = Optimizer(
            self.run, inner, target_batch_size=64, gather=self.gather, matchmaking_seconds=20.0, num_threads=1
        )
        self.optimizer = optimizer
        self.all_are_there.wait(PATIENCE_SECONDS)  # alone, the poisoner would be measured against nobody
        while optimizer.epoch < EPOCHS:
            shards = [self.recipe.samples(number, self.generator) for number in range(self.recipe.num_shards)]
            chosen = torch.randint(len(shards), (samples,), generator=self.generator).tolist()
            batch = self.recipe.collate([next(shards[number]) for number in chosen])
            optimizer.zero_grad()
            self.recipe.loss(self.model, batch).backward()
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(factor)
            optimizer.step(batch_size=claimed)

    def accuracy(self) -> float:
        with torch.no_grad():
            return self.recipe.evaluate(self.model)["accuracy"]


@pytest.mark.parametrize(
    ("aggregator", "samples", "claimed", "factor"),
    [
        ("median", 8 * HONEST_SAMPLES, 8 * HONEST_SAMPLES, -10.0),  # fast, and honest about that
        ("centered_clipping", HONEST_SAMPLES, 10**9, -1.0),  # as fast as the others, and lies
    ],
)
def test_one_poisoner_of_four_does_not_win_by_its_weight(
    aggregator: str, samples: int, claimed: int, factor: float
) -> None:
    with train_lab() as lab:
        all_are_there = threading.Barrier(4)
        programs = [Program(lab, number, aggregator, all_are_there) for number in (3, 0, 1, 2)]
        honest = {"samples": HONEST_SAMPLES, "claimed": HONEST_SAMPLES, "factor": 1.0}
        poison = {"samples": samples, "claimed": claimed, "factor": factor}
        work = [lambda p=program, o=poison if i == 1 else honest: p.train(**o) for i, program in enumerate(programs)]
        together(*work)
        assert programs[0].accuracy() > LEARNS
        if claimed > samples:
            optimizer = programs[0].optimizer
            assert optimizer is not None
            head = optimizer.collaboration.averager.lineage.head
            assert head is not None
            [liar] = [member for member in head.members if member.peer == programs[1].run.peer_id]
            assert liar.claimed >= claimed
            assert liar.weight <= 16 * max(member.weight for member in head.members if member is not liar) * EPOCHS
            book = ContributionBook()
            receipts = receipts_of(head, "run", head.coordinator, {})
            assert added(book, head, {}).peers[liar.peer].samples == liar.weight
            assert {receipt.peer: receipt.samples for receipt in receipts}[liar.peer] == liar.weight
