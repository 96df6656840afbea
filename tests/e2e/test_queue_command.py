"""`potluck queue` by the real commands: the organiser makes queues, a laptop with a link uses them."""

from __future__ import annotations

import json

from commandline import Party


def test_queues_from_the_command_line(party: Party) -> None:
    here = ("--run", party.place[1], "--folder", party.place[3])

    def queue(*arguments: str) -> str:
        return party.terminal.run("queue", *arguments, *here)

    assert "The queue jobs is there." in queue("add", "jobs", "--tries", "1", "--max-items", "100")
    assert "The topic board is there." in queue("add", "board", "--topic")
    made = party.ask("invite", "--queue", "jobs", "--queue", "board=take")
    laptop = ("--link", made["link"])
    assert party.terminal.ask("queue", "put", "jobs", '{"seed": 7}', "--id", "s7", *laptop) == {"put": True}
    assert party.terminal.ask("queue", "put", "jobs", "1", "--id", "s7", *laptop) == {"put": False}
    refused = party.terminal.refuse("queue", "put", "board", "1", *laptop, code=1)
    assert "may not put on board" in refused
    assert "is not JSON" in party.terminal.refuse("queue", "put", "jobs", "{", *laptop, code=2)
    [row] = [row for row in party.terminal.ask("queue", "ls", *here) if row["definition"]["name"] == "jobs"]
    assert (row["items"], row["dead"]) == (1, 0)
    assert "experience" not in queue("ls")
    assert "seed" in queue("peek", "jobs")
    taken = json.loads(party.terminal.run("queue", "take", "jobs", "--keep", "--json", *laptop))
    assert (taken["id"], taken["value"], taken["tries"]) == ("s7", {"seed": 7}, 1)
    party.terminal.run("queue", "take", "jobs", "--wait", "0.5", *laptop, code=1)  # its only try is over
    assert "seed" in queue("dead", "jobs")
    assert "1 dead letters are in jobs again" in queue("dead", "jobs", "--retry")
    assert "seed" in queue("take", "jobs", "--wait", "5")
    queue("put", "board", '"hello"')
    assert party.terminal.ask("queue", "take", "board", *laptop)["value"] == "hello"
    queue("put", "jobs", "1")
    assert "1 items of jobs are gone." in queue("purge", "jobs")
    assert "is gone" in queue("rm", "board")
    assert "there is no queue board" in party.terminal.refuse("queue", "take", "board", *laptop, code=2)
    missing = party.terminal.refuse("queue", "add", "Bad Name", *here, code=2)
    assert "cannot name a queue" in missing
