"""Spot checks: which server checks which, what is rounding, and that the liar is the one who goes."""

from __future__ import annotations

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.pipeline.judging import (
    ALONE_AFTER,
    CEILING,
    FLOORS,
    MEASURED_AFTER,
    NEIGHBOURS_AFTER,
    Check,
    CheckResult,
    Judge,
    Tolerances,
)

HONEST = {"output": 3e-7, "gradient": 1e-6, "sum": 2e-6}
FALSE = {"output": 0.5, "gradient": 1e-6, "sum": 2e-6}


def stages_of(num_stages: int, replicas: int) -> dict[str, frozenset[int]]:
    return {f"s{stage}.{r}": frozenset({stage}) for stage in range(num_stages) for r in range(replicas)}


@given(seed=st.integers(0, 2**32), num_stages=st.integers(1, 6), replicas=st.integers(1, 4), rate=st.floats(0, 1))
def test_a_check_has_one_verifier_that_has_the_blocks(seed: int, num_stages: int, replicas: int, rate: float) -> None:
    judge = Judge(rate=rate, chance=random.Random(seed))
    serving = stages_of(num_stages, replicas)
    holding = serving | {"listener": frozenset(range(num_stages))}
    checks = judge.choose(serving, holding)
    assert all(check.server != check.verifier for check in checks)
    assert all(holding[check.verifier] >= serving[check.server] for check in checks)
    assert len({check.verifier for check in checks}) == len(checks) == len({check.server for check in checks})


def test_so_many_are_checked_as_the_rate_says_and_none_without_one() -> None:
    judge = Judge(rate=0.05, chance=random.Random(1))
    serving = stages_of(4, 2)
    num_checks = sum(len(judge.choose(serving, serving)) for _ in range(2000))
    assert 0.8 < num_checks / (0.05 * 2000 * len(serving)) < 1.2
    assert Judge(rate=0.0).choose(serving, serving) == ()
    alone = Judge(rate=1.0)
    assert alone.choose({"a": frozenset({0})}, {"a": frozenset({0})}) == ()
    assert alone.num_unchecked == 1


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    replicas=st.integers(3, 5),
    lie=st.sampled_from(["as server", "as verifier", "as neighbour"]),
    share=st.floats(0.2, 1.0),
)
def test_the_one_liar_is_excluded_and_nobody_else(seed: int, replicas: int, lie: str, share: float) -> None:
    """It lies in a share of the steps only, and may be checked by anybody."""
    chance = random.Random(seed)
    serving = stages_of(3, replicas)
    liar = f"s1.{chance.randrange(replicas)}"
    judge = Judge(rate=1.0 if lie == "as neighbour" else 0.3, chance=chance)
    for _ in range(200):
        there = {name: blocks for name, blocks in serving.items() if name not in judge.excluded}
        for check in judge.choose(there, there):
            is_lie = chance.random() < share
            result = CheckResult(compared=4, errors=HONEST)
            if is_lie and liar == {"as server": check.server, "as verifier": check.verifier}.get(lie):
                result = CheckResult(compared=4, errors=FALSE)
            elif is_lie and lie == "as neighbour" and check.server[1] != "1" and liar not in judge.excluded:
                result = CheckResult(compared=0, contradicted_by=(liar,))
            if {check.server, check.verifier} & judge.excluded.keys():
                continue  # found out in this very step
            judge.hear(check, result, {})
    assert set(judge.excluded) == {liar}


def test_the_conductors_own_peer_is_believed_at_once() -> None:
    judge = Judge(rate=1.0, trusted=frozenset({"host"}))
    finding = judge.hear(Check("a", "host"), CheckResult(compared=3, errors=FALSE), {})
    assert finding.failed
    assert set(finding.excluded) == {"a"}
    finding = judge.hear(Check("host", "b"), CheckResult(compared=3, errors=FALSE), {})
    assert not finding.failed
    assert set(finding.excluded) == {"b"}


def test_where_nobody_else_can_judge_the_server_goes_after_some_failed_checks() -> None:
    judge = Judge(rate=1.0)
    found = [judge.hear(Check("a", "b"), CheckResult(compared=3, errors=FALSE), {}) for _ in range(ALONE_AFTER)]
    assert [bool(finding.excluded) for finding in found] == [False] * (ALONE_AFTER - 1) + [True]
    assert set(judge.excluded) == {"a"}
    judge = Judge(rate=1.0)
    for _ in range(NEIGHBOURS_AFTER):
        judge.hear(Check("a", "b"), CheckResult(compared=0, contradicted_by=("n",)), {})
    assert set(judge.excluded) == {"a", "n"}, "one of them lies: who does is not known"


def test_a_check_without_anything_to_compare_says_nothing() -> None:
    judge = Judge(rate=1.0)
    assert judge.hear(Check("a", "b"), CheckResult(compared=0, note="lost"), {}) == judge.hear(
        Check("a", "b"), CheckResult(compared=2, errors=HONEST), {}
    )
    assert (judge.num_unchecked, judge.num_checks, judge.num_failed) == (1, 1, 0)
    assert judge.hear(Check("a", "b"), CheckResult(compared=2, errors={"sum": math.nan}), {}).failed


@given(
    codec=st.sampled_from(sorted(FLOORS)),
    honest=st.floats(0, 1e-3),
    false=st.lists(st.floats(0, CEILING), max_size=10),
    count=st.integers(MEASURED_AFTER, 40),
)
def test_a_tolerance_is_measured_by_pair_and_the_few_cannot_widen_it(
    codec: str, honest: float, false: list[float], count: int
) -> None:
    tolerances = Tolerances(codec)
    unmeasured = tolerances.limit("cpu-1", "cuda-2", "output")
    for error in [honest] * (len(false) + count) + false:
        tolerances.note("cuda-2", "cpu-1", "output", error)
    limit = tolerances.limit("cpu-1", "cuda-2", "output")
    assert limit == tolerances.limit("cuda-2", "cpu-1", "output")
    assert limit == min(max(16 * honest, FLOORS[codec]), unmeasured)
    assert tolerances.limit("cpu-1", "cpu-1", "output") == unmeasured, "another pair"
