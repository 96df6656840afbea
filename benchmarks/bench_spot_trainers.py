"""The spot runner with real trainers on shaped lines: time to a loss, or a trace of preemptions; by `potluck spot up`.

    scripts/bench spot_trainers                                   # as root: it builds network namespaces
    scripts/bench spot_trainers --replay --trace g4dn-spot.csv --compress 60

*Time to a loss*, one way after the other: four workers on equal lines, on lines of 20, 10, 10 and 5 Mbit/s (as fast
together), the same without an aux peer, and with preemptions. Seconds count from the first epoch, so starting does not;
the loss is the median of what workers last said.

*Replay*: the tiers and an aux peer again. The trace takes workers away without notice, and the runner brings them back.
Each second every machine is looked at: it must be the only one of its slot, run in its slot's network, and have its
slot's line; what is wrong in two looks counts, since a machine that is being taken away loses its line first. In the
end the runner is killed, and `potluck spot down` has to find and remove everything.
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
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

import harness
from potluck.spot.preemption import PreemptionConfig, compressed, generate, parse_trace
from potluck.spot.tiers import slots
from potluck.testing import namespaces
from potluck.testing.slotlines import PREFIX

POTLUCK = (sys.executable, "-m", "potluck.cli")
BANDWIDTH, NUM_WORKERS, NUM_AUX = "1x20,2x10,1x5", 4, 1
LOOK_SECONDS = 1.0
AFTER_SECONDS = 10.0
START_SECONDS = 40.0  # for the first epoch, beside the time of the way
RUN_FILE = """\
name = "spot"
recipe = "stdlib-lm"
[model]
layers = 2
width = 64
heads = 4
context = 32
[training]
algorithm = "sync"
target_batch_size = 256
matchmaking_seconds = 2.0
[optimizer]
learning_rate = 3e-3
"""


class Experiment:
    """A home of its own for the commands, and what is seen of the machines."""

    def __init__(self, folder: Path) -> None:
        self.name = f"bench-{os.getpid()}"
        self.folder = folder
        self.machines = folder / "data" / "potluck" / "spot" / self.name / "machines"
        self.lines = f"{PREFIX}.{self.name}."
        self.rates = {
            slot.name: slot.bandwidth_mbit
            for slot in slots(num_workers=NUM_WORKERS, num_aux=NUM_AUX, bandwidth=BANDWIDTH)
        }
        self.counts: Counter[str] = Counter()
        self._suspects: set[tuple[str, int]] = set()
        self._environment = {
            **os.environ,
            "XDG_DATA_HOME": str(folder / "data"),
            "POTLUCK_DATA": str(folder / "files"),
            "OMP_NUM_THREADS": "1",
        }

    def losses(self) -> tuple[int, list[float]]:
        """The newest epoch, and what each machine that is there said last."""
        epoch, losses = 0, []
        for path in self.machines.glob("*/machine.json"):
            output = path.with_name("output.log")
            if not output.exists() or not self._is_alive(json.loads(path.read_text())):
                continue
            said = [line for line in output.read_text(errors="replace").splitlines() if '"progress"' in line]
            if said and (last := json.loads(said[-1])).get("loss") is not None:
                epoch = max(epoch, last["epoch"])
                losses.append(last["loss"])
        return epoch, losses

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """A potluck command; its output goes to a file."""
        with (self.folder / f"{words[1]}.log").open("ab") as log:
            return subprocess.Popen([*POTLUCK, *words], env=self._environment, stdout=log, stderr=subprocess.STDOUT)

    def ask(self, *words: str) -> Any:
        """A potluck command's answer."""
        done = subprocess.run(
            [*POTLUCK, *words, "--experiment", self.name, "--json"], env=self._environment, stdout=subprocess.PIPE
        )
        return json.loads(done.stdout)

    def look(self) -> None:
        """At each machine that is there."""
        alive: Counter[str] = Counter()
        before, self._suspects = self._suspects, set()
        for path in self.machines.glob("*/machine.json"):
            machine = json.loads(path.read_text())
            if not self._is_alive(machine):
                continue
            slot = machine["slot"]
            alive[slot] += 1
            if machine["pid"] not in _pids(f"{self.lines}{slot}.host"):
                self._suspects.add(("outside_its_network", machine["pid"]))
            if not self._has_line(slot):
                self._suspects.add(("wrong_tiers", machine["pid"]))
        self.counts.update(what for what, _pid in self._suspects & before)
        self.counts["looks"] += 1
        self.counts["workers_alive"] += sum(slot.startswith("worker") for slot in alive)
        self.counts["looks_without_aux"] += alive["aux-0"] == 0
        self.counts["slots_filled_twice"] += sum(number > 1 for number in alive.values())

    def _is_alive(self, machine: dict[str, Any]) -> bool:
        try:
            process = psutil.Process(machine["pid"])
            return process.create_time() == machine["created_at"] and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def _has_line(self, slot: str) -> bool:
        rate = self.rates[slot]
        if rate is None:
            return True
        wanted = (f'"rate_bits_per_second": {rate * 1e6}', f"rate {rate:g}Mbit")
        try:
            queue = namespaces.run_tool(["tc", "-n", f"{self.lines}{slot}.host", "qdisc", "show", "dev", "eth0"])
        except namespaces.LabError:  # being taken away
            return False
        shapers = [" ".join(psutil.Process(pid).cmdline()) for pid in _pids(f"{self.lines}{slot}.line")]
        return any(word in text for word in wanted for text in (queue, *shapers))

    def left(self) -> int:
        """Processes and networks of the experiment that are still there."""
        running = 0
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            running += any(str(self.machines) in word for word in words)
        return running + len(namespaces.existing(self.lines))

    def trained(self) -> dict[str, Any]:
        """Epochs and samples, by what the trainers said."""
        epoch, samples, started = 0, 0, Counter[str]()
        for place in self.machines.iterdir():
            started[place.name.rsplit("-", 2)[0]] += 1
            said = [line for line in (place / "output.log").read_text().splitlines() if '"progress"' in line]
            if said:
                last = json.loads(said[-1])
                epoch, samples = max(epoch, last["epoch"]), samples + last["samples"]
        return {"epochs": epoch, "samples": samples, "machines_by_slot": dict(sorted(started.items()))}


