"""The example's laptop and learner as real processes around a real hub: the learner dies and comes back."""

from __future__ import annotations

import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from frameworkprograms import environment
from runhouse import RunHouse, open_run
from test_docs_fleet import make_queues

from potluck.hub.guard.member import Scopes
from potluck.hub.queues import QueueDefinition, Rights
from potluck.testing.processes import Children, ManagedProcess

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "four_laptops"
PATIENCE_SECONDS = 100.0


async def link_for(house: RunHouse, rights: Rights) -> str:
    scopes = Scopes(roles=("worker",), queues=rights)
    _, secret = await (await house.organiser()).create_invite(scopes=scopes, uses=None)
    return str(replace(house.host.link, invite=secret))


def start(children: Children, folder: Path, link: str, program: str, *arguments: str) -> ManagedProcess:
    folder.mkdir(exist_ok=True)
    env = {**environment(folder, link), "POTLUCK_IDENTITY": str(folder / "key.nkey")}
    return children.spawn([sys.executable, str(EXAMPLE / program), *arguments], name=folder.name, env=env, cwd=folder)


@pytest.mark.timeout(400)
async def test_laptops_learn_on_while_the_learner_is_dead(tmp_path: Path, children: Children) -> None:
    async with open_run(tmp_path / "run", peer=None) as house:
        await make_queues(
            house,
            QueueDefinition(name="experience", when_full="drop", max_items=64),
            QueueDefinition(name="value", kind="topic"),
        )
        put = await link_for(house, {"experience": ("put",), "value": ("take",)})
        take = await link_for(house, {"experience": ("take",), "value": ("put", "take")})
        ada = start(children, tmp_path / "ada", put, "laptop.py", "--name", "ada", "--steps", "1000000000")
        bob = start(
            children, tmp_path / "bob", put, "laptop.py", "--name", "bob", "--task", "acrobot", "--policy", "relu",
            "--steps", "1000000000",
        )  # fmt: skip
        await ada.until_line(r"value of own \(version 0", PATIENCE_SECONDS)
        learner = start(children, tmp_path / "learner", take, "learner.py")
        for laptop in (ada, bob):
            await laptop.until_line(r"value of pooled \(version \d+, \d fragments behind\)", PATIENCE_SECONDS)
        os.kill(learner.pid, signal.SIGKILL)
        await learner.until_exit(PATIENCE_SECONDS)
        told = len(ada.output())
        await ada.until_line(r"value of own \(version [1-9]\d*, (9|\d\d+) fragments behind\)", PATIENCE_SECONDS)
        assert "uses its own critic: the pooled network is silent or late" in ada.output()[told:]
        again = start(children, tmp_path / "learner", take, "learner.py")
        await again.until_line(r"the value network goes on from version [1-9]\d*", PATIENCE_SECONDS)
        steps = int(re.findall(r"step (\d+):", ada.output())[-1])
        await ada.until_line(r"uses version \d+ of the pooled network", PATIENCE_SECONDS)
        assert int(re.findall(r"step (\d+):", ada.output())[-1]) >= steps
        for process in (ada, bob, again):
            os.kill(process.pid, signal.SIGINT)
            assert await process.until_exit(PATIENCE_SECONDS) is not None
