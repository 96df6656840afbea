"""Shares: optimal against HiGHS and brute force, never worse than equal shares; reducers left out; whole chunks."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from potluck.errors import ConfigurationError, RetryableError
from potluck.round.plan.partition import Partition, PartitionConfig, partition, round_shares
from potluck.round.plan.shares import (
    FASTEST_BYTES_PER_SECOND,
    MemberCapacity,
    RoundModel,
    known_speeds,
    levelled,
    optimal_shares,
    smallest_seconds,
)

MB = 1_000_000
FREE = PartitionConfig(smallest_share_bytes=0, seconds_per_link=0.0)


def member(kind: str, up: float | None, down: float | None, peer: str = "p") -> MemberCapacity:
    sends, reduces, receives = {
        "full": (True, True, True),
        "client": (True, False, True),
        "aux": (False, True, True),
        "helper": (False, True, False),  # an aux peer that does not want the averages
    }[kind]
    return MemberCapacity(
        peer=peer,
        sends=sends,
        reduces=reduces,
        receives=receives,
        upload_bytes_per_second=up,
        download_bytes_per_second=down,
    )


def traffic(members: list[MemberCapacity], shares: list[float]) -> list[tuple[float, float]]:
    """Bytes up and down of each member, counted message by message, for a contribution of one byte."""
    up, down = [0.0] * len(members), [0.0] * len(members)
    for reducer, share in enumerate(shares):
        for index, other in enumerate(members):
            if index == reducer:
                continue
            if other.sends:  # its contribution to this part
                up[index] += share
                down[reducer] += share
            if other.receives:  # the average of this part
                up[reducer] += share
                down[index] += share
    return list(zip(up, down, strict=True))


def seconds(members: list[MemberCapacity], shares: list[float]) -> float:
    return max(
        max(up / float(m.upload_bytes_per_second or 0), down / float(m.download_bytes_per_second or 0))
        for m, (up, down) in zip(members, traffic(members, shares), strict=True)
    )


def highs(members: list[MemberCapacity]) -> float:
    """The optimum of the linear program in (w, t), built from the message-by-message count."""
    n = len(members)
    zero, units = traffic(members, [0.0] * n), [traffic(members, [float(i == j) for i in range(n)]) for j in range(n)]
    rows, limits = [], []
    for i, m in enumerate(members):
        for direction, speed in ((0, m.upload_bytes_per_second), (1, m.download_bytes_per_second)):
            # Traffic is linear in the shares, given that they add up to one: no constant is left.
            assert zero[i][direction] == 0.0
            rows.append([units[j][i][direction] for j in range(n)] + [-float(speed or 0) / MB])  # t in microseconds
            limits.append(0.0)
    bounds = [(0.0, 1.0 if m.reduces else 0.0) for m in members] + [(0.0, None)]
    solution = linprog(
        [0.0] * n + [1.0], A_ub=rows, b_ub=limits, A_eq=[[1.0] * n + [0.0]], b_eq=[1.0], bounds=bounds, method="highs"
    )
    assert solution.status == 0
    return float(solution.fun) / MB


speeds = st.floats(0.01, 100.0).map(lambda mega: mega * MB)
kinds = st.sampled_from(["full", "full", "client", "aux", "helper"])


@st.composite
def groups(draw: st.DrawFn, largest: int = 12) -> list[MemberCapacity]:
    members = [
        member(kind, up, down, f"p{i}")
        for i, (kind, up, down) in enumerate(
            draw(st.lists(st.tuples(kinds, speeds, speeds), min_size=1, max_size=largest))
        )
    ]
    if not any(m.sends for m in members):
        members.append(member("full", draw(speeds), draw(speeds), "sender"))
    if not any(m.reduces for m in members):
        members.append(member("aux", draw(speeds), draw(speeds), "reducer"))
    return members


@settings(max_examples=400)
@given(members=groups())
@example([member("client", MB, MB), member("client", MB, MB), member("aux", 2 * MB, 1.75 * MB)])
def test_the_time_is_the_optimum_of_the_linear_program(members: list[MemberCapacity]) -> None:
    model = RoundModel(members, contribution_bytes=1)
    reducers = np.array([m.reduces for m in members])
    best = highs(members)
    assert smallest_seconds(model, reducers) == pytest.approx(best, rel=1e-6, abs=1e-12)
    optimum = optimal_shares(model, reducers)
    shares = optimum.shares.tolist()
    assert optimum.seconds == pytest.approx(best, rel=1e-6, abs=1e-12)
    assert optimum.reducing_seconds <= optimum.seconds * (1 + 1e-9)
    assert math.fsum(shares) == pytest.approx(1.0, abs=1e-12)
    assert all(share >= 0.0 for share in shares)
    assert all(share == 0.0 for share, m in zip(shares, members, strict=True) if not m.reduces)
    assert seconds(members, shares) == pytest.approx(best, rel=1e-6, abs=1e-12)


@settings(max_examples=200)
@given(members=groups(), data=st.data())
def test_the_model_counts_every_message(members: list[MemberCapacity], data: st.DataObject) -> None:
    raw = data.draw(st.lists(st.floats(0.01, 1.0), min_size=len(members), max_size=len(members)))
    shares = [value / sum(raw) for value in raw]
    modelled = RoundModel(members, contribution_bytes=1).seconds(np.array(shares))
    for predicted, m, (up, down) in zip(modelled, members, traffic(members, shares), strict=True):
        expected = max(up / (m.upload_bytes_per_second or 0), down / (m.download_bytes_per_second or 0))
        assert predicted == pytest.approx(expected, rel=1e-9, abs=1e-15)


@settings(max_examples=40)
@given(members=groups(largest=3))
def test_no_brute_force_grid_is_better(members: list[MemberCapacity]) -> None:
    members = members[:4]
    if not any(m.sends for m in members) or not any(m.reduces for m in members):
        return
    steps = 24
    best = min(
        seconds(members, [count / steps for count in counts])
        for counts in itertools.product(range(steps + 1), repeat=len(members))
        if sum(counts) == steps and all(m.reduces or not count for m, count in zip(members, counts, strict=True))
    )
    ours = seconds(
        members, optimal_shares(RoundModel(members, contribution_bytes=1), reducers_of(members)).shares.tolist()
    )
    assert ours <= best * (1 + 1e-9) + 1e-12


def reducers_of(members: list[MemberCapacity]) -> np.ndarray:
    return np.array([m.reduces for m in members])


@settings(max_examples=300)
@given(members=groups(), size=st.integers(10**6, 10**9), per_link=st.sampled_from([0.0, 0.001, 0.1]))
def test_never_worse_than_equal_shares(members: list[MemberCapacity], size: int, per_link: float) -> None:
    config = PartitionConfig(smallest_share_bytes=0, seconds_per_link=per_link)
    result = partition(members, contribution_bytes=size, num_chunks=1000, config=config)
    num_eligible = sum(m.reduces for m in members)
    equal = [m.reduces / num_eligible for m in members]
    num_used = sum(1 for share in result.shares if share)
    ours = size * seconds(members, list(result.shares)) + per_link * num_used
    assert ours <= (size * seconds(members, equal) + per_link * num_eligible) * (1 + 1e-9)


def test_equal_peers_have_equal_shares() -> None:
    for count in (2, 3, 8):
        members = [member("full", 10 * MB, 10 * MB, f"p{i}") for i in range(count)]
        result = partition(members, contribution_bytes=50 * MB, num_chunks=96, config=FREE)
        assert result.shares == pytest.approx([1 / count] * count)
        assert result.num_chunks == (96 // count,) * count
        assert result.predicted_seconds == pytest.approx(5 * (1 + (count - 2) / count))


def test_a_weak_peer_gets_less_and_a_weaker_one_nothing() -> None:
    members = [
        member("full", 100 * MB, 100 * MB),
        member("full", 100 * MB, 100 * MB),
        member("full", 90 * MB, 100 * MB),
        member("full", 1 * MB, 100 * MB),
    ]
    result = partition(members, contribution_bytes=50 * MB, num_chunks=1000, config=FREE)
    assert result.shares[0] == pytest.approx(result.shares[1])
    assert 0 < result.shares[2] < result.shares[0]
    assert result.shares[3] == 0.0
    assert result.predicted_seconds == pytest.approx(50.0), "its own upload, and nothing that anybody could take off it"


def test_when_a_client_is_slowest_the_reducers_still_finish_early() -> None:
    members = [member("client", 1 * MB, 1 * MB), member("full", 100 * MB, 100 * MB), member("full", 10 * MB, 10 * MB)]
    result = partition(members, contribution_bytes=10 * MB, num_chunks=1000, config=FREE)
    assert result.predicted_seconds == pytest.approx(10.0)
    assert result.shares[1] > 0.9, "half for each would be as fast by the model, and close to the limit"


def test_clients_reduce_nothing_and_one_aux_reduces_for_all() -> None:
    members = [member("client", 10 * MB, 10 * MB, f"c{i}") for i in range(5)] + [member("aux", 100 * MB, 100 * MB)]
    result = partition(members, contribution_bytes=10 * MB, num_chunks=20, config=FREE)
    assert result.num_chunks == (0, 0, 0, 0, 0, 20)
    assert result.num_reducers == 1
    assert result.predicted_seconds == pytest.approx(1.0)


def test_an_aux_peer_relieves_the_trainers() -> None:
    trainers = [member("full", 10 * MB, 10 * MB, f"t{i}") for i in range(4)]
    alone = partition(trainers, contribution_bytes=10 * MB, num_chunks=100, config=FREE)
    helped = partition(
        [*trainers, member("aux", 50 * MB, 50 * MB)], contribution_bytes=10 * MB, num_chunks=100, config=FREE
    )
    assert helped.shares[4] > max(helped.shares[:4])
    assert helped.predicted_seconds < alone.predicted_seconds


@pytest.mark.parametrize("kind", ["full", "client"])
def test_a_lone_peer_keeps_everything_at_home(kind: str) -> None:
    result = partition([member(kind, 1.0, None)], contribution_bytes=10 * MB, num_chunks=20)
    assert result == Partition(shares=(1.0,), num_chunks=(20,), predicted_seconds=0.0)


def test_a_lone_trainer_with_helpers_needs_none_of_them() -> None:
    members = [member("client", 1 * MB, 1 * MB), member("helper", 100 * MB, 100 * MB)]
    assert partition(members, contribution_bytes=10 * MB, num_chunks=20).num_chunks == (20, 0)


def test_all_clients_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(RetryableError, match="potluck aux"):
        partition([member("client", MB, MB), member("client", MB, MB)], contribution_bytes=MB, num_chunks=2)


def test_nobody_who_contributes_is_an_error() -> None:
    for members in ([], [member("aux", MB, MB)]):
        with pytest.raises(ConfigurationError, match="trainer"):
            partition(members, contribution_bytes=MB, num_chunks=2)


def test_small_shares_move_to_others() -> None:
    members = [member("full", 100 * MB, 100 * MB, f"p{i}") for i in range(8)]
    config = PartitionConfig(smallest_share_bytes=300_000, seconds_per_link=0.0)
    result = partition(members, contribution_bytes=1_000_000, num_chunks=30, config=config)
    assert result.num_reducers == 3
    assert min(share for share in result.shares if share) * 1_000_000 >= 300_000
    tiny = partition(members, contribution_bytes=1000, num_chunks=1, config=config)
    assert tiny.num_reducers == 1


def test_more_reducers_than_useful_are_left_out() -> None:
    members = [member("full", 100 * MB, 100 * MB, f"p{i:02}") for i in range(64)]
    costly = PartitionConfig(seconds_per_link=0.02, smallest_share_bytes=0)
    few = partition(members, contribution_bytes=10 * MB, num_chunks=640, config=costly)
    many = partition(members, contribution_bytes=1000 * MB, num_chunks=640, config=costly)
    assert 1 < few.num_reducers < many.num_reducers <= 64
    # As good as any number of equal reducers: 1 + (n − 2)/k contributions at 10 a second, and k links.
    best = min((1 + 62 / k) / 10 + 0.02 * k for k in range(1, 65))
    assert few.predicted_seconds + 0.02 * few.num_reducers == pytest.approx(best, rel=0.02)


def test_two_peers_share_large_work_and_not_small_work() -> None:
    # By bytes alone it makes no difference who of two reduces; adding up and links decide.
    members = [member("full", 100 * MB, 100 * MB), member("full", 50 * MB, 100 * MB)]
    assert partition(members, contribution_bytes=50 * MB, num_chunks=100).num_chunks == (50, 50)
    assert partition(members, contribution_bytes=200_000, num_chunks=4).num_reducers == 1


def test_a_slow_uploader_is_no_reason_to_burden_one_reducer() -> None:
    members = [member("client", 1 * MB, 1 * MB), *(member("full", 100 * MB, 100 * MB, f"p{i}") for i in range(4))]
    result = partition(members, contribution_bytes=50 * MB, num_chunks=100)
    assert result.num_chunks == (0, 25, 25, 25, 25)


def test_speeds_that_differ_by_chance_make_no_unequal_shares() -> None:
    told = [7.3e6, 6.3e6, 6.2e6, 6.9e6]
    assert levelled(told) == [pytest.approx(6.6e6)] * 4
    even = levelled([5e6, None, 5.5e6, 20e6, 1e6])
    assert even == [pytest.approx(5.25e6), None, pytest.approx(5.25e6), 20e6, 1e6], "real differences count"
    assert levelled([None, None]) == [None, None]
    assert levelled([]) == []
    senseless = levelled([4e6, math.inf, -1.0, 0.0])
    assert senseless == [4e6, math.inf, -1.0, 0.0]


def test_unknown_and_senseless_speeds_are_taken_as_typical() -> None:
    assert known_speeds([None, 4e6, 6e6, math.nan, -1.0, math.inf, 0.0], 1e6) == [5e6, 4e6, 6e6, 5e6, 5e6, 5e6, 5e6]
    assert known_speeds([None, None], 7e6) == [7e6, 7e6]
    assert known_speeds([1e300, 1e-300], 1.0) == [FASTEST_BYTES_PER_SECOND, 1e3]
    members = [member("full", None, None), member("full", math.nan, -5.0), member("full", None, math.inf)]
    assert partition(members, contribution_bytes=30 * MB, num_chunks=30, config=FREE).num_chunks == (10, 10, 10)


@settings(max_examples=300)
@given(
    shares=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40).filter(lambda values: sum(values) > 1e-3),
    num_chunks=st.integers(0, 3000),
)
def test_whole_chunks_add_up_and_stay_close_to_the_shares(shares: list[float], num_chunks: int) -> None:
    counts = round_shares(shares, num_chunks)
    assert sum(counts) == num_chunks
    total = math.fsum(shares)
    for share, count in zip(shares, counts, strict=True):
        assert count >= math.floor(share / total * num_chunks * (1 - 1e-12))
        if share == 0.0:
            assert count == 0
    # Nobody would rather have another's last chunk: the largest share per chunk came first.
    for share, count in zip(shares, counts, strict=True):
        for other, other_count in zip(shares, counts, strict=True):
            if other_count:
                assert share / (count + 1) <= other / other_count * (1 + 1e-9)


@settings(max_examples=100)
@given(members=groups(), size=st.integers(0, 10**9), num_chunks=st.integers(0, 2000))
def test_any_group_gets_a_whole_partition(members: list[MemberCapacity], size: int, num_chunks: int) -> None:
    result = partition(members, contribution_bytes=size, num_chunks=num_chunks)
    assert sum(result.num_chunks) == num_chunks
    assert (
        all(m.reduces or not count for m, count in zip(members, result.num_chunks, strict=True))
        or sum(m.receives for m in members) == 1
    )
    assert math.isfinite(result.predicted_seconds)


def test_wrong_members_and_configurations_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="receive"):
        MemberCapacity(peer="x", sends=True, receives=False)
    for wrong in (
        {"smallest_share_bytes": -1},
        {"seconds_per_link": -0.1},
        {"default_bytes_per_second": 0.0},
        {"reduced_bytes_per_second": 0.0},
    ):
        with pytest.raises(ConfigurationError):
            PartitionConfig(**wrong)


def test_two_hundred_members_are_planned_in_no_time() -> None:
    generator = np.random.default_rng(0)
    members = [member("full", *(10 ** generator.uniform(6, 8, 2)), f"p{i}") for i in range(200)]
    start = time.perf_counter()
    partition(members, contribution_bytes=100 * MB, num_chunks=200)
    assert time.perf_counter() - start < 10, "a fraction of a second on an idle machine"
