"""A public run as people have it: an organiser and volunteers, each with the real commands, in real processes."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
from commandline import PATIENCE_SECONDS, Terminal, events, until_event
from organiser import LONG_SECONDS, ONE_THREAD, Organiser, end, until_epoch

from potluck.testing.polling import poll_until_sync
from potluck.testing.ports import unused_tcp_port


class Cluster:
    """Three hosts of one run, each as a person starts it."""

    def __init__(self, organiser: Organiser) -> None:
        terminal = organiser.terminal
        ports = [unused_tcp_port() for _ in range(3)]
        hubs = ",".join(f"127.0.0.1:{port}" for port in ports)
        folders = [terminal.folder / f"hub-{place}" for place in (1, 2, 3)]
        terminal.run("host", organiser.folder, "--folder", folders[0], "--make-identity")
        for folder in folders[1:]:
            shutil.copytree(folders[0] / "identity", folder / "identity")
        self.folders = folders
        self.hosts = []
        for place, folder in enumerate(folders, 1):
            what = (organiser.folder,) if place == 1 else ("--run", "waves")
            where = ("--folder", folder, "--listen", "127.0.0.1", "--cluster", hubs, "--place", str(place), "--json")
            self.hosts.append(terminal.start("host", *what, *where, name=f"host-{place}", **ONE_THREAD))
        self.links = [str(until_event(host, "ready")["link"]) for host in self.hosts]

    def kill_server(self, place: int) -> None:
        """Kill the server under one host, and wait until that host has started another."""

        def pid() -> int:
            return int((self.folders[place] / "server.pid").read_text())

        killed = pid()
        os.kill(killed, signal.SIGKILL)
        poll_until_sync(lambda: pid() != killed, PATIENCE_SECONDS, lambda: self.hosts[place].output()[-2000:])


@pytest.mark.timeout(300)
def test_a_newcomer_with_three_terminals(terminal: Terminal) -> None:
    organiser = Organiser(terminal)
    organiser.edit("target_batch_size = 256", "target_batch_size = 64")
    host, link = organiser.host()
    ada, grace = (organiser.join(link, name, "--batch-size", "8") for name in ("Ada", "Grace"))
    for process in (ada, grace):
        assert until_event(process, "training")["recipe"] == "recipe.py"
    until_epoch(ada, 3)
    until_epoch(grace, 3)
    seen = terminal.ask("monitor", link, "--once", patience_seconds=LONG_SECONDS)
    assert seen["run"] == "waves"
    assert seen["epoch"] >= 3
    assert seen["target"] == 64
    trainers = {row["name"]: row for row in seen["peers"] if row["role"] == "trainer"}
    assert set(trainers) == {"Ada", "Grace"}
    assert [row["name"] for row in seen["peers"] if row["coordinates"]] == ["host"]
    board = terminal.ask("leaderboard", link, patience_seconds=LONG_SECONDS)
    assert {row["name"] for row in board["peers"]} == {"Ada", "Grace"}
    assert board["epoch"] >= 3
    assert sum(row["samples"] for row in board["peers"]) >= 64 * (board["epoch"] - board["missed"])
    end(ada)
    given = until_event(ada, "trained")
    assert given["samples"] == 8 * given["steps"] > 0
    until_epoch(grace, events(grace)[-1].get("epoch", 0) + 2)  # alone
    end(grace)
    end(host)


@pytest.mark.timeout(300)
def test_what_changes_in_run_toml_is_followed_by_all(terminal: Terminal) -> None:
    organiser = Organiser(terminal)
    organiser.edit("# [groups] ", "[groups] ")
    organiser.edit('# critic = "all"', 'critic = "all"')
    place = ("--folder", terminal.folder / "hub")
    unknown = "the run has no group 'critc': it has critic, main"
    assert unknown in terminal.refuse("host", organiser.folder, *place, "--group", "critc", code=2)
    host, link = organiser.host()
    assert unknown in terminal.refuse("members", "invite", *place, "--group", "critc", code=2)
    ada = organiser.join(link, "Ada", "--batch-size", "64")
    few = organiser.join(link, "Few", "--batch-size", "8", "--max-steps", "3")
    assert few.wait(LONG_SECONDS) == 0, few.output()
    assert until_event(few, "trained")["steps"] == 3
    until_epoch(ada, 2)
    end(host)
    organiser.edit("end_epoch = 0 ", "end_epoch = 9 ")
    host, again = organiser.host()
    assert again == link
    assert ada.wait(LONG_SECONDS) == 0, ada.output()
    assert until_event(ada, "trained")["epoch"] >= 9
    late = organiser.join(link, "Late")
    assert late.wait(LONG_SECONDS) == 0, late.output()
    assert until_event(late, "over")["epoch"] >= 9
    assert "trained" not in {each["event"] for each in events(late)}
    end(host)
    organiser.edit("seed = 0", "seed = 1")
    refused = terminal.refuse("host", organiser.folder, "--folder", terminal.folder / "hub", code=2)
    assert "seed" in refused


@pytest.mark.timeout(400)
def test_of_three_hosts_one_loses_its_server_one_is_killed_for_good_and_the_run_goes_on(terminal: Terminal) -> None:
    organiser = Organiser(terminal)
    cluster = Cluster(organiser)
    ada, grace = (organiser.join(cluster.links[0], name, "--batch-size", "64") for name in ("Ada", "Grace"))
    until_epoch(ada, 3)
    until_epoch(grace, 3)

    def newest() -> int:
        told = [each for process in (ada, grace) for each in events(process) if each["event"] == "progress"]
        return max(each["epoch"] for each in told)

    cluster.kill_server(1)
    until_epoch(ada, newest() + 2)
    os.kill(cluster.hosts[0].pid, signal.SIGKILL)
    assert cluster.hosts[0].wait(PATIENCE_SECONDS) == -signal.SIGKILL
    seen = newest()
    until_epoch(ada, seen + 3)
    until_epoch(grace, seen + 3)
    edsger = organiser.join(cluster.links[0], "Edsger", "--batch-size", "64")  # by the dead host's link
    until_epoch(edsger, seen + 4)
    assert "Traceback" not in cluster.hosts[1].output()
    for process in (ada, grace, edsger):
        end(process)


@pytest.mark.timeout(400)
def test_all_stop_and_the_run_goes_on_from_the_hosts_backup(terminal: Terminal) -> None:
    organiser = Organiser(terminal)
    host, link = organiser.host()
    ada = organiser.join(link, "Ada", "--batch-size", "64")
    until_epoch(ada, 12)
    states = terminal.folder / "hub" / "states"
    poll_until_sync(lambda: list(states.rglob("*.safetensors")) or None, LONG_SECONDS, "the host to keep states")
    end(ada)  # who has the host take over what she has, though it does so every ten epochs otherwise
    end(host)
    host, again = organiser.host()
    assert again == link
    grace = organiser.join(link, "Grace", "--batch-size", "64")  # who has never seen this run
    reached = until_event(ada, "trained")["epoch"]
    assert max(int(path.stem.removeprefix("epoch-")) for path in states.rglob("epoch-*.json")) >= reached
    assert until_epoch(grace, 0)["epoch"] >= reached
    until_epoch(grace, reached + 2)
    end(grace)
    end(host)
