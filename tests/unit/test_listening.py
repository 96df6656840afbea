"""A peer that fetches listens to rounds meanwhile; what it waits for when the state has come."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from potluck.errors import RoundFailedError
from potluck.optim.listening import Listener
from potluck.testing.virtualloop import in_virtual_time


class Rounds:
    """A collaboration in which the peer is in a round from the start; what becomes of it is up to the test."""

    def __init__(self) -> None:
        self.epoch = 4
        self.is_in_round = True
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def average(self, tensors: Mapping[str, Tensor], **_: Any) -> Any:
        assert tensors == {}
        return await self.outcome


class Nothing:
    """A method without tensors."""

    def blank(self, _epoch: int) -> Any:
        return type("Offer", (), {"tensors": {}})


class Held:
    holds = True


async def work() -> str:
    await asyncio.sleep(1.0)
    return "the state"


def listener(rounds: Rounds) -> Listener:
    return Listener(Nothing(), rounds)  # type: ignore[arg-type]


@in_virtual_time
async def test_a_round_that_counts_on_the_peer_is_heard_to_its_end() -> None:
    rounds = Rounds()
    asyncio.get_running_loop().call_later(5.0, rounds.outcome.set_result, Held())
    hearing = listener(rounds)
    assert await hearing.during(work()) == "the state"
    assert asyncio.get_running_loop().time() >= 5.0
    assert list(hearing.averages) == [5]


@in_virtual_time
async def test_a_round_that_is_given_up_is_not_waited_for() -> None:
    rounds = Rounds()
    asyncio.get_running_loop().call_later(5.0, setattr, rounds, "is_in_round", False)  # and nobody begins another
    hearing = listener(rounds)
    async with asyncio.timeout(10.0):
        assert await hearing.during(work()) == "the state"
    assert not hearing.averages


@in_virtual_time
async def test_a_round_that_fails_is_not_waited_for() -> None:
    rounds = Rounds()
    asyncio.get_running_loop().call_later(5.0, rounds.outcome.set_exception, RoundFailedError("it came to nothing"))
    async with asyncio.timeout(10.0):
        assert await listener(rounds).during(work()) == "the state"
