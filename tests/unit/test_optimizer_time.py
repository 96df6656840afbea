"""An optimizer in virtual time: when it takes part in rounds, and how long it waits for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from trainlab import loss_of, make_batch, make_model

from potluck.optim.optimizer import Optimizer
from potluck.peer.identity import Identity
from potluck.round import averager
from potluck.run.joined import Joined
from potluck.sim.inlinerun import InlineLoop
from potluck.sim.inlineworkers import InlineWorkers
from potluck.sim.memoryrun import MemoryPeer, MemoryRun


class Lab:
    """A run in memory, and one trainer in it."""

    def __init__(self, loop: InlineLoop) -> None:
        self.loop = loop
        self.memory = loop.call(self._open())
        self.run = Joined(lambda: self._join("Ada"), loop).open()
        self.model = make_model()

    async def _open(self) -> MemoryRun:
        memory = MemoryRun(clock=self.loop)
        await memory.open()
        return memory

    async def _join(self, name: str) -> MemoryPeer:
        return await self.memory.join(name, identity=Identity.temporary())

    def optimizer(self, **options: object) -> Optimizer:
        inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return Optimizer(self.run, inner, source=None, batch_size_per_step=4, **options)  # type: ignore[arg-type]

    def step(self, optimizer: Optimizer, seconds: float) -> None:
        """A step that takes so long to compute."""
        self.run.sleep(seconds)
        loss_of(self.model, make_batch(0)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr(averager, "workers_for", lambda *_: InlineWorkers())
    with InlineLoop() as loop:
        lab = Lab(loop)
        yield lab
        lab.run.close()
        loop.call(lab.memory.close())


def test_an_epoch_ends_with_the_step_that_fills_the_batch(lab: Lab) -> None:
    optimizer = lab.optimizer(target_batch_size=12)
    epochs = []
    for _ in range(9):
        lab.step(optimizer, 60.0)
        epochs.append(optimizer.epoch)
    assert epochs == [0, 0, 1, 1, 1, 2, 2, 2, 3]


def test_the_pace_is_that_of_the_steps_and_not_of_what_is_waited_for(lab: Lab) -> None:
    optimizer = lab.optimizer(target_batch_size=1000)
    for _ in range(5):
        lab.step(optimizer, 10.0)
    assert optimizer.pace.seconds_per_step == pytest.approx(10.0, rel=0.01)
    optimizer.rest()
    lab.run.sleep(3600.0)
    optimizer.go_on()
    lab.step(optimizer, 10.0)
    assert optimizer.pace.seconds_per_step == pytest.approx(10.0, rel=0.01)


def test_a_lone_peer_hands_in_at_once(lab: Lab) -> None:
    optimizer = lab.optimizer(target_batch_size=1000)
    lab.step(optimizer, 1.0)
    began_at = lab.loop.monotonic()
    assert optimizer.hand_in(600.0) == 4
    assert lab.loop.monotonic() - began_at < 10.0
    assert (optimizer.epoch, optimizer.samples) == (1, 0)
