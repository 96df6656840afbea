"""The example's laptop and learner as real processes around a real hub: the learner dies and comes back."""

from __future__ import annotations

import asyncio
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

from potluck.hub.access.member import Scopes
from potluck.hub.queues import QueueDefinition, Rights
from potluck.testing.polling import poll_until
from potluck.testing.processes import Children, ManagedProcess

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "four_laptops"
PATIENCE_SECONDS = 100.0
ACROBAT = ("--task", "acrobot", "--policy", "relu")
FRESH = r"\(version [1-9]\d*, [0-8] fragments behind\)"


async def link_for(house: RunHouse, rights: Rights) -> str:
    scopes = Scopes(roles=("worker",), queues=rights)
    _, secret = await (await house.organiser()).create_invite(scopes=scopes, uses=None)
    return str(replace(house.host.link, invite=secret))


def start(children: Children, folder: Path, link: str, program: str, *arguments: str) -> ManagedProcess:
    folder.mkdir(exist_ok=True)
    if program == "laptop.py":
        arguments = (*arguments, "--steps", "1000000000", "--tell-every", "2")
    env = {**environment(folder, link), "POTLUCK_IDENTITY": str(folder / "key.nkey")}
    return children.spawn([sys.executable, str(EXAMPLE / program), *arguments], name=folder.name, env=env, cwd=folder)


async def until_says(process: ManagedProcess, after: int, pattern: str) -> None:
    """Wait until a process says this, beyond what it had said at some point."""
    await poll_until(
        lambda: re.search(pattern, process.output()[after:]) is not None, PATIENCE_SECONDS, lambda: process.tail()
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dead_seconds", [0, pytest.param(60, marks=pytest.mark.soak)])
async def test_laptops_learn_on_while_the_learner_is_dead(
    tmp_path: Path, children: Children, dead_seconds: float
) -> None:
    async with open_run(tmp_path / "run", peer=None) as house:
        await make_queues(
            house,
            QueueDefinition(name="experience", when_full="drop", max_items=64),
            QueueDefinition(name="value", kind="topic"),
        )
        put = await link_for(house, {"experience": ("put",), "value": ("take",)})
        take = await link_for(house, {"experience": ("take",), "value": ("put", "take")})
        ada = start(children, tmp_path / "ada", put, "laptop.py", "--name", "ada")
        bob = start(children, tmp_path / "bob", put, "laptop.py", "--name", "bob", *ACROBAT)
        await until_says(ada, 0, r"value of own \(version 0")
        learner = start(children, tmp_path / "learner", take, "learner.py")
        for laptop in (ada, bob):
            await until_says(laptop, 0, FRESH)
        os.kill(learner.pid, signal.SIGKILL)
        await learner.until_exit(PATIENCE_SECONDS)
        killed = len(ada.output())
        await until_says(ada, killed, r"value of own \(version [1-9]\d*, \d\d+ fragments behind\)")
        if dead_seconds:
            await asyncio.sleep(dead_seconds)
            steps = [int(step) for step in re.findall(r"step (\d+)", ada.output()[killed:])]
            assert steps[-1] > steps[0] + 5000, "it trains on"
        again = start(children, tmp_path / "learner", take, "learner.py")
        await until_says(again, 0, r"the value network goes on from version [1-9]\d*")
        back = len(ada.output())
        await until_says(ada, back, FRESH)
        for process in (ada, bob, again):
            os.kill(process.pid, signal.SIGINT)
            assert await process.until_exit(PATIENCE_SECONDS) is not None


@pytest.mark.timeout(600)
async def test_laptops_train_the_trunk_together_without_a_learner(tmp_path: Path, children: Children) -> None:
    """One laptop dies on the way; the other goes on, and a third gets the trunk as it is."""
    async with open_run(tmp_path / "run", peer=None) as house:
        scopes = Scopes(roles=("trainer",), groups=("value",), coordinates=True, trusted=True)
        _, secret = await (await house.organiser()).create_invite(scopes=scopes, uses=None)
        link = str(replace(house.host.link, invite=secret))
        way = ("--way", "together")
        ada = start(children, tmp_path / "ada", link, "laptop.py", "--name", "ada", *way)
        bob = start(children, tmp_path / "bob", link, "laptop.py", "--name", "bob", *ACROBAT, *way)
        for laptop in (ada, bob):
            await until_says(laptop, 0, r"uses version [1-9]\d* of the pooled network")
            await until_says(laptop, 0, r" ([2-9]|\d\d+) rounds\)")
        os.kill(bob.pid, signal.SIGKILL)
        await bob.until_exit(PATIENCE_SECONDS)
        rounds = num_rounds(ada)
        cem = start(children, tmp_path / "cem", link, "laptop.py", "--name", "cem", *way)
        await until_says(cem, 0, r"uses version [1-9]\d* of the pooled network")
        for laptop in (ada, cem):
            await poll_until(lambda each=laptop: num_rounds(each) > rounds + 1, PATIENCE_SECONDS, laptop.tail)
        for laptop in (ada, cem):  # there is nobody left to take over what they have: they wait for that, but not long
            os.kill(laptop.pid, signal.SIGTERM)
        for laptop in (ada, cem):
            assert await laptop.until_exit(PATIENCE_SECONDS) == 0, laptop.tail()
            assert "done: return" in laptop.output()


def num_rounds(laptop: ManagedProcess) -> int:
    """Of the group, as a laptop has said last."""
    return int(re.findall(r"(\d+) rounds", laptop.output())[-1])
