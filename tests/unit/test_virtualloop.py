from __future__ import annotations

import asyncio
import time

import pytest

from potluck.sim.virtualloop import LoopClock, NothingLeftError, VirtualTimeLoop, in_virtual_time, process


@in_virtual_time
async def test_an_hour_takes_no_time() -> None:
    clock, before = LoopClock(), time.monotonic()
    started_at = clock.monotonic()
    await asyncio.sleep(3600)
    assert clock.monotonic() - started_at == pytest.approx(3600)
    assert time.monotonic() - before < 60
    assert LoopClock(wall_error_seconds=7200).wall() - clock.wall() == pytest.approx(7200)


@in_virtual_time
async def test_timers_run_in_their_order() -> None:
    seen: list[float] = []

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append(seconds)

    await asyncio.gather(*map(wait, (30, 1, 0.001, 500)))
    assert seen == [0.001, 1, 30, 500]


@in_virtual_time
async def test_deadlines_pass() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10):
            await asyncio.Event().wait()


async def wait_for_nothing() -> None:
    await asyncio.Event().wait()


def test_a_test_that_would_hang_fails() -> None:
    with pytest.raises(NothingLeftError), asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(wait_for_nothing())


def test_a_task_left_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.testing.leaks.SETTLE_SECONDS", 0.0)

    @in_virtual_time
    async def leaves_a_task() -> None:
        task = asyncio.create_task(asyncio.sleep(10**6), name="forgotten")
        await asyncio.sleep(0)
        assert not task.done()

    with pytest.raises(AssertionError, match="forgotten"):
        leaves_a_task()


@in_virtual_time
async def test_a_stopped_process_goes_on_where_it_was() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    seen: list[tuple[str, float]] = []
    started_at = loop.time()

    async def count(name: str) -> None:
        for _ in range(3):
            await asyncio.sleep(1)
            seen.append((name, loop.time() - started_at))

    with process("alice"):
        alice = asyncio.create_task(count("alice"))
    bob = asyncio.create_task(count("bob"))
    await asyncio.sleep(1.5)
    loop.freeze("alice")
    await asyncio.sleep(10)
    loop.thaw("alice")
    await asyncio.gather(alice, bob)
    assert [round(at) for name, at in seen if name == "bob"] == [1, 2, 3]
    assert [round(at, 1) for name, at in seen if name == "alice"] == [1.0, 11.5, 12.5]


@in_virtual_time
async def test_what_was_cancelled_meanwhile_does_not_run() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    seen: list[str] = []
    with process("alice"):
        handle = loop.call_later(1, seen.append, "cancelled")
        loop.call_later(1, seen.append, "kept")
    loop.freeze("alice")
    await asyncio.sleep(2)
    handle.cancel()
    loop.thaw("alice")
    await asyncio.sleep(1)
    assert seen == ["kept"]


def test_differences_of_times_are_exact() -> None:
    @in_virtual_time
    async def wait(first_seconds: float) -> None:
        clock = LoopClock()
        await asyncio.sleep(first_seconds)
        started_at = clock.monotonic()
        await asyncio.sleep(1.5)  # across 1024 s, where floating-point numbers become coarser
        assert clock.monotonic() - started_at == 1.5

    for step in range(100):
        wait(22.6 + 0.01 * step)
