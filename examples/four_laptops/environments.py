"""Small tasks in numpy, many environments at once: CartPole and its variants, Acrobot, Pendulum with five torques.

The physics and the constants are those of the classic control tasks (Barto, Sutton and Anderson 1983; Sutton 1996).
A time limit *truncates* an episode: the state after it would have gone on, and a value of it can be had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass
class Steps:
    """What came of one step of all environments."""

    observations: Array
    """To act on next: the first one of a new episode, where one has ended."""
    rewards: Array
    terminated: Array
    truncated: Array
    last_observations: Array
    """The same before any reset."""


class Environments:
    """Several copies of one task. A task says how it begins, moves and ends."""

    num_actions: int
    num_features: int
    time_limit: int
    task: str
    """Tasks of one name have observations of one meaning."""
    discount = 0.99
    threshold: float
    """The mean return of 20 episodes from which the task counts as learnt."""

    def __init__(self, number: int, seed: int) -> None:
        self.number = number
        self.random = np.random.default_rng(seed)
        self.state = self.begin(number)
        self._age = np.zeros(number, int)
        self._returns = np.zeros(number)
        self.finished: list[float] = []
        """Returns of the episodes that have ended, oldest first."""

    def begin(self, number: int) -> Array:
        """First states of so many episodes."""
        raise NotImplementedError

    def move(self, actions: Array) -> tuple[Array, Array]:
        """Change the states; returns rewards, and where the episode has ended."""
        raise NotImplementedError

    def observe(self) -> Array:
        """What a policy sees, float32."""
        return self.state.astype(np.float32)

    def step(self, actions: Array) -> Steps:
        """One step of all environments; those whose episode has ended begin another."""
        rewards, terminated = self.move(actions)
        self._age += 1
        self._returns += rewards
        truncated = (self._age >= self.time_limit) & ~terminated
        last = observations = self.observe()
        ended = terminated | truncated
        if ended.any():
            self.finished += self._returns[ended].tolist()
            self.state[ended] = self.begin(int(ended.sum()))
            self._age[ended] = 0
            self._returns[ended] = 0.0
            observations = self.observe()
        return Steps(observations, rewards, terminated, truncated, last)

    def recent_return(self, episodes: int = 20) -> float:
        """The mean of the newest episodes; minus infinity until there are so many."""
        return float(np.mean(self.finished[-episodes:])) if len(self.finished) >= episodes else -np.inf


class CartPole(Environments):
    """Keep a pole upright on a cart, by pushing left or right."""

    task = "cartpole"
    num_actions, num_features, time_limit, threshold = 2, 4, 500, 475.0
    gravity, half_length, pole_mass = 9.8, 0.5, 0.1

    def begin(self, number: int) -> Array:
        return self.random.uniform(-0.05, 0.05, (number, 4))

    def move(self, actions: Array) -> tuple[Array, Array]:
        _, speed, angle, turning = self.state.T
        total, moment = self.pole_mass + 1.0, self.pole_mass * self.half_length
        sine, cosine = np.sin(angle), np.cos(angle)
        push = (np.where(actions == 1, 10.0, -10.0) + moment * turning**2 * sine) / total
        spin = (self.gravity * sine - cosine * push) / (
            self.half_length * (4.0 / 3.0 - self.pole_mass * cosine**2 / total)
        )
        acceleration = push - moment * spin * cosine / total
        self.state = self.state + 0.02 * np.stack([speed, acceleration, turning, spin], 1)
        terminated = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > np.radians(12))
        return np.ones(self.number), terminated


class MoonCartPole(CartPole):
    """Less gravity."""

    gravity = 5.0


class LongCartPole(CartPole):
    """A longer pole, which falls more slowly."""

    half_length = 0.8


class HeavyCartPole(CartPole):
    """More gravity, and a shorter pole: it falls fast."""

    gravity, half_length = 14.0, 0.4


class Acrobot(Environments):
    """Swing a two-link arm above a line, by a torque at the joint between the links."""

    task = "acrobot"
    num_actions, num_features, time_limit, threshold = 3, 6, 500, -100.0

    def begin(self, number: int) -> Array:
        return self.random.uniform(-0.1, 0.1, (number, 4))

    def observe(self) -> Array:
        first, second = self.state[:, 0], self.state[:, 1]
        angles = [np.cos(first), np.sin(first), np.cos(second), np.sin(second)]
        return np.stack([*angles, self.state[:, 2], self.state[:, 3]], 1).astype(np.float32)

    def move(self, actions: Array) -> tuple[Array, Array]:
        torque, state, dt = actions - 1.0, self.state, 0.2
        one = _acrobot_slope(state, torque)
        two = _acrobot_slope(state + dt / 2 * one, torque)
        three = _acrobot_slope(state + dt / 2 * two, torque)
        four = _acrobot_slope(state + dt * three, torque)
        state = state + dt / 6 * (one + 2 * two + 2 * three + four)
        state[:, :2] = (state[:, :2] + np.pi) % (2 * np.pi) - np.pi
        state[:, 2] = state[:, 2].clip(-4 * np.pi, 4 * np.pi)
        state[:, 3] = state[:, 3].clip(-9 * np.pi, 9 * np.pi)
        self.state = state
        terminated = -np.cos(state[:, 0]) - np.cos(state[:, 0] + state[:, 1]) > 1.0
        return np.where(terminated, 0.0, -1.0), terminated


def _acrobot_slope(state: Array, torque: Array) -> Array:
    """Links of length and mass 1, centres at 0.5, moments of inertia 1, as in Sutton's book."""
    first, second, turning, spinning = state.T
    g, sine, cosine = 9.8, np.sin(second), np.cos(second)
    d1 = 0.25 + (1.25 + cosine) + 2.0
    d2 = 0.25 + 0.5 * cosine + 1.0
    phi2 = 0.5 * g * np.cos(first + second - np.pi / 2)
    phi1 = -0.5 * spinning**2 * sine - spinning * turning * sine + 1.5 * g * np.cos(first - np.pi / 2) + phi2
    second_spin = (torque + d2 / d1 * phi1 - 0.5 * turning**2 * sine - phi2) / (1.25 - d2**2 / d1)
    first_spin = -(d2 * second_spin + phi1) / d1
    return np.stack([turning, spinning, first_spin, second_spin], 1)


