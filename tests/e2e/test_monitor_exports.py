"""`potluck monitor --wandb --tensorboard`, as people start it: TensorBoard for real, Weights & Biases by a stand-in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from commandline import PATIENCE_SECONDS, Terminal, events
from organiser import LONG_SECONDS, Organiser

from potluck.testing.polling import poll_until_sync

STANDINS = Path(__file__).with_name("standins")
LINK = "potluck://127.0.0.1:1/bakery?ca=abcdefghijklmnopqrstuvwxyz234567#ask"  # where nobody listens


def found_first(folder: Path) -> dict[str, str]:
    """The environment in which packages in this folder come before those that are installed."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))}


def lines_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's own
def test_each_epoch_of_a_run_is_told_to_both(terminal: Terminal, fresh_terminal: Terminal) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    organiser = Organiser(terminal)
    _, link = organiser.host()
    noted, folder = terminal.folder / "wandb.jsonl", terminal.folder / "board"
    wanted = ("--wandb", "bread", "--tensorboard", folder, "--json")
    settings = {"WANDB_STAND_IN_FILE": str(noted), **found_first(STANDINS)}
    monitor = fresh_terminal.start("monitor", link, *wanted, **settings)
    organiser.join(link, "Ada", "--batch-size", "64")
    poll_until_sync(lambda: len(lines_of(noted)) >= 4 or None, LONG_SECONDS, monitor.tail)
    monitor.interrupt()
    assert monitor.wait(PATIENCE_SECONDS) == 0, monitor.output()

    first, *logged, last = lines_of(noted)
    assert first == {"call": "init", "project": "bread", "name": "waves", "job_type": "monitor"}
    assert last == {"call": "finish"}
    shown: dict[int, Any] = {}
    for told in events(monitor):
        if told["loss"] is not None:
            shown.setdefault(told["epoch"], told)
    assert [each["step"] for each in logged] == sorted(shown)
    for each in logged:
        assert each["data"]["loss"] == shown[each["step"]]["loss"] > 0
        assert each["data"]["trainers"] == 1
    board = EventAccumulator(str(folder))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("run/loss")] == [
        (each["step"], pytest.approx(each["data"]["loss"])) for each in logged
    ]


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_without_the_package_it_is_said_what_to_install(fresh_terminal: Terminal, tmp_path: Path, package: str) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{package}'\")\n")
    told = fresh_terminal.refuse("monitor", LINK, f"--{package}", "bread", code=2, **found_first(tmp_path))
    assert told.startswith(f"--{package} needs the package: pip install {package} (")
