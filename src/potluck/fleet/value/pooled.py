"""The laptop's side of a pooled value network: `advantages = pooled.advantages(fragment)` in any loop.

Each fragment trains the laptop's own small critic too. While the pooled network has a head for this policy, is not too
old, and does not predict far worse than the own critic, values are the mean of both, each weighted by how well it has
predicted lately. Else they are the own critic's alone, and the log and `statistics()` say so. So a dead learner costs
quality and never progress, and so does one that publishes nonsense.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from potluck.errors import ConfigurationError, ProtocolError
from potluck.fleet.sync import Fleet
from potluck.fleet.value import returns
from potluck.fleet.value.fragment import Array, Fragment, Origin, check_origin
from potluck.fleet.value.network import ValueNetwork
from potluck.fleet.value.together import TogetherWay
from potluck.fleet.value.training import ValueConfig, ValueTrainer, error_of, values_of
from potluck.fleet.value.version import ValueVersion
from potluck.fleet.value.ways import LearnerWay, ValueWay
from potluck.run.joined import Joined

logger = logging.getLogger(__name__)

Critic = Literal["pooled", "own"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledConfig:
    """How a laptop uses a pooled value network."""

    discount: float = 0.99
    """γ."""

    smoothing: float = 0.95
    """λ of GAE."""

    max_staleness: int = 8
    """How many fragments the pooled network may be behind before the own critic takes its place."""

    tolerance: float = 3.0
    """It does so too when the pooled network's error is more than so many times its own, until it is half of that."""

    error_rate: float = 0.2
    """How fast the errors that are compared follow the newest fragment's."""

    own: ValueConfig = field(default_factory=ValueConfig)
    """The laptop's own critic."""

    seed: int = 0
    """Of the own critic's first weights."""

    def __post_init__(self) -> None:
        for name in ("discount", "smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: choose 0 to 1")
        if self.max_staleness < 0 or not self.tolerance > 0 or not 0 < self.error_rate <= 1:
            raise ConfigurationError(
                f"max_staleness {self.max_staleness}, tolerance {self.tolerance} and error_rate {self.error_rate} make "
                "no sense: choose at least 0, more than 0, and 0 to 1"
            )


