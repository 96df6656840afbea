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


async def as_second_peer(children: Children, folder: Path, name: str, *arguments: str) -> ManagedProcess:
    """The example to its end, with a few steps, in a run that another one has started and goes on with."""
    shared = ("--target-batch-size", "32", *arguments)
    first = start(children, folder / "first", name, "--steps", "1000000", *shared)
    second = start(children, folder / "second", name, "--steps", "8", *shared, link=await printed_link(first))
    assert await second.until_exit(PATIENCE_SECONDS * 2) == 0, second.tail()
    assert first.exit_code is None, first.tail()
    return second


@pytest.mark.timeout(300)
async def test_the_lightning_example_trains_with_another_and_validates(tmp_path: Path, children: Children) -> None:
    second = await as_second_peer(children, tmp_path, "lightning_lm.py")
    [loss] = re.findall(r"^done: loss ([\d.]+) on text", second.output(), re.MULTILINE)
    assert 0.0 < float(loss) < 6.0


@pytest.mark.timeout(300)
async def test_the_albert_example_trains_with_another_on_a_dataset_of_ones_own(
    tmp_path: Path, children: Children
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.txt").write_text("Everybody brings what they have, and all eat together.\n" * 200)
    second = await as_second_peer(children, tmp_path, "transformers_albert.py", "--dataset", str(data))
    told = re.findall(r"'potluck_epoch': (\d+).*'potluck_own_samples': (\d+), 'potluck_peers': (\d+)", second.output())
    assert told
    assert int(told[-1][1]) == 8 * 16
    assert int(told[-1][2]) == 2
    [loss] = re.findall(r"^done: loss ([\d.]+) on average", second.output(), re.MULTILINE)
    assert 0.0 < float(loss) < 8.0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["lightning_lm.py", "transformers_albert.py"])
async def test_an_example_trains_in_a_run_of_a_host_which_saves_its_state(
    tmp_path: Path, children: Children, name: str
) -> None:
    """`potluck host --run NAME`, without a run.toml: what is trained is up to the programs."""
    place = ("--folder", tmp_path / "hub", "--listen", "127.0.0.1", "--no-dashboard", "--no-wheel", "--json")
    host = children.spawn([sys.executable, "-m", "potluck.cli", "host", "--run", "shared", *place], name="host")
    link = (await host.until_line(r'"event":"ready".*"link":"([^"]+)"', PATIENCE_SECONDS)).group(1)
    example = start(children, tmp_path / "peer", name, "--steps", "8", "--target-batch-size", "32", link=link)
    assert await example.until_exit(PATIENCE_SECONDS * 2) == 0, example.tail()
    assert "done: loss" in example.output()
    saved = [path.name for path in (tmp_path / "hub" / "states" / "backups").glob("epoch-*.json")]
    assert saved, "the host has taken over what the only trainer leaves"
    assert host.exit_code is None
