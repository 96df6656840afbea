"""`potluck visualize`, every so many epochs: what cannot be fetched is tried again, and who is out is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from potluck.cli import visualize
from potluck.errors import AccessError, StateUnavailableError
from potluck.sim.virtualloop import in_virtual_time


class Fetched:
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def __enter__(self) -> Fetched:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tensors(self) -> dict[str, Any]:
        return {"epoch": self.epoch}


class Viewer:
    """A run that makes an epoch each second; its states cannot be had in the seconds that are named."""

    def __init__(self, *failing: int) -> None:
        self.began = asyncio.get_running_loop().time()
        self.failing = failing
        self.asked: list[int] = []

    @property
    def epoch(self) -> int:
        return int(asyncio.get_running_loop().time() - self.began)

    async def until_epoch(self, epoch: int) -> None:
        await asyncio.sleep(max(0.0, self.began + epoch - asyncio.get_running_loop().time()))

    async def newest(self, *, at_least_epoch: int, timeout_seconds: float) -> Fetched:
        self.asked.append(at_least_epoch)
        if self.epoch in self.failing:
            raise StateUnavailableError("nobody serves it")
        return Fetched(self.epoch)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    epochs: list[int] = []

    async def at_once(work: Any, *arguments: Any) -> Any:
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    monkeypatch.setattr(visualize, "_preview", lambda _recipe, tensors: (str(tensors["epoch"]), {}))
    monkeypatch.setattr(visualize, "_tell", lambda epoch, *_: epochs.append(epoch))
    return epochs


@in_virtual_time
async def test_it_is_shown_every_so_many_epochs_and_tried_again(shown: list[int]) -> None:
    viewer: Any = Viewer(11)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(30.5):
            await visualize.keep_showing(viewer, None, every=10, once=False, as_json=False)
    assert shown == [1, 16, 26]
    assert viewer.asked == [1, 11, 11, 26]


@in_virtual_time
async def test_once_is_once(shown: list[int]) -> None:
    await visualize.keep_showing(Viewer(), None, every=10, once=True, as_json=False)  # type: ignore[arg-type]
    assert shown == [1]
    failing: Any = Viewer(*range(100))
    with pytest.raises(StateUnavailableError):
        await visualize.keep_showing(failing, None, every=10, once=True, as_json=False)


@in_virtual_time
async def test_who_is_banned_does_not_wait_for_ever() -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    began = loop.time()
    loop.call_later(5.0, ended.set_exception, AccessError("an organiser has banned you"))
    with pytest.raises(AccessError, match="banned"):
        await visualize.unless_ended(ended, asyncio.sleep(1e6))
    assert loop.time() - began < 10.0
    await visualize.unless_ended(loop.create_future(), asyncio.sleep(1))