class PooledValue:
    """One policy's share in a pooled value network. Made by `join`, or with a way of one's own."""

    def __init__(
        self, way: ValueWay, *, laptop: str, task: str, policy: str = "policy", config: PooledConfig | None = None
    ) -> None:
        self.config = config or PooledConfig()
        self.origin = check_origin(Origin(laptop, task, policy))
        self.using: Critic = "own"
        """Whether the pooled network has a share in the newest advantages, or they are the own critic's alone."""
        self.why = "no version of the pooled network has come yet"
        """The reason, while that is the own critic."""
        self.pooled_share = 0.0
        """The weight of the pooled network in them."""
        self.counts: Counter[str] = Counter()
        self._way = way
        self._policy_version = 0
        self._number = 0
        self._version: ValueVersion | None = None
        self._network: ValueNetwork | None = None
        self._errors: dict[Critic, float] = {}
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            own = ValueNetwork(self.config.own.width, self.config.own.depth)
        self._own = ValueTrainer(own, self.config.own, seed=self.config.seed)

    @classmethod
    def join(
        cls,
        place: Fleet | Joined,
        *,
        laptop: str,
        task: str,
        policy: str = "policy",
        way: Literal["learner", "together"] = "learner",
        config: PooledConfig | None = None,
        **names: str,
    ) -> PooledValue:
        """Take part in one of two ways.

        `learner`: by the queue and topic of a fleet (`potluck.fleet.connect`); `experience=…` and `value=…` name others
        than the usual ones. `together`: by rounds of a group of a run (`potluck.join`); `group=…` names another one.
        """
        made: ValueWay
        if way == "learner" and isinstance(place, Fleet):
            made = LearnerWay(place, **names)
        elif way == "together" and isinstance(place, Joined):
            made = TogetherWay(place, **names)  # type: ignore[arg-type]
        else:
            raise ConfigurationError(
                f"a value network is not pooled by the way {way!r} with {type(place).__name__}: use 'learner' with "
                "`potluck.fleet.connect(…)`, or 'together' with `potluck.join(…)`"
            )
        return cls(made, laptop=laptop, task=task, policy=policy, config=config)

    def advantages(self, fragment: Fragment, *, share: bool = True) -> torch.Tensor:
        """GAE of each step, [steps, environments]; the own critic learns from the fragment, and so do the others.

        With `share=False`, call `share` afterwards, as with log-probabilities of the policy after its update.
        """
        fragment.check()
        fragment.origin, fragment.discount = self.origin, self.config.discount
        self._look_for_version()
        fragment.policy_version = self._policy_version
        fragment.value_version = self._number
        self._own.prepare(self.origin, fragment)
        own = values_of(self._own.network, self.origin, fragment)
        pooled = self._pooled_values(fragment)
        self._compare(fragment, own, pooled)
        values, next_values = self._choose(own, pooled)
        result = returns.advantages(
            fragment.rewards,
            values,
            next_values,
            fragment.terminated,
            fragment.truncated,
            discount=self.config.discount,
            smoothing=self.config.smoothing,
        )
        self._policy_version += 1
        self.counts[self.using] += 1
        self._own.learn([(self.origin, fragment)])
        if share:
            self.share(fragment)
        return torch.as_tensor(result, dtype=torch.float32)

    def share(self, fragment: Fragment, present_log_probs: Any = None) -> None:
        """Hand a fragment to the pooled network, with log-probabilities of the present policy where they differ.

        Never waits for the hub.
        """
        if fragment.origin != self.origin:
            raise ConfigurationError("share a fragment after `advantages` has seen it")
        if present_log_probs is not None:
            fragment.present_log_probs = np.asarray(present_log_probs, np.float32)
            fragment.check()
        if not self._way.offer(fragment):
            self.counts["not_shared"] += 1

    @property
    def staleness(self) -> int | None:
        """How many of our fragments the pooled network has not learnt from yet; None while it has no head for us."""
        record = self._version.heads.get(self.origin.head) if self._version is not None else None
        return None if record is None else max(self._policy_version - 1 - record.policy_version, 0)

    def statistics(self) -> dict[str, float | str]:
        """How things stand."""
        return {
            "using": self.using,
            "why": self.why if self.using == "own" else "",
            "pooled_share": self.pooled_share,
            "version": self._number,
            "staleness": -1 if self.staleness is None else self.staleness,
            "policy_version": self._policy_version,
            **{f"fragments_by_{name}": self.counts[name] for name in ("pooled", "own")},
            "not_shared": self.counts["not_shared"],
            "unusable_versions": self.counts["unusable_versions"],
            **{f"error_{name}": error for name, error in self._errors.items()},
            **{f"way_{name}": figure for name, figure in self._way.statistics().items()},
        }

    def close(self) -> None:
        """Take part no more. Idempotent."""
        self._way.close()

    def _look_for_version(self) -> None:
        version = self._way.newest()
        if version is None or version is self._version:
            return
        try:
            self._network = version.network()
        except ProtocolError as error:
            self.counts["unusable_versions"] += 1
            logger.warning("%s: %s", self.origin.head, error)
            self._network = None
        self._version, self._number = version, version.number
        record = version.heads.get(self.origin.head)
        if record is not None:  # a laptop that was started again goes on counting
            self._policy_version = max(self._policy_version, record.policy_version + 1)

    def _pooled_values(self, fragment: Fragment) -> tuple[Array, Array] | None:
        """Values of the pooled network where it has any, however good they are."""
        network = self._network
        if network is None or not network.knows(self.origin):
            return None
        if network.num_features(self.origin.task) != fragment.num_features:
            return None  # somebody uses our task's name for another one
        return values_of(network, self.origin, fragment)

    def _compare(self, fragment: Fragment, own: tuple[Array, Array], pooled: tuple[Array, Array] | None) -> None:
        """Measure both on a fragment that neither has seen, by the same returns."""
        if pooled is None:
            self._errors.pop("pooled", None)
            return
        values, next_values = (own[0] + pooled[0]) / 2, (own[1] + pooled[1]) / 2
        came_out = values + returns.advantages(
            fragment.rewards,
            values,
            next_values,
            fragment.terminated,
            fragment.truncated,
            discount=self.config.discount,
            smoothing=1.0,
        )
        measured: dict[Critic, float] = {"own": error_of(own[0], came_out), "pooled": error_of(pooled[0], came_out)}
        for critic, error in measured.items():
            before = self._errors.get(critic, error)
            self._errors[critic] = before + self.config.error_rate * (error - before)

    def _choose(self, own: tuple[Array, Array], pooled: tuple[Array, Array] | None) -> tuple[Array, Array]:
        why = self._why_own(pooled is not None)
        using: Critic = "own" if why else "pooled"
        if using != self.using:
            told = f"its own critic: {why}" if why else f"version {self._number} of the pooled network"
            logger.log(logging.WARNING if why else logging.INFO, "%s uses %s", self.origin.head, told)
        self.using, self.why = using, why
        if pooled is None or why:
            self.pooled_share = 0.0
            return own
        # Two estimates with independent errors are best weighted by the inverse of their squares.
        share = self.pooled_share = self._errors["own"] / (self._errors["own"] + self._errors["pooled"])
        return share * pooled[0] + (1 - share) * own[0], share * pooled[1] + (1 - share) * own[1]

    def _why_own(self, has_pooled: bool) -> str:
        if self._version is None:
            return "no version of the pooled network has come yet"
        if not has_pooled:
            return f"version {self._number} of the pooled network cannot be used, or has no head for this policy"
        behind = self.staleness
        if behind is not None and behind > self.config.max_staleness:
            return f"the pooled network is silent or late: it is {behind} fragments behind"
        # Once out, it has to be clearly better to come back: else it would come and go with each fragment.
        tolerance = self.config.tolerance / (1 if self.using == "pooled" else 2)
        if self._errors["pooled"] > tolerance * self._errors["own"]:
            return (
                f"the pooled network predicts worse (error {self._errors['pooled']:.2f}, own {self._errors['own']:.2f})"
            )
        return ""
