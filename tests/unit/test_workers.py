"""Threads for tensor work: outcomes come on the loop, nothing is lost, and nobody's settings are touched."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest
import torch

from potluck.errors import ConfigurationError
from potluck.round.member.workers import Workers


async def test_results_and_errors_come_back_on_the_loop() -> None:
    workers = Workers(2)
    workers.start()
    loop_thread = threading.get_ident()
    try:
        assert await workers.run(lambda: 6 * 7) == 42
        with pytest.raises(ZeroDivisionError):
            await workers.run(lambda: 1 // 0)
        where: list[int] = []
        told = asyncio.Event()

        def done(thread: int) -> None:
            where.extend((thread, threading.get_ident()))
            told.set()

        workers.submit(threading.get_ident, done, lambda error: None)
        await asyncio.wait_for(told.wait(), 10)
        assert where[0] != loop_thread, "the work is done elsewhere"
        assert where[1] == loop_thread, "and told here"
    finally:
        await workers.close()


async def test_no_outcome_is_lost_when_many_come_at_once() -> None:
    workers = Workers(3)
    workers.start()
    try:
        for _ in range(20):
            numbers = await asyncio.gather(*(workers.run(lambda n=n: n) for n in range(200)))  # type: ignore[misc]
            assert numbers == list(range(200))
    finally:
        await workers.close()


async def test_one_taker_that_fails_keeps_no_outcome_from_others(caplog: pytest.LogCaptureFixture) -> None:
    workers = Workers(1)
    workers.start()
    taken: list[int] = []

    def fail(result: int) -> None:
        raise RuntimeError("the taker's own mistake")

    gate = threading.Event()
    try:
        workers.submit(gate.wait, lambda _: None, lambda _: None)  # so that the next outcomes come together
        workers.submit(lambda: 1, fail, lambda _: None)
        workers.submit(lambda: 2, taken.append, lambda _: None)
        with caplog.at_level(logging.ERROR):
            gate.set()
            assert await workers.run(lambda: 3) == 3
        assert taken == [2]
        assert workers.num_errors == 1
        assert "the taker's own mistake" in caplog.text
    finally:
        gate.set()
        await workers.close()


async def test_closing_finishes_what_was_submitted_and_ends_the_threads() -> None:
    workers = Workers(2)
    workers.start()
    done: list[int] = []
    gate = threading.Event()
    workers.submit(gate.wait, lambda _: None, lambda _: None)
    for number in range(10):
        workers.submit(lambda n=number: n, done.append, lambda _: None)  # type: ignore[misc]
    closing = asyncio.create_task(workers.close())
    await asyncio.sleep(0)
    assert not closing.done(), "work is under way"
    gate.set()
    await closing
    assert sorted(done) == list(range(10))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("potluck-tensors")]
    await workers.close()


async def test_kernels_use_one_core_in_a_worker_and_as_many_as_before_elsewhere() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        workers = Workers(2)
        workers.start()
        assert torch.get_num_threads() == 2
        try:
            assert [await workers.run(torch.get_num_threads) for _ in range(4)] == [1] * 4
        finally:
            await workers.close()
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert found == [2], "threads that start later have the user's setting"
    finally:
        torch.set_num_threads(before)


def test_a_worker_at_least() -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        Workers(0)
    assert 1 <= Workers().num_threads <= 4
