"""Advantages and value targets from what happened: GAE and V-trace (pure, numpy).

All arrays are [steps, environments]. `next_values` are V(s′): of the observation that followed, before any reset. A
step that *terminated* an episode has nothing after it. A step at which an episode was *truncated* (a time limit) has:
it bootstraps with V of the last observation. In neither case anything leaks into the next episode.

GAE (Schulman and others, 2016):

    δ_t = r_t + γ (1 − terminated_t) V(s′_t) − V(s_t)
    A_t = δ_t + γ λ (1 − ended_t) A_{t+1}

V-trace (Espeholt and others, 2018) with ratios between the present policy π and the one that acted, μ:

    ρ_t = min(ρ̄, π/μ)   c_t = λ min(c̄, π/μ)
    v_t = V(s_t) + ρ_t δ_t + γ c_t (1 − ended_t) (v_{t+1} − V(s_{t+1}))

Where π = μ and ρ̄ ≥ 1, v_t − V(s_t) is A_t. So one backward pass does for both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Array = npt.NDArray[Any]

LARGEST_LOG_RATIO = 20.0  # beyond it exp() says nothing that a cut at 1 would not


def advantages(
    rewards: Array,
    values: Array,
    next_values: Array,
    terminated: Array,
    truncated: Array,
    *,
    discount: float,
    smoothing: float,
) -> Values:
    """GAE of each step; `smoothing` is its λ."""
    return _backward(rewards, values, next_values, terminated, truncated, 1.0, smoothing, discount)


def v_trace_targets(
    rewards: Array,
    values: Array,
    next_values: Array,
    terminated: Array,
    truncated: Array,
    behaviour_log_probs: Array,
    present_log_probs: Array,
    *,
    discount: float,
    smoothing: float = 1.0,
    most_ratio: float = 1.0,
    most_trace: float = 1.0,
) -> Values:
    """What V of the present policy should be at each step; `most_ratio` and `most_trace` are ρ̄ and c̄."""
    log_ratio = np.asarray(present_log_probs, np.float64) - np.asarray(behaviour_log_probs, np.float64)
    ratio = np.exp(np.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
    traces = smoothing * np.minimum(ratio, most_trace)
    ratios = np.minimum(ratio, most_ratio)
    corrections = _backward(rewards, values, next_values, terminated, truncated, ratios, traces, discount)
    targets: Values = np.asarray(values, np.float64) + corrections
    return targets


def _backward(
    rewards: Array,
    values: Array,
    next_values: Array,
    terminated: Array,
    truncated: Array,
    ratios: Values | float,
    traces: Values | float,
    discount: float,
) -> Values:
    values = np.asarray(values, np.float64)
    goes_on = 1.0 - np.asarray(terminated, np.float64)
    deltas = ratios * (np.asarray(rewards, np.float64) + discount * goes_on * next_values - values)
    carried = discount * traces * goes_on * (1.0 - np.asarray(truncated, np.float64))
    result = np.empty_like(deltas)
    after = np.zeros(deltas.shape[1:])
    for step in range(len(deltas) - 1, -1, -1):
        after = deltas[step] + carried[step] * after
        result[step] = after
    return result
