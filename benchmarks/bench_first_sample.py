"""Seconds from `potluck join` to the first contributed sample, with a model of 25 M parameters, preflight included.

    scripts/bench first_sample [--json] [--repeats 3] [--apart]
    scripts/bench first_sample --own      # the run has its own recipe, tokenizer and data; volunteers have its link

A host is open on this machine; a volunteer types `potluck join LINK`. The clock runs from the start of that process.
Moments on its way: it is in the run; torch is imported; the model is made; the run's state is loaded; its first sample
is handed in (a step is done in it, and the coordinator may count on it); its samples are in a committed epoch. Twice:
as the first trainer of the run, and as a newcomer who has to load the state (300 MB with Adam's statistics) from
another who trains on the same two cores. The baseline is a plain PyTorch process that imports torch, makes the same
model and does one step.

What the newcomer costs the other is its samples per second while the newcomer comes in, against those of the same time
just before; once as they are, and once between rounds: a round of two takes time that a lone trainer does not spend,
however states travel. "giver_slowdown" is 0.1 where the giver computes a tenth less.

On two cores the giver also loses what the newcomer's own imports and steps take of them. With --apart the giver has a
core to itself while it is measured, and host and newcomer share the others: what is left is the cost of giving.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness import parser, report, say
from potluck.testing.processes import Children, ManagedProcess

POTLUCK = (sys.executable, "-m", "potluck.cli")
PATIENCE_SECONDS = 300.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
ALONE_SECONDS = 12.0  # how long the giver trains alone before the newcomer starts
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
OWN_RUN_FILE = """\
name = "own"
recipe = "recipe.py"
files = ["tokenizer.json", "texts.jsonl"]
requirements = ["tokenizers>=0.20"]
[training]
algorithm = "sync"
target_batch_size = 32
matchmaking_seconds = 1.0
"""
OWN_RECIPE = """\
import json
import torch
from tokenizers import Tokenizer
from potluck.recipes import Recipe, RecipeConfig

class Own(Recipe[RecipeConfig]):
    num_shards = 16

    def model(self):
        layer = torch.nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True, norm_first=True)
        return torch.nn.ModuleDict({
            "in": torch.nn.Embedding(4096, 256),
            "body": torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
            "out": torch.nn.Linear(256, 4096),
        })

    def samples(self, shard, generator):
        tokenizer = Tokenizer.from_file(str(self.file("tokenizer.json")))
        with self.file("texts.jsonl").open() as lines:
            for number, line in enumerate(lines):
                if number % self.num_shards == shard:
                    tokens = tokenizer.encode(json.loads(line)["text"]).ids
                    for at in range(0, len(tokens) - 64, 64):
                        yield (torch.tensor(tokens[at : at + 65]),)

    def loss(self, model, batch):
        tokens = batch[0]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(64, tokens.device)
        seen = model["out"](model["body"](model["in"](tokens[:, :-1]), mask=mask, is_causal=True))
        return torch.nn.functional.cross_entropy(seen.flatten(0, 1), tokens[:, 1:].flatten())
