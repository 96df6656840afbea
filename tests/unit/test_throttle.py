"""A cap on what links send and receive, on virtual time."""

from __future__ import annotations

import pytest

from potluck.errors import ConfigurationError
from potluck.link.limits import INITIAL_CREDIT_BYTES, MIB, LinkConfig
from potluck.link.throttle import Throttle
from potluck.sim.linknode import LinkNode
from potluck.sim.memorycarrier import Conditions, MemoryNetwork
from potluck.sim.virtualclock import VirtualClock

RATE = 1_000_000.0


def test_the_bucket_fills_up_and_may_be_overdrawn_by_one_packet() -> None:
    throttle = Throttle(RATE)
    assert throttle.available_bytes(0.0) == RATE * 0.1
    throttle.spent(300_000)
    assert throttle.available_bytes(0.1) == 0
    assert throttle.available_at(1, 0.1) == pytest.approx(0.2, abs=1e-3)
    assert throttle.available_bytes(0.201) == pytest.approx(1000, abs=1)
    assert throttle.available_bytes(100.0) == RATE * 0.1
    assert throttle.available_at(10**9, 100.0) == 100.0, "no more than a full bucket is waited for"


@pytest.mark.parametrize("rate", [0.0, -1.0, 1000.0, float("nan")])
def test_a_cap_that_leaves_nothing(rate: float) -> None:
    with pytest.raises(ConfigurationError, match="at least"):
        LinkConfig(send_bytes_per_second=rate)


def seconds_for(total: int, sender: LinkConfig, *receivers: LinkConfig, message: int = MIB // 4) -> list[float]:
    """How long it takes one peer to send so much to each of the others, on a fast line."""
    clock = VirtualClock()
    network = MemoryNetwork(schedule=clock.schedule)
    network.set_conditions(Conditions(delay_seconds=0.01, bytes_per_second=100e6), kind="direct")
    one = LinkNode("one", network, clock, config=sender)
    receipts = []
    for number, config in enumerate(receivers):
        other = LinkNode(f"other {number}", network, clock, config=config)
        one.table.update_peer(other.presence())
        other.table.update_peer(one.presence())
        receipts.append([one.send(other.name, b"", [bytes(message)]) for _ in range(total // message)])
    start = clock.monotonic()
    ends: list[float | None] = [None] * len(receivers)
    while any(end is None for end in ends):
        assert clock.monotonic() - start < 100.0, "it never ends"
        clock.advance(0.05)
        for number, sent in enumerate(receipts):
            if ends[number] is None and all(receipt.acknowledged for receipt in sent):
                ends[number] = clock.monotonic() - start
    return [end for end in ends if end is not None]


def test_all_links_together_send_no_faster() -> None:
    free = LinkConfig()
    [quick] = seconds_for(8 * MIB, free, free)
    assert quick < 1.0
    capped = LinkConfig(send_bytes_per_second=RATE)
    expected = 8 * MIB / RATE
    [slow] = seconds_for(8 * MIB, capped, free)
    assert expected - 1.0 < slow < 1.2 * expected
    both = seconds_for(4 * MIB, capped, free, free)
    assert expected - 1.0 < max(both) < 1.2 * expected


@pytest.mark.parametrize("message", [MIB // 4, 8 * MIB])
def test_nobody_is_sent_more_than_it_wants(message: int) -> None:
    capped, free = LinkConfig(receive_bytes_per_second=RATE), LinkConfig()
    [slow] = seconds_for(8 * MIB, free, capped, message=message)
    expected = (8 * MIB - INITIAL_CREDIT_BYTES) / RATE
    assert expected - 1.0 < slow < 1.2 * expected + 1.0


def test_small_messages_are_not_held_up_for_long() -> None:
    clock = VirtualClock()
    network = MemoryNetwork(schedule=clock.schedule)
    config = LinkConfig(send_bytes_per_second=RATE)
    one, other = (LinkNode(name, network, clock, config=config) for name in ("one", "other"))
    one.table.update_peer(other.presence())
    other.table.update_peer(one.presence())
    bulk = one.send("other", b"", [bytes(8 * MIB)], bulk=True)
    clock.advance(1.0)
    small = one.send("other", b"hello", [bytes(1000)])
    clock.advance(1.0)
    assert small.acknowledged
    assert not bulk.acknowledged
