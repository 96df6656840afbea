"""The laptop's side: which critic is used, and that it says so."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch
from test_value_network import sent, walk

from potluck.errors import ConfigurationError
from potluck.fleet.value.fragment import Fragment, Origin
from potluck.fleet.value.learner import LearnerConfig, ValueLearner
from potluck.fleet.value.pooled import PooledConfig, PooledValue
from potluck.fleet.value.version import ValueVersion
from potluck.fleet.value.ways import LocalWay


class OpenWay(LocalWay):
    """What was offered can be looked at, and the newest version be another than the learner's."""

    def __init__(self) -> None:
        super().__init__(ValueLearner())
        self.offered: list[Fragment] = []
        self.given: ValueVersion | None = None

    def offer(self, fragment: Fragment) -> bool:
        self.offered.append(fragment)
        return super().offer(fragment)

    def newest(self) -> ValueVersion | None:
        return self.given or super().newest()


def join(way: LocalWay, laptop: str = "ada", **config: float) -> PooledValue:
    return PooledValue(
        way, laptop=laptop, task="walk", policy="mlp", config=PooledConfig(**{"tolerance": 1e9, **config})
    )  # type: ignore[arg-type]


def test_advantages_come_from_the_pooled_network_once_it_knows_us() -> None:
    way = LocalWay(ValueLearner())
    pooled = join(way)
    first = pooled.advantages(walk(1))
    assert first.shape == (32, 4)
    assert first.dtype == torch.float32
    assert pooled.using == "own"
    assert "no version" in pooled.why
    assert way.learn() == 1
    fragment, own = walk(2), copy.deepcopy(pooled._own.network)
    found = pooled.advantages(fragment)
    assert pooled.using == "pooled"
    assert 0 < pooled.pooled_share < 1
    version = way.newest()
    assert version is not None
    networks = {version.network(): pooled.pooled_share, own: 1 - pooled.pooled_share}
    values = sum(share * each.values(pooled.origin, fragment.observations[:-1]) for each, share in networks.items())
    np.testing.assert_allclose(
        found.numpy(), fragment.rewards - np.asarray(values), rtol=1e-4, atol=1e-5
    )  # one step an episode


def test_a_silent_learner_costs_no_progress_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    way = LocalWay(ValueLearner())
    pooled = join(way, max_staleness=3)
    pooled.advantages(walk(0))
    way.learn()
    with caplog.at_level(logging.INFO):
        used = []
        for seed in range(1, 8):
            pooled.advantages(walk(seed))
            used.append(pooled.using)
    assert used == ["pooled"] * 4 + ["own"] * 3
    assert "uses its own critic: the pooled network is silent or late: it is 4 fragments behind" in caplog.text
    assert pooled.statistics()["staleness"] == 7
    caplog.clear()
    way.learn()  # it is back
    with caplog.at_level(logging.INFO):
        pooled.advantages(walk(8))
    assert pooled.using == "pooled"
    assert "uses version 2 of the pooled network" in caplog.text


def test_a_pooled_network_that_predicts_nonsense_is_not_used() -> None:
    way = OpenWay()
    pooled = join(way, tolerance=1.1)
    for seed in range(20):
        pooled.advantages(walk(seed))
        way.learn()
    version = way.newest()
    assert version is not None
    head = f"heads.{pooled.origin.head}.linear.weight"
    way.given = msgspec.structs.replace(version, state={**version.state, head: -5 * version.state[head]})
    pooled.advantages(walk(100))
    assert pooled.using == "own"
    assert "predicts worse" in pooled.why
    way.given = msgspec.structs.replace(version, state={**version.state, head: np.zeros((3, 3))})
    pooled.advantages(walk(101))
    assert pooled.using == "own"
    assert pooled.counts["unusable_versions"] == 1


def test_another_task_under_our_task_s_name_stops_nobody() -> None:
    way = LocalWay(ValueLearner())
    way.offer(sent(Origin("mallory", "walk", "mlp"), 1, features=9))
    way.learn()
    pooled = join(way)
    for seed in range(3):
        pooled.advantages(walk(seed))
        way.learn()
    assert pooled.using == "own"


def test_the_present_policy_s_log_probabilities_travel() -> None:
    way = OpenWay()
    pooled = join(way)
    fragment = walk(1)
    pooled.advantages(fragment, share=False)
    assert way.offered == []
    pooled.share(fragment, present_log_probs=torch.full((32, 4), -0.5))
    [shared] = way.offered
    np.testing.assert_array_equal(shared.behaviour_and_present()[1], np.full((32, 4), -0.5, np.float32))
    with pytest.raises(ConfigurationError, match="after `advantages` has seen it"):
        pooled.share(walk(2))


def test_a_laptop_that_starts_again_goes_on_counting() -> None:
    way = LocalWay(ValueLearner(LearnerConfig(max_staleness=2)))
    before = join(way)
    for seed in range(10):
        before.advantages(walk(seed))
        way.learn()
    after = join(way)
    after.advantages(walk(11))
    assert way.learn() == 1, "its fragments are not taken for old ones"
    assert after.statistics()["policy_version"] == 11


class Nowhere:
    """A way that is gone."""

    def offer(self, fragment: Fragment) -> bool:
        return False

    def newest(self) -> None:
        return None

    def statistics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


def test_what_could_not_be_shared_is_counted() -> None:
    pooled = PooledValue(Nowhere(), laptop="ada", task="walk")
    pooled.advantages(walk(1))
    assert pooled.statistics()["not_shared"] == 1


def test_the_fleet_imports_without_torch() -> None:
    code = "import sys, potluck.fleet as f; print('torch' in sys.modules); f.PooledValue; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], check=True, timeout=100, capture_output=True, text=True)
    assert told.stdout.split() == ["False", "True"]
