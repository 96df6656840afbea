"""GAE and V-trace against the formulas written out step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.fleet.value.returns import advantages, v_trace_targets

DISCOUNT = 0.97


class Story:
    """Random steps, with episodes that end and that are cut off."""

    def __init__(self, seed: int, steps: int = 23, environments: int = 3) -> None:
        random = np.random.default_rng(seed)
        shape = (steps, environments)
        self.rewards, self.values, self.next_values = random.normal(size=(3, *shape))
        self.terminated = random.random(shape) < 0.15
        self.truncated = (random.random(shape) < 0.15) & ~self.terminated
        self.behaviour, self.present = -random.random((2, *shape)) * 2

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.rewards, self.values, self.next_values, self.terminated, self.truncated


def gae_by_sum(story: Story, smoothing: float) -> Any:
    """A_t as the sum of all later δ of the same episode."""
    result = np.zeros_like(story.rewards)
    for step, environment in np.ndindex(*story.rewards.shape):
        weight = 1.0
        for later in range(step, len(story.rewards)):
            at = (later, environment)
            bootstrap = 0.0 if story.terminated[at] else story.next_values[at]
            result[step, environment] += weight * (story.rewards[at] + DISCOUNT * bootstrap - story.values[at])
            if story.terminated[at] or story.truncated[at]:
                break
            weight *= DISCOUNT * smoothing
    return result


def v_trace_by_sum(story: Story, most_ratio: float, most_trace: float) -> Any:
    """v_t = V + Σ_s γ^{s−t} (Π c) ρ_s δ_s, as in the paper."""
    ratio = np.exp(story.present - story.behaviour)
    result = story.values.copy()
    for step, environment in np.ndindex(*story.rewards.shape):
        weight = 1.0
        for later in range(step, len(story.rewards)):
            at = (later, environment)
            bootstrap = 0.0 if story.terminated[at] else story.next_values[at]
            delta = min(most_ratio, ratio[at]) * (story.rewards[at] + DISCOUNT * bootstrap - story.values[at])
            result[step, environment] += weight * delta
            if story.terminated[at] or story.truncated[at]:
                break
            weight *= DISCOUNT * min(most_trace, ratio[at])
    return result


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_gae_is_the_sum_that_defines_it(seed: int, smoothing: float) -> None:
    story = Story(seed)
    found = advantages(*story.arrays, discount=DISCOUNT, smoothing=smoothing)
    np.testing.assert_allclose(found, gae_by_sum(story, smoothing), rtol=1e-9, atol=1e-9)


@given(st.integers(0, 1000), st.sampled_from([(1.0, 1.0), (2.0, 1.0), (1.5, 0.5)]))
def test_v_trace_is_the_sum_that_defines_it(seed: int, most: tuple[float, float]) -> None:
    story = Story(seed)
    found = v_trace_targets(
        *story.arrays, story.behaviour, story.present, discount=DISCOUNT, most_ratio=most[0], most_trace=most[1]
    )
    np.testing.assert_allclose(found, v_trace_by_sum(story, *most), rtol=1e-9, atol=1e-9)


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.9, 1.0]))
def test_v_trace_of_the_policy_that_acted_is_td_lambda(seed: int, smoothing: float) -> None:
    story = Story(seed)
    targets = v_trace_targets(*story.arrays, story.behaviour, story.behaviour, discount=DISCOUNT, smoothing=smoothing)
    gae = advantages(*story.arrays, discount=DISCOUNT, smoothing=smoothing)
    np.testing.assert_allclose(targets - story.values, gae, rtol=1e-9, atol=1e-9)


def test_on_policy_v_trace_is_the_return() -> None:
    rewards = np.array([[1.0], [2.0], [3.0]])
    values, next_values = np.array([[7.0], [-3.0], [0.5]]), np.array([[-3.0], [0.5], [10.0]])
    nothing = np.zeros((3, 1), bool)
    targets = v_trace_targets(rewards, values, next_values, nothing, nothing, rewards * 0, rewards * 0, discount=0.5)
    np.testing.assert_allclose(targets[:, 0], [1 + 0.5 * (2 + 0.5 * (3 + 0.5 * 10)), 2 + 0.5 * 8, 8.0])


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_nothing_leaks_into_the_episode_before(ends: str) -> None:
    story = Story(5)
    story.terminated[:], story.truncated[:] = False, False
    getattr(story, ends)[10] = True
    before = advantages(*story.arrays, discount=DISCOUNT, smoothing=0.9)
    story.rewards[11:] += 100.0
    after = advantages(*story.arrays, discount=DISCOUNT, smoothing=0.9)
    np.testing.assert_array_equal(before[:11], after[:11])
    story.next_values[10] += 1.0  # the last observation counts where the episode was cut off, and only there
    bootstrapped = advantages(*story.arrays, discount=DISCOUNT, smoothing=0.9)
    np.testing.assert_allclose(bootstrapped[10] - after[10], DISCOUNT if ends == "truncated" else 0.0)


def test_a_policy_that_never_acts_so_is_not_learnt_from() -> None:
    story = Story(1)
    targets = v_trace_targets(*story.arrays, story.behaviour, story.behaviour - 1e6, discount=DISCOUNT)
    np.testing.assert_allclose(targets, story.values, atol=1e-6)
    unbounded = v_trace_targets(*story.arrays, story.behaviour - 1e6, story.behaviour, discount=DISCOUNT)
    assert np.isfinite(unbounded).all()