"""
OWN_TEXT_BYTES = 6_000_000
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


@dataclass(frozen=True)
class Moment:
    """How far a trainer was, and when that was seen."""

    at: float
    epoch: int
    samples: int


class Pace:
    """Follows what a trainer says of itself."""

    def __init__(self, process: ManagedProcess) -> None:
        self._process = process
        self._moments: list[Moment] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def __enter__(self) -> Pace:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._is_over.wait(0.02):
            told = [event for event in events(self._process) if event["event"] == "progress"]
            now = time.monotonic()
            self._moments += [Moment(now, e["epoch"], e["samples"]) for e in told[len(self._moments) :]]

    def samples_per_second(self, begin: float, end: float, *, between_rounds: bool) -> float:
        """In that time; leaving aside, where that is wanted, whatever a round was in."""
        moments = [moment for moment in self._moments if begin <= moment.at <= end]
        pairs = list(itertools.pairwise(moments))
        if between_rounds:
            pairs = [(before, after) for before, after in pairs if before.epoch == after.epoch]
        seconds = sum(after.at - before.at for before, after in pairs)
        if not seconds:
            raise SystemExit(f"{self._process.name} said nothing of itself from {begin:.1f} to {end:.1f}")
        return sum(after.samples - before.samples for before, after in pairs) / seconds


class Volunteer:
    """One `potluck join`, and when it got how far."""

    def __init__(self, children: Children, folder: Path, link: str, name: str) -> None:
        key = ("--identity-path", folder / f"{name}.nkey", "--name", name, "--yes")
        nothing_yet = {"POTLUCK_DATA": str(folder / name / "files"), "XDG_DATA_HOME": str(folder / name)}
        self.started = time.monotonic()
        self.process = children.spawn(
            [*POTLUCK, "join", link, *key, "--json"], name=name, env={**ONE_THREAD, **nothing_yet}
        )

    def stay_on(self, cores: Collection[int]) -> None:
        """Compute on these cores from now on."""
        stay_on(self.process.pid, cores)

    def seconds(self) -> dict[str, float]:
        """Until each of the moments; and what it had used of a processor at its first sample."""
        moments = {
            "in_the_run": lambda e: e["event"] == "joined" and "name" not in e,
            "torch_imported": lambda e: e["event"] == "prepared" and e["what"] == "torch",
            "model_ready": lambda e: e["event"] == "prepared" and e["what"] == "model",
            "state_loaded": lambda e: e["event"] == "training",
            "first_sample": lambda e: e["event"] == "progress" and e["samples"] > 0,
        }
        found = {name: until(self.process, is_it) for name, is_it in moments.items()}
        used = psutil.Process(self.process.pid).cpu_times()
        first_epoch = found["first_sample"][0]["epoch"]
        found["first_epoch"] = until(self.process, lambda e: e["event"] == "progress" and e["epoch"] > first_epoch)
        return {name: at - self.started for name, (_, at) in found.items()} | {"processor": used.user + used.system}

    def leave(self) -> None:
        """Ctrl-C."""
        os.kill(self.process.pid, signal.SIGINT)
        self.process.wait(PATIENCE_SECONDS)


def stay_on(pid: int, cores: Collection[int]) -> None:
    """Have a process compute on these cores, with all threads and children that it has; later ones follow."""
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)


def make_own_run(folder: Path) -> None:
    """A recipe, texts (the source of Python's own library) and a tokenizer that was trained on them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    (folder / "run.toml").write_text(OWN_RUN_FILE)
    (folder / "recipe.py").write_text(OWN_RECIPE)
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = path.read_text("utf-8", "replace")
        texts += [text[at : at + 4000] for at in range(0, len(text), 4000)]
        size += len(text)
        if size > OWN_TEXT_BYTES:
            break
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts[:500], trainers.BpeTrainer(vocab_size=4096, show_progress=False, initial_alphabet=alphabet)
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def measure(folder: Path, *, is_apart: bool, is_own: bool) -> dict[str, dict[str, float]]:
    """One run: the first trainer, then a newcomer."""
    if is_own:
        make_own_run(folder)
    else:
        (folder / "run.toml").write_text(RUN_FILE)
    with Children(log_folder=folder) as children:
        place = ("--folder", folder / "hub", "--listen", "127.0.0.1", "--no-dashboard", "--json")
        host = children.spawn([*POTLUCK, "host", folder, *place], name="host", env=ONE_THREAD)
        link = until(host, lambda e: e["event"] == "ready")[0]["link"]
        first = Volunteer(children, folder, link, "first")
        found = {"first": first.seconds()}
        until(first.process, lambda e: e["event"] == "batch size")
        own, *others = sorted(os.sched_getaffinity(0))
        if is_apart:
            stay_on(host.pid, others)
            first.stay_on([own])
        with Pace(first.process) as pace:
            time.sleep(ALONE_SECONDS)
            newcomer = Volunteer(children, folder, link, "newcomer")
            if is_apart:
                newcomer.stay_on(others)
            found["newcomer"] = newcomer.seconds()
        found["giver"] = slowdown(pace, newcomer.started, found["newcomer"]["first_sample"])
        newcomer.leave()
        first.leave()
        os.kill(host.pid, signal.SIGINT)
        host.wait(PATIENCE_SECONDS)
    return found


def slowdown(pace: Pace, came_at: float, seconds: float) -> dict[str, float]:
    """By how much the giver was slower while somebody came in, as a share of its speed before."""

    def lost(*, between_rounds: bool) -> float:
        before = pace.samples_per_second(came_at - ALONE_SECONDS, came_at, between_rounds=between_rounds)
        meanwhile = pace.samples_per_second(came_at, came_at + seconds, between_rounds=between_rounds)
        return 1 - meanwhile / before

    return {"slowdown": lost(between_rounds=True), "slowdown_with_rounds": lost(between_rounds=False)}


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
    arguments.add_argument("--apart", action="store_true", help="the giver has a core to itself")
    arguments.add_argument("--own", action="store_true", help="a run with its own recipe, tokenizer and data")
    chosen = arguments.parse_args()
    if chosen.apart and len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("--apart needs two cores")
    runs, plain = [], []
    for _ in range(chosen.repeats):
        plain.append(plain_seconds())
        with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
            runs.append(measure(Path(folder), is_apart=chosen.apart, is_own=chosen.own))
        say(json.dumps(runs[-1]))
    figures: dict[str, Any] = {
        f"{who}_{what}" + ("" if who == "giver" else "_seconds"): statistics.median(run[who][what] for run in runs)
        for who, moments in runs[0].items()
        for what in moments
    }
    figures["plain_torch_step_seconds"] = statistics.median(plain)
    figures["ratio"] = figures["newcomer_first_sample_seconds"] / figures["plain_torch_step_seconds"]
    size = "own recipe, tokenizer and data, 5 M parameters" if chosen.own else "25 M parameters"
    report(figures, as_json=chosen.json, title=f"from `potluck join` to the first contributed sample, {size}")


if __name__ == "__main__":
    main()
