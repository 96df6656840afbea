"""A peer that fetches listens to rounds meanwhile; what it waits for when the state has come."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from potluck.errors import RoundFailedError, StateUnavailableError
from potluck.optim.epochlistener import EpochListener
from potluck.sim.virtualloop import in_virtual_time


class Rounds:
    """A collaboration in which the peer is in a round from the start; what becomes of it is up to the test."""

    def __init__(self) -> None:
        self.epoch = 4
        self.is_in_round = True
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def work(self, on_tensors: Any) -> Any:
        return on_tensors()

    async def average(self, tensors: Mapping[str, Tensor], **_: Any) -> Any:
        assert tensors == {}
        return await self.outcome

    async def hear_late(self, _tensors: Mapping[str, Tensor], *, epoch: int) -> None:
        raise StateUnavailableError(f"nobody has the averages of epoch {epoch}")


class Nothing:
    """A method without tensors."""

    def blank(self, _epoch: int) -> Any:
        return type("Offer", (), {"tensors": {}})


class Held:
    holds = True


async def listener(rounds: Rounds) -> EpochListener:
    """One that has begun to listen when the state has come."""
    hearing = EpochListener(Nothing(), rounds)  # type: ignore[arg-type]
    await hearing.start()
    await asyncio.sleep(1.0)
    return hearing


@in_virtual_time
async def test_a_round_that_counts_on_the_peer_is_heard_to_its_end() -> None:
    rounds = Rounds()
    asyncio.get_running_loop().call_later(5.0, rounds.outcome.set_result, Held())
    hearing = await listener(rounds)
    await hearing.finish()
    assert asyncio.get_running_loop().time() >= 5.0
    assert list(hearing.averages) == [5]


@in_virtual_time
async def test_a_round_that_is_given_up_is_not_waited_for() -> None:
    rounds = Rounds()
    asyncio.get_running_loop().call_later(5.0, setattr, rounds, "is_in_round", False)  # and nobody begins another
    hearing = await listener(rounds)
    async with asyncio.timeout(10.0):
        await hearing.finish()
    assert not hearing.averages


@in_virtual_time
async def test_a_round_that_fails_is_not_waited_for() -> None:
    rounds = Rounds()
    asyncio.get_running_loop().call_later(5.0, rounds.outcome.set_exception, RoundFailedError("it came to nothing"))
    async with asyncio.timeout(10.0):
        await (await listener(rounds)).finish()


@in_virtual_time
async def test_an_epoch_that_is_committed_is_heard_while_its_averages_are_written() -> None:
    rounds = Rounds()

    def commit() -> None:
        rounds.epoch, rounds.is_in_round = 5, False

    asyncio.get_running_loop().call_later(2.0, commit)
    asyncio.get_running_loop().call_later(9.0, rounds.outcome.set_result, Held())  # they are large
    hearing = await listener(rounds)
    await hearing.finish()
    assert list(hearing.averages) == [5]


@in_virtual_time
async def test_who_stops_listening_has_the_method_for_itself() -> None:
    rounds, uses = Rounds(), []

    async def work(on_tensors: Any) -> Any:
        uses.append("begins")
        await asyncio.sleep(3.0)
        uses.append("ends")
        return on_tensors()

    rounds.work = work  # type: ignore[method-assign]
    hearing = await listener(rounds)
    await hearing.close()
    assert uses == ["begins", "ends"]


class Passing(Rounds):
    """Rounds that pass without this peer, so many seconds each; afterwards it is in one that lasts."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self._seconds = list(seconds)

    async def average(self, tensors: Mapping[str, Tensor], **_: Any) -> Any:
        if not self._seconds:
            return await self.outcome
        await asyncio.sleep(self._seconds.pop(0))
        self.epoch += 1
        return type("Result", (), {"holds": False})


async def fetched(hearing: EpochListener, rounds: Rounds, seconds: float) -> tuple[int, int]:
    """The epoch of a state that takes so long to fetch, and how often its fetch began."""
    num_starts = 0

    async def fetch() -> int:
        nonlocal num_starts
        num_starts, epoch = num_starts + 1, rounds.epoch
        await asyncio.sleep(seconds)
        return epoch

    return await hearing.meanwhile(fetch), num_starts


class Kept(Passing):
    """Rounds whose averages can be had afterwards, after so long."""

    async def hear_late(self, _tensors: Mapping[str, Tensor], *, epoch: int) -> None:
        await asyncio.sleep(4.0)


@in_virtual_time
async def test_an_epoch_that_passed_unheard_is_heard_afterwards_and_the_fetch_goes_on() -> None:
    rounds = Kept(2.0, 3.0)
    hearing = await listener(rounds)
    assert await fetched(hearing, rounds, 10.0) == (4, 1)
    rounds.outcome.cancel()
    await hearing.close()
    assert sorted(hearing.averages) == [5, 6]


@in_virtual_time
async def test_what_was_missed_last_is_waited_for() -> None:
    rounds = Kept(2.0)
    rounds.is_in_round = False
    hearing = await listener(rounds)
    await asyncio.sleep(1.5)
    await hearing.finish()
    assert sorted(hearing.averages) == [5]


@in_virtual_time
async def test_a_fetch_begins_anew_when_an_epoch_passes_that_nobody_has() -> None:
    rounds = Passing(2.0)
    hearing = await listener(rounds)  # takes a second
    began = asyncio.get_running_loop().time()
    assert await fetched(hearing, rounds, 10.0) == (5, 2)
    assert asyncio.get_running_loop().time() - began < 12.0  # at once, not when the first was complete
    rounds.outcome.cancel()
    await hearing.close()


@in_virtual_time
async def test_a_fetch_whose_every_epoch_passes_unheard_is_let_come_in_the_end() -> None:
    rounds = Passing(*[1.5] * 10)
    hearing = await listener(rounds)
    epoch, num_starts = await fetched(hearing, rounds, 3.5)
    assert (epoch, num_starts) == (7, 4)
    rounds.outcome.cancel()
    await hearing.close()
