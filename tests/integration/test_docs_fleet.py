"""The programs that docs/fleet.md shows, run as they stand there, by WebSocket with TLS to a real host."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runhouse import RUN, RunHouse, open_run

import potluck.fleet
from potluck.fleet.member import FleetMember
from potluck.hub.access.member import Scopes
from potluck.hub.access.organise import Done
from potluck.hub.access.queueing import CreateQueue
from potluck.hub.joinlink import fetch_address
from potluck.hub.keys import HubKeys
from potluck.hub.queues import QueueDefinition
from potluck.peer.identity import Identity
from potluck.run.loopthread import LoopThread

LoopThread().__enter__().close()  # libuv opens one pipe per process, for good: before a test counts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fleet.md"


async def make_queues(house: RunHouse, *definitions: QueueDefinition) -> None:
    keys = HubKeys.load_or_create(house.folder / "identity")
    member = FleetMember(await fetch_address(house.host.link), RUN, Identity(keys.organiser_seed))
    await member.open(is_member=True)
    for definition in definitions:
        await member.ask("create", CreateQueue(definition=definition), Done)
    await member.close()


async def test_the_programs_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.setenv("POTLUCK_IDENTITY", str(tmp_path / "laptop.nkey"))
    async with open_run(tmp_path / "run", peer=None) as house:
        topics = [QueueDefinition(name=name, kind="topic") for name in ("weights", "value")]
        await make_queues(house, QueueDefinition(name="experience"), *topics)
        rights: Any = {"*": ("put", "take")}
        scopes = Scopes(roles=("worker",), queues=rights)
        _, secret = await (await house.organiser()).create_invite(scopes=scopes, uses=None)
        link = str(replace(house.host.link, invite=secret))

        def by_websocket(text: str) -> potluck.fleet.Fleet:
            assert text == "potluck://…"
            return potluck.fleet.connect(link, websocket_only=True)

        for program in programs:
            names = {"by_websocket": by_websocket}
            await asyncio.to_thread(exec, program.replace("potluck.fleet.connect(", "by_websocket("), names)
    assert capsys.readouterr().out.splitlines() == ["1.0", "{'step': 4}", *["torch.Size([64, 8]) own"] * 3]
