"""Seconds from `potluck join` to the first contributed sample, with a model of 25 M parameters, preflight included.

    scripts/bench first_sample [--json] [--repeats 3]

A host is open on this machine; a volunteer types `potluck join LINK`. The clock runs from the start of that process.
Moments on its way: it is in the run; torch is imported; the model is made; the run's state is loaded; its first sample
is handed in (a step is done in it, and the coordinator may count on it); its samples are in a committed epoch. Twice:
as the first trainer of the run, and as a newcomer who has to load the state (300 MB with Adam's statistics) from
another who trains on the same two cores. The baseline is a plain PyTorch process that imports torch, makes the same
model and does one step.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import parser, report, say
from potluck.testing.processes import Children, ManagedProcess

POTLUCK = (sys.executable, "-m", "potluck.cli")
PATIENCE_SECONDS = 300.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
RUN_FILE = """\
name = "first"
recipe = "stdlib-lm"
[model]
layers = 8
width = 512
heads = 8
context = 32
[training]
algorithm = "sync"
target_batch_size = 32
matchmaking_seconds = 1.0
"""
PLAIN = """
import torch
from potluck.recipes.stdlib_lm import Config, StdlibLM
recipe = StdlibLM(Config(layers=8, width=512, heads=8, context=32))
model = recipe.model()
optimizer = torch.optim.AdamW(model.parameters())
samples = recipe.samples(0, torch.Generator())
batch = recipe.collate([next(samples) for _ in range(4)])
recipe.loss(model, batch).backward()
optimizer.step()
print(sum(p.numel() for p in model.parameters()))
"""


def events(process: ManagedProcess) -> list[dict[str, Any]]:
    """What a command has said in JSON."""
    complete, _, _ = process.output().rpartition("\n")
    return [json.loads(line) for line in complete.splitlines() if line.startswith("{")]


def until(process: ManagedProcess, is_it: Callable[[dict[str, Any]], bool]) -> tuple[dict[str, Any], float]:
    """The first event that is it, and when it was seen."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        found = next(filter(is_it, events(process)), None)
        if found is not None:
            return found, time.monotonic()
        if process.exit_code is not None:
            break
        time.sleep(0.02)
    raise SystemExit(f"{process.name} did not do what is measured:\n{process.output()[-3000:]}")


class Volunteer:
    """One `potluck join`, and when it got how far."""

    def __init__(self, children: Children, folder: Path, link: str, name: str) -> None:
        key = ("--identity-path", folder / f"{name}.nkey", "--name", name)
        self.started = time.monotonic()
        self.process = children.spawn([*POTLUCK, "join", link, *key, "--json"], name=name, env=ONE_THREAD)

    def seconds(self) -> dict[str, float]:
        """Until each of the moments."""
        moments = {
            "in_the_run": lambda e: e["event"] == "joined" and "name" not in e,
            "torch_imported": lambda e: e["event"] == "prepared" and e["what"] == "torch",
            "model_ready": lambda e: e["event"] == "prepared" and e["what"] == "model",
            "state_loaded": lambda e: e["event"] == "training",
            "first_sample": lambda e: e["event"] == "progress" and e["samples"] > 0,
        }
        found = {name: until(self.process, is_it) for name, is_it in moments.items()}
        first_epoch = found["first_sample"][0]["epoch"]
        found["first_epoch"] = until(self.process, lambda e: e["event"] == "progress" and e["epoch"] > first_epoch)
        return {name: at - self.started for name, (_, at) in found.items()}

    def leave(self) -> None:
        """Ctrl-C."""
        os.kill(self.process.pid, signal.SIGINT)
        self.process.wait(PATIENCE_SECONDS)


def measure(folder: Path) -> dict[str, dict[str, float]]:
    """One run: the first trainer, then a newcomer."""
    (folder / "run.toml").write_text(RUN_FILE)
    with Children(log_folder=folder) as children:
        place = ("--folder", folder / "hub", "--listen", "127.0.0.1", "--no-dashboard", "--json")
        host = children.spawn([*POTLUCK, "host", folder, *place], name="host", env=ONE_THREAD)
        link = until(host, lambda e: e["event"] == "ready")[0]["link"]
        first = Volunteer(children, folder, link, "first")
        found = {"first": first.seconds()}
        newcomer = Volunteer(children, folder, link, "newcomer")
        found["newcomer"] = newcomer.seconds()
        newcomer.leave()
        first.leave()
        os.kill(host.pid, signal.SIGINT)
        host.wait(PATIENCE_SECONDS)
    return found


def plain_seconds() -> float:
    """A PyTorch process that does one step by itself."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PLAIN], capture_output=True, text=True, env={**os.environ, **ONE_THREAD}
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    say(f"plain PyTorch with {int(done.stdout):,} parameters: {time.monotonic() - started:.2f} s")
    return time.monotonic() - started


def main() -> None:
    arguments = parser(__doc__, repeats=3)
    chosen = arguments.parse_args()
    runs, plain = [], []
    for _ in range(chosen.repeats):
        plain.append(plain_seconds())
        with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
            runs.append(measure(Path(folder)))
        say(json.dumps(runs[-1]))
    figures: dict[str, Any] = {
        f"{who}_{what}_seconds": statistics.median(run[who][what] for run in runs)
        for who, moments in runs[0].items()
        for what in moments
    }
    figures["plain_torch_step_seconds"] = statistics.median(plain)
    figures["ratio"] = figures["newcomer_first_sample_seconds"] / figures["plain_torch_step_seconds"]
    report(figures, as_json=chosen.json, title="from `potluck join` to the first contributed sample, 25 M parameters")


if __name__ == "__main__":
    main()
