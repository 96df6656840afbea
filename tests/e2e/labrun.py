"""A run in the lab: a real host, real peers in processes of their own, and what a test wants to know of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from potluck.hub.joinlink import JoinLink
from potluck.testing.natlab import Host, Node
from potluck.testing.polling import ConditionNotMetError, poll_until_sync
from potluck.testing.processes import ManagedProcess

POTLUCK = Path(sys.executable).with_name("potluck")
PEER_PROGRAM = Path(__file__).with_name("labpeer.py")
MIB = 1024 * 1024
PATIENCE_SECONDS = 50.0  # for whatever should happen soon: the machine may be busy


class RunningPeer:
    """A peer in the lab."""

    def __init__(self, process: ManagedProcess) -> None:
        self._process = process
        joined = self.until("joined")
        self.id: str = joined["peer"]
        self.server: str = joined["server"]

    @classmethod
    def start(cls, node: Node, link: str, *options: str) -> RunningPeer:
        """Join from a node of the lab, and wait until the peer is in."""
        return cls(node.popen([sys.executable, PEER_PROGRAM, link, *options], name="peer", stdin=True))

    def until(self, event: str, *, since: int = 0, within_seconds: float = PATIENCE_SECONDS, **fields: str) -> Any:
        """Wait until the peer says this."""
        words = [f'"{name}": {json.dumps(value)}' for name, value in {"event": event, **fields}.items()]
        return json.loads(self._process.wait_for_line(".*".join(words), within_seconds, since=since).string)

    def decided(self) -> Any:
        """Wait until it knows whether others can dial it, and return that."""
        return self.until("reachability")

    def send(self, to: RunningPeer, transfer: str, num_bytes: int) -> None:
        """Begin to send; `until_arrived` of the other tells when it is there."""
        self._order(do="send", to=to.id, transfer=transfer, bytes=num_bytes)

    def report(self) -> Any:
        """How things stand with it."""
        mark = self._process.mark()
        self._order(do="report")
        return self.until("report", since=mark)

    def until_path(self, other: RunningPeer, path: str, *, within_seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until it uses that kind of path to the other."""
        try:
            poll_until_sync(
                lambda: self.report()["paths"].get(other.id) == path,
                within_seconds,
                f"a {path} path",
                every_seconds=0.2,
            )
        except ConditionNotMetError as error:
            raise AssertionError(f"{error}; instead: {self.report()}") from None

    def leave(self) -> None:
        """Have it leave the run in good order."""
        self._order(do="leave")
        assert self._process.wait(PATIENCE_SECONDS) == 0, self._process.tail()

    def _order(self, **order: object) -> None:
        self._process.send_line(json.dumps(order))


class LabRun:
    """A run whose host is on one node."""

    def __init__(self, node: Host, folder: Path, *options: str) -> None:
        """Start `potluck host` there, with a WebSocket beside the hub's usual port."""
        self.node = node
        command: list[str | Path] = [
            POTLUCK,
            "host",
            "--run",
            "lab",
            "--folder",
            folder,
            "--announce",
            node.address,
            "--json",
            *options,
        ]
        self._process = node.popen(command, name="host")
        ready = json.loads(self._process.wait_for_line('"event":"ready"', PATIENCE_SECONDS).string)
        self.link: str = ready["link"]
        self.address = JoinLink.parse(self.link)

    def join(self, node: Node, *options: str) -> RunningPeer:
        """A peer on that node."""
        return RunningPeer.start(node, self.link, *options)

    def command_joins(self, node: Node, folder: Path) -> None:
        """Run `potluck join` there until it is in, and press Ctrl-C."""
        command: list[str | Path] = [POTLUCK, "join", self.link, "--json", "--identity-path", folder / "joins.nkey"]
        process = node.popen(command, name="join")
        process.wait_for_line('"event":"joined"', PATIENCE_SECONDS)
        process.interrupt()
        assert process.wait(PATIENCE_SECONDS) == 0, process.tail()

    def until_dead(self, peer: RunningPeer) -> Any:
        """Wait until the host says that a peer is dead, and return what it says."""
        return json.loads(self._process.wait_for_line(f'"event":"dead","peer":"{peer.id}"', 80.0).string)

    def deaths(self) -> list[str]:
        """What the host has said of peers that were dead. On a busy machine a peer may well be suspect for a moment."""
        return [line for line in self._process.output().splitlines() if '"event":"dead"' in line]


def exchange(
    sender: RunningPeer, receiver: RunningPeer, transfer: str, num_bytes: int, *, within_seconds: float
) -> float:
    """Send so much and see that it arrives whole; returns the seconds it took."""
    sender.send(receiver, transfer, num_bytes)
    return finish(sender, receiver, transfer, num_bytes, within_seconds=within_seconds)


def finish(
    sender: RunningPeer, receiver: RunningPeer, transfer: str, num_bytes: int, *, within_seconds: float
) -> float:
    """Wait for the end of a transfer and check every byte of it; returns the seconds it took."""
    received = receiver.until("received", transfer=transfer, within_seconds=within_seconds)
    sent = sender.until("sent", transfer=transfer, within_seconds=within_seconds)
    assert received["bytes"] == num_bytes
    assert received["out_of_place"] == 0
    assert received["sha256"] == sent["sha256"]
    return float(sent["seconds"])


def check_nothing_repeated(receiver: RunningPeer) -> None:
    """Check at the end that nothing came after the end of a transfer, and that nothing failed."""
    report = receiver.report()
    for arrived in report["transfers"].values():
        assert arrived["out_of_place"] == 0
        assert arrived["pieces"] == -(-arrived["bytes"] // (256 * 1024))
    assert report["messages_lost"] == report["resets"] == 0, report
