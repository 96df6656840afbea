"""The show in the lab: a public host, two trainers behind different NATs, and a host that dies in the middle."""

from __future__ import annotations

import json
from typing import Any

import pytest
from commandline import Terminal, events, until_event
from labrun import POTLUCK
from organiser import LONG_SECONDS, ONE_THREAD, Organiser, end, until_epoch

from potluck.testing.natlab import Host, NatLab
from potluck.testing.processes import ManagedProcess

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("needs_lab")]

BEFORE_EPOCH, AFTER_EPOCHS = 15, 15


class LabOrganiser(Organiser):
    """A run whose commands are typed on nodes of the lab."""

    def host_at(self, node: Host) -> tuple[ManagedProcess, str]:
        where = ("--folder", self.terminal.folder / "hub", "--announce", node.address, "--no-dashboard", "--json")
        process = node.popen([POTLUCK, "host", self.folder, *where], name="host", env=ONE_THREAD)
        return process, str(until_event(process, "ready")["link"])

    def join_at(self, node: Host, link: str) -> ManagedProcess:
        key = ("--identity-path", self.terminal.folder / f"{node.name}.nkey", "--name", node.name)
        options = ("--recipe", self.recipe, "--batch-size", "32", "--json")
        return node.popen([POTLUCK, "join", link, *key, *options], name="join", env=ONE_THREAD)

    def monitor_at(self, node: Host, link: str) -> Any:
        """The run as `potluck monitor` shows it."""
        process = node.popen([POTLUCK, "monitor", link, "--once", "--json"], name="monitor", env=ONE_THREAD)
        assert process.wait(LONG_SECONDS) == 0, process.tail()
        return json.loads(process.output())


def progress(process: ManagedProcess) -> list[dict[str, Any]]:
    return [each for each in events(process) if each["event"] == "progress"]


@pytest.mark.timeout(400)
def test_two_homes_train_together_and_the_host_dies_in_the_middle(lab: NatLab, terminal: Terminal) -> None:
    organiser = LabOrganiser(terminal)
    organiser.edit("target_batch_size = 256", "target_batch_size = 128")
    public = lab.public("hub")
    homes = [lab.behind_nat("alice"), lab.behind_nat("bob", kind="symmetric")]
    host, link = organiser.host_at(public)
    trainers = [organiser.join_at(home, link) for home in homes]
    for trainer in trainers:
        until_epoch(trainer, BEFORE_EPOCH)
    seen = organiser.monitor_at(public, link)
    reach = {row["name"]: row["reach"] for row in seen["peers"]}
    assert (reach["alice"], reach["bob"], reach["host"]) == ("client", "client", "full")

    host.kill()
    before = max(each["epoch"] for trainer in trainers for each in progress(trainer))
    host, again = organiser.host_at(public)
    assert again == link
    for trainer in trainers:
        until_epoch(trainer, before + AFTER_EPOCHS)
    after = organiser.monitor_at(public, link)
    assert after["epoch"] >= before + AFTER_EPOCHS
    assert {row["name"] for row in after["peers"] if row["role"] == "trainer"} == {"alice", "bob"}
    for trainer in trainers:
        told = progress(trainer)
        epochs = [each["epoch"] for each in told]
        assert epochs == sorted(epochs), "a committed epoch was lost"
        assert told[-1]["loss"] < 0.7 * told[0]["loss"]
        end(trainer)
    end(host)
