"""One laptop: trains its own policy on its own task, and pools what it learns about the worth of states.

    python laptop.py --task cartpole --policy mlp                 # as a job of a fleet: see fleet.toml
    python laptop.py LINK --name bob --task cartpole-long         # by hand, with a link for its queues
    python laptop.py LINK --way together                          # without a learner: the trunk is trained in rounds

The learner (`learner.py`) may come later, or die: until it is back, the laptop uses its own critic, and says so. Killed
and started again, the laptop goes on from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import math
import platform
import re
from pathlib import Path

import torch
from environments import ALL, Environments
from policies import NAMES, make
from ppo import PPO, PPOConfig

import potluck
import potluck.fleet
from potluck.fleet.value.pooled import PooledConfig, PooledValue
from potluck.fleet.value.together import TogetherWay
from potluck.fleet.value.training import ValueConfig
from potluck.fleet.value.ways import LearnerWay, ValueWay
from potluck.run.joined import Joined

NUM_ENVIRONMENTS = 8
CHECKPOINT = Path("checkpoints/laptop.pt")


def make_laptop(way: ValueWay, name: str, task: str, policy: str, seed: int, own: ValueConfig | None = None) -> PPO:
    """A policy in its environments, with a share in a pooled value network."""
    environments: Environments = ALL[task](NUM_ENVIRONMENTS, seed)
    config = PooledConfig(discount=environments.discount, own=own or ValueConfig(), seed=seed)
    pooled = PooledValue(way, laptop=name, task=environments.task, policy=policy, config=config)
    torch.manual_seed(seed)
    made = make(policy, environments.num_features, environments.num_actions)
    return PPO(made, environments, pooled, PPOConfig(), seed)


def join(link: str, way: str, job: potluck.fleet.CurrentJob) -> potluck.fleet.Fleet | Joined:
    """The fleet's queues, or its run, where the value network is trained together."""
    if way == "together":
        run = potluck.join(link)
        run.is_leaving = job.stopping.is_set  # then it waits for nobody any more
        return run
    return potluck.fleet.connect(link) if link else job.fleet


def train(laptop: PPO, job: potluck.fleet.CurrentJob, steps: int, tell_every: int) -> None:
    """Train until there are so many steps, or the job is told to end."""
    if CHECKPOINT.exists():
        laptop.restore(torch.load(CHECKPOINT, weights_only=True))
        print(f"goes on from step {laptop.num_steps}", flush=True)
    iteration = 0
    while laptop.num_steps < steps and not job.stopping.is_set():
        laptop.iterate()
        iteration += 1
        tell(laptop, job, aloud=iteration % tell_every == 0)
        if iteration % tell_every == 0:
            save(laptop, job)
    save(laptop, job)


def tell(laptop: PPO, job: potluck.fleet.CurrentJob, *, aloud: bool) -> None:
    """Log the figures that `potluck fleet ps` and the dashboard show."""
    score, pooled = laptop.environments.recent_return(), laptop.pooled.statistics()
    figures = {"steps": laptop.num_steps}
    figures |= {name: float(pooled[name]) for name in ("version", "staleness", "pooled_share")}
    if math.isfinite(score):  # there were 20 episodes
        figures["return"] = score
    job.log(figures)
    if aloud:
        print(
            f"step {laptop.num_steps}: return {score:.1f}, value of {pooled['using']} "
            f"(version {pooled['version']}, {pooled['staleness']} fragments behind"
            + (f", {pooled['way_rounds']:.0f} rounds)" if "way_rounds" in pooled else ")"),
            flush=True,
        )


def save(laptop: PPO, job: potluck.fleet.CurrentJob) -> None:
    """Keep what it has learnt: `potluck fleet cp JOB:checkpoints` brings it."""
    torch.save(laptop.state(), CHECKPOINT.name)
    job.checkpoint(CHECKPOINT.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("link", nargs="?", default="", help="the fleet's join link, where this is not a job")
    parser.add_argument("--name", default="", help="of this laptop, in small letters; else the job's, or the machine's")
    parser.add_argument("--task", choices=ALL, default="cartpole")
    parser.add_argument("--policy", choices=NAMES, default="mlp")
    parser.add_argument("--way", choices=("learner", "together"), default="learner")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150_000)
    parser.add_argument("--tell-every", type=int, default=10, help="iterations between two lines, and two checkpoints")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("potluck.fleet.value").setLevel(logging.INFO)
    torch.set_num_threads(1)
    job = potluck.fleet.current()
    name = arguments.name or job.name or re.sub(r"[^a-z0-9]+", "-", platform.node().lower()).strip("-")[:40]
    with job, join(arguments.link, arguments.way, job) as place:
        way = TogetherWay(place) if isinstance(place, Joined) else LearnerWay(place)
        laptop = make_laptop(way, name, arguments.task, arguments.policy, arguments.seed)
        train(laptop, job, arguments.steps, arguments.tell_every)
        laptop.pooled.close()
    print(f"done: return {laptop.environments.recent_return():.1f}", flush=True)


if __name__ == "__main__":
    main()
