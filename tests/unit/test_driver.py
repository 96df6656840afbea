"""The driver on its own, in virtual time: what becomes of an offer, however a round ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from trainlab import loss_of, make_batch, make_model, parameters_of

from potluck.errors import RoundFailedError
from potluck.optim.driver import LOOK_UP_SECONDS, Driver, DriverConfig
from potluck.optim.modelstate import ModelState
from potluck.optim.targetbatch import TargetBatch
from potluck.round.outcome import LeftBehind, PhaseSeconds, RoundResult
from potluck.round.plan.messages import Commit, CommittedMember, RoundKey
from potluck.sim.inlinerun import InlineRun

PEER = "ADA"


def commit_of(epoch: int) -> Commit:
    key = RoundKey(epoch=epoch, token=1, attempt=0)
    members = (CommittedMember(peer=PEER, weight=4.0, holds=True), CommittedMember(peer="BOB", weight=4.0, holds=True))
    return Commit(epoch=epoch, key=key, term=1, coordinator=PEER, members=members, digest="d", parent="", layout="l")


@dataclass
class Rounds:
    """An averager whose rounds take as long, and end, as a test says."""

    seconds: float = 1.0
    error: Exception | None = None
    is_missed: bool = False
    epoch: int = 0
    num_restored: int = 0
    num_left: int = 0

    async def average(
        self, tensors: Mapping[str, Tensor], *, weight: float, epoch: int, timeout_seconds: float, phases: int = 0
    ) -> RoundResult:
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.num_left += 1
            raise
        if self.error is not None:
            raise self.error
        self.epoch = epoch
        left_behind = LeftBehind(head_epoch=epoch, holders=("BOB",), reason="too late") if self.is_missed else None
        if not self.is_missed:
            for tensor in tensors.values():
                tensor.mul_(0.5)  # the other's were zero
        return RoundResult(
            commit=commit_of(epoch),
            role="sender",
            sent_bytes=0,
            received_bytes=0,
            seconds=PhaseSeconds(),
            left_behind=left_behind,
        )

    async def work(self, on_tensors: Callable[[], Any]) -> Any:
        return on_tensors()


class Lab:
    """A model, its gradients, and a driver."""

    def __init__(self, run: InlineRun) -> None:
        self.run = run
        self.rounds = Rounds()
        self.model = make_model()
        self.method = TargetBatch(ModelState(torch.optim.SGD(self.model.parameters(), lr=0.1)))
        collaboration: Any = type("Together", (), {"averager": self.rounds})()
        self.driver = Driver(run, self.method, collaboration, DriverConfig())  # type: ignore[arg-type]
        self.driver.begin()

    def add_batch(self) -> list[Tensor]:
        """Gradients of a batch, added up; returns what a step on half of them should make."""
        self.model.zero_grad()
        loss_of(self.model, make_batch(0)).backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]
        self.method.gradients.add(4)
        pairs = zip(parameters_of(self.model), gradients, strict=True)
        return [parameter - 0.05 * gradient for parameter, gradient in pairs]


@pytest.fixture
def lab() -> Iterator[Lab]:
    with InlineRun() as run:
        yield Lab(run)


def test_a_round_steps_on_the_average(lab: Lab) -> None:
    expected = lab.add_batch()
    began_at = lab.run.monotonic()
    assert lab.driver.round()
    assert lab.run.monotonic() - began_at == pytest.approx(1.0)
    assert (lab.driver.epoch, lab.method.gradients.samples) == (1, 0)
    for parameter, wanted in zip(lab.model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter, wanted)


def test_the_samples_of_a_round_that_failed_count_again(lab: Lab) -> None:
    lab.add_batch()
    lab.rounds.error = RoundFailedError("nobody was there")
    assert not lab.driver.round()
    assert (lab.driver.epoch, lab.method.gradients.samples, lab.driver.counts["failed_rounds"]) == (0, 4, 1)
    lab.rounds.error = None
    assert lab.driver.round()
    assert (lab.driver.epoch, lab.method.gradients.samples) == (1, 0)


def test_a_round_that_takes_too_long_is_left_and_its_samples_count_again(lab: Lab) -> None:
    lab.add_batch()
    lab.rounds.seconds = 3600.0
    began_at = lab.run.monotonic()
    assert not lab.driver.round(timeout_seconds=20.0)
    assert lab.run.monotonic() - began_at == pytest.approx(20.0)
    assert (lab.rounds.num_left, lab.method.gradients.samples) == (1, 4)


def test_a_peer_that_gives_up_leaves_its_round_soon(lab: Lab) -> None:
    lab.add_batch()
    lab.rounds.seconds = 3600.0
    began_at = lab.run.monotonic()
    lab.driver.gives_up = lambda: lab.run.monotonic() - began_at >= 5.0
    assert not lab.driver.round()
    assert lab.run.monotonic() - began_at <= 5.0 + LOOK_UP_SECONDS
    assert (lab.rounds.num_left, lab.method.gradients.samples) == (1, 4)


def test_a_round_in_the_background_is_landed_when_it_is_over(lab: Lab) -> None:
    lab.add_batch()
    lab.driver.begin_round(delay_step=False)
    assert lab.driver.is_busy
    assert not lab.driver.land(wait=False)
    lab.run.sleep(2.0)
    assert lab.driver.land(wait=False)
    assert (lab.driver.epoch, lab.driver.is_busy) == (1, False)


def test_a_round_in_the_background_is_waited_for_on_leaving_but_not_for_ever(lab: Lab) -> None:
    lab.add_batch()
    lab.rounds.seconds = 3600.0
    lab.driver.begin_round(delay_step=False)
    began_at = lab.run.monotonic()
    lab.driver.close(wait_seconds=10.0)
    assert lab.run.monotonic() - began_at == pytest.approx(10.0)
    assert (lab.rounds.num_left, lab.method.gradients.samples) == (1, 4)
    lab.driver.close(wait_seconds=10.0)