class Pendulum(Environments):
    """Swing a pendulum up and hold it there, with one of five torques."""

    task = "pendulum"
    num_actions, num_features, time_limit, threshold = 5, 3, 200, -300.0
    discount = 0.95

    def begin(self, number: int) -> Array:
        return self.random.uniform([-np.pi, -1.0], [np.pi, 1.0], (number, 2))

    def observe(self) -> Array:
        angle, speed = self.state.T
        return np.stack([np.cos(angle), np.sin(angle), speed], 1).astype(np.float32)

    def move(self, actions: Array) -> tuple[Array, Array]:
        angle, speed = self.state.T
        torque = actions - 2.0
        upright = (angle + np.pi) % (2 * np.pi) - np.pi
        cost = upright**2 + 0.1 * speed**2 + 0.001 * torque**2
        speed = (speed + (15.0 * np.sin(angle) + 3.0 * torque) * 0.05).clip(-8.0, 8.0)
        self.state = np.stack([angle + speed * 0.05, speed], 1)
        return -cost, np.zeros(self.number, bool)


ALL = {
    "cartpole": CartPole,
    "cartpole-moon": MoonCartPole,
    "cartpole-long": LongCartPole,
    "cartpole-heavy": HeavyCartPole,
    "acrobot": Acrobot,
    "pendulum": Pendulum,
}
RELATED = ("cartpole", "cartpole-moon", "cartpole-long", "cartpole-heavy")
UNRELATED = ("cartpole", "acrobot", "pendulum", "cartpole-heavy")
