"""Slots, supervision, traces and notices of spot machines, without a provider."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from potluck.errors import ConfigurationError
from potluck.spot import notice
from potluck.spot.preemption import Change, PreemptionConfig, compressed, generate, parse_trace
from potluck.spot.provider import Machine, NoCapacityError
from potluck.spot.runner import Runner
from potluck.spot.supervision import End, Rest, Start, Supervision, SupervisionConfig, standing
from potluck.spot.tiers import Slot, parse_tiers, slots

DEDLOC = slots(num_workers=16, num_aux=4, bandwidth="4x200,8x100,4x50", aux_bandwidth_mbit=500)
CONFIG = SupervisionConfig(kinds=("small", "large"), settle_seconds=60, short_life_seconds=15)


def test_slots_have_their_tiers_in_order() -> None:
    lines = [slot.bandwidth_mbit for slot in DEDLOC]
    assert lines == [200] * 4 + [100] * 8 + [50] * 4 + [500] * 4
    assert [slot.name for slot in DEDLOC[:2] + DEDLOC[-1:]] == ["worker-0", "worker-1", "aux-3"]
    assert parse_tiers("2 x 10, 0.5") == [(2, 10.0), (1, 0.5)]


def test_one_line_is_for_all_workers() -> None:
    assert {slot.bandwidth_mbit for slot in slots(num_workers=3, num_aux=0, bandwidth="100")} == {100}


@pytest.mark.parametrize("wrong", ["4y200", "x", "0x100", "4x0", "", ","])
def test_wrong_tiers_are_told(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match=r"COUNTxMBIT|above 0"):
        parse_tiers(wrong)


def test_tiers_for_other_numbers_of_workers_are_told() -> None:
    with pytest.raises(ConfigurationError, match="lines for 12 workers, and --workers asks for 16"):
        slots(num_workers=16, num_aux=0, bandwidth="4x200,8x100")


class Market:
    """A provider in memory: lists what it started, loses what it is told to lose."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.num_started = 0

    def carry_out(self, supervision: Supervision, now: float, *, hidden: bool = False) -> list[Start]:
        done = []
        for action in supervision.decide([] if hidden else self.machines.values(), now, {}):
            if isinstance(action, End):
                del self.machines[action.machine.id]
            if not isinstance(action, Start):
                continue
            self.num_started += 1
            machine = Machine(
                id=f"i-{self.num_started}", slot=action.slot.name, kind=action.kind, state="running", started_at=now
            )
            self.machines[machine.id] = machine
            supervision.started(action, machine, now)
            done.append(action)
        return done


@given(st.lists(st.lists(st.integers(0, 19), max_size=6), min_size=1, max_size=30))
@settings(deadline=None)
def test_what_is_preempted_comes_back_in_its_own_tier_and_supervision_never_ends(preempted: list[list[int]]) -> None:
    market, supervision, now = Market(), Supervision(DEDLOC, CONFIG), 0.0
    for batch in preempted:
        for _ in range(6):  # a few turns fill every slot
            now += 61
            market.carry_out(supervision, now)
        filled = Counter(machine.slot for machine in market.machines.values())
        assert filled == Counter(slot.name for slot in DEDLOC)
        found = standing(DEDLOC, market.machines.values(), {})
        assert found.is_full
        assert (found.num_workers, found.num_aux) == (16, 4)
        for number in batch:
            name = DEDLOC[number].name
            market.machines = {key: each for key, each in market.machines.items() if each.slot != name}


def test_aux_peers_never_count_as_workers() -> None:
    aux = [Machine(id=f"i-{i}", slot=f"aux-{i}", kind="small", state="running") for i in range(4)]
    found = standing(DEDLOC, aux, {"small": 0.5})
    assert (found.num_workers, found.num_aux, found.is_full, found.dollars_per_hour) == (0, 4, False, 2.0)
    starts = [action for action in Supervision(DEDLOC, CONFIG).decide(aux, 0.0, {}) if isinstance(action, Start)]
    assert {start.slot.role for start in starts} == {"worker"}


def test_aux_peers_are_started_before_workers_that_may_find_no_capacity() -> None:
    config = SupervisionConfig(kinds=("small",), starts_at_once=5)
    starts = Supervision(DEDLOC, config).decide([], 0.0, {})
    assert [start.slot.name for start in starts if isinstance(start, Start)] == [
        *(f"aux-{n}" for n in range(4)),
        "worker-0",
    ]


