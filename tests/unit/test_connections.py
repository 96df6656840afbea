"""The table of open connections: events, lists, and what is missing from either."""

from __future__ import annotations

from typing import Any

from potluck.hub.guard.connections import REMEMBER_CLOSED_SECONDS, Connection, Connections
from potluck.hub.guard.presencecore import ConnectionId

ANN, BOB = "U" + "A" * 55, "U" + "B" * 55


def made(number: int, peer: str = ANN, *, server: str = "one", **changes: Any) -> Connection:
    return Connection(**{"id": ConnectionId(server, number), "peer": peer, "lane": "main", "seen_at": 1.0, **changes})


def test_connections_open_and_close():
    table = Connections()
    assert table.opened(made(1, host="192.0.2.1", opened_at=5.0))
    assert not table.opened(made(1))
    assert table.opened(made(2, lane="bulk"))
    assert table.is_live(ANN)
    assert (table.count("main"), table.count("bulk"), len(table)) == (1, 1, 2)
    assert table.host_of(ANN) == "192.0.2.1"
    closed = table.closed(ConnectionId("one", 1), 2.0)
    assert closed is not None
    assert closed.peer == ANN
    assert not table.is_live(ANN)
    assert table.closed(ConnectionId("one", 1), 2.0) is None
    assert table.of_peer(ANN) == [made(2, lane="bulk")]
    table.closed(ConnectionId("one", 2), 2.0)
    assert len(table) == 0
    assert table.host_of(ANN) == ""


def test_the_oldest_come_first_and_the_newest_tells_the_host():
    table = Connections()
    table.opened(made(1, opened_at=9.0, host="new"))
    table.opened(made(2, opened_at=3.0, host="old"))
    assert [connection.host for connection in table.of_peer(ANN)] == ["old", "new"]
    assert table.host_of(ANN) == "new"


def test_what_closed_while_a_list_was_made_does_not_come_back():
    table = Connections()
    table.opened(made(1))
    table.closed(ConnectionId("one", 1), 10.0)
    assert not table.opened(made(1))
    assert table.compare([made(1)], ["one"], 9.0, 10.0) == []
    assert not table.is_live(ANN)
    table.compare([], ["one"], 10.0, 10.0 + REMEMBER_CLOSED_SECONDS)
    assert table.opened(made(1))  # by then it is forgotten


def test_what_is_not_listed_has_vanished():
    table = Connections()
    table.opened(made(1))
    table.opened(made(2, BOB))
    assert table.compare([made(2, BOB)], ["one"], 5.0, 6.0) == [made(1)]
    assert not table.is_live(ANN)
    assert table.is_live(BOB)


def test_what_opened_after_the_question_is_not_missed_in_the_answer():
    table = Connections()
    table.opened(made(1, seen_at=7.0))
    assert table.compare([], ["one"], 5.0, 8.0) == []
    assert table.is_live(ANN)


def test_a_server_that_does_not_answer_once_is_only_slow():
    table = Connections()
    table.opened(made(1, server="two"))
    assert table.compare([], ["one"], 5.0, 6.0) == []
    assert table.compare([made(1, server="two")], ["one", "two"], 7.0, 8.0) == []
    assert table.compare([], ["one"], 9.0, 10.0) == []
    assert table.compare([], ["one"], 11.0, 12.0) == [made(1, server="two")]