def _pids(namespace: str) -> list[int]:
    try:
        return [int(word) for word in namespaces.run_tool(["ip", "netns", "pids", namespace]).split()]
    except namespaces.LabError:
        return []


EQUAL = "4x11"
WAYS: dict[str, tuple[str, ...]] = {
    "equal lines": ("--aux", "1", "--bandwidth", EQUAL),
    "tiers": ("--aux", "1", "--bandwidth", BANDWIDTH),
    "tiers, no aux peer": ("--aux", "0", "--bandwidth", BANDWIDTH),
    "tiers, preempted": ("--aux", "1", "--bandwidth", BANDWIDTH, "--churn"),
}


def time_to_loss(options: tuple[str, ...], target: float, seconds: float, churn: float) -> dict[str, Any]:
    """Train one way until the loss is there, or so long."""
    if options[-1] == "--churn":
        options = (*options, str(churn))
    with tempfile.TemporaryDirectory(prefix="potluck-spot-") as scratch:
        experiment = Experiment(Path(scratch))
        (Path(scratch) / "run.toml").write_text(RUN_FILE)
        up = experiment.start(
            "spot", "up", scratch, "--workers", str(NUM_WORKERS), *options, "--experiment", experiment.name, "--json"
        )
        asked = time.monotonic()
        began, first, epoch, reached = None, 0, 0, None
        losses: list[float] = []
        try:
            while up.poll() is None and time.monotonic() - (began or asked + START_SECONDS) < seconds:
                epoch, losses = experiment.losses() if experiment.machines.exists() else (0, [])
                if began is None and epoch and len(losses) == NUM_WORKERS:
                    began, first = time.monotonic(), epoch
                if began is not None and losses and statistics.median(losses) <= target:
                    reached = time.monotonic() - began
                    break
                time.sleep(LOOK_SECONDS / 2)
            lasted = time.monotonic() - began if began is not None else 0.0
        finally:
            up.send_signal(signal.SIGKILL)
            up.wait()
            experiment.ask("spot", "down")
        return {
            "seconds_to_start": round(began - asked, 1) if began is not None else None,
            "seconds_to_loss": round(reached, 1) if reached is not None else None,
            "epochs_per_second": round((epoch - first) / lasted, 2) if lasted else 0.0,
            "loss": round(statistics.median(losses), 3) if losses else None,
            "epoch": epoch,
            "left_after_down": experiment.left(),
        }


