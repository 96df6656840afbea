"""One laptop: trains its own policy on its own task, and pools what it learns about the worth of states.

    python laptop.py LINK --name ada --task cartpole --policy mlp
    python laptop.py LINK --name bob --task cartpole-long --policy gru

The learner (`learner.py`) may come later, or die: until it is back, the laptop uses its own critic, and says so.
"""

from __future__ import annotations

import argparse
import logging

import torch
from environments import ALL, Environments
from policies import NAMES, make
from ppo import PPO, PPOConfig

import potluck.fleet
from potluck.fleet.value.pooled import PooledConfig, PooledValue
from potluck.fleet.value.training import ValueConfig
from potluck.fleet.value.ways import LearnerWay, ValueWay

NUM_ENVIRONMENTS = 8
TELL_EVERY = 10  # iterations


def make_laptop(way: ValueWay, name: str, task: str, policy: str, seed: int, own: ValueConfig | None = None) -> PPO:
    """A policy in its environments, with a share in a pooled value network."""
    environments: Environments = ALL[task](NUM_ENVIRONMENTS, seed)
    config = PooledConfig(discount=environments.discount, own=own or ValueConfig(), seed=seed)
    pooled = PooledValue(way, laptop=name, task=environments.task, policy=policy, config=config)
    torch.manual_seed(seed)
    made = make(policy, environments.num_features, environments.num_actions)
    return PPO(made, environments, pooled, PPOConfig(), seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("link", nargs="?", default="", help="the fleet's join link; else POTLUCK_LINK")
    parser.add_argument("--name", required=True, help="of this laptop, in small letters")
    parser.add_argument("--task", choices=ALL, default="cartpole")
    parser.add_argument("--policy", choices=NAMES, default="mlp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150_000)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("potluck.fleet.value").setLevel(logging.INFO)
    torch.set_num_threads(1)
    with potluck.fleet.connect(arguments.link) as fleet:
        laptop = make_laptop(LearnerWay(fleet), arguments.name, arguments.task, arguments.policy, arguments.seed)
        iteration = 0
        while laptop.num_steps < arguments.steps:
            laptop.iterate()
            iteration += 1
            if iteration % TELL_EVERY == 0:
                score, pooled = laptop.environments.recent_return(), laptop.pooled.statistics()
                print(
                    f"step {laptop.num_steps}: return {score:.1f}, value of {pooled['using']} "
                    f"(version {pooled['version']}, {pooled['staleness']} fragments behind)",
                    flush=True,
                )
        laptop.pooled.close()
    print(f"done: return {laptop.environments.recent_return():.1f}", flush=True)


if __name__ == "__main__":
    main()
