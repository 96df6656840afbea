"""`potluck spot` with real trainers: each slot a network namespace behind a line of its own speed."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from commandline import PATIENCE_SECONDS, POTLUCK, Terminal, events, until_event
from organiser import LONG_SECONDS, ONE_THREAD, Organiser, end, until_epoch

from potluck.testing import namespaces
from potluck.testing.polling import poll_until_sync
from potluck.testing.shaping import netem_available
from potluck.testing.slotlines import PREFIX, SlotLines

EXPERIMENT = f"trial-{os.getpid()}"
LINES = f"{PREFIX}.{EXPERIMENT}."
# Of three nodes the first goes away; the third comes and takes its place.
TRACE = "0,add,node1\n0,add,node2\n5000,remove,node1\n6000,add,node3\n"


@pytest.fixture
def lines() -> Iterator[SlotLines]:
    made = SlotLines(EXPERIMENT)
    yield made
    made.remove()


def line_of(slot: str) -> str:
    """How a slot's line is shaped, by what shapes it."""
    if netem_available():
        return namespaces.run_tool(["tc", "-n", f"{LINES}{slot}.host", "qdisc", "show", "dev", "eth0"])
    pids = namespaces.run_tool(["ip", "netns", "pids", f"{LINES}{slot}.line"]).split()
    return " ".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)


def machines(terminal: Terminal, slot: str) -> list[Path]:
    """The folders of all machines that a slot has had, in order."""
    return sorted((terminal.folder / "data/potluck/spot" / EXPERIMENT / "machines").glob(f"{slot}-*"))


def has_trained(machine: Path) -> bool:
    log = machine / "output.log"
    said = log.read_text().splitlines() if log.exists() else []
    return any(json.loads(line).get("samples", 0) > 0 for line in said if line.startswith('{"event":"progress"'))


@pytest.mark.lab
@pytest.mark.usefixtures("needs_lab", "lines")
@pytest.mark.timeout(400)
def test_trainers_on_lines_of_their_tiers_through_a_preemption(terminal: Terminal) -> None:
    organiser = Organiser(terminal)
    trace = terminal.folder / "trace.csv"
    trace.write_text(TRACE)
    wanted = ("--workers", "2", "--bandwidth", "1x20,1x5", "--aux", "1", "--experiment", EXPERIMENT)
    market = ("--trace", trace, "--compress", "1", "--json")
    up = terminal.start("spot", "up", organiser.folder, *wanted, *market, name="up", **ONE_THREAD)
    link = until_event(up, "ready")["link"]
    assert "25.1.0.1" in link
    poll_until_sync(lambda: len(machines(terminal, "worker-0")) >= 2, LONG_SECONDS, "the first worker to come again")
    again = machines(terminal, "worker-0")[-1]
    for machine in (again, machines(terminal, "worker-1")[-1]):
        poll_until_sync(
            lambda machine=machine: has_trained(machine),
            LONG_SECONDS,
            lambda machine=machine: f"{machine.name} to train: {(machine / 'output.log').read_text()[-2000:]}",
        )
    for slot, rate in (("worker-0", ("20000000.0", "20Mbit")), ("worker-1", ("5000000.0", "5Mbit"))):
        assert any(word in line_of(slot) for word in rate), line_of(slot)
        pid = json.loads((machines(terminal, slot)[-1] / "machine.json").read_text())["pid"]
        assert str(pid) in namespaces.run_tool(["ip", "netns", "pids", f"{LINES}{slot}.host"]).split()
    os.kill(up.pid, signal.SIGINT)
    assert up.wait(PATIENCE_SECONDS) == 0, up.output()
    assert "Traceback" not in up.output()
    place = ("--experiment", EXPERIMENT)
    there = terminal.ask("spot", "status", *place)
    assert {machine["slot"] for machine in there} == {"worker-0", "worker-1", "aux-0"}, "they outlive the runner"
    removed = terminal.ask("spot", "down", *place)["removed"]
    assert {machine["id"] for machine in there} <= set(removed)
    assert namespaces.existing(LINES) == []
    assert terminal.ask("spot", "status", *place) == []
    assert any("worker-0 is" in each["text"] for each in events(up) if each["event"] == "said")


class Metadata(BaseHTTPRequestHandler):
    """AWS's metadata service, version 2: it wants a token, and has nothing to say until a notice is given."""

    notice = threading.Event()

    def do_PUT(self) -> None:
        self._answer(200, b"token")

    def do_GET(self) -> None:
        assert self.headers["X-aws-ec2-metadata-token"] == "token"
        is_given = self.notice.is_set()
        action = b'{"action": "terminate", "time": "2026-11-18T02:30:00Z"}' if is_given else b""
        self._answer(200 if is_given else 404, action)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[ThreadingHTTPServer]:
    Metadata.notice.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.timeout(400)
def test_a_trainer_with_two_minutes_notice_hands_in_its_work_and_leaves(
    terminal: Terminal, metadata: ThreadingHTTPServer
) -> None:
    """As on a spot machine: `spot watch` around `join`. What it has given counts, and the run goes on without it."""
    organiser = Organiser(terminal)
    host, link = organiser.host()
    stays = organiser.join(link, "stays")
    url = f"http://127.0.0.1:{metadata.server_address[1]}"
    watch = ("spot", "watch", "--metadata-url", url, "--poll-seconds", "0.2", "--", *POTLUCK)
    goes = organiser.join(link, "goes", program=(*POTLUCK, *watch))
    until_epoch(goes, 2)
    Metadata.notice.set()
    assert goes.wait(PATIENCE_SECONDS) == 0, goes.output()
    assert "terminate at 2026-11-18T02:30:00Z: the peer hands in its work and leaves" in goes.output()
    assert "Traceback" not in goes.output()
    left = until_event(goes, "trained")
    assert left["given"] > 0
    until_epoch(stays, left["epoch"] + 2)
    for process in (stays, host):
        end(process)
