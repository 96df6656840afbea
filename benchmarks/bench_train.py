"""Seconds to a fixed loss: four peers on lines of 100 Mbit/s and 50 ms, Potluck against hivemind.Optimizer.

    scripts/bench train [--json] [--repeats 3] [--only sync,hivemind] [--steps 96]

A small internet (potluck.testing.natlab, needs root): a hub without a line of its own, and four peers whose lines let
through 100 Mbit/s each way and take 50 ms each way, so that a round trip between two peers takes 200 ms. All contenders
train the same model (toylm.py) on the same batches, for as many samples. Losses are measured afterwards, of what the
first peer had after every few steps, so that measuring costs no contender any time. Contenders take turns, `--repeats`
times; figures are medians of all runs, ratios those of the medians, and what each run came to stands beside them.

  sync        a shared batch, averaged in float16, one step
  sync8       the same in 8 bits, with a scale for each block: half the bytes
  delays      the same, averaged and stepped in the background: gradients are an epoch old
  diloco      local steps, exchanged in float16 in the background now and then
  sparseloco  the same with the largest of each block in two bits
  hivemind    hivemind.Optimizer, the shared batch in float16
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import HIVEMIND, ROOT, environment_with, parser, report, say
from potluck.testing.natlab import Host, NatLab
from potluck.testing.processes import ManagedProcess
from toylm import corpus

NUM_PEERS = 4
RATE_MBIT, DELAY_MS = 100.0, 50.0
START_SECONDS, TRAIN_SECONDS, EVALUATE_SECONDS = 180.0, 900.0, 300.0
TASK: dict[str, Any] = {
    "num_peers": NUM_PEERS,
    "width": 256,
    "num_layers": 4,
    "length": 32,
    "batch_size": 4,
    "steps_per_epoch": 4,
    "step_seconds": 0.3,
    "lr": 3e-3,
    "warm_up_epochs": 10,
    "local_lr": 1e-3,
    "kept_every": 4,
}
TARGET_LOSS = 3.3
LOWER_LOSS = 3.2  # where all curves are flat: which batches made an epoch decides by ten seconds
OPTIONS: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync8": {},
    "hivemind": {"matchmaking_seconds": 3.0, "averaging_timeout_seconds": 30.0, "average_state_every": 20},
    "diloco": {"inner_steps": 16, "overlap_steps": 12, "outer_lr": 0.7, "outer_momentum": 0.5},
    "sparseloco": {"inner_steps": 12, "overlap_steps": 11, "outer_lr": 0.7, "k": 256},
    "delays": {},
}


def told(process: ManagedProcess, event: str, within_seconds: float) -> dict[str, Any]:
    """What a process says of this event."""
    answer: dict[str, Any] = json.loads(process.wait_for_line(f'"event": "{event}"', within_seconds).string)
    return answer


class Contender:
    """One way to train, in a lab of its own."""

    def __init__(self, lab: NatLab, kind: str, folder: Path, num_steps: int) -> None:
        self._lab = lab
        self._task = {**TASK, "kind": kind, "num_steps": num_steps, "options": OPTIONS[kind]}
        self._folder = folder
        self.hub = lab.public("hub")
        self.nodes = [lab.public(f"peer{number}") for number in range(NUM_PEERS)]
        self.peers: list[ManagedProcess] = []

    def start(self) -> None:
        """Start everybody, and shape the lines."""
        for node in self.nodes:
            node.shape(rate_mbit=RATE_MBIT, delay_ms=DELAY_MS)
        text = self._folder / "text"
        text.write_bytes(corpus(2_000_000))
        command = self._hivemind() if self._task["kind"] == "hivemind" else self._potluck()
        for number, node in enumerate(self.nodes):
            task = json.dumps({**self._task, "number": number, "text": str(text)})
            argv = [word if isinstance(word, str) else word(node, task) for word in command]
            self.peers.append(node.popen(argv, name="peer", stdin=True))
        for peer in self.peers:
            told(peer, "ready", START_SECONDS)

    def _potluck(self) -> Sequence[Any]:
        program = [sys.executable, str(ROOT / "benchmarks" / "train_host.py"), str(self._folder), self.hub.address]
        link = told(self.hub.popen(program, name="host"), "ready", START_SECONDS)["link"]
        peer = str(ROOT / "benchmarks" / "train_peer.py")
        return [sys.executable, peer, lambda _, task: task, link, lambda node, _: node.address]

    def _hivemind(self) -> Sequence[Any]:
        python = str(environment_with("hivemind", [HIVEMIND]))
        program = str(ROOT / "benchmarks" / "baselines" / "hivemind_train.py")
        first = self.hub.popen([python, program, "bootstrap", self.hub.address], name="dht", stdin=True)
        addresses = told(first, "ready", START_SECONDS)["addresses"]
        return [python, program, lambda _, task: task, lambda node, _: node.address, *addresses]

    def train(self) -> dict[str, Any]:
        """Train, and return what came of it."""
        before = [_line_bytes(node) for node in self.nodes]
        for peer in self.peers:
            peer.send_line("go")
        for peer in self.peers:
            told(peer, "trained", TRAIN_SECONDS)
        line_bytes = [_line_bytes(node) - start for node, start in zip(self.nodes, before, strict=True)]
        for peer in self.peers:
            peer.send_line("stop")
        ends = [told(peer, "finished", EVALUATE_SECONDS) for peer in self.peers]
        for peer in self.peers:
            peer.send_line("leave")
        return {"ends": ends, "line_bytes": line_bytes}


def _line_bytes(node: Host) -> int:
    """All that has passed a peer's line, both ways, headers included."""
    passed = node.link_statistics()
    return int(passed["up"]["passed_bytes"] + passed["down"]["passed_bytes"])


