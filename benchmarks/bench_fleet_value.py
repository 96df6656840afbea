"""Steps to learn four tasks with four policies: with a pooled value network, and with own critics alone.

    scripts/bench fleet_value [--json] [--seeds 5] [--minutes 40] [--cap 150000]
        [--ways pooled,own,own-more,sb3] [--groups related,unrelated]

Related tasks are variants of CartPole; unrelated ones are CartPole, Acrobot, Pendulum and a heavy CartPole. The laptops
are MLP, wide, ReLU and GRU (examples/four_laptops). All have the same PPO and the same first weights:

    pooled    own critics with 6 passes over each fragment, and a learner with 16
    own       own critics with 6 passes, as many as the policy: PPO as it is known
    own-more  own critics with 16 passes (related tasks only): is it the pooling, or the passes?
    sb3       Stable-Baselines3's PPO with the same settings and its own MLP (installed on first use)

A task is learnt when 20 fresh episodes, tried every 1,024 steps, have the threshold as their mean return; not reached
counts as the cap. The learner is in the same process, so that a seed gives the same figures each time; it publishes
once for each fragment of all laptops.

`--ways sb3 --groups related --seeds 1` measures SB3 alone. When the minutes are over, what has not ended is left out,
and the report says how many seeds there were.
"""

from __future__ import annotations

import logging
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from harness import ROOT, environment_with, parser, report, run_baseline, say

EXAMPLE = ROOT / "examples" / "four_laptops"
SB3 = "stable-baselines3==2.9.2"
WAYS = ("pooled", "own", "own-more", "sb3")
EVALUATE_EVERY = 1024
EPISODES = 20
MORE_PASSES = 16
SB3_SECONDS = 1800.0


@dataclass(frozen=True)
class Job:
    """One run of four laptops, or of one task by SB3."""

    way: str  # pooled, own, own-more, sb3
    tasks: tuple[str, ...]
    group: str
    seed: int
    cap: int


class Nobody:
    """A way to no pooled network at all."""

    def offer(self, fragment: Any) -> bool:
        return True

    def newest(self) -> None:
        return None

    def statistics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


def run(job: Job) -> list[int]:
    """Steps to the threshold, by laptop."""
    sys.path.insert(0, str(EXAMPLE))
    import torch
    from laptop import make_laptop
    from policies import NAMES

    from potluck.fleet.value.learner import LearnerConfig, ValueLearner
    from potluck.fleet.value.training import ValueConfig
    from potluck.fleet.value.ways import LocalWay

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    way = LocalWay(ValueLearner(LearnerConfig(seed=job.seed))) if job.way == "pooled" else Nobody()
    own = ValueConfig(passes=MORE_PASSES) if job.way == "own-more" else ValueConfig()
    laptops = [
        make_laptop(way, f"laptop-{number}", task, policy, 10 * job.seed + number, own)
        for number, (task, policy) in enumerate(zip(job.tasks, NAMES, strict=True))
    ]
    reached: dict[int, int] = {}
    while len(reached) < len(laptops) and laptops[0].num_steps < job.cap:
        for number, laptop in enumerate(laptops):
            if number in reached and job.way != "pooled":
                continue  # nobody learns from it
            laptop.iterate()
            if number not in reached and laptop.num_steps % EVALUATE_EVERY == 0:
                score = laptop.evaluate(EPISODES, seed=1000 + job.seed)
                if score >= laptop.environments.threshold:
                    reached[number] = laptop.num_steps
        if isinstance(way, LocalWay):
            way.learn()
    return [reached.get(number, job.cap) for number in range(len(laptops))]


def run_sb3(job: Job, python: str) -> list[int]:
    """The same for tasks that SB3 learns one by one."""
    return [
        run_baseline(python, "sb3_ppo.py", EXAMPLE, task, job.seed, job.cap, timeout_seconds=SB3_SECONDS)["steps"]
        for task in job.tasks
    ]


