"""Held-out accuracy of four peers one of whom sends poison: real rounds, every aggregator (recipe digits).

    scripts/bench poison [--json] [--only median] [--attacks flip,weight] [--seeds 5] [--epochs 60]

Each peer is a thread with the real optimizer, on a run in memory: hub, lease, plans, links and reducers are the
product's own, only the wires are missing. So weights are what peers happen to have done by the time a round starts.

    flip      the poisoner sends minus ten times its gradient, with an honest count of samples
    weight    it sends its negated gradient and says that it was made of 10⁹ samples
    none      nobody does anything of the kind

*Offline* is what the aggregator itself can do: the same batches, all four in every epoch with equal weights, no run.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from harness import parser, report, say
from potluck.clock import SystemClock
from potluck.optim.optimizer import Optimizer
from potluck.peer.identity import Identity
from potluck.recipes.digits import Config, Digits
from potluck.round.aggregators import AGGREGATOR_NAMES, AggregatorSpec, aggregator_for
from potluck.round.coordinator.gathering import GatherConfig
from potluck.run.joined import Joined
from potluck.run.loopthread import LoopThread
from potluck.sim.memoryrun import MemoryPeer, MemoryRun
from potluck.state.keeper import StateConfig
from potluck.training.trainer.feed import RandomShards

NUM_PEERS = 4
BATCH_SIZE = 16
BATCHES = 2  # of each peer in an epoch, where all are equally fast
TARGET = NUM_PEERS * BATCH_SIZE * BATCHES
LEARNING_RATE = 0.01
ATTACKS = ("none", "flip", "weight")
PATIENCE_SECONDS = 300.0


class Peer:
    """One peer's model, data, and what it makes of its gradients."""

    def __init__(self, number: int, seed: int, attack: str) -> None:
        torch.manual_seed(seed)
        self.recipe = Digits(Config())
        self.model = self.recipe.model()
        self.inner = torch.optim.AdamW(self.model.named_parameters(), lr=LEARNING_RATE)
        self.attack = attack if number == 0 else "none"
        self._samples = self._endless(1000 * seed + number)

    def compute(self) -> int:
        """One batch's gradient; returns how many samples it says that were."""
        self.model.zero_grad()
        batch = self.recipe.collate([next(self._samples) for _ in range(BATCH_SIZE)])
        self.recipe.loss(self.model, batch).backward()
        factor = {"none": 1.0, "flip": -10.0, "weight": -1.0}[self.attack]
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(factor)
        return 10**9 if self.attack == "weight" else BATCH_SIZE

    def accuracy(self) -> float:
        with torch.no_grad():
            return self.recipe.evaluate(self.model)["accuracy"]

    def _endless(self, seed: int) -> Iterator[Any]:
        shards, generator = RandomShards(self.recipe.num_shards, seed), torch.Generator().manual_seed(seed)
        while True:
            yield from self.recipe.samples(shards.take(), generator)


@contextmanager
def memory_run() -> Iterator[tuple[LoopThread, MemoryRun]]:
    with LoopThread("bench-loop") as loop:

        async def open_run() -> MemoryRun:
            memory = MemoryRun(clock=SystemClock())
            await memory.open()
            return memory

        memory = loop.call(open_run())
        try:
            yield loop, memory
        finally:
            loop.call(memory.close())


def accuracy_in_a_run(aggregator: str, attack: str, seed: int, epochs: int) -> float:
    """What an honest peer's model is worth after so many epochs."""
    peers = [Peer(number, seed, attack) for number in range(NUM_PEERS)]
    results: list[float] = []
    gather = GatherConfig(aggregator=AggregatorSpec(name=aggregator))
    ready = threading.Barrier(NUM_PEERS)
    with memory_run() as (loop, memory):

        def join(number: int) -> Joined:
            async def start() -> MemoryPeer:
                coordinates = number == NUM_PEERS - 1
                return await memory.join(
                    f"peer {number}", identity=Identity.temporary(), coordinates=coordinates, trusted=coordinates
                )

            return Joined(start, loop).open()

        runs = [join(number) for number in reversed(range(NUM_PEERS))][::-1]

        def train(peer: Peer, run: Joined) -> None:
            optimizer = Optimizer(
                run,
                peer.inner,
                target_batch_size=TARGET,
                gather=gather,
                matchmaking_seconds=3.0,
                num_threads=1,
                state=StateConfig(),
            )
            ready.wait(PATIENCE_SECONDS)
            while optimizer.epoch < epochs:
                optimizer.step(batch_size=peer.compute())
            if peer is peers[-1]:
                results.append(peer.accuracy())

        threads = [threading.Thread(target=train, args=pair) for pair in zip(peers, runs, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        for run in runs:
            run.close()
    return results[0]


def accuracy_offline(aggregator: str, attack: str, seed: int, epochs: int) -> float:
    """The same without a run: all are in every epoch, and weigh the same."""
    peers = [Peer(number, seed, attack) for number in range(NUM_PEERS)]
    shared = peers[-1]
    robust = aggregator_for(AggregatorSpec(name=aggregator))
    for _ in range(epochs):
        rows = {}
        for number, peer in enumerate(peers):
            peer.model.load_state_dict(shared.model.state_dict())
            sums = torch.zeros(sum(parameter.numel() for parameter in peer.model.parameters()))
            for _ in range(BATCHES):
                peer.compute()
                sums += torch.cat([parameter.grad.flatten() for parameter in peer.model.parameters()])
            rows[str(number)] = sums / BATCHES
        out = torch.empty_like(rows["0"])
        robust.aggregate(rows, dict.fromkeys(rows, 1.0), out)
        position = 0
        for parameter in shared.model.parameters():
            parameter.grad = out[position : position + parameter.numel()].view_as(parameter).clone()
            position += parameter.numel()
        shared.inner.step()
    return shared.accuracy()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", default=",".join(AGGREGATOR_NAMES))
    arguments.add_argument("--attacks", default=",".join(ATTACKS))
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--epochs", type=int, default=60)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for attack in given.attacks.split(","):
        for name in given.only.split(","):
            found = [accuracy_in_a_run(name, attack, seed, given.epochs) for seed in range(given.seeds)]
            offline = [accuracy_offline(name, attack, seed, given.epochs) for seed in range(given.seeds)]
            figures[f"{attack}: {name}"] = {
                "accuracy": round(statistics.mean(found), 3),
                "lowest": round(min(found), 3),
                "offline": round(statistics.mean(offline), 3),
            }
            say(f"{attack:8} {name:22} {figures[f'{attack}: {name}']}")
    report(figures, as_json=given.json, title="one of four sends poison: held-out accuracy")


if __name__ == "__main__":
    main()
