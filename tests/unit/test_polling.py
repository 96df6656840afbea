from __future__ import annotations

import pytest

from potluck.sim.virtualclock import VirtualClock
from potluck.testing import polling
from potluck.testing.polling import ConditionNotMetError, poll_until, poll_until_sync


async def test_it_returns_what_the_condition_returned() -> None:
    answers = iter([[], [], ["alice"]])
    assert await poll_until(lambda: next(answers), 30, "alice", every_seconds=0) == ["alice"]


async def test_a_condition_may_be_async() -> None:
    answers = iter([0, 7])

    async def condition() -> int:
        return next(answers)

    assert await poll_until(condition, 30, "seven", every_seconds=0) == 7


async def test_the_deadline_says_what_was_waited_for_and_last_seen() -> None:
    with pytest.raises(ConditionNotMetError, match=r"waited 0 s for bob to see alice; last seen: \[\]"):
        await poll_until(list, 0, "bob to see alice")
    with pytest.raises(ConditionNotMetError, match="for the state is now 5; last seen: None"):
        poll_until_sync(lambda: None, 0, lambda: f"the state is now {2 + 3}")


async def test_errors_of_the_condition_are_not_swallowed() -> None:
    def broken() -> bool:
        raise KeyError("no such peer")

    with pytest.raises(KeyError):
        await poll_until(broken, 30, "anything")
    with pytest.raises(KeyError):
        poll_until_sync(broken, 30, "anything")


class ClockWithSleep(VirtualClock):
    def sleep(self, seconds: float) -> None:
        self.advance(seconds)


def test_the_condition_is_asked_once_more_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ClockWithSleep()
    monkeypatch.setattr(polling, "time", clock)
    asked_at: list[float] = []

    def comes_true_while_the_machine_is_busy() -> bool:
        asked_at.append(clock.monotonic())
        if len(asked_at) == 1:
            clock.advance(100.0)
        return len(asked_at) == 2

    assert poll_until_sync(comes_true_while_the_machine_is_busy, 10, "the second answer")
    asked_at.clear()
    clock.advance(1.0)
    with pytest.raises(ConditionNotMetError):
        poll_until_sync(lambda: asked_at.append(clock.monotonic()), 1, "nothing", every_seconds=0.25)
    assert len(asked_at) == 5
