"""Who should not be let in, or should not be listened to: each is handled as said, and the run goes on unharmed."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import Terminal, events, until_event
from organiser import LONG_SECONDS, Organiser, end, until_epoch

from potluck.hub.joinlink import JoinLink
from potluck.testing.processes import ManagedProcess

NAN_PEER = (sys.executable, str(Path(__file__).with_name("nanpeer.py")))


def progress(process: ManagedProcess) -> list[dict[str, Any]]:
    return [each for each in events(process) if each["event"] == "progress"]


def given(terminal: Terminal, link: str) -> dict[str, float]:
    """The leaderboard: samples by name."""
    board = terminal.ask("leaderboard", link, patience_seconds=LONG_SECONDS)
    return {row["name"]: row["samples"] for row in board["peers"]}


@pytest.mark.timeout(400)
def test_strangers_the_banned_and_the_poisonous_do_no_harm(terminal: Terminal) -> None:
    organiser = Organiser(terminal)
    host, link = organiser.host()
    ada = organiser.join(link, "Ada", "--batch-size", "64")
    until_epoch(ada, 2)
    place = ("--run", "waves", "--folder", terminal.folder / "hub")

    # A stranger waits, and is not in the run.
    asking = str(replace(JoinLink.parse(link), invite=""))
    stranger = organiser.join(asking, "Stranger", "--message", "may I?")
    who = until_event(stranger, "waiting")["peer"]
    [request] = terminal.ask("members", "requests", *place)
    assert request["peer"] == who
    assert who not in {row["peer"] for row in terminal.ask("members", "list", *place)}
    refused = organiser.join(asking, "Impatient", "--wait-minutes", "0")
    assert refused.wait(LONG_SECONDS) == 1
    assert "not let you in yet" in refused.output()

    # Who has another recipe is told so.
    changed = terminal.folder / "changed.py"
    changed.write_text(organiser.recipe.read_text().replace("0.05", "0.5"))
    other = organiser.join(link, "Other", "--recipe", changed)
    assert other.wait(LONG_SECONDS) == 2
    assert "is not the recipe of this run" in other.output()

    # Who is banned is cut off while it trains, and does not come back.
    banned = organiser.join(link, "Banned", "--batch-size", "64")
    peer = until_event(banned, "joined")["peer"]
    until_event(banned, "training")
    assert "is banned" in terminal.run("members", "ban", peer, "--reason", "it was rude", *place)
    assert banned.wait(LONG_SECONDS) == 1
    assert "it was rude" in banned.output()
    again = organiser.join(link, "Banned")
    assert again.wait(LONG_SECONDS) == 1
    assert "banned" in again.output()

    # NaNs are left out of the average: nobody's parameters become NaN, and they count for nothing.
    poisoner = organiser.join(link, "Poisoner", "--batch-size", "64", "--client-mode", program=NAN_PEER)
    until_event(poisoner, "training")
    reached = until_epoch(ada, 0 if not progress(ada) else progress(ada)[-1]["epoch"] + 5)["epoch"]
    end(poisoner)

    until_epoch(ada, reached + 3)
    assert all(math.isfinite(each["loss"]) for each in progress(ada))
    epochs = [each["epoch"] for each in progress(ada)]
    assert epochs == sorted(epochs)
    board = given(terminal, link)
    assert board["Ada"] > 0
    assert board.get("Poisoner", 0) == 0
    assert not {"Stranger", "Impatient", "Other"} & set(board)
    end(stranger)
    end(ada)
    end(host)
