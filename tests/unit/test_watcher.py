"""Following a run: what is begun and fails half-way is taken back."""

from __future__ import annotations

from typing import Any

import pytest

from potluck.errors import HubUnavailableError
from potluck.hub.guard.member import Scopes
from potluck.hub.guard.permissions import main_permissions
from potluck.hub.presence import Card
from potluck.hub.subjects import Subjects
from potluck.monitor.watcher import Watcher
from potluck.peer.identity import Identity
from potluck.peer.session import Session
from potluck.testing.memoryhub import MemoryHub
from potluck.testing.virtualloop import LoopClock, in_virtual_time

SUBJECTS = Subjects("test")


class Failing:
    """A hub connection whose n-th subscription fails."""

    def __init__(self, connection: Any, failing: int) -> None:
        self._connection = connection
        self._left = failing

    async def subscribe(self, *arguments: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise HubUnavailableError("the hub is away just now")
        return await self._connection.subscribe(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


@in_virtual_time
@pytest.mark.parametrize("failing", [1, 2])
async def test_a_watcher_that_cannot_start_leaves_nothing_behind(failing: int):
    hub = MemoryHub("test")
    identity = Identity.temporary()
    connection = hub.connect(identity.peer_id, main_permissions(SUBJECTS, identity.peer_id, Scopes()))
    session = Session(lambda *_: None, identity, SUBJECTS, Card(session="s1", role="observer"), LoopClock())
    session._hub = Failing(connection, failing)
    watcher = Watcher(session)
    with pytest.raises(HubUnavailableError):
        await watcher.start()
    await watcher.close()
    left = connection.statistics()
    assert (left["subscriptions"], left["watches"]) == (0, 0)
