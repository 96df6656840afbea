"""The value network: PopArt keeps values, heads share a trunk, versions travel, training learns the true values."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.errors import ConfigurationError, ProtocolError
from potluck.fleet.items import decode_item, encode_item
from potluck.fleet.value.fragment import Fragment, Origin, staleness
from potluck.fleet.value.learner import LearnerConfig, ValueLearner
from potluck.fleet.value.network import Adapter, PopArtHead, ValueNetwork
from potluck.fleet.value.training import ValueConfig, ValueTrainer, values_of
from potluck.fleet.value.version import ValueVersion

ADA = Origin("ada", "walk", "mlp")
BOB = Origin("bob", "walk", "gru")
CAT = Origin("cat", "swim")


def walk(seed: int, *, steps: int = 32, environments: int = 4, features: int = 3, scale: float = 1.0) -> Fragment:
    """A fragment whose value is known: the reward is the first feature, and episodes have one step."""
    random = np.random.default_rng(seed)
    observations = random.normal(size=(steps + 1, environments, features)).astype(np.float32)
    rewards = scale * observations[:-1, :, 0]
    ended = np.ones((steps, environments), bool)
    return Fragment(
        observations=observations,
        rewards=rewards,
        terminated=ended,
        truncated=~ended,
        final_observations=np.zeros((0, features), np.float32),
        log_probs=np.zeros((steps, environments), np.float32),
    )


def sent(origin: Origin, seed: int, policy_version: int = 0, value_version: int = 0, **shape: Any) -> Fragment:
    fragment = walk(seed, **shape)
    fragment.origin, fragment.policy_version, fragment.value_version = origin, policy_version, value_version
    return fragment


@given(st.lists(st.tuples(st.floats(-1e4, 1e4), st.floats(1e-2, 1e4)), min_size=1, max_size=8), st.floats(0.01, 1.0))
@settings(deadline=None)
def test_popart_leaves_values_where_they_are(moves: list[tuple[float, float]], rate: float) -> None:
    torch.manual_seed(0)
    head, hidden = PopArtHead(8), torch.randn(50, 8)
    for mean, scale in moves:
        before = head.value(hidden).detach()
        head.follow(mean + scale * torch.randn(64), rate)
        after = head.value(hidden).detach()
        size = max(float(before.abs().max()), head.scale, abs(mean))
        torch.testing.assert_close(after, before, rtol=0, atol=1e-4 * size)


def test_popart_normalises_what_it_has_seen() -> None:
    head = PopArtHead(4)
    targets = 500 + 30 * torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    head.follow(targets, 0.1)  # the first targets count fully
    normal = head.normalise(targets)
    assert abs(float(normal.mean())) < 1e-3
    assert abs(float(normal.std()) - 1) < 1e-2


def test_an_adapter_normalises_observations() -> None:
    adapter = Adapter(2, 4)
    seen = torch.tensor([100.0, -3.0]) + torch.tensor([5.0, 0.1]) * torch.randn(4000, 2)
    for part in seen.chunk(8):
        adapter.follow(part, memory=1e9)
    torch.testing.assert_close(adapter.mean, seen.mean(0), rtol=1e-4, atol=1e-4)
    deviation = (adapter.square - adapter.mean.square()).sqrt()
    torch.testing.assert_close(deviation, seen.std(0), rtol=5e-2, atol=1e-2)


def test_training_finds_the_values_of_heads_of_very_different_scales() -> None:
    torch.manual_seed(0)
    trainer = ValueTrainer(ValueNetwork(32, 2), ValueConfig(learning_rate=3e-3))
    for seed in range(80):
        trainer.learn([(ADA, walk(seed)), (CAT, walk(seed + 999, features=2, scale=1000.0))])
    for origin, scale, features in ((ADA, 1.0, 3), (CAT, 1000.0, 2)):
        fragment = walk(12345, features=features, scale=scale)
        values, _ = values_of(trainer.network, origin, fragment)
        assert np.mean((values - fragment.rewards) ** 2) < 0.05 * np.var(fragment.rewards)


def test_the_last_observation_of_a_truncated_episode_is_what_follows_it() -> None:
    network = ValueNetwork(8, 2)
    network.add(ADA, 3)
    fragment = walk(1, steps=4, environments=2)
    fragment.terminated = np.zeros((4, 2), bool)
    fragment.truncated = np.zeros((4, 2), bool)
    fragment.truncated[1, 1] = fragment.truncated[2, 0] = True
    fragment.final_observations = np.array([[9, 9, 9], [-9, 0, 9]], np.float32)
    fragment.check()
    values, next_values = values_of(network, ADA, fragment)
    rows = network.values(ADA, fragment.observations).numpy()
    finals = network.values(ADA, fragment.final_observations).numpy()
    np.testing.assert_allclose(values, rows[:-1])
    np.testing.assert_allclose(next_values[1, 1], finals[0])
    np.testing.assert_allclose(next_values[2, 0], finals[1])
    np.testing.assert_allclose(next_values[0], rows[1])


def test_fragments_and_versions_travel_and_give_the_same_values() -> None:
    learner = ValueLearner()
    fragment = decode_item(encode_item(sent(ADA, 1)), Fragment)
    assert learner.learn([fragment, sent(BOB, 2), sent(CAT, 3, features=5)]) == 3
    version = decode_item(encode_item(learner.version()), ValueVersion)
    assert version.number == 1
    assert set(version.heads) == {"ada/walk/mlp", "bob/walk/gru", "cat/swim/policy"}
    observations = np.random.default_rng(0).normal(size=(7, 3))
    torch.testing.assert_close(version.network().values(BOB, observations), learner.network.values(BOB, observations))
    again = ValueLearner(resume=version)
    assert again.number == 1
    assert again.learn([sent(ADA, 4, policy_version=1)]) == 1
    with pytest.raises(ConfigurationError, match="keep them, or use another topic"):
        ValueLearner(LearnerConfig(value=ValueConfig(width=7)), resume=version)


def changed(version: ValueVersion, name: str, **fields: Any) -> ValueVersion:
    state = dict(version.state)
    if name:
        state[name] = fields.pop("weights")
    return msgspec.structs.replace(version, state=state, **fields)


def test_versions_that_make_no_sense_are_refused() -> None:
    learner = ValueLearner()
    learner.learn([sent(ADA, 1)])
    good = learner.version()
    bad = [
        changed(good, "", width=10**9),
        changed(good, "", width=10_000),
        changed(good, "", features={"walk": 4}),
        changed(good, "", features={}),
        changed(good, "trunk.0.weight", weights=np.full((128, 128), np.nan, np.float32)),
        changed(good, "trunk.0.weight", weights=np.zeros((2, 2), np.float32)),
        changed(good, "more", weights=np.zeros(3)),
    ]
    for version in bad:
        with pytest.raises(ProtocolError):
            version.network()
    good.network()


def test_staleness_counts_the_value_network_and_the_policy() -> None:
    assert staleness(sent(ADA, 0, policy_version=5, value_version=10), 12, 5) == 2
    assert staleness(sent(ADA, 0, policy_version=5, value_version=10), 12, 9) == 4
    assert staleness(sent(ADA, 0, policy_version=5), 1000, 5) == 0, "it knew no version: judged by its policy"


def test_the_learner_leaves_out_what_is_too_old() -> None:
    learner = ValueLearner(LearnerConfig(max_staleness=2))
    for version in range(4):
        assert learner.learn([sent(ADA, version, version, version)]) == 1
    assert learner.number == 4
    assert learner.learn([sent(ADA, 9, 4, value_version=1), sent(BOB, 9, 0, value_version=2)]) == 1
    assert learner.counts["too_old"] == 1
    waited = [sent(BOB, each, policy_version=each) for each in range(6)]  # five of one policy lay in the queue
    assert learner.learn(waited) == 3
    assert learner.version().heads[BOB.head].policy_version == 5


def test_fragments_that_nobody_should_send_are_left_out() -> None:
    learner = ValueLearner()
    learner.learn([sent(ADA, 1)])
    nan = sent(BOB, 1)
    nan.rewards = np.full_like(nan.rewards, np.nan)
    short = sent(BOB, 1)
    short.observations = short.observations[:-1]
    assert learner.learn([nan, short, walk(1), sent(BOB, 1, features=9), sent(Origin("../x", "walk"), 1)]) == 0
    assert learner.counts["unusable"] == 5
    assert learner.number == 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("observations", np.zeros((32, 4, 3)), "one row more than steps"),
        ("rewards", np.zeros(32), r"\[steps, environments\]"),
        ("truncated", np.ones((32, 4), bool), "add the last observation"),
        ("log_probs", np.zeros((31, 4)), "log_probs of a fragment has the shape"),
        ("rewards", np.full((32, 4), np.inf), "not all finite"),
        ("discount", 1.5, "choose 0 to 1"),
    ],
)
def test_a_wrong_fragment_is_told_what_is_wrong(field: str, value: Any, message: str) -> None:
    fragment = walk(1)
    setattr(fragment, field, value)
    with pytest.raises(ConfigurationError, match=message):
        fragment.check()
