"""Recovery on its own, without a run: the time is what the test says it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from trainlab import make_model

from potluck.errors import DeadlineExceededError, FatalError, StateUnavailableError
from potluck.optim.method import RunState
from potluck.optim.modelstate import ModelState
from potluck.optim.recovery import Recovery, RecoveryConfig
from potluck.optim.targetbatch import TargetBatch
from potluck.sim.inlinerun import InlineRun


class EpochFive:
    """An averager that knows of five epochs, and hears of no more."""

    epoch = 5
    num_restored = 0
    is_in_round = False

    async def average(self, *_tensors: object, **_options: object) -> None:
        await asyncio.Event().wait()

    async def hear_late(self, *_tensors: object, **_options: object) -> None:
        raise StateUnavailableError("nobody has them")

    async def work(self, on_tensors: Any) -> Any:
        return on_tensors()


class NobodyHasIt:
    """Keepers that take their time, and give nothing."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def publish(self, _state: RunState) -> None:
        pass

    def deviates(self) -> bool:
        return True

    async def resume(self, *, base: Mapping[str, Tensor], timeout_seconds: float) -> None:
        return None

    async def fetch(self, *, at_least_epoch: int, base: Mapping[str, Tensor], timeout_seconds: float) -> RunState:
        return await self._fail(min(timeout_seconds, 100.0))

    async def repair(self, *, epoch: int, base: Mapping[str, Tensor], timeout_seconds: float) -> RunState:
        return await self._fail(timeout_seconds)

    async def _fail(self, seconds: float) -> RunState:
        self.waits.append(seconds)
        await asyncio.sleep(seconds)
        raise StateUnavailableError("nobody has it")

    def statistics(self) -> dict[str, int]:
        return {}


def make_recovery(source: NobodyHasIt | None, run: InlineRun) -> Recovery:
    method = TargetBatch(ModelState(torch.optim.SGD(make_model().parameters(), lr=0.1)))
    parts: Any = (run, method, EpochFive(), RecoveryConfig(load_state_timeout_seconds=600.0), source)
    return Recovery(*parts, lambda _epoch: None)


@pytest.fixture
def run() -> Iterator[InlineRun]:
    with InlineRun() as run:
        yield run


def test_repairs_that_fail_take_no_more_of_the_time_than_those_that_succeed(run: InlineRun) -> None:
    source = NobodyHasIt()
    recovery = make_recovery(source, run)
    began_at = run.clock.monotonic()
    for _ in range(3000):
        run.sleep(1.0)
        assert not recovery.mend()
    assert len(source.waits) > 1
    assert sum(source.waits) <= 10.0 + 0.05 * (run.clock.monotonic() - began_at) + 30.0


def test_a_state_that_nobody_gives_is_asked_for_until_the_deadline(run: InlineRun) -> None:
    source = NobodyHasIt()
    began_at = run.clock.monotonic()
    with pytest.raises(DeadlineExceededError, match="epoch 5 within 600 s"):
        make_recovery(source, run).catch_up()
    assert 600.0 <= run.clock.monotonic() - began_at <= 601.0
    assert len(source.waits) >= 6, "again and again, since somebody may come"


def test_without_a_source_of_states_a_peer_that_is_behind_cannot_go_on(run: InlineRun) -> None:
    with pytest.raises(FatalError, match="no source of states"):
        make_recovery(None, run).catch_up()


class OneAtATime(EpochFive):
    """An averager in which nobody can listen twice, and whose past averages can be had."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.is_listened_to = False

    async def average(self, *_tensors: object, **_options: object) -> None:
        assert not self.is_listened_to, "this peer is in a round already"
        self.is_listened_to = True
        try:
            await asyncio.Event().wait()
        finally:
            self.is_listened_to = False

    async def hear_late(self, *_tensors: object, **options: Any) -> None:
        self.heard.append(options["epoch"])


class HasThree(NobodyHasIt):
    """A keeper whose state is two epochs behind when it has come."""

    def __init__(self, state: RunState) -> None:
        super().__init__()
        self._state = state

    async def resume(self, *, base: Mapping[str, Tensor], timeout_seconds: float) -> RunState:  # type: ignore[override]
        await asyncio.sleep(1.0)
        return self._state


def test_a_newcomer_whose_state_came_late_hears_what_it_missed(run: InlineRun) -> None:
    method, averager = TargetBatch(ModelState(torch.optim.SGD(make_model().parameters(), lr=0.1))), OneAtATime()
    state = RunState(epoch=3, tensors=method.tensors(), metadata=method.metadata())
    parts: Any = (run, method, averager, RecoveryConfig(), HasThree(state))
    recovery = Recovery(*parts, lambda _epoch: None)
    recovery.begin(listens_on=True)
    assert (recovery.epoch, averager.heard) == (5, [4, 5])
    recovery.hear_out()
    assert not averager.is_listened_to
