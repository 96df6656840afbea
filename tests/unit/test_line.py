"""Whose packet is next on a thin line, on virtual time: links take turns, and streams have what rounds leave."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ConfigurationError, PeerUnreachableError
from potluck.link.channel.packet import Urgency
from potluck.link.channel.sendreceipt import SendReceipt
from potluck.link.limits import KIB, MIB, LinkConfig
from potluck.link.line import MOVING_SECONDS, SharedLine
from potluck.link.throttle import Throttle
from potluck.sim.linknode import LinkNode
from potluck.sim.memorycarrier import Conditions, MemoryNetwork
from potluck.sim.virtualclock import VirtualClock

RATE = 250_000.0  # 2 Mbit/s
SHARE = 0.2
PACKET = 16 * KIB


class Lab:
    """Peers that all know each other, on fast ways; some have capped lines."""

    def __init__(self, *capped: str, free: tuple[str, ...] = ("host",), way: Conditions | None = None) -> None:
        self.clock = VirtualClock()
        network = MemoryNetwork(schedule=self.clock.schedule)
        network.set_conditions(way or Conditions(delay_seconds=0.001, bytes_per_second=100e6), kind="direct")
        cap = LinkConfig(send_bytes_per_second=RATE, receive_bytes_per_second=RATE, stream_share=SHARE)
        configs = {**dict.fromkeys(capped, cap), **dict.fromkeys(free, LinkConfig(stream_share=SHARE))}
        self.nodes = {name: LinkNode(name, network, self.clock, config=config) for name, config in configs.items()}
        for one in self.nodes.values():
            for other in self.nodes.values():
                if one is not other:
                    one.table.update_peer(other.presence())

    def send(self, sender: str, to: str, num_bytes: int, urgency: Urgency) -> list[SendReceipt]:
        link = self.nodes[sender].table.links[to]
        frame = memoryview(bytes(64 * KIB))
        return [link.send(b"", [frame], urgency=urgency) for _ in range(num_bytes // len(frame))]

    def seconds_until(self, *sent: list[SendReceipt], within: float = 600.0) -> float:
        began = self.clock.monotonic()
        while not all(receipt.acknowledged for receipts in sent for receipt in receipts):
            assert self.clock.monotonic() - began < within, "it never ends"
            self.clock.advance(0.1)
        return self.clock.monotonic() - began


def arrived(receipts: list[SendReceipt]) -> float:
    """The share of messages that have arrived."""
    return sum(receipt.acknowledged for receipt in receipts) / len(receipts)


def test_links_take_turns_on_a_capped_line_and_none_seems_dead() -> None:
    lab = Lab("ada", "bob")
    pairs = [(one, other) for one in lab.nodes for other in lab.nodes if one != other]
    sent = {pair: lab.send(*pair, 4 * MIB, Urgency.BULK) for pair in pairs}
    longest_seconds = dict.fromkeys(pairs, 0.0)
    for _ in range(200):
        lab.clock.advance(0.1)
        now = lab.clock.monotonic()
        for one, other in pairs:
            if arrived(sent[one, other]) < 1.0:
                silent = now - max(lab.nodes[other].table.links[one].arrived_at(Urgency.BULK), 1000.0)
                longest_seconds[one, other] = max(longest_seconds[one, other], silent)
    assert max(longest_seconds.values()) < 1.5, longest_seconds
    to_both = [arrived(sent["ada", "bob"]), arrived(sent["ada", "host"])]
    assert min(to_both) > 0.8 * max(to_both) > 0.0
    # What each capped line sends and gets, 8 MiB either way, takes as long as the cap says, and no longer.
    assert 20.0 + lab.seconds_until(*sent.values()) < 1.2 * 8 * MIB / RATE


def test_streams_have_their_share_beside_bulk_and_all_of_the_line_without_it() -> None:
    lab = Lab("ada", free=("bob", "host"))
    bulk = lab.send("ada", "bob", 8 * MIB, Urgency.BULK)
    stream = lab.send("ada", "host", 16 * MIB, Urgency.STREAM)
    bulk_seconds = lab.seconds_until(bulk)
    assert bulk_seconds < 1.15 * 8 * MIB / RATE / (1 - SHARE)
    assert 0.5 * SHARE / (1 - SHARE) < arrived(stream) * 16 / 8 < 1.5 * SHARE / (1 - SHARE)
    rest_bytes = 16 * MIB * (1 - arrived(stream))
    assert lab.seconds_until(stream) < 1.15 * rest_bytes / RATE


def test_streams_yield_on_the_same_link_and_without_a_cap() -> None:
    thin = Conditions(delay_seconds=0.02, bytes_per_second=RATE)
    lab = Lab(free=("ada", "bob"), way=thin)
    stream = lab.send("ada", "bob", 16 * MIB, Urgency.STREAM)
    lab.clock.advance(2.0)
    before = arrived(stream)
    bulk = lab.send("ada", "bob", 4 * MIB, Urgency.BULK)
    seconds = lab.seconds_until(bulk)
    assert seconds < 1.2 * 4 * MIB / RATE / (1 - SHARE)
    assert 0.5 * SHARE / (1 - SHARE) < (arrived(stream) - before) * 16 / 4 < 1.5 * SHARE / (1 - SHARE)


def test_bulk_that_does_not_move_leaves_the_line_to_streams() -> None:
    line = SharedLine(None, stream_share=SHARE)
    line.bulk_waits("one", True)
    line.sent("one", 60, PACKET, Urgency.BULK, 10.0)
    line.sent("one", 60, 8 * PACKET, Urgency.STREAM, 10.0)
    assert not line.admits_streams(10.0 + MOVING_SECONDS / 2)
    assert line.admits_streams(10.0 + 2 * MOVING_SECONDS), "the path of the bulk is dead, or nobody takes it"
    line.sent("one", 60, PACKET, Urgency.BULK, 20.0)
    line.bulk_waits("one", False)
    assert line.admits_streams(20.0)


@given(st.lists(st.tuples(st.sampled_from([Urgency.BULK, Urgency.STREAM]), st.integers(1, 512 * KIB)), max_size=200))
def test_streams_never_get_far_more_than_their_share_while_bulk_moves(wanted: list[tuple[Urgency, int]]) -> None:
    line = SharedLine(None, stream_share=SHARE)
    line.bulk_waits("one", True)
    now, passed = 0.0, {Urgency.BULK: 0, Urgency.STREAM: 0}
    line.sent("one", 0, 1, Urgency.BULK, now)
    for urgency, num_bytes in wanted:
        if urgency == Urgency.STREAM and not line.admits_streams(now):
            continue
        now += MOVING_SECONDS / 1000
        line.sent("one", 0, num_bytes, urgency, now)
        passed[urgency] += num_bytes
    largest = 512 * KIB  # by one packet the share may be overdrawn
    assert passed[Urgency.STREAM] <= (passed[Urgency.BULK] + 1) * SHARE / (1 - SHARE) + largest


def test_who_waits_for_the_cap_is_served_in_turn_and_who_leaves_holds_up_nobody() -> None:
    throttle = Throttle(RATE)
    throttle.spent(int(RATE))
    assert [throttle.admits(user, 1, 0.0) for user in ("one", "two", "three")] == [0, 0, 0]
    opened = throttle.available_at(1, 0.0)
    assert not throttle.admits("three", 1, opened)
    assert not throttle.admits("two", 1, opened)
    throttle.leave("one")
    assert not throttle.admits("three", 1, opened)
    assert throttle.admits("two", 1, opened)


def test_what_has_not_begun_to_leave_can_be_withdrawn() -> None:
    lab = Lab("ada", free=("bob",))
    old = lab.send("ada", "bob", 8 * MIB, Urgency.BULK)
    lab.clock.advance(1.0)
    over = PeerUnreachableError("the round is over")
    withdrawn = [receipt for receipt in old if receipt.withdraw(over)]
    assert len(withdrawn) > len(old) / 2
    assert all(receipt.error is over for receipt in withdrawn)
    assert not withdrawn[0].withdraw(over), "it is settled"
    new = lab.send("ada", "bob", MIB, Urgency.BULK)
    assert lab.seconds_until(new, [receipt for receipt in old if receipt not in withdrawn]) < 3 * MIB / RATE
    assert not old[0].withdraw(over), "it has arrived"


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0])
def test_a_share_that_leaves_one_nothing(share: float) -> None:
    with pytest.raises(ConfigurationError, match="stream_share"):
        LinkConfig(stream_share=share)
