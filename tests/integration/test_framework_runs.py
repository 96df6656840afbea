"""Trainers of Lightning and transformers in processes of their own: they train one model, die and come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from frameworkprograms import (
    Programs,
    assert_as_one_process,
    digests,
    finish,
    num_left_behind,
    printed_link,
    told,
    until_in,
)
from traincompany import PATIENCE_SECONDS, house_with_link

from potluck.testing.processes import Children, ManagedProcess

# The snippet in the documentation of lightning-hivemind: the import and the accelerator are changed, and nothing else.
SNIPPET = """
import torch
from functools import partial
from lightning import Trainer
from potluck.integrations.lightning import PotluckStrategy as HivemindStrategy

trainer = Trainer(
    strategy=HivemindStrategy(
        target_batch_size=8192,
        delay_state_averaging=True,
        delay_grad_averaging=True,
        delay_optimizer_step=True,
        offload_optimizer=True,  # required to delay averaging
        scheduler_fn=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=...),
    ),
    accelerator="cpu",
    devices=1,
)
"""
ATTEMPTS = 3
OPTIONS = {"target_batch_size": 48, "matchmaking_time": 20.0}  # nobody is left behind because this machine is busy


@pytest.mark.timeout(480)
async def test_the_snippet_of_hivemind_trains_two_peers_of_which_one_dies_and_comes_back(
    tmp_path: Path, children: Children
) -> None:
    snippet = tmp_path / "snippet.py"  # with its dots filled in, and a target that a test reaches
    snippet.write_text(SNIPPET.replace("8192", "48").replace("gamma=...", "gamma=0.999"))
    programs = Programs(children, tmp_path, "lightningchild.py")
    endless = ("1000000", "{}", str(snippet))
    first = await dies_and_comes_back(programs, *endless)
    assert any(line["peers"] == 2 for line in told(first, "done"))
    for line in told(first, "done"):
        assert line["rate"] == pytest.approx(0.1 * 0.999 ** line["done"])


async def dies_and_comes_back(programs: Programs, *arguments: str, num_programs: int = 2) -> ManagedProcess:
    """Some programs in one run, of which the last is killed and started again; all hold the same. The first of them."""
    first = programs.start(0, *arguments)
    link = await printed_link(first)
    others = [programs.start(number, *arguments, link=link) for number in range(1, num_programs)]
    await until_in(first, *others)
    killed = others.pop()
    await killed.until_line(r'"done": [3-9],', PATIENCE_SECONDS)
    killed.kill()
    again = programs.start(num_programs - 1, *arguments, link=link)
    await until_in(again)
    back = await again.until_line(r'"done": (\d+),', PATIENCE_SECONDS)
    for program in (first, *others, again):
        await program.until_line(rf'"done": {int(back.group(1)) + 3},', PATIENCE_SECONDS)
    assert told(again, "joined")[0]["epoch"] >= 3  # it took over what the run had
    held = digests(first, *others, killed, again)
    assert all(len(each) == 1 for each in held.values()), held
    return first


@pytest.mark.timeout(480)
async def test_three_lightning_peers_equal_one_process_and_leave_when_they_are_done(
    tmp_path: Path, children: Children
) -> None:
    await equal_one_process(tmp_path, children, {}, {"client_mode": True}, {})


async def equal_one_process(tmp_path: Path, children: Children, *peers: dict[str, Any]) -> None:
    num_epochs = 5
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        async with house_with_link(folder) as (_, link):
            programs = Programs(children, folder, "lightningchild.py")
            running = [
                programs.start(number, str(num_epochs), json.dumps({**OPTIONS, **options}), link=str(link))
                for number, options in enumerate(peers)
            ]
            await until_in(*running)
            values = await finish(*running)
        assert all(each == values[0] for each in values)
        if not num_left_behind(*running):  # else not all batches count that were told
            assert_as_one_process(values[0], num_epochs, *running)
            return
    pytest.fail(f"somebody was left behind in each of {ATTEMPTS} attempts")


@pytest.mark.timeout(480)
async def test_two_trainers_of_transformers_equal_one_process(tmp_path: Path, children: Children) -> None:
    num_epochs = 4
    programs = Programs(children, tmp_path, "transformerschild.py")
    first = programs.start(0, str(num_epochs), str(tmp_path / "first"))
    second = programs.start(1, str(num_epochs), str(tmp_path / "second"), link=await printed_link(first))
    await until_in(first, second)
    one, other = await finish(first, second)
    assert one == other
    assert_as_one_process(one, num_epochs, first, second)
    assert any(line["potluck_peers"] == 2 for line in told(first, "done"))


@pytest.mark.timeout(480)
async def test_three_trainers_of_transformers_of_which_one_dies_and_comes_back(
    tmp_path: Path, children: Children
) -> None:
    programs = Programs(children, tmp_path, "transformerschild.py")
    first = await dies_and_comes_back(programs, "1000000", str(tmp_path / "output"), num_programs=3)
    assert any(line["potluck_peers"] == 3 for line in told(first, "done"))
