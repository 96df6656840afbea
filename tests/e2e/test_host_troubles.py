"""What a host lives through: its server killed or stopped, its disk full, itself frozen, its folder lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commandline import PATIENCE_SECONDS, Terminal, events, until_event

from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import Children, ManagedProcess
from potluck.testing.smalldisk import CannotMountError, fill, small_disk

pytestmark = pytest.mark.timeout(400)

RUN_FILE = """\
name = "bakery"
recipe = "stdlib-lm"
[model]
layers = 1
width = 16
heads = 2
context = 8
[training]
algorithm = "sync"
target_batch_size = 64
matchmaking_seconds = 0.5
"""
DISK_BYTES = 48 << 20
TRAINER_DISK_BYTES = 320 << 20  # with less it would not be let in
FROZEN_SECONDS = 20.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Bakery:
    """A run that trains, in a folder of its own."""

    def __init__(self, terminal: Terminal, folder: Path) -> None:
        self.terminal = terminal
        self.folder = folder
        (terminal.folder / "run.toml").write_text(RUN_FILE)
        self.host = self.start_host()
        self.link: str = until_event(self.host, "ready")["link"]

    def start_host(self, *options: str) -> ManagedProcess:
        place = ("--folder", self.folder, "--listen", "127.0.0.1", "--backup-every", "5")
        return self.terminal.start("host", self.terminal.folder, *place, "--json", *options, **ONE_THREAD)

    def join(self, name: str, *options: str | Path, **environment: str) -> ManagedProcess:
        key = ("--identity-path", self.terminal.folder / f"{name}.nkey", "--name", name)
        return self.terminal.start("join", self.link, *key, "--json", *options, name=name, **ONE_THREAD, **environment)

    def server(self) -> int:
        """The process id of the hub's server."""
        return int((self.folder / "server.pid").read_text())

    def until_other_server(self, pid: int) -> None:
        """Wait until the hub has another server than that."""
        poll_until_sync(lambda: self.server() != pid, PATIENCE_SECONDS, lambda: f"another server: {self.host.tail()}")


class Town:
    """A bakery with one trainer, on a small disk where one can be mounted. Each test leaves it working."""

    def __init__(self, bakery: Bakery, disk: Path | None, why_no_disk: str) -> None:
        self.bakery, self.disk, self.why_no_disk = bakery, disk, why_no_disk
        self.ada = bakery.join("ada")
        self.until_epoch(2)

    def epoch(self) -> int:
        """The newest epoch that the trainer has told of."""
        return max((event["epoch"] for event in events(self.ada) if event["event"] == "progress"), default=0)

    def until_epoch(self, epoch: int) -> None:
        """Wait until the trainer is so far."""
        poll_until_sync(
            lambda: self.epoch() >= epoch and self.ada.exit_code is None,
            PATIENCE_SECONDS,
            lambda: f"epoch {epoch}: {self.ada.tail()}\n{self.bakery.host.tail()}",
        )

    def goes_on(self) -> bool:
        """Wait for two more epochs; whether none was lost, and nobody told of a bug."""
        self.until_epoch(self.epoch() + 2)
        told = [event["epoch"] for event in events(self.ada) if event["event"] == "progress"]
        return told == sorted(told) and "Traceback" not in self.bakery.host.output() + self.ada.output()


def until_event_after(process: ManagedProcess, epoch: int) -> None:
    """Wait until a trainer tells of this epoch."""
    poll_until_sync(
        lambda: any(event["event"] == "progress" and event["epoch"] >= epoch for event in events(process)),
        PATIENCE_SECONDS,
        process.tail,
    )


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    folder = tmp_path_factory.mktemp("town")
    with contextlib.ExitStack() as stack:
        disk, why_not = None, ""
        try:
            disk = stack.enter_context(small_disk(folder / "disk", DISK_BYTES))
        except CannotMountError as error:
            why_not = str(error)
        children = stack.enter_context(Children(log_folder=folder))
        yield Town(Bakery(Terminal(folder, children), folder / "disk" / "hub"), disk, why_not)


def words_of(process: ManagedProcess) -> str:
    """What a process has said, without the terminal's line breaks."""
    return " ".join(process.output().split())


def test_a_killed_server_is_started_again_and_the_run_goes_on(town: Town) -> None:
    bakery, first = town.bakery, town.bakery.server()
    os.kill(first, signal.SIGKILL)
    bakery.until_other_server(first)
    assert town.goes_on()
    newcomer = bakery.join("bob", "--role", "aux")
    until_event(newcomer, "joined")  # by the same link: port and certificate are as before
    newcomer.interrupt()
    assert newcomer.wait(PATIENCE_SECONDS) == 0
    assert "code -9" in words_of(bakery.host)