def main() -> None:
    """Time each way, or replay a trace once."""
    parser = harness.parser(__doc__, repeats=None)
    parser.add_argument("--replay", action="store_true", help="replay a trace instead")
    parser.add_argument("--trace", type=Path, help="a log of preemptions; else one is generated")
    parser.add_argument("--compress", type=float, default=60.0, help="so many times as fast")
    parser.add_argument("--loss", type=float, default=3.3, help="that is to be reached")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each way, at most")
    parser.add_argument("--churn", type=float, default=240.0, help="preemptions an hour")
    parser.add_argument("--only", choices=list(WAYS))
    arguments = parser.parse_args()
    if (reason := namespaces.lab_available()) is not None:
        raise SystemExit(reason)
    if arguments.replay:
        print(json.dumps(replay(arguments.trace, arguments.compress)))
        return
    found: dict[str, Any] = {"loss": arguments.loss}
    for name, options in WAYS.items():
        if arguments.only in (None, name):
            found[name] = time_to_loss(options, arguments.loss, arguments.seconds, arguments.churn)
            harness.say(f"{name}: {found[name]}")
    harness.report(found, as_json=arguments.json, title="spot_trainers")


def replay(trace: Path | None, compress: float) -> dict[str, Any]:
    """Once, with counts of what went wrong."""
    with tempfile.TemporaryDirectory(prefix="potluck-spot-") as scratch:
        experiment = Experiment(Path(scratch))
        if trace is None:
            trace = Path(scratch) / "trace.csv"
            made = generate(PreemptionConfig(num_machines=6, bursts_per_hour=20.0), hours=2.0, seed=7)
            trace.write_text("".join(f"{change.seconds * 1000:.0f},{change.kind},{change.node}\n" for change in made))
        changes = compressed(parse_trace(trace.read_text()), compress)
        (Path(scratch) / "run.toml").write_text(RUN_FILE)
        wanted = ("--workers", str(NUM_WORKERS), "--aux", str(NUM_AUX), "--bandwidth", BANDWIDTH)
        market = ("--trace", str(trace), "--compress", str(compress), "--experiment", experiment.name)
        up = experiment.start("spot", "up", scratch, *wanted, *market, "--json")
        try:
            while not experiment.machines.exists() and up.poll() is None:
                time.sleep(0.1)
            began = time.monotonic()
            while time.monotonic() - began < changes[-1].seconds + AFTER_SECONDS and up.poll() is None:
                experiment.look()
                time.sleep(LOOK_SECONDS)
            trained = experiment.trained() if experiment.machines.exists() else {}
        finally:
            is_up = up.poll() is None
            os.kill(up.pid, signal.SIGKILL)  # a crash of the runner
            up.wait()
            there = experiment.ask("spot", "status")
            removed = experiment.ask("spot", "down")["removed"]
        said = (Path(scratch) / "up.log").read_text(errors="replace")
        counts = experiment.counts
        answer = {
            "events": len(changes),
            "compressed_by": compress,
            "runner_lived": is_up,
            "seconds": round(time.monotonic() - began, 1),
            **trained,
            "looks": counts["looks"],
            "share_of_wanted_workers": round(counts["workers_alive"] / max(1, NUM_WORKERS * counts["looks"]), 3),
            **{
                name: counts[name]
                for name in ("looks_without_aux", "slots_filled_twice", "outside_its_network", "wrong_tiers")
            },
            "machines_before_down": len(there),
            "removed_by_down": len(removed),
            "left_after_down": experiment.left(),
        }
        if not is_up:
            print(said[-3000:], file=sys.stderr)
    return answer


if __name__ == "__main__":
    main()
