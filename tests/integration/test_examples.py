"""The examples run as they are, with small arguments, alone and with others."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from frameworkprograms import environment, printed_link
from traincompany import PATIENCE_SECONDS

from potluck.testing.processes import Children, ManagedProcess

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def start(
    children: Children, folder: Path, name: str, *arguments: str, link: str = "", fresh: bool = False
) -> ManagedProcess:
    folder.mkdir(exist_ok=True)
    argv = [sys.executable, str(EXAMPLES / name), *arguments]
    return children.spawn(argv, name=name, env=environment(folder, link), cwd=folder, fresh=fresh)


@pytest.mark.timeout(300)
async def test_two_plain_loops_train_together(tmp_path: Path, children: Children) -> None:
    first = start(children, tmp_path / "first", "plain_loop.py", "--epochs", "1000000")
    second = start(
        children, tmp_path / "second", "plain_loop.py", "--epochs", "1000000", link=await printed_link(first)
    )
    await first.until_line(r"^epoch 10: loss", PATIENCE_SECONDS)
    told = await second.until_line(r"^epoch (\d+): loss", PATIENCE_SECONDS)
    await first.until_line(rf"^epoch {told.group(1)}: loss", PATIENCE_SECONDS)  # one run, one count
    os.kill(second.pid, signal.SIGINT)
    assert await second.until_exit(PATIENCE_SECONDS) != 0
    os.kill(first.pid, signal.SIGINT)
    assert await first.until_exit(PATIENCE_SECONDS) != 0
    assert "KeyboardInterrupt" in first.output()


@pytest.mark.timeout(300)
async def test_a_plain_loop_comes_to_its_end(tmp_path: Path, children: Children) -> None:
    alone = start(children, tmp_path, "plain_loop.py", "--epochs", "10", fresh=True)
    assert await alone.until_exit(PATIENCE_SECONDS) == 0, alone.tail()
    assert re.search(r"^done at epoch 10: loss [\d.]+$", alone.output(), re.MULTILINE)


@pytest.mark.timeout(300)
async def test_the_lightning_example_trains_and_validates(tmp_path: Path, children: Children) -> None:
    alone = start(children, tmp_path, "lightning_lm.py", "--steps", "8", "--target-batch-size", "32")
    assert await alone.until_exit(PATIENCE_SECONDS * 2) == 0, alone.tail()
    [loss] = re.findall(r"^done: loss ([\d.]+) on text", alone.output(), re.MULTILINE)
    assert 0.0 < float(loss) < 6.0


@pytest.mark.timeout(300)
async def test_the_albert_example_trains_on_a_dataset_of_ones_own(tmp_path: Path, children: Children) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.txt").write_text("Everybody brings what they have, and all eat together.\n" * 200)
    arguments = ("--steps", "8", "--target-batch-size", "32", "--dataset", str(data))
    alone = start(children, tmp_path / "alone", "transformers_albert.py", *arguments)
    assert await alone.until_exit(PATIENCE_SECONDS * 2) == 0, alone.tail()
    assert "'potluck_epoch': 4" in alone.output()
    [loss] = re.findall(r"^done: loss ([\d.]+) on average", alone.output(), re.MULTILINE)
    assert 0.0 < float(loss) < 8.0
