"""Stable-Baselines3's PPO on one of the example's tasks: sb3_ppo.py EXAMPLE-FOLDER TASK SEED CAP."""

from __future__ import annotations

import json
import sys
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

sys.path.insert(0, sys.argv[1])
from environments import ALL, Environments

NUM_ENVIRONMENTS = 8
EVALUATE_EVERY = 1024
EPISODES = 20


class Wrapped(VecEnv):
    """Our environments as SB3 wants them."""

    def __init__(self, inner: Environments) -> None:
        self.inner = inner
        self._actions: Any = None
        limits = np.full(inner.num_features, np.inf, np.float32)
        super().__init__(
            inner.number, gymnasium.spaces.Box(-limits, limits), gymnasium.spaces.Discrete(inner.num_actions)
        )

    def reset(self) -> Any:
        return self.inner.observe()

    def step_async(self, actions: Any) -> None:
        self._actions = actions

    def step_wait(self) -> Any:
        came = self.inner.step(self._actions)
        ended = came.terminated | came.truncated
        infos: list[dict[str, Any]] = [
            {"terminal_observation": last, "TimeLimit.truncated": bool(cut)} if end else {}
            for last, cut, end in zip(came.last_observations, came.truncated, ended, strict=True)
        ]
        return came.observations, came.rewards.astype(np.float32), ended, infos

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        pass

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return [None] * self.num_envs

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


class UntilThreshold(BaseCallback):
    """Stops when fresh episodes reach the threshold."""

    def __init__(self, task: str, seed: int) -> None:
        super().__init__()
        self.task, self.seed = task, seed
        self.reached = 0

    def _on_step(self) -> bool:
        if self.num_timesteps % EVALUATE_EVERY == 0 and self._evaluate() >= ALL[self.task].threshold:
            self.reached = self.num_timesteps
        return not self.reached

    def _evaluate(self) -> float:
        environments = ALL[self.task](EPISODES, self.seed)
        returns, running = np.zeros(EPISODES), np.ones(EPISODES, bool)
        observations = environments.observe()
        while running.any():
            actions, _ = self.model.predict(observations, deterministic=False)
            came = environments.step(actions)
            returns += came.rewards * running
            running &= ~(came.terminated | came.truncated)
            observations = came.observations
        return float(returns.mean())


def main() -> None:
    task, seed, cap = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    watching = UntilThreshold(task, 1000 + seed)
    inner = ALL[task](NUM_ENVIRONMENTS, seed)
    model = PPO(
        "MlpPolicy", Wrapped(inner), n_steps=64, batch_size=128, n_epochs=6, learning_rate=1e-3, gamma=inner.discount,
        gae_lambda=0.95, ent_coef=0.01, seed=seed, device="cpu",
    )  # fmt: skip
    model.learn(cap, callback=watching)
    print(json.dumps({"steps": watching.reached or cap}))


main()
