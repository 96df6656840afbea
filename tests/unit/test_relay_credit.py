"""Credit: what is on its way to one receiver stays within its budget, and nobody starves."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from potluck.errors import ConfigurationError
from potluck.link.relay.credit import KIB, MIB, RESERVE_BYTES, CreditConfig, InboundBudget, SendCredit

PACKET_BYTES = 512 * KIB
CONFIG = CreditConfig()


class Sender:
    """An honest sender and the way between it and the receiver: both directions keep their order."""

    def __init__(self, budget: InboundBudget, clock: list[float]) -> None:
        self.budget = budget
        self.clock = clock
        self.to_sender: deque[tuple[int, int]] = deque()
        self.to_receiver: deque[tuple[str, int, int, int]] = deque()
        self.account = budget.open(lambda limit, serial: self.to_sender.append((limit, serial)), clock[0])
        self.allowance = SendCredit(limit_bytes=self.account.limit_bytes, base_bytes=self.account.limit_bytes)
        self.num_arrived = 0

    @property
    def in_flight_bytes(self) -> int:
        return sum(size for kind, size, _, _ in self.to_receiver if kind == "data")

    def send(self, size: int) -> bool:
        if not self.allowance.allows(size):
            self.allowance.want(size)
            self.to_receiver.append(("want", size, self.allowance.sent_bytes, 0))
            return False
        self.allowance.sent_bytes += size
        self.to_receiver.append(("data", size, 0, 0))
        return True

    def give_back(self) -> None:
        if self.allowance.is_busy and not self.allowance.wanted_bytes:
            self.allowance.give_back()
            a = self.allowance
            self.to_receiver.append(("yield", a.limit_bytes, a.sent_bytes, a.serial))

    def hear(self) -> None:
        if self.to_sender:
            self.allowance.granted(*self.to_sender.popleft())

    def deliver(self, *, lose: bool = False) -> None:
        if not self.to_receiver:
            return
        kind, first, sent, serial = self.to_receiver.popleft()
        if kind == "want":
            self.budget.wants(self.account, sent, first, self.clock[0])
        elif kind == "yield":
            self.budget.yields(self.account, sent, first, serial)
        elif not lose:
            assert self.budget.arrived(self.account, first, self.clock[0]), (
                "an honest sender is never beyond its credit"
            )
            self.num_arrived += 1


def granted_bytes(budget: InboundBudget, senders: list[Sender]) -> int:
    return sum(sender.account.limit_bytes - sender.account.received_bytes for sender in senders)


def test_a_little_needs_no_asking() -> None:
    budget = InboundBudget()
    sender = Sender(budget, [0.0])
    for _ in range(1000):
        assert sender.send(10 * KIB)
        sender.deliver()
        sender.hear()
    assert budget.charged_bytes == 0


def test_one_sender_gets_the_whole_budget_and_is_never_stopped() -> None:
    budget = InboundBudget()
    clock = [0.0]
    sender = Sender(budget, clock)
    assert not sender.send(PACKET_BYTES)
    sender.deliver()
    sender.hear()
    assert sender.allowance.limit_bytes == CONFIG.least_bytes
    for _ in range(4000):  # 2 GB at 500 MB/s
        clock[0] += 0.001
        assert sender.send(PACKET_BYTES)
        sender.deliver()
        sender.hear()
    assert budget.budget_bytes == CONFIG.most_bytes


def test_the_budget_follows_the_speed_of_the_line() -> None:
    budget = InboundBudget()
    clock = [0.0]
    sender = Sender(budget, clock)
    for _ in range(1000):
        clock[0] += 0.05  # 10 packets of 512 KiB in half a second: 10 MB/s
        if not sender.send(PACKET_BYTES):
            sender.deliver()
        sender.deliver()
        sender.hear()
        sender.hear()
    assert 16 * MIB < budget.budget_bytes < 24 * MIB


def test_credit_that_is_given_back_serves_others() -> None:
    budget = InboundBudget()
    clock = [0.0]
    first, second = Sender(budget, clock), Sender(budget, clock)
    assert not first.send(PACKET_BYTES)
    first.deliver()
    first.hear()
    assert budget.charged_bytes == budget.budget_bytes - first.allowance.base_bytes
    assert not second.send(PACKET_BYTES)
    second.deliver()
    assert budget.num_waiting == 1
    first.give_back()
    first.deliver()
    assert budget.num_waiting == 0
    second.hear()
    assert second.send(PACKET_BYTES)


def test_who_has_used_up_its_credit_and_stops_makes_room_for_others() -> None:
    budget = InboundBudget()
    clock = [0.0]
    senders = [Sender(budget, clock) for _ in range(8)]
    for _ in range(40):
        for sender in senders:
            if not sender.allowance.wanted_bytes:
                sender.send(400 * KIB)
            sender.deliver()
            sender.hear()
    first, *others = senders
    for sender in others:
        sender.allowance.wanted_bytes = 0  # what it had to send is gone
        sender.give_back()
        while sender.to_receiver:
            sender.deliver()
    for _ in range(20):
        if not first.allowance.wanted_bytes:
            first.send(400 * KIB)
        first.deliver()
        first.hear()
    left = first.account.limit_bytes - first.account.received_bytes
    assert left >= budget.budget_bytes // 2 - 400 * KIB, "it shares with nobody, so it has the budget for itself"


def test_credit_that_crossed_a_yield_is_not_counted_back() -> None:
    budget = InboundBudget()
    clock = [0.0]
    sender = Sender(budget, clock)
    sender.send(PACKET_BYTES)
    sender.deliver()
    sender.hear()
    sender.give_back()
    charged = budget.charged_bytes
    budget.wants(sender.account, 0, PACKET_BYTES, 0.0)  # our newest word leaves before the yield arrives
    sender.deliver()
    assert budget.charged_bytes == charged
    sender.hear()
    assert sender.allowance.limit_bytes == sender.account.limit_bytes


def test_a_sender_that_sits_on_its_credit_is_counted_no_longer() -> None:
    budget = InboundBudget()
    clock = [0.0]
    idle, other = Sender(budget, clock), Sender(budget, clock)
    idle.send(PACKET_BYTES)
    idle.deliver()
    clock[0] = 1.0
    other.send(PACKET_BYTES)
    other.deliver()
    budget.write_off_idle(clock[0])
    assert budget.num_waiting == 1
    clock[0] = CONFIG.idle_seconds + 0.5
    budget.write_off_idle(clock[0])
    assert budget.num_waiting == 0
    other.hear()
    assert other.send(PACKET_BYTES)


def test_a_path_that_closes_gives_its_credit_back() -> None:
    budget = InboundBudget()
    clock = [0.0]
    first, second = Sender(budget, clock), Sender(budget, clock)
    for sender in (first, second):
        sender.send(PACKET_BYTES)
        sender.deliver()
    assert budget.num_waiting == 1
    budget.close(first.account)
    budget.close(first.account)
    assert budget.num_waiting == 0
    budget.close(second.account)
    assert budget.charged_bytes == 0


def test_a_waiting_path_that_closes_does_not_hold_up_the_others() -> None:
    budget = InboundBudget()
    clock = [0.0]
    senders = [Sender(budget, clock) for _ in range(3)]
    for sender in senders:
        sender.send(PACKET_BYTES)
        sender.deliver()
    assert budget.num_waiting == 2
    budget.close(senders[1].account)
    budget.close(senders[0].account)
    assert budget.num_waiting == 0
    senders[2].hear()
    assert senders[2].send(PACKET_BYTES)
    budget.close(senders[2].account)
    assert budget.charged_bytes == 0


def test_who_waits_is_served_before_who_still_has_credit_gets_more() -> None:
    budget = InboundBudget()
    clock = [0.0]
    busy, waiting = Sender(budget, clock), Sender(budget, clock)
    for sender in (busy, waiting):
        sender.send(MIB)
        sender.deliver()
        sender.hear()
    assert budget.num_waiting == 1
    limit = busy.account.limit_bytes
    while busy.send(100 * KIB):
        busy.deliver()
        if budget.num_waiting == 0:
            break
        assert busy.account.limit_bytes == limit
    waiting.hear()
    assert waiting.send(MIB)


def test_more_than_the_credit_is_refused() -> None:
    budget = InboundBudget()
    account = budget.open(lambda limit, serial: None, 0.0)
    assert not budget.arrived(account, account.limit_bytes + 1, 0.0)
    assert budget.arrived(account, account.limit_bytes, 0.0)


def test_many_paths_share_the_reserve() -> None:
    budget = InboundBudget()
    accounts = [budget.open(lambda limit, serial: None, 0.0) for _ in range(1000)]
    assert sum(account.limit_bytes for account in accounts) < 4 * RESERVE_BYTES
    assert accounts[-1].limit_bytes >= 4 * KIB


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    num_senders=st.integers(1, 40),
    loss=st.sampled_from([0.0, 0.0, 0.1]),
    packet_bytes=st.sampled_from([1000, 100 * KIB, PACKET_BYTES, MIB + 1000]),
)
@example(seed=2080, num_senders=5, loss=0.0, packet_bytes=MIB + 1000)  # all hold some credit, and none enough
def test_the_budget_holds_and_everything_arrives(seed: int, num_senders: int, loss: float, packet_bytes: int) -> None:
    """Senders that start, stop, yield and ask in any order; messages each way take their time."""
    chance = random.Random(seed)
    clock = [0.0]
    budget = InboundBudget()
    senders = [Sender(budget, clock) for _ in range(num_senders)]
    left = {sender: chance.randrange(0, 30) for sender in senders}
    allowed = CONFIG.most_bytes + num_senders * CONFIG.base_bytes + 2 * MIB
    for turn in range(60_000):
        clock[0] += 0.0005
        sender = chance.choice(senders)
        match chance.randrange(5):
            case 0 if left[sender] and not sender.allowance.wanted_bytes:
                left[sender] -= sender.send(packet_bytes)
            case 1:
                if chance.random() < 0.05:
                    sender.give_back()
            case 2:
                sender.hear()
            case _:
                lose = bool(sender.to_receiver) and sender.to_receiver[0][0] == "data" and chance.random() < loss
                sender.deliver(lose=lose)
        if turn % 16:
            continue
        assert budget.charged_bytes <= CONFIG.most_bytes
        assert granted_bytes(budget, senders) <= allowed
        assert sum(sender.in_flight_bytes for sender in senders) <= allowed
        if not any(left.values()) and not any(sender.to_receiver for sender in senders):
            break
    assert not any(left.values()), "somebody starved"


@pytest.mark.parametrize(
    "wrong",
    [
        {"least_bytes": 1 * MIB},
        {"most_bytes": 3 * MIB},
        {"base_bytes": 0},
        {"base_bytes": 64 * MIB},
        {"absorb_seconds": 0.0},
        {"idle_seconds": -1.0},
    ],
)
def test_a_config_that_cannot_work_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        CreditConfig(**wrong)  # type: ignore[arg-type]
