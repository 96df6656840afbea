"""What an aux peer cannot take of a module's steps is tried again, and not at once (see also test_paths_run.py)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from potluck.errors import StateUnavailableError
from potluck.paths.moduleheir import FAILED_PAUSE_SECONDS, ModuleHeir, ModuleMethod
from potluck.sim.virtualloop import in_virtual_time


@in_virtual_time
async def test_what_fails_is_tried_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = [StateUnavailableError("a holder came back without the averages"), KeyError("momentum")]
    tried_at: list[float] = []

    async def inherit(self: ModuleHeir, head: object) -> None:
        tried_at.append(asyncio.get_running_loop().time())
        if errors:
            raise errors.pop(0)

    async def close() -> None:
        """Nothing is open."""

    monkeypatch.setattr(ModuleHeir, "_inherit", inherit)
    head = SimpleNamespace(epoch=1, holders=(), members=())
    averager = SimpleNamespace(listen=lambda _: None, lineage=SimpleNamespace(head=head))
    keeper = SimpleNamespace(directory=SimpleNamespace(verdict=lambda _: None))
    helper: Any = SimpleNamespace(collaboration=SimpleNamespace(averager=averager), keeper=keeper, close=close)
    group: Any = SimpleNamespace(name="shared", session=SimpleNamespace(roster={}))
    heir = ModuleHeir(group, helper, ModuleMethod(), 2)
    await asyncio.sleep(3 * FAILED_PAUSE_SECONDS)
    await heir.close()
    assert heir.counts == {"failed": 1, "errors": 1}
    first, second, third, *_ = tried_at
    assert second - first >= FAILED_PAUSE_SECONDS
    assert third - second >= FAILED_PAUSE_SECONDS
