"""Programs with a loop of their own in a hosted run, beside a trainer of `potluck join`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from commandline import Terminal, events, until_event
from organiser import LONG_SECONDS, ONE_THREAD, Organiser, end, until_epoch

from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import ManagedProcess

PROGRAM = (sys.executable, str(Path(__file__).with_name("ownloop.py")))


def own_loop(organiser: Organiser, link: str, *arguments: str) -> ManagedProcess:
    recipe = str(organiser.recipe) if organiser.recipe.exists() else "digits"
    environment = {"POTLUCK_IDENTITY": str(organiser.terminal.folder / "own.nkey"), **ONE_THREAD}
    return organiser.terminal.start(link, recipe, *arguments, name="own", program=PROGRAM, **environment)


def texts(process: ManagedProcess, event: str) -> list[str]:
    return [each["text"] for each in events(process) if each["event"] == event]


def samples_of(organiser: Organiser, link: str, name: str) -> Any:
    board = organiser.terminal.ask("leaderboard", link, patience_seconds=LONG_SECONDS)
    return sum(row["samples"] for row in board["peers"] if row["name"] == name)


def until_ended(process: ManagedProcess) -> int:
    code = poll_until_sync(lambda: (process.exit_code,) if process.exit_code is not None else None, LONG_SECONDS,
                           lambda: f"the program's end: {process.output()[-3000:]}")[0]  # fmt: skip
    return int(code)


@pytest.mark.timeout(500)
def test_a_loop_of_one_s_own_trains_with_the_run_s_model_and_settings(terminal: Terminal) -> None:
    organiser = Organiser(terminal)
    organiser.edit("warmup_epochs = 10", "warmup_epochs = 0")
    organiser.edit("learning_rate = 1e-3", "learning_rate = 2e-3")
    host, link = organiser.host()

    # Before anybody has trained, nobody knows what the parameters of a recipe of the organiser's own are called.
    early = own_loop(organiser, link, "sync", "1")
    assert until_ended(early) != 0
    assert "AdamW(model.named_parameters())" in early.output()
    assert "nobody has trained in the run waves yet" in early.output()

    ada = organiser.join(link, "ada", "--batch-size", "16")
    until_epoch(ada, 2)
    own = own_loop(organiser, link, "sync-framework", "6", "--refused")
    done = until_event(own, "done")
    assert until_ended(own) == 0, own.output()

    # What cannot be meant is said in one sentence, with what to write.
    kind, groups, algorithm, order = texts(own, "refused")
    assert "steps with AdamW and one group of parameters, and this is SGD with 1" in kind
    assert "this is AdamW with 2" in groups
    assert "use potluck.Optimizer(run, …) for it" in algorithm
    assert "AdamW(model.named_parameters())" in order
    assert not [each for each in events(own) if each["event"] == "taken"]

    # What the run says counts, and is named where the program said otherwise.
    [warning] = [text for text in texts(own, "warning") if "settings of the run" in text]
    assert "lr=0.002 (here 0.5)" in warning
    assert "target_batch_size=256 (here 7)" in warning
    assert (done["lr"], done["betas"]) == (0.002, [0.9, 0.99])
    begun = until_event(own, "begun")
    assert begun["epoch"] >= 2
    assert begun["names"] == [f"{layer}.{what}" for layer in (0, 2, 4) for what in ("weight", "bias")]

    # And so its steps are everybody's, to the bit, and its samples count.
    assert done["statistics"].get("mended", 0) == done["statistics"].get("mended_numbers", 0) == 0, done
    assert samples_of(organiser, link, "own") > 0
    end(ada)
    end(host)


@pytest.mark.timeout(500)
def test_a_loop_of_one_s_own_begins_a_run_and_takes_part_in_diloco(terminal: Terminal) -> None:
    organiser = Organiser(terminal, "--recipe", "digits")
    organiser.edit("width = 64", "width = 16")
    organiser.edit('algorithm = "sync"           #', 'algorithm = "diloco"         #')
    organiser.edit("target_batch_size = 256      #", "inner_steps = 4              #")
    host, link = organiser.host()
    enough = terminal.folder / "enough"
    own = own_loop(organiser, link, "diloco", "6", "--until", str(enough))
    assert until_event(own, "begun")["names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    ada = organiser.join(link, "ada", "--batch-size", "8")  # with the names that the program began with
    until_epoch(ada, 4)
    enough.touch()
    done = until_event(own, "done")
    [warning] = [text for text in texts(own, "warning") if "settings of the run" in text]
    assert "inner_steps=4 (here 7)" in warning
    assert done["lr"] != 0.5
    assert until_ended(own) == 0, own.output()
    until_epoch(ada, done["epoch"])
    assert samples_of(organiser, link, "own") > 0
    end(ada)
    end(host)
