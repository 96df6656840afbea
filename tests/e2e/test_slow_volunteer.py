"""Volunteers whose machines are not alike, with the real commands: what a slow one is told is what the book says."""

from __future__ import annotations

import pytest
from commandline import Terminal, until_event
from organiser import LONG_SECONDS, ONE_THREAD, Organiser, end, until_epoch

from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import ManagedProcess

STEP_SECONDS = 0.02


@pytest.mark.timeout(300)
def test_a_slow_volunteer_takes_part_and_is_told_what_the_book_says(terminal: Terminal) -> None:
    organiser = Organiser(terminal, step_seconds=0.0)
    organiser.edit('algorithm = "sync" ', 'algorithm = "diloco" ')
    organiser.edit("target_batch_size = 256 ", "inner_steps = 20 ")
    recipe = organiser.recipe.read_text()
    slowed = '        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))\n        x, y = batch\n'
    organiser.recipe.write_text("import os\nimport time\n" + recipe.replace("        x, y = batch\n", slowed))
    host, link = organiser.host()

    def join(name: str, batch_size: int, step_seconds: float) -> ManagedProcess:
        key = ("--identity-path", terminal.folder / f"{name}.nkey", "--name", name)
        what = ("--recipe", organiser.recipe, "--batch-size", str(batch_size), "--json")
        environment = {**ONE_THREAD, "STEP_SECONDS": str(step_seconds)}
        return terminal.start("join", link, *key, *what, name=name, **environment)

    ada = join("Ada", 8, STEP_SECONDS)
    slow = join("Slow", 32, 10 * STEP_SECONDS)
    joined_at = until_epoch(slow, 1)["epoch"]
    until_epoch(slow, joined_at + 12)
    end(slow)
    told = until_event(slow, "trained")

    def row() -> dict[str, float] | None:
        board = terminal.ask("leaderboard", link, patience_seconds=LONG_SECONDS)
        found = next(row for row in board["peers"] if row["name"] == "Slow")
        return found if board["epoch"] >= told["epoch"] else None

    found = poll_until_sync(row, LONG_SECONDS, lambda: "the book of the slow one's last epoch")
    assert told["given"] == found["samples"] > 0
    assert found["epochs"] >= 0.9 * (told["epoch"] - joined_at)
    for process in (ada, host):
        end(process)
