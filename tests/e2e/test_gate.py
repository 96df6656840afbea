"""`gate = true`: a run whose held-out loss leaves the band goes back by itself, by the real commands."""

from __future__ import annotations

from typing import Any

import pytest
from commandline import Terminal
from organiser import LONG_SECONDS, Organiser, end, until_epoch

from potluck.testing.polling import poll_until_sync

GOOD_EVALUATIONS = 4  # one more than are needed before anything is judged


@pytest.mark.soak  # 40 s on a busy machine; test_lossband.py has what decides
@pytest.mark.timeout(400)
def test_a_run_goes_back_from_a_mistaken_learning_rate_and_says_whose_work_was_in_it(terminal: Terminal) -> None:
    organiser = Organiser(terminal)
    organiser.edit("gate = false", "gate = true")
    organiser.edit("every_epochs = 0", "every_epochs = 2")
    host, link = organiser.host()
    ada = organiser.join(link, "Ada", "--batch-size", "64")
    place = ("--run", "waves", "--folder", terminal.folder / "hub")

    def monitor() -> dict[str, Any]:
        return dict(terminal.ask("monitor", link, "--once", patience_seconds=LONG_SECONDS))

    evaluated: set[int] = set()

    def enough() -> bool:
        if (epoch := monitor()["held_out_epoch"]) is not None:
            evaluated.add(epoch)
        return len(evaluated) >= GOOD_EVALUATIONS

    poll_until_sync(enough, LONG_SECONDS, lambda: f"evaluations: {evaluated}; {host.output()[-2000:]}")
    changed = terminal.ask("run", "set", "learning_rate=30.0", *place, patience_seconds=LONG_SECONDS)

    def order() -> Any:
        log = terminal.ask("run", "log", *place, patience_seconds=LONG_SECONDS)
        return next((row for row in log if row["by"] == "gate"), None)

    given = poll_until_sync(order, LONG_SECONDS, lambda: f"the gate: {host.output()[-3000:]}")
    assert given["what"].startswith("back to epoch ")
    back_to = int(given["what"].removeprefix("back to epoch "))
    assert given["reason"].startswith("held-out loss ")
    assert given["reason"].endswith("since then: Ada")
    assert back_to <= changed["from_epoch"] + 2, "a step of the new rate is what spoils it"
    terminal.ask("run", "set", "learning_rate=1e-3", *place, patience_seconds=LONG_SECONDS)
    until_epoch(ada, given["from_epoch"] + 1)
    assert list((terminal.folder / "hub" / "states" / "best").glob("epoch-*.json"))
    end(ada)
    end(host)
