"""What is done about a server that dies, about a full disk, and about one that does not answer."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from potluck.errors import HubUnavailableError
from potluck.hub.server.diskspace import MIB, DiskSpace, Level
from potluck.hub.server.restarts import MAX_RESTARTS, WITHIN_SECONDS
from potluck.hub.server.supervisor import Supervisor
from potluck.sim.virtualloop import LoopClock, in_virtual_time

FOLDER = Path("/srv/bakery")
DISK_BYTES = 1000 * MIB


class Scene:
    """A server whose fate the test decides."""

    def __init__(self) -> None:
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.num_restarts = 0
        self.error = ""
        self.answers = True
        self.is_doomed = False
        self.free_bytes = DISK_BYTES
        self.supervisor = Supervisor(self, FOLDER, clock=LoopClock(), measure_disk=self._measure)
        self.life = asyncio.create_task(self.supervisor.run())

    def _measure(self, folder: Path) -> DiskSpace:
        assert folder == FOLDER
        return DiskSpace(total_bytes=DISK_BYTES, free_bytes=self.free_bytes)

    async def write_error(self) -> str:
        if not self.answers:
            raise HubUnavailableError("no answer")
        return self.error

    async def restart(self) -> None:
        self.num_restarts += 1
        self.died = asyncio.get_running_loop().create_future()
        self.error = ""
        if self.is_doomed:
            self.die()

    def die(self) -> None:
        self.died.set_result("it ended with code -9. It said last: out of memory")

    async def end(self) -> None:
        self.life.cancel()
        await asyncio.wait({self.life})


@in_virtual_time
async def test_a_server_that_dies_is_started_again_at_once_and_told_for_a_while() -> None:
    scene = Scene()
    await asyncio.sleep(100.0)
    assert (scene.num_restarts, scene.supervisor.troubles) == (0, {})
    scene.die()
    await asyncio.sleep(0.5)
    assert scene.num_restarts == 1
    assert "code -9" in scene.supervisor.troubles["hub server"]
    await asyncio.sleep(100.0)
    assert scene.supervisor.troubles == {}
    await scene.end()


@in_virtual_time
async def test_a_server_that_dies_again_and_again_is_given_up_with_its_last_words() -> None:
    scene = Scene()
    scene.is_doomed = True
    scene.die()
    reason = await asyncio.wait_for(scene.life, WITHIN_SECONDS)
    assert scene.num_restarts == MAX_RESTARTS
    assert "again and again" in reason
    assert "out of memory" in reason


@in_virtual_time
async def test_deaths_that_are_long_past_are_forgiven() -> None:
    scene = Scene()
    for _ in range(5 * MAX_RESTARTS):
        scene.die()
        await asyncio.sleep(WITHIN_SECONDS)
    assert scene.num_restarts == 5 * MAX_RESTARTS
    await scene.end()


@in_virtual_time
async def test_a_full_disk_is_waited_for_however_long_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.free_bytes = 50 * MIB
    await asyncio.sleep(5.0)
    assert "has little room left (52.4 MB of 1.0 GB free)" in scene.supervisor.troubles["disk"]
    scene.free_bytes, scene.error = 0, "stream write error: no space left on device"
    await asyncio.sleep(7 * 24 * 3600.0)
    assert scene.num_restarts == 0
    assert "is full (0.0 MB of 1.0 GB free), so the hub cannot write" in scene.supervisor.troubles["disk"]
    scene.free_bytes = 500 * MIB
    await asyncio.sleep(10.0)
    assert scene.num_restarts == 1
    assert "disk" not in scene.supervisor.troubles
    assert len([record for record in caplog.records if "/srv/bakery" in record.getMessage()]) == 4  # once a change
    await scene.end()


@in_virtual_time
async def test_a_disk_that_is_full_again_and_again_never_ends_the_host() -> None:
    scene = Scene()
    for _ in range(100):
        scene.error = "stream write error: no space left on device"  # of a quota, say, that the disk does not show
        await asyncio.sleep(30.0)
    assert scene.num_restarts == 100
    await scene.end()


@in_virtual_time
async def test_a_server_that_dies_while_the_disk_is_full_is_started_when_there_is_room() -> None:
    scene = Scene()
    scene.free_bytes = 0
    scene.die()
    await asyncio.sleep(3600.0)
    assert scene.num_restarts == 0
    scene.free_bytes = 500 * MIB
    await asyncio.sleep(5.0)
    assert scene.num_restarts == 1
    await scene.end()


@in_virtual_time
async def test_a_server_that_does_not_answer_is_told_once_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    await asyncio.sleep(10.0)
    scene.answers = False
    await asyncio.sleep(600.0)
    scene.answers = True
    await asyncio.sleep(10.0)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 2
    assert "is it stopped" in told[0]
    assert told[1] == "the hub's server answers again"
    assert scene.num_restarts == 0
    await scene.end()


@pytest.mark.parametrize(
    ("total", "free", "level"),
    [
        (100_000 * MIB, 1100 * MIB, "enough"),
        (100_000 * MIB, 1000 * MIB, "low"),
        (100_000 * MIB, 60 * MIB, "full"),
        (48 * MIB, 5 * MIB, "enough"),
        (48 * MIB, 4 * MIB, "low"),
        (48 * MIB, MIB // 2, "full"),
    ],
)
def test_what_is_little_room_depends_on_the_disk(total: int, free: int, level: Level) -> None:
    assert DiskSpace(total_bytes=total, free_bytes=free).level == level