def test_a_machine_that_is_not_listed_yet_is_not_started_twice() -> None:
    one = slots(num_workers=1, num_aux=0)
    market, supervision = Market(), Supervision(one, CONFIG)
    assert len(market.carry_out(supervision, 0.0)) == 1
    assert not market.carry_out(supervision, 10.0, hidden=True)  # the list lags behind
    assert not market.carry_out(supervision, 20.0)  # it is seen
    market.machines.clear()
    assert len(market.carry_out(supervision, 30.0)) == 1  # and then its absence means that it is gone


def test_what_has_no_slot_or_is_there_twice_is_ended() -> None:
    there = [
        Machine(id="i-1", slot="worker-0", kind="small", state="running", started_at=1.0),
        Machine(id="i-2", slot="worker-0", kind="small", state="running", started_at=2.0),
        Machine(id="i-3", slot="worker-9", kind="small", state="running"),
    ]
    actions = Supervision(slots(num_workers=1, num_aux=0), CONFIG).decide(there, 0.0, {})
    assert [action.machine.id for action in actions if isinstance(action, End)] == ["i-3", "i-2"]


def test_a_failed_start_waits_longer_each_time_and_takes_another_kind() -> None:
    supervision = Supervision(slots(num_workers=1, num_aux=0), CONFIG)
    now, waits, kinds = 0.0, [], []
    for _ in range(8):
        (start,) = supervision.decide([], now, {})
        assert isinstance(start, Start)
        kinds.append(start.kind)
        waits.append(supervision.failed(start, now, other_kind=True))
        assert supervision.decide([], now + waits[-1] - 0.1, {}) == []
        now += waits[-1]
    assert kinds == ["small", "large"] * 4
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600]


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_machine_that_is_gone_at_once_makes_its_slot_wait_longer_each_time(is_seen: bool) -> None:
    """Its peer may refuse to train: without a pause, machines would be bought for nothing, for ever."""
    market, supervision = Market(), Supervision(slots(num_workers=1, num_aux=0), CONFIG)
    now, rests = 0.0, []
    for _ in range(4):
        assert len(market.carry_out(supervision, now)) == 1
        now += 10 if is_seen else CONFIG.settle_seconds
        if is_seen:
            assert not market.carry_out(supervision, now)
        market.machines.clear()
        (rest,) = supervision.decide([], now, {})
        assert isinstance(rest, Rest)
        assert rest.lived_seconds == (10 if is_seen else 0)
        rests.append(rest.seconds)
        assert supervision.decide([], now + rest.seconds - 0.1, {}) == []
        now += rest.seconds
    assert rests == [10, 20, 40, 80]
    market.carry_out(supervision, now)
    market.carry_out(supervision, now + 20)  # this one stays
    market.machines.clear()
    assert len(market.carry_out(supervision, now + 30)) == 1


class Refusing:
    """A provider that has no room for a while, and one kind that it never starts."""

    def __init__(self) -> None:
        self.there: list[Machine] = []
        self.is_full = True

    def machines(self) -> list[Machine]:
        return list(self.there)

    def start(self, slot: Slot, kind: str) -> Machine:
        if self.is_full:
            raise NoCapacityError("no room")
        if kind == "large":
            raise ConfigurationError("the image is for another processor")
        machine = Machine(id=f"i-{len(self.there)}", slot=slot.name, kind=kind, state="running")
        self.there.append(machine)
        return machine

    def end(self, ids: Sequence[str]) -> None:
        raise AssertionError("nothing is to be ended")

    def prices(self, kinds: Sequence[str]) -> dict[str, float]:
        return dict.fromkeys(kinds, 0.1)

    def remove_everything(self) -> list[str]:
        return []


async def test_a_kind_that_is_refused_later_holds_up_no_other_slot() -> None:
    wanted = slots(num_workers=2, num_aux=1)
    config = SupervisionConfig(kinds=("small", "large"), aux_kinds=("small",), first_wait_seconds=0.0, settle_seconds=0)
    provider, said = Refusing(), list[str]()
    runner = Runner(provider, Supervision(wanted, config), say=said.append)
    assert not (await runner.turn()).is_full
    provider.is_full = False
    await runner.turn()
    assert [machine.slot for machine in provider.there] == ["aux-0"], "workers were to be large now"
    assert sum("another processor" in each for each in said) == 2
    assert (await runner.turn()).is_full


