"""Which connections lead nowhere, as Linux tells it."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from potluck.hub.guard import acknowledgements
from potluck.hub.guard.acknowledgements import read_table, unacknowledged

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LINE = "   0: 0100007F:107E {remote} {state} {sent:08X}:00000000 01:00000014 {repeats:08X}  1000        0 12345 1\n"
OF_LITTLE_ENDIANS = pytest.mark.skipif(sys.byteorder != "little", reason="the lines are as x86 and ARM write them")


def table(remote: str = "070200C0:C350", state: str = "01", sent: int = 40, repeats: int = 4) -> str:
    return HEAD + LINE.format(remote=remote, state=state, sent=sent, repeats=repeats)


@OF_LITTLE_ENDIANS
def test_what_was_sent_again_and_again_leads_nowhere() -> None:
    assert read_table(table()) == {("192.0.2.7", 50000)}


@pytest.mark.parametrize(
    "line", [table(sent=0), table(repeats=1), table(state="06")], ids=["all acknowledged", "one lost", "closed"]
)
def test_what_is_acknowledged_or_closed_is_not_named(line: str) -> None:
    assert read_table(line) == set()


@OF_LITTLE_ENDIANS
def test_addresses_are_written_as_the_hub_writes_them() -> None:
    mapped = table("0000000000000000FFFF0000070200C0:C350")
    plain = table("B80D0120000000000000000001000000:C350")
    assert read_table(mapped) == {("192.0.2.7", 50000)}
    assert read_table(plain) == {("2001:db8::1", 50000)}


def test_the_table_of_this_machine_can_be_read_and_a_live_connection_is_not_in_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.sendall(b"nobody reads this, and the kernel acknowledges it")
        assert server.getsockname() not in unacknowledged()


def test_where_the_system_tells_nothing_nobody_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(acknowledgements, "TABLES", (tmp_path / "absent",))
    assert unacknowledged() == set()
