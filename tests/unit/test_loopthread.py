"""The bridge between a user's thread and the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from trainlab import train_lab

from potluck.errors import BannedError, ConfigurationError
from potluck.run.calls import ThreadResult
from potluck.run.joined import Joined, join
from potluck.run.loopthread import SWITCH_SECONDS, LoopThread, RunningLoop


async def answer(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def fail() -> None:
    raise ValueError("on purpose")


def test_coroutines_run_on_the_loop_and_results_come_back() -> None:
    with LoopThread() as loop:
        assert loop.call(answer(3)) == 3
        assert loop.submit(answer(4)).result() == 4
        seen: list[str] = []
        done = threading.Event()
        loop.soon(lambda: (seen.append(threading.current_thread().name), done.set()))
        assert done.wait(10)
        assert seen == ["potluck-loop"]
        with pytest.raises(ValueError, match="on purpose"):
            loop.call(fail())


def test_threads_give_way_quickly_while_a_loop_runs_and_not_after() -> None:
    before = sys.getswitchinterval()
    with LoopThread():
        assert sys.getswitchinterval() == pytest.approx(min(SWITCH_SECONDS, before))
        with LoopThread():
            pass
        assert sys.getswitchinterval() == pytest.approx(min(SWITCH_SECONDS, before))
    assert sys.getswitchinterval() == pytest.approx(before)


def wait_in_two_steps(loop: LoopThread, work: Coroutine[Any, Any, Any]) -> None:
    """As the driver of a training does: it begins a round, and waits for it later."""
    call = loop.submit(work)
    try:
        call.wait()
    finally:
        call.end(10)
        assert call.is_known


@pytest.mark.parametrize("wait", [LoopThread.call, wait_in_two_steps])
def test_ctrl_c_ends_the_work_on_the_loop_and_goes_on_here_whenever_it_comes(wait: Callable[..., Any]) -> None:
    """Again and again: the signal meets the waiting thread at other places, also where it only begins to wait."""

    async def wait_for_ever(started: threading.Event, ended: threading.Event) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    def interrupt(started: threading.Event) -> None:
        started.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    with LoopThread() as loop:
        for number in range(100):
            started, ended = threading.Event(), threading.Event()
            interrupter = threading.Thread(target=interrupt, args=(started,))
            interrupter.start()
            with pytest.raises(KeyboardInterrupt):
                wait(loop, wait_for_ever(started, ended))
            interrupter.join()
            assert ended.is_set()
            assert loop.call(answer(number)) == number


def test_ctrl_c_while_waiting_for_a_thread_does_not_hold_it_up() -> None:
    for _ in range(100):
        outcome, waiting = ThreadResult[int](), threading.Event()

        def work(outcome: ThreadResult[int] = outcome, waiting: threading.Event = waiting) -> None:
            waiting.wait(10)
            os.kill(os.getpid(), signal.SIGINT)
            outcome.settle(3)

        def wait(outcome: ThreadResult[int] = outcome, waiting: threading.Event = waiting) -> None:
            waiting.set()
            outcome.wait()
            threading.Event().wait(10)  # the outcome came first: the signal meets us here

        worker = threading.Thread(target=work)
        worker.start()
        with pytest.raises(KeyboardInterrupt):
            wait()
        worker.join(10)
        assert not worker.is_alive()
        assert outcome.wait(10)
        assert outcome.result() == 3


def test_what_does_not_come_in_time_is_not_waited_for() -> None:
    outcome = ThreadResult[int]()
    assert not outcome.wait(0)
    assert not outcome.wait(0.01)
    outcome.settle(error=ValueError("on purpose"))
    assert outcome.wait(0)
    with pytest.raises(ValueError, match="on purpose"):
        outcome.result()


def test_closing_ends_what_is_left() -> None:
    loop = LoopThread()
    loop.start()
    loop.start()
    future = loop.submit(asyncio.Event().wait())
    loop.close()
    loop.close()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    with pytest.raises(ConfigurationError, match="left already"):
        loop.call(answer(1))


def test_what_is_attached_is_closed_last_first_before_the_peer_whatever_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with train_lab() as lab:
        run = lab.join("alice")
        order: list[str] = []

        def closer(name: str, error: Exception | None = None) -> Any:
            async def close() -> None:
                order.append(f"{name} in {len(lab.memory.peers)}")
                if error is not None:
                    raise error

            return close

        run.attach(closer("first"))
        run.attach(closer("second", RuntimeError("on purpose")))
        run.attach(closer("third"))
        run.check()
        run.close()
        run.close()
        assert order == ["third in 1", "second in 1", "first in 1"]
        assert "closing a part of the run failed" in caplog.text
        with pytest.raises(ConfigurationError, match="not joined"):
            run.check()


def test_who_is_thrown_out_learns_why_at_the_next_step() -> None:
    with train_lab() as lab:
        run = lab.join("alice")
        run.soon(lambda: run.peer.session._end(BannedError("banned by an organiser")))
        lab.loop.call(answer(0))
        with pytest.raises(BannedError):
            run.check()


def test_a_failed_start_leaves_nothing_behind() -> None:
    async def start() -> Any:
        raise ConfigurationError("no such run")

    run = Joined(start)
    before = threading.active_count()
    with pytest.raises(ConfigurationError, match="no such run"):
        run.open()
    assert threading.active_count() == before


def test_ctrl_c_that_comes_when_one_is_in_already_leaves_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Peer:
        closed = False

        async def close(self) -> None:
            self.closed = True

    peer, calls = Peer(), iter([True, False])

    async def start() -> Any:
        return peer

    call = LoopThread.call

    def interrupted(self: LoopThread, work: Any) -> Any:
        result = call(self, work)
        if next(calls):
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(LoopThread, "call", interrupted)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        Joined(start).open()
    assert peer.closed
    assert threading.active_count() == before


def test_join_wants_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POTLUCK_LINK", raising=False)
    with pytest.raises(ConfigurationError, match="POTLUCK_LINK"):
        join()
    with pytest.raises(ConfigurationError):
        join("http://example.org")


def test_who_waits_for_a_loop_that_is_closed_is_let_go() -> None:
    loop = asyncio.new_event_loop()  # which never runs, so that nothing it is given ever begins
    call = RunningLoop(loop, threading.Thread())
    work = asyncio.sleep(0)
    threading.Timer(0.1, loop.close).start()
    with pytest.raises(concurrent.futures.CancelledError, match="has ended"):
        call.call(work)
    work.close()