def measure(options: Any) -> dict[str, Any]:
    """All jobs, as many at a time as there are workers. Those of SB3 come last."""
    sys.path.insert(0, str(EXAMPLE))
    from environments import RELATED, UNRELATED

    chosen = options.groups.split(",")
    groups = {group: tasks for group, tasks in {"related": RELATED, "unrelated": UNRELATED}.items() if group in chosen}
    ways = [way for way in WAYS if way in options.ways.split(",")]
    jobs = [
        Job(way, tasks, group, seed, options.cap)
        for seed in range(options.seeds)
        for way in ways
        for group, tasks in groups.items()
        if (way, group) != ("own-more", "unrelated")
    ]
    jobs.sort(key=lambda job: job.way == "sb3")
    sb3 = str(environment_with("sb3", [SB3])) if "sb3" in ways else ""
    results: dict[Job, list[int]] = {}
    ends = time.monotonic() + 60 * options.minutes
    pool = ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn"))
    futures = {pool.submit(run_sb3, job, sb3) if job.way == "sb3" else pool.submit(run, job): job for job in jobs}
    try:
        for future in as_completed(futures, timeout=max(ends - time.monotonic(), 1)):
            job = futures[future]
            results[job] = future.result()
            say(f"seed {job.seed}, {job.group}, {job.way}: {results[job]}")
    except TimeoutError:
        say("the minutes are over: what has not ended is left out")
        for process in multiprocessing.active_children():
            process.kill()
    pool.shutdown(wait=False, cancel_futures=True)
    return summary(whole_seeds(results), groups)


def whole_seeds(results: dict[Job, list[int]]) -> dict[tuple[str, str], list[list[int]]]:
    """Results by group and way, of the seeds that all ways of a group but SB3's have."""
    found: dict[tuple[str, str], list[list[int]]] = {}
    for group in {job.group for job in results}:
        ways = {job.way for job in results if job.group == group}
        seeds = [{job.seed for job in results if (job.group, job.way) == (group, way)} for way in ways - {"sb3"}]
        common = set.intersection(*seeds) if seeds else set()
        for job in sorted(results, key=lambda each: each.seed):
            if job.group == group and (job.seed in common or job.way == "sb3"):
                found.setdefault((group, job.way), []).append(results[job])
    return found


def summary(done: dict[tuple[str, str], list[list[int]]], groups: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Means over seeds, by task; ratios of the means over tasks and seeds."""
    figures: dict[str, Any] = {}
    for group, tasks in groups.items():
        rows = {way: done[group, way] for way in WAYS if (group, way) in done}
        for way, row in rows.items():
            by_task = {
                task: round(statistics.mean(column)) for task, column in zip(tasks, zip(*row, strict=True), strict=True)
            }
            figures[f"{group}_{way}_steps"] = by_task
        if {"pooled", "own"} <= set(rows):
            pooled, own = ([sum(seed) for seed in rows[way]] for way in ("pooled", "own"))
            figures[f"{group}_pooled_over_own"] = round(sum(pooled) / sum(own), 3)
            figures[f"{group}_ratio_by_seed"] = [round(one / other, 3) for one, other in zip(pooled, own, strict=True)]
            if "own-more" in rows:
                more = sum(map(sum, rows["own-more"]))
                figures[f"{group}_pooled_over_own_more"] = round(sum(pooled) / more, 3)
            worst = max(
                sum(row[number] for row in rows["pooled"]) / sum(row[number] for row in rows["own"])
                for number in range(len(tasks))
            )
            figures[f"{group}_worst_task_ratio"] = round(worst, 3)
        figures[f"{group}_seeds"] = {way: len(row) for way, row in rows.items()}
        figures[f"{group}_all"] = rows
    return figures


def main() -> None:
    arguments = parser(__doc__, repeats=None)
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--minutes", type=float, default=40.0, help="what has not ended after these is left out")
    arguments.add_argument("--cap", type=int, default=150_000, help="steps of each laptop at most")
    arguments.add_argument("--workers", type=int, default=2, help="processes at a time")
    arguments.add_argument("--ways", default=",".join(WAYS), help="what is measured, with commas")
    arguments.add_argument("--groups", default="related,unrelated", help="which tasks, with commas")
    options = arguments.parse_args()
    report(measure(options), as_json=options.json, title="fleet_value: steps to the threshold")


if __name__ == "__main__":
    main()