def seconds_to(loss: float, losses: list[list[float]]) -> float | None:
    """When the loss was reached first."""
    return next((at for at, _, reached in losses if reached <= loss), None)


def measure(kind: str, num_steps: int, log_folder: Path | None) -> dict[str, Any]:
    """One contender from start to end."""
    if log_folder is not None:
        log_folder = log_folder / kind  # each lab counts its logs from 0
        log_folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder, NatLab(log_folder=log_folder) as lab:
        contender = Contender(lab, kind, Path(folder), num_steps)
        contender.start()
        outcome = contender.train()
    ends, losses = outcome["ends"], outcome["ends"][0]["losses"]
    result = {
        "seconds": max(end["seconds"] for end in ends),
        "seconds_to_loss": seconds_to(TARGET_LOSS, losses),
        "seconds_to_lower_loss": seconds_to(LOWER_LOSS, losses),
        "final_loss": losses[-1][2],
        "computing_share": min(end["computing"] for end in ends),
        "computing_share_of_each": [round(end["computing"], 3) for end in ends],
        "gradients_share": min(end["gradients"] for end in ends),
        "working_share": max(end["working"] for end in ends),
        "waiting_share": max(end["waiting"] for end in ends),
        "megabytes_per_peer": max(outcome["line_bytes"]) / 1e6,
        "megabytes_of_each": [round(num_bytes / 1e6, 1) for num_bytes in outcome["line_bytes"]],
        "epochs": max(end["epoch"] for end in ends),
        "slowest_batch_seconds": max(end["slowest_batch_seconds"] for end in ends),
        "losses": [[round(value, 3) for value in row] for row in losses],
        "statistics": ends[0]["statistics"],
    }
    say(
        f"{kind:12} {result['seconds']:6.1f} s, {_shown(result['seconds_to_loss'])} s to a loss of {TARGET_LOSS}, "
        f"{_shown(result['seconds_to_lower_loss'])} s to {LOWER_LOSS}, "
        f"{result['final_loss']:.3f} in the end, {100 * result['computing_share']:.1f}% computing "
        f"({100 * result['gradients_share']:.1f}% gradients), {100 * result['working_share']:.1f}% own work, "
        f"{result['megabytes_per_peer']:.1f} MB a peer, {result['epochs']} epochs"
    )
    return result


def _shown(seconds: float | None) -> str:
    return "no" if seconds is None else f"{seconds:.1f}"


def median_of(values: list[float | None]) -> float | None:
    """Of several runs, where None has not got there at all."""
    median = statistics.median(math.inf if value is None else value for value in values)
    return median if math.isfinite(median) else None


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of several runs of a contender: medians of what can be ordered, and all runs of what is looked at."""
    ordered = [name for name, value in runs[0].items() if value is None or isinstance(value, (int, float))]
    return {
        **runs[-1],
        **{name: median_of([run[name] for run in runs]) for name in ordered},
        "seconds_to_loss_of_runs": [run["seconds_to_loss"] for run in runs],
        "seconds_to_lower_loss_of_runs": [run["seconds_to_lower_loss"] for run in runs],
    }


def ratios_of(results: dict[str, dict[str, Any]], figure: str) -> dict[str, float]:
    """How much longer hivemind took than each of the others, where both have come so far."""
    base = results.get("hivemind", {}).get(figure)
    return {
        kind: base / result[figure]
        for kind, result in results.items()
        if base is not None and result[figure] is not None and kind != "hivemind"
    }


def figures_of(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All figures in one table, and the ratios to hivemind."""
    figures: dict[str, Any] = {
        f"{kind}_{name}": value for kind, result in results.items() for name, value in result.items()
    }
    ratios = ratios_of(results, "seconds_to_loss")
    figures |= {f"ratio_{kind}": ratio for kind, ratio in ratios.items()}
    figures |= {f"ratio_{kind}_lower": ratio for kind, ratio in ratios_of(results, "seconds_to_lower_loss").items()}
    lazy = [kind for kind in ("diloco", "sparseloco") if kind in ratios]
    if lazy:
        best = max(lazy, key=lambda kind: ratios[kind])
        figures |= {
            "best_low_communication": best,
            "ratio_best": ratios[best],
            "utilization_best": results[best]["computing_share"],
        }
    return figures


def main() -> None:
    options = parser(__doc__, repeats=3)
    options.add_argument("--only", default="", help="some contenders, with commas")
    options.add_argument("--steps", type=int, default=96, help="of each peer")
    options.add_argument("--log-folder", type=Path, help="keep what the processes say")
    arguments = options.parse_args()
    chosen = [kind for kind in OPTIONS if not arguments.only or kind in arguments.only.split(",")]
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in chosen}
    for number in range(arguments.repeats):
        for kind in chosen:
            folder = arguments.log_folder / str(number) if arguments.log_folder else None
            runs[kind].append(measure(kind, arguments.steps, folder))
    results = {kind: together(of_kind) for kind, of_kind in runs.items()}
    report(figures_of(results), as_json=arguments.json, title="seconds to a fixed loss, four peers on slow lines")


if __name__ == "__main__":
    main()