def test_dear_kinds_are_not_started() -> None:
    config = SupervisionConfig(kinds=("small", "large"), max_price=0.5)
    supervision = Supervision(slots(num_workers=1, num_aux=0), config)
    (start,) = supervision.decide([], 0.0, {"small": 0.6, "large": 0.4})
    assert isinstance(start, Start)
    assert start.kind == "large"
    assert supervision.decide([], 0.0, {"small": 0.6, "large": 0.7}) == []


@given(st.integers(1, 40), st.floats(0.0, 40.0), st.floats(1.0, 5.0), st.integers(0, 1000))
@example(1, 5e-324, 1.0, 0)
@settings(deadline=None, max_examples=50)
def test_generated_machines_come_before_they_go(machines: int, bursts: float, burst: float, seed: int) -> None:
    config = PreemptionConfig(num_machines=machines, bursts_per_hour=bursts, mean_burst=burst)
    changes = generate(config, hours=6, seed=seed)
    assert changes == generate(config, hours=6, seed=seed)
    alive: set[str] = set()
    for change in changes:
        assert (change.kind == "remove") == (change.node in alive)
        alive ^= {change.node}
        assert len(alive) <= machines
    assert [change.seconds for change in changes] == sorted(change.seconds for change in changes)


def test_the_generator_is_fitted_to_the_logs() -> None:
    changes = generate(PreemptionConfig(num_machines=28), hours=1000, seed=1)
    removals = Counter(change.seconds for change in changes if change.kind == "remove")
    assert 4500 < len(removals) < 5500  # bursts in 1,000 hours
    assert 7000 < removals.total() < 11000  # the logs have 7.0 and 14.7 departures an hour
    alive_hours = sum((-1 if change.kind == "add" else 1) * change.seconds for change in changes) / 3600
    num_left = sum(1 if change.kind == "add" else -1 for change in changes)
    assert 14 < (alive_hours + 1000 * num_left) / 1000 < 22  # machines on average; the logs have 12.8 and 24.0


def test_both_forms_of_logs_are_read() -> None:
    events = parse_trace("0,add,node1\n0,add,node2\n\n60000,remove,node1\n")
    assert events == [Change(0.0, "add", "node1"), Change(0.0, "add", "node2"), Change(60.0, "remove", "node1")]
    counts = parse_trace("2021-12-10, 13:07:45, 2\n2021-12-10, 13:08:45, 3\n2021-12-10, 13:07:55, 1\n")
    assert [(change.seconds, change.kind) for change in counts] == [
        *[(0.0, "add")] * 2,
        (10.0, "remove"),
        *[(60.0, "add")] * 2,
    ]
    assert compressed(events, 60)[-1] == Change(1.0, "remove", "node1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("0,add,node1\nx,add,node2", "line 2"),
        ("0,add,node1\n5,add,node1", "line 2 of the trace cannot be: node1 is there"),
        ("0,remove,node1", "is not there"),
        ("2021-12-10, noon, 3", "date, time, machines"),
    ],
)
def test_a_wrong_log_is_told_with_its_line(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse_trace(text)


async def test_a_notice_asks_the_command_to_leave(tmp_path: Path) -> None:
    began = tmp_path / "began"
    program = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        f"pathlib.Path({str(began)!r}).touch()\n"
        "time.sleep(600)"
    )

    async def about_to_go() -> str:
        return "terminate at noon" if began.exists() else ""

    said: list[str] = []
    code = await notice.watch(
        [sys.executable, "-c", program], about_to_go, stop=asyncio.Event(), poll_seconds=0.05, say=said.append
    )
    assert code == 7
    assert said == ["terminate at noon: the peer hands in its work and leaves"]


async def test_a_command_that_ends_by_itself_is_not_signalled() -> None:
    async def never() -> str:
        return ""

    code = await notice.watch([sys.executable, "-c", "raise SystemExit(3)"], never, stop=asyncio.Event())
    assert code == 3


def test_slots_are_bounded() -> None:
    for workers, aux in ((0, 0), (-1, 4), (2000, 0)):
        with pytest.raises(ConfigurationError, match="from 1 to 1000 machines"):
            slots(num_workers=workers, num_aux=aux)
    assert slots(num_workers=0, num_aux=1) == [Slot(role="aux", index=0)]
