"""Outer optimizers, streaming, DyLU and quorum: formulas as they are written, and identities that hold exactly."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from potluck.errors import ConfigurationError, ProtocolError
from potluck.messages import decode
from potluck.optim.methods.delayed import DelayedNesterov
from potluck.optim.methods.dylu import fast_rate, inner_steps
from potluck.optim.methods.outer import Nesterov, OuterOptimizer, OuterSGD
from potluck.optim.methods.quorum import LONGEST_GRACE_SECONDS, AdaptiveGrace, AdaptiveQuorum, ByMost, token_weight
from potluck.optim.methods.streaming import FragmentSchedule, layer_of, mix, split
from potluck.round.coordinator.trigger import Quorum, ReadySender
from potluck.round.plan.messages import Ready
from potluck.round.plan.specs import StartSpec

torch.set_num_threads(1)


def changes(count: int, size: int = 50) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=generator) for _ in range(count)]


def run(outer: OuterOptimizer, deltas: list[Tensor]) -> Tensor:
    parameters = {"w": torch.ones_like(deltas[0])}
    for delta in deltas:
        outer.step(parameters, {"w": delta})
    return parameters["w"]


def run_torch(deltas: list[Tensor], **options: float | bool) -> Tensor:
    parameter = torch.nn.Parameter(torch.ones_like(deltas[0]))
    optimizer = torch.optim.SGD([parameter], **options)  # type: ignore[arg-type]
    for delta in deltas:
        parameter.grad = delta.clone()
        optimizer.step()
    return parameter.detach()


def test_nesterov_is_torchs_own_bit_for_bit() -> None:
    deltas = changes(9)
    assert torch.equal(run(Nesterov(0.7, 0.9), deltas), run_torch(deltas, lr=0.7, momentum=0.9, nesterov=True))


def test_nesterov_follows_its_formula() -> None:
    theta, velocity = torch.ones(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    deltas = changes(5)
    for delta in deltas:
        velocity = delta.double() + 0.9 * velocity
        theta = theta - 0.7 * (delta.double() + 0.9 * velocity)
    torch.testing.assert_close(run(Nesterov(), deltas).double(), theta, rtol=1e-5, atol=1e-5)


def test_nesterov_without_momentum_is_sgd() -> None:
    deltas = changes(4)
    assert torch.equal(run(Nesterov(0.3, 0.0), deltas), run(OuterSGD(0.3), deltas))


def test_outer_sgd_with_lr_1_is_the_average_of_the_parameters() -> None:
    theta, workers = torch.ones(50), changes(4)
    mean_change = torch.stack([theta - worker for worker in workers]).mean(0)
    parameters = {"w": theta.clone()}
    OuterSGD(1.0).step(parameters, {"w": mean_change})
    # θ − mean(θ − θ_k) = mean θ_k; each of the operations rounds once, hence a few units in the last place
    torch.testing.assert_close(parameters["w"], torch.stack(workers).mean(0), rtol=1e-6, atol=1e-6)


def test_fragments_have_momentum_of_their_own() -> None:
    a, b = changes(2)
    parameters = {"a": torch.ones(50), "b": torch.ones(50)}
    outer = Nesterov()
    outer.step(parameters, {"a": a})
    assert torch.equal(parameters["b"], torch.ones(50))
    outer.step(parameters, {"b": b})
    assert torch.equal(parameters["b"], run(Nesterov(), [b]))


@pytest.mark.parametrize("outer", [Nesterov(), DelayedNesterov(delay=3), OuterSGD(0.5)])
def test_a_saved_outer_optimizer_goes_on_bit_for_bit(outer: OuterOptimizer) -> None:
    deltas = changes(7)
    parameters = {"w": torch.ones(50)}
    for delta in deltas[:4]:
        outer.step(parameters, {"w": delta})
    other = type(outer)(delay=3) if isinstance(outer, DelayedNesterov) else type(outer)()
    if isinstance(outer, OuterSGD):
        other = OuterSGD(0.5)
    other.load_tensors(outer.tensors())
    other.load_numbers(outer.numbers())
    copy = {"w": parameters["w"].clone()}
    for delta in deltas[4:]:
        outer.step(parameters, {"w": delta})
        other.step(copy, {"w": delta})
    assert torch.equal(copy["w"], parameters["w"])


def test_delayed_nesterov_with_one_peer_is_nesterov() -> None:
    deltas = changes(6)
    torch.testing.assert_close(run(DelayedNesterov(delay=1), deltas), run(Nesterov(), deltas), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.25])
def test_delayed_nesterov_follows_its_formula(spread: float) -> None:
    deltas = [delta.double() for delta in changes(11)]
    theta, momentum = torch.ones(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    buffer = torch.zeros(50, dtype=torch.float64)
    for number, g in enumerate(deltas, start=1):
        buffer = buffer + g
        if number % 4:
            theta = theta - 0.7 * (spread * 0.9 * momentum + g / 4)
        else:
            momentum = 0.9 * momentum + buffer / 4
            theta = theta - 0.7 * ((1 - spread * 4 + spread) * 0.9 * momentum + g / 4)
            buffer = torch.zeros(50, dtype=torch.float64)
    got = run(DelayedNesterov(delay=4, spread=spread), deltas)
    torch.testing.assert_close(got, theta, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("speed", "fastest", "expected"),
    [(10, 10, 50), (5, 10, 25), (3.33, 10, 16), (8, 10, 50), (7.9, 10, 39), (0.01, 10, 1), (0, 10, 50), (20, 10, 50)],
)
def test_slow_peers_take_fewer_inner_steps(speed: float, fastest: float, expected: int) -> None:
    assert inner_steps(50, speed, fastest) == expected


# Streaming


def test_the_schedule_of_the_paper() -> None:
    schedule = FragmentSchedule(inner_steps=12, num_fragments=4)
    synced = {t: schedule.fragment_at(t) for t in range(25) if schedule.fragment_at(t) is not None}
    assert synced == {3: 1, 6: 2, 9: 3, 12: 0, 15: 1, 18: 2, 21: 3, 24: 0}
    assert [schedule.fragment_of_epoch(epoch) for epoch in range(1, 9)] == list(synced.values())


@given(st.integers(1, 300), st.integers(1, 12))
def test_every_fragment_has_its_turn(inner: int, num_fragments: int) -> None:
    schedule = FragmentSchedule(inner_steps=inner, num_fragments=num_fragments)
    every = schedule.steps_per_round
    turns = [schedule.fragment_at(every * epoch) for epoch in range(1, num_fragments + 1)]
    assert sorted(turns) == list(range(num_fragments))  # type: ignore[type-var]
    assert turns == [schedule.fragment_of_epoch(epoch) for epoch in range(1, num_fragments + 1)]
    assert all(schedule.fragment_at(step) is None for step in range(every * num_fragments) if step % every)


def test_one_fragment_is_diloco() -> None:
    schedule = FragmentSchedule(inner_steps=7)
    assert [t for t in range(30) if schedule.fragment_at(t) is not None] == [7, 14, 21, 28]


def test_fragments_are_whole_layers_strided() -> None:
    names = [f"blocks.{n}.{part}" for n in range(5) for part in ("weight", "bias")] + ["head.weight"]
    fragments = split(names, 2)
    assert fragments[0] == [f"blocks.{n}.{part}" for n in (0, 2, 4) for part in ("weight", "bias")]
    assert fragments[1] == [*(f"blocks.{n}.{part}" for n in (1, 3) for part in ("weight", "bias")), "head.weight"]
    assert sorted(name for fragment in fragments for name in fragment) == sorted(names)
    assert split(names, 1) == [names]
    assert layer_of("embedding") == "embedding"
    with pytest.raises(ConfigurationError, match="6 layers"):
        split(names, 7)


def test_mixing_keeps_or_takes() -> None:
    shared = {"a": torch.full((3,), 4.0), "b": torch.full((3,), 4.0)}
    for alpha, expected in ((0.0, 4.0), (0.25, 3.5), (1.0, 2.0)):
        local = {"a": torch.full((3,), 2.0), "b": torch.full((3,), 2.0)}
        mix(local, shared, ["a"], alpha)
        assert local["a"].tolist() == [expected] * 3
        assert local["b"].tolist() == [2.0] * 3


@pytest.mark.parametrize(
    "wrong", [{"inner_steps": 0}, {"num_fragments": 0}, {"overlap_steps": 6}, {"overlap_steps": -1}, {"mixing": 1.5}]
)
def test_schedules_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        FragmentSchedule(**{"inner_steps": 12, "num_fragments": 2, **wrong})  # type: ignore[arg-type]


# Quorum


def ready(**since: float) -> list[ReadySender]:
    return [ReadySender(peer=peer, weight=1.0, since=time) for peer, time in since.items()]


def begin_rounds(grace: AdaptiveGrace, number: int, work_seconds: float, lateness: Sequence[float]) -> None:
    for _ in range(number):
        grace.round_begins(work_seconds)
        for late in lateness:
            grace.observe(late)


def test_the_grace_window_follows_the_lateness() -> None:
    grace = AdaptiveGrace(least_seconds=0.5, most_seconds=20.0)
    assert grace.seconds == 20.0
    begin_rounds(grace, 20, 3.0, [0.1, 2.0])
    assert grace.seconds == pytest.approx(2.5)
    begin_rounds(grace, 20, 1.2, [0.01])
    assert grace.seconds == 0.5
    begin_rounds(grace, 2, 1.2, [1e9, -1.0, 2.1])  # what cannot have been, or is out of reach, is not learnt from
    assert grace.seconds == 0.5


def test_a_quorum_waits_as_long_as_it_has_paid_off() -> None:
    trigger = AdaptiveQuorum(min_senders=2, grace=AdaptiveGrace(least_seconds=0.1, most_seconds=8.0))
    everybody = frozenset("abc")
    assert trigger.due_at(ready(a=1.0), everybody) is None
    assert trigger.due_at(ready(a=1.0, b=2.0), everybody) == 10.0
    assert trigger.due_at(ready(a=1.0, b=2.0, c=3.0), everybody) == -float("inf")
    trigger.begun(1, ready(a=1.0, b=2.0, c=3.0), 3.0)  # c was one second late
    assert trigger.due_at(ready(a=4.0, b=5.0), everybody) == 13.0  # one round says nothing yet
    trigger.begun(2, ready(a=4.0, b=5.0), 7.0)
    assert trigger.grace.seconds == pytest.approx(1.25)
    assert trigger.due_at(ready(a=10.0, b=11.0), everybody) == pytest.approx(12.25)


def test_a_quorum_learns_from_those_whom_it_began_without() -> None:
    trigger, everybody = AdaptiveQuorum(grace=AdaptiveGrace(most_seconds=30.0)), frozenset("ab")
    trigger.begun(1, ready(a=-10.0), -10.0)
    trigger.begun(2, ready(a=0.0), 0.0)  # a round's work takes ten seconds, and nobody was late
    now = 0.0
    for epoch in range(3, 20):
        came = ready(a=now + 10.0)
        due_at = trigger.due_at(came, everybody)
        assert due_at is not None
        if due_at >= now + 10.0 + 6.0:
            break
        trigger.begun(epoch, came, due_at)
        for _ in range(3):  # it says so each second, and only the first time counts
            trigger.came_late(epoch, "b", now + 10.0 + 6.0)
        trigger.came_late(epoch - 1, "b", now + 10.0)  # of an epoch before: that is out of reach
        now = due_at
    assert trigger.grace.seconds == pytest.approx(1.25 * 6.0)
    assert epoch <= 5


def test_another_attempt_says_nothing_new_of_the_work_of_a_round() -> None:
    trigger = AdaptiveQuorum(grace=AdaptiveGrace(least_seconds=0.0, most_seconds=30.0))
    for epoch in range(1, 6):
        came = ready(a=9.0 * epoch)
        trigger.begun(epoch, came, 9.0 * epoch)
        trigger.begun(epoch, came, 9.0 * epoch + 3.0)
    assert trigger.grace.reach_seconds == 6.0


@given(
    work=st.floats(0.1, 1000.0),
    lateness=st.lists(st.lists(st.floats(-1.0, 3000.0), max_size=6), max_size=30),
    most=st.floats(0.5, 300.0),
)
def test_the_window_stays_within_bounds_and_lets_in_who_is_within_reach(
    work: float, lateness: list[list[float]], most: float
) -> None:
    grace = AdaptiveGrace(least_seconds=0.2, most_seconds=most)
    for each in lateness:
        begin_rounds(grace, 1, work, each)
    assert 0.2 <= grace.seconds <= most
    if lateness:
        reach = min(max(work, 2.0), most)
        assert grace.seconds <= 1.25 * reach
        assert grace.seconds >= min(work / 3, most) * (1 - 1e-9)
        latest = [max((late for late in each if 0 <= late <= reach), default=0.0) for each in lateness[-16:]]
        missed = sum(late > grace.seconds for late in latest)
        assert missed <= 0.1 * len(latest)


@given(rates=st.lists(st.floats(0.0, 1e12), max_size=40), claim=st.floats(1.0, 1e12))
def test_no_single_claim_of_speed_cuts_the_others_to_one_step(rates: list[float], claim: float) -> None:
    honest = [rate for rate in rates if 1.0 <= rate <= 10.0] or [1.0]
    fast = fast_rate([*honest, claim])
    assert fast <= 8 * max(honest)
    assert inner_steps(20, max(honest), fast) >= 2
    if len(honest) >= 3:
        assert fast <= max(honest)
    assert fast_rate([]) == fast_rate([0.0, float("inf"), float("nan")]) == 0.0


@given(own=st.floats(1e-6, 1e6), fast=st.floats(1e-6, 1e6), most=st.integers(1, 10_000))
def test_steps_by_speed_end_in_time_and_whoever_is_about_as_fast_takes_all(own: float, fast: float, most: int) -> None:
    steps = inner_steps(most, own, fast)
    assert 1 <= steps <= most
    if own >= 0.8 * fast:
        assert steps == most
    elif steps > 1:
        assert steps / own <= most / fast * (1 + 1e-9), "as many seconds as the fast ones take, or fewer"


@pytest.mark.parametrize(
    ("rates", "expected"),
    [((1.0, 10.0), 8.0), ((1.0, 3.0, 10.0), 10.0), ((0.1, 1.0, 1.0), 1.0), ((1.0, 1.0, 1.0, 1e9), 1.0), ((5.0,), 0.0)],
)
def test_the_fast_ones_are_the_upper_quartile(rates: tuple[float, ...], expected: float) -> None:
    assert fast_rate(rates) == expected


OTHERWISE = StartSpec(least_seconds=3.0, most_seconds=30.0)
AT_ONCE = Quorum(grace_seconds=0.0).start


def said(start: StartSpec | None, **since: float) -> list[ReadySender]:
    return [ReadySender(peer=peer, weight=1.0, since=time, start=start) for peer, time in since.items()]


def test_rounds_start_as_most_trainers_would_have_them() -> None:
    trigger, everybody = ByMost(OTHERWISE), frozenset("abc")
    assert trigger.start is None
    assert trigger.due_at(said(AT_ONCE, a=10.0), everybody) == 40.0, "one of three has no say"
    assert trigger.due_at(said(AT_ONCE, a=10.0, b=11.0), everybody) == 10.0
    assert trigger.due_at([], everybody) is None
    assert trigger.due_at(said(AT_ONCE, c=20.0), everybody) == 20.0, "what the others said is kept while they are there"
    assert trigger.due_at(said(AT_ONCE, c=30.0), frozenset("cde")) == 60.0, (
        "they are gone, and those who came say nothing"
    )


def test_a_few_can_neither_rush_a_run_nor_make_it_wait() -> None:
    trigger, everybody = ByMost(OTHERWISE), frozenset("abcde")
    usual = Quorum(grace_seconds=5.0).start
    never = StartSpec(min_senders=1000, least_seconds=1e9, most_seconds=1e9)
    assert trigger.due_at(said(usual, a=1.0, b=1.0, c=1.0), everybody) == 6.0
    for hostile in (AT_ONCE, never):
        assert trigger.due_at(said(hostile, d=10.0, e=10.0), everybody) == 15.0
        assert trigger.due_at([*said(usual, a=10.0), *said(hostile, d=11.0, e=11.0)], everybody) == 15.0
    two = StartSpec(min_senders=2, least_seconds=0.0, most_seconds=1e9)
    assert trigger.due_at(said(two, a=20.0), frozenset("ab")) == 50.0, "they do not agree"
    assert trigger.due_at(said(two, a=20.0), frozenset("a")) is None
    assert trigger.due_at(said(two, a=20.0, b=21.0), frozenset("abc")) == 21.0 + LONGEST_GRACE_SECONDS


def test_a_window_of_the_trainers_does_not_shrink_below_that_of_a_host() -> None:
    trigger, adaptive = ByMost(OTHERWISE), StartSpec(least_seconds=0.1, most_seconds=20.0)
    for number in range(8):
        came = said(adaptive, a=10.0 + number, b=10.1 + number, c=10.1 + number)
        trigger.due_at(came, frozenset("abc"))
        trigger.begun(number, came, 10.1 + number)
    waiting = trigger.due_at(said(adaptive, a=30.0, b=30.1), frozenset("abc"))
    assert waiting == 30.0 + OTHERWISE.least_seconds


def test_what_triggers_say_of_themselves_makes_them_again() -> None:
    constant = Quorum(min_senders=3, grace_seconds=4.0)
    again = AdaptiveQuorum.of(constant.start)
    assert again.start == constant.start
    for _ in range(3):  # however late the others were
        for waiting in (ready(a=1.0, b=1.0, c=2.0), ready(a=1.0, b=1.0, c=2.0, d=5.5), []):
            assert again.due_at(waiting, frozenset("abcde")) == constant.due_at(waiting, frozenset("abcde"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_senders": 0},
        {"least_seconds": -1.0},
        {"least_seconds": 5.0},
        {"most_seconds": float("nan")},
    ],
    ids=str,
)
def test_starts_that_cannot_be_are_refused_when_they_come_from_a_peer(wrong: dict[str, float]) -> None:
    given = {"min_senders": 1, "least_seconds": 1.0, "most_seconds": 2.0, **wrong}
    with pytest.raises(ConfigurationError):
        StartSpec(**given)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError):
        decode(Ready, msgspec.msgpack.encode({"session": "s", "epoch": 1, "start": given}))


def test_weights_by_tokens() -> None:
    assert token_weight(1000, 10) == 100_000
    assert token_weight(1000, 20) == 50_000
    assert token_weight(0, 0) == 0


def test_the_window_is_a_share_of_the_time_between_rounds_however_punctual_all_are() -> None:
    trigger = AdaptiveQuorum(grace=AdaptiveGrace(least_seconds=0.5, most_seconds=30.0))
    trainers = frozenset("abc")
    for number in range(6):
        trigger.begun(number, ready(a=30.0 * number, b=30.0 * number, c=30.0 * number), 30.0 * number)
    assert trigger.grace.seconds == pytest.approx(10.0)
    due_at = trigger.due_at([ReadySender(peer="a", weight=1.0, since=240.0)], trainers)
    assert due_at == pytest.approx(250.0)
