"""Who has to leave the lobby."""

from __future__ import annotations

from potluck.hub.access.member import AccessRequest
from potluck.hub.guard.connections import Connection
from potluck.hub.guard.lobbycrowd import (
    IDLE_SECONDS,
    LobbyCrowd,
    address_of,
    first_to_go,
    num_from_address,
    share_of_address,
)
from potluck.hub.guard.presencecore import ConnectionId


def stranger(number: int, host: str = "192.0.2.1", at: float = 0.0) -> Connection:
    peer, number_id = f"U{number}", ConnectionId("S", number)
    return Connection(id=number_id, peer=peer, lane="lobby", host=host, opened_at=at + number / 1000, seen_at=at)


def request(number: int, host: str) -> AccessRequest:
    return AccessRequest(peer=f"U{number}", person="key:U", role="trainer", host=host, asked_at=float(number))


def numbers(cut: list[tuple[Connection, str]]) -> list[int]:
    return [connection.id.number for connection, _ in cut]


def nobody(_peer: str) -> bool:
    return False


def test_the_idle_are_cut_and_those_who_wait_are_not() -> None:
    crowd, present = LobbyCrowd(100), [stranger(1), stranger(2)]
    waits = {"U2"}
    assert crowd.to_cut(present, waits.__contains__, IDLE_SECONDS) == []
    [(cut, reason)] = crowd.to_cut(present, waits.__contains__, IDLE_SECONDS + 0.1)
    assert cut.id.number == 1
    assert "does not wait for anything" in reason
    assert crowd.to_cut(present, waits.__contains__, IDLE_SECONDS + 0.2) == []  # it is on its way out
    waits.clear()  # a decision was made: there is time to hear of it
    assert crowd.to_cut(present, nobody, 2 * IDLE_SECONDS) == []
    assert numbers(crowd.to_cut(present, nobody, 2 * IDLE_SECONDS + 0.3)) == [2]


def test_a_full_lobby_cuts_the_oldest_of_the_busiest_address() -> None:
    crowd = LobbyCrowd(12)
    busy = [stranger(number, "192.0.2.66") for number in range(1, 9)]
    honest = [stranger(number, f"192.0.2.{number}") for number in range(100, 106)]
    assert numbers(crowd.to_cut([*honest, *busy], nobody, 1.0)) == [1, 2]
    assert numbers(crowd.to_cut([*honest, *busy, stranger(200, "192.0.2.66")], nobody, 1.0)) == [3]


def test_an_address_beyond_its_share_makes_room_by_itself() -> None:
    crowd = LobbyCrowd(400)
    crowded = [stranger(number, "192.0.2.66") for number in range(103)] + [stranger(500, "192.0.2.1")]
    waits = {"U0", "U1"}
    assert numbers(crowd.to_cut(crowded, waits.__contains__, 1.0)) == [2, 3, 4]
    assert share_of_address(400) == 100
    assert share_of_address(4) == 8  # a small lobby does not shut out a small group


def test_nobody_who_waits_is_cut_for_others() -> None:
    crowd = LobbyCrowd(2)
    assert crowd.to_cut([stranger(number) for number in range(20)], lambda _peer: True, 1.0) == []


def test_an_address_of_ipv6_is_a_network() -> None:
    assert address_of("2001:db8::1") == address_of("2001:db8::ffff:1") != address_of("2001:db8:0:1::1")
    assert address_of("::ffff:192.0.2.1") == address_of("192.0.2.1") == "192.0.2.1"
    assert address_of("") == ""


def test_the_newest_of_the_busiest_address_makes_room_on_the_list() -> None:
    waiting = [request(1, "192.0.2.66"), request(2, "192.0.2.66"), request(3, "192.0.2.1")]
    assert first_to_go(waiting, "192.0.2.2") == "U2"
    assert first_to_go(waiting, "192.0.2.1") == ""  # it would be as busy itself
    assert first_to_go([], "192.0.2.1") == ""
    assert num_from_address(waiting, "192.0.2.66") == 2