def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_room(town: Town) -> None:
    if town.disk is None:
        pytest.skip(town.why_no_disk)
    host, first = town.bakery.host, town.bakery.server()
    monitor = town.bakery.terminal.start("monitor", town.bakery.link, "--json")
    until_event(monitor, "run")
    ballast = fill(town.disk, leave_bytes=DISK_BYTES // 20)
    try:
        assert "has little room left" in until_event(host, "alarm", kind="disk")["text"]
        fill(town.disk)
        # A backup that is pruned in this moment makes a little room.
        full = re.compile(r"is full \(0\.\d MB of 50\.3 MB free\), so the hub cannot write: the run waits")
        poll_until_sync(lambda: full.search(words_of(host)), PATIENCE_SECONDS, host.tail)
        poll_until_sync(
            lambda: any(
                alarm["kind"] == "disk" and full.search(alarm["text"]) for alarm in events(monitor)[-1]["alarms"]
            ),
            PATIENCE_SECONDS,
            monitor.tail,
        )
    finally:
        ballast.unlink()  # the next tests need the room
    town.bakery.until_other_server(first)
    assert town.goes_on()
    until_event(host, "alarm over", kind="disk")


@pytest.mark.timeout(300)
def test_a_trainer_whose_disk_fills_trains_on_and_saves_again_when_there_is_room(town: Town) -> None:
    """Backups and receipts are on that disk; half a line or half a backup is never left behind."""
    if town.disk is None:
        pytest.skip(town.why_no_disk)
    with small_disk(town.bakery.terminal.folder / "bob's disk", TRAINER_DISK_BYTES) as disk:
        states = disk / "states"
        options = ("--backup-every-step", "1", "--state-path", states)
        bob = town.bakery.join("bob", *options, XDG_DATA_HOME=str(disk))

        def until(text: str) -> None:
            poll_until_sync(lambda: text in words_of(bob), PATIENCE_SECONDS, bob.tail)

        def saved() -> list[str]:
            return sorted(path.name for path in (states / "backups").glob("epoch-*.json"))

        def receipts() -> list[Any]:
            files = (disk / "potluck" / "receipts").glob("*.jsonl")
            return [json.loads(line) for file in files for line in file.read_text().splitlines()]

        poll_until_sync(lambda: len(saved()) >= 2 and receipts(), PATIENCE_SECONDS, bob.tail)
        ballast = fill(disk)
        before = saved()[-1]
        for text in ("Training goes on without backups", "receipts could not be written"):
            # Backups that are pruned make room: take that too.
            poll_until_sync(lambda: fill(disk) and text in words_of(bob), PATIENCE_SECONDS, bob.tail)  # noqa: B023
        last = max(event["epoch"] for event in events(bob) if event["event"] == "progress")
        until_event_after(bob, last + 3)
        assert words_of(bob).count("Training goes on without backups") == 1
        ballast.unlink()
        until("backups are written again")
        until("receipts are written to")
        assert saved()[-1] > before
        epochs = [receipt["epoch"] for receipt in receipts()]
        assert len(set(epochs)) == len(epochs), "no receipt is there twice"
        bob.interrupt()
        assert bob.wait(PATIENCE_SECONDS) == 0, bob.tail()
        assert "Traceback" not in bob.output()
    assert town.goes_on()


@pytest.mark.parametrize("whom", ["the host", "the server"])
def test_who_is_frozen_for_a_while_goes_on(town: Town, whom: str) -> None:
    """Longer than a handler's timeout and than the silence after which peers count as dead."""
    bakery = town.bakery
    pid = bakery.host.pid if whom == "the host" else bakery.server()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(FROZEN_SECONDS)
    os.kill(pid, signal.SIGCONT)
    assert town.goes_on()
    assert not [event for event in events(bakery.host) if event["event"] == "dead" and event["name"] == "ada"]


def test_members_of_a_lost_run_are_told_and_go_on_when_it_is_back(town: Town) -> None:
    """Another hub answers at the address: the run was started anew in another folder, or somebody plays the hub."""
    bakery = town.bakery
    ports = json.loads((bakery.folder / "ports.json").read_text())
    bakery.host.interrupt()
    assert bakery.host.wait(PATIENCE_SECONDS) == 0
    place = ("--run", "bakery", "--folder", bakery.terminal.folder / "anew", "--listen", "127.0.0.1")
    where = ("--port", str(ports["client"]), "--websocket-port", str(ports["websocket"]))
    anew = bakery.terminal.start("host", *place, *where, "--json", name="anew", **ONE_THREAD)
    until_event(anew, "ready")
    told = "is not the one that the join link names"
    poll_until_sync(lambda: told in words_of(town.ada), PATIENCE_SECONDS, town.ada.tail)
    assert "join by the new link" in words_of(town.ada)
    anew.interrupt()
    assert anew.wait(PATIENCE_SECONDS) == 0
    assert town.ada.exit_code is None
    bakery.host = bakery.start_host()
    until_event(bakery.host, "ready")
    assert town.goes_on()
