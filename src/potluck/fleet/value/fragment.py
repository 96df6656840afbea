"""A fragment: some steps of one laptop's policy in its environments, as they travel through the queue."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from potluck.errors import ConfigurationError, ProtocolError
from potluck.hub.queues import NAME

Array = npt.NDArray[Any]

MOST_STEPS = 1 << 20  # steps × environments in one fragment
MOST_FEATURES = 1 << 16


class Origin(msgspec.Struct, frozen=True):
    """Whose experience it is: the value of a state belongs to a task and to a policy."""

    laptop: str
    task: str
    policy: str = "policy"

    @property
    def head(self) -> str:
        """The name of its head in the value network."""
        return f"{self.laptop}/{self.task}/{self.policy}"


class Fragment(msgspec.Struct, kw_only=True):
    """Steps [T] of several environments [N] at once.

    `observations` has T + 1 rows: row t + 1 came after step t, and where an episode ended with step t it is the first
    one of the next episode. The last observation of an episode that was truncated then stands in
    `final_observations`, in the order of steps and, within a step, of environments.
    """

    observations: np.ndarray[Any, Any]  # [T + 1, N, features]
    rewards: np.ndarray[Any, Any]  # [T, N]
    terminated: np.ndarray[Any, Any]  # [T, N]: the episode ended
    truncated: np.ndarray[Any, Any]  # [T, N]: it was cut off
    final_observations: np.ndarray[Any, Any]  # [number of truncated steps, features]
    log_probs: np.ndarray[Any, Any]  # [T, N]: of the actions, by the policy that acted
    present_log_probs: np.ndarray[Any, Any] | None = None  # by the policy as it is when this is sent; None: the same
    origin: Origin | None = None  # filled in when it is sent, as are the versions
    discount: float = 0.99  # γ: part of what a value means
    policy_version: int = 0  # fragments that this policy had made before
    value_version: int = 0  # the newest version of the value network that the laptop knew; 0: none

    @property
    def num_steps(self) -> int:
        """Steps of all environments together."""
        return int(self.rewards.size)

    @property
    def num_features(self) -> int:
        """The size of an observation."""
        return int(self.observations.shape[-1])

    def check(self) -> None:
        """ConfigurationError when the arrays do not fit together or hold something that is no number."""
        shape = self.rewards.shape
        if len(shape) != 2 or not 0 < self.rewards.size <= MOST_STEPS:
            raise ConfigurationError(f"a fragment's rewards are [steps, environments], not of shape {shape}")
        if self.observations.ndim != 3 or self.observations.shape[:2] != (shape[0] + 1, shape[1]):
            raise ConfigurationError(
                f"a fragment of {shape[0]} steps of {shape[1]} environments has observations of shape "
                f"[{shape[0] + 1}, {shape[1]}, features] (one row more than steps), not {self.observations.shape}"
            )
        if not 0 < self.num_features <= MOST_FEATURES:
            raise ConfigurationError(f"an observation has 1 to {MOST_FEATURES} features, not {self.num_features}")
        if not 0 <= self.discount <= 1:
            raise ConfigurationError(f"the discount of a fragment is {self.discount}: choose 0 to 1")
        for name in ("terminated", "truncated", "log_probs", "present_log_probs"):
            array = getattr(self, name)
            if array is not None and array.shape != shape:
                raise ConfigurationError(f"{name} of a fragment has the shape {array.shape}, and rewards {shape}")
        finals = (int(self.truncated.astype(bool).sum()), self.num_features)
        if self.final_observations.shape != finals:
            raise ConfigurationError(
                f"a fragment with {finals[0]} truncated steps has final observations of shape {finals}, not "
                f"{self.final_observations.shape}: add the last observation of each episode that was cut off"
            )
        for name in ("observations", "final_observations", "rewards", "log_probs", "present_log_probs"):
            array = getattr(self, name)
            if array is not None and not (array.dtype.kind in "fiu" and np.isfinite(array).all()):
                raise ConfigurationError(f"{name} of a fragment are not all finite numbers")

    def behaviour_and_present(self) -> tuple[Array, Array]:
        """Log-probabilities by the policy that acted, and by the present one."""
        present = self.log_probs if self.present_log_probs is None else self.present_log_probs
        return self.log_probs, present


def checked(fragment: Fragment) -> Fragment:
    """A fragment from the network, or ProtocolError."""
    try:
        fragment.check()
        if fragment.origin is None:
            raise ConfigurationError("a fragment does not name its laptop")
        check_origin(fragment.origin)
    except ConfigurationError as error:
        raise ProtocolError(str(error)) from error
    return fragment


def check_origin(origin: Origin) -> Origin:
    """The origin itself, or ConfigurationError when a name does not fit into lists and state dicts."""
    for what in ("laptop", "task", "policy"):
        name = getattr(origin, what)
        if not NAME.fullmatch(name):
            raise ConfigurationError(
                f"{name[:60]!r} cannot name a {what}: use 1 to 40 lower-case letters, digits and inner hyphens"
            )
    return origin


def staleness(fragment: Fragment, value_version: int, newest_policy_version: int) -> int:
    """How many versions a fragment is behind when the learner comes to it, its time in the queue included.

    The value network has gone on since the fragment was made, and so has the policy: the larger count is meant. A
    laptop that knew no version yet is judged by its policy alone.
    """
    behind_value = value_version - fragment.value_version if fragment.value_version else 0
    return max(behind_value, newest_policy_version - fragment.policy_version, 0)
