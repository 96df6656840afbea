"""Run tiny profiles of experiments as people would: `potluck host`, and peers with `potluck join`, each with a home of
its own. Each ends with its run, and says what was learned.

    python experiments/tiny.py trecover
    python experiments/tiny.py all --pictures docs/images
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from potluck.testing.natlab import Host

HERE = Path(__file__).parent
POTLUCK = (sys.executable, "-m", "potluck.cli")
START_SECONDS = 600.0  # a host that trains a tokenizer on a busy machine
LEAVE_SECONDS = 20.0
LONGEST_SECONDS = 300.0  # that a profile should take on two cores with nothing else to do
SITES = {"diloco-four-sites": (4, 2.0, 50.0)}  # peers, Mbit/s and milliseconds of their lines; else 2 peers, no lines
BATCH_SIZES = {"swav": 32, "diloco-four-sites": 2}  # else 16; on a busy machine a search finds too small ones
LOOKS = 6  # at what the model does, from the first epoch to the last


class Command:
    """A potluck command in a process of its own, with a home of its own, whose JSON lines are read."""

    def __init__(
        self, scratch: Path, name: str, *words: str | Path, inside: Host | None = None, home: str = ""
    ) -> None:
        self.name, self.home, self.log = name, scratch / (home or name), scratch / f"{name}.log"
        self.home.mkdir(exist_ok=True)
        environment = {**os.environ, "HOME": str(self.home), "XDG_DATA_HOME": str(self.home), "POTLUCK_LINK": ""}
        environment |= {
            "POTLUCK_DATA": str(self.home / "files"),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._node = inside
        argv = self.inside([*POTLUCK, *map(str, words), "--json"])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def inside(self, argv: list[str]) -> list[str]:
        """A command as it is run where this one runs."""
        return argv if self._node is None else self._node.namespace.exec_argv(argv)

    def events(self) -> list[dict[str, Any]]:
        """What it has said, in whole lines."""
        complete, _, _ = self.log.read_text(encoding="utf-8", errors="replace").rpartition("\n")
        return [json.loads(line) for line in complete.splitlines() if line.startswith("{")]

    def until(self, event: str, seconds: float) -> dict[str, Any]:
        """Wait for an event."""
        end = time.monotonic() + seconds
        has_ended = False
        while time.monotonic() < end and not has_ended:
            has_ended = self.process.poll() is not None
            for each in self.events():
                if each.get("event") == event:
                    return each
            time.sleep(0.2)
        raise SystemExit(f"{self.name} has not said {event!r}:\n{self.log.read_text(errors='replace')[-3000:]}")

    def end(self) -> None:
        """As Ctrl-C does; killed where that is not enough."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextmanager
def running(
    scratch: Path, run_file: Path, nodes: Sequence[Host | None], end_epoch: int, options: Sequence[str] = ()
) -> Iterator[list[Command]]:
    """The host, and the peers that train with it: each on its node of a lab, or all on this machine."""
    commands: list[Command] = []
    hub, *sites = nodes
    where = ("--listen", "127.0.0.1") if hub is None else ("--announce", hub.address)
    try:
        host = Command(
            scratch, "host", "host", run_file, "--folder", scratch / "hub", *where, "--no-dashboard", inside=hub
        )
        commands.append(host)
        link = host.until("ready", START_SECONDS)["link"]
        every = ("--every", str(max(1, end_epoch // LOOKS)))
        commands.append(Command(scratch, "visualize", "visualize", link, *every, inside=hub, home="host"))
        for number, site in enumerate(sites):
            key = scratch / f"peer-{number}.nkey"
            words = ("join", link, "--yes", "--identity-path", key, "--name", f"peer-{number}", *options)
            commands.append(Command(scratch, f"peer-{number}", *words, inside=site))
        yield commands
    finally:
        for command in reversed(commands):
            command.end()


@contextmanager
def places(num_peers: int, line_mbit: float, delay_ms: float) -> Iterator[list[Host | None]]:
    """Where host and peers run: here, or, with a speed, each behind a line of its own in the lab."""
    if not line_mbit:
        yield [None] * (1 + num_peers)
        return
    from potluck.testing.natlab import NatLab

    with NatLab() as lab:
        sites = [lab.behind_nat(f"site-{number}") for number in range(num_peers)]
        for site in sites:
            site.shape(rate_mbit=line_mbit, delay_ms=delay_ms)
        yield [lab.public("hub"), *sites]


def ask(host: Command, *words: str | Path) -> Any:
    """A command's answer in JSON, with the host's home."""
    environment = {**os.environ, "XDG_DATA_HOME": str(host.home), "POTLUCK_DATA": str(host.home / "files")}
    argv = host.inside([*POTLUCK, *map(str, words), "--json"])
    done = subprocess.run(argv, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"potluck {' '.join(map(str, words))}: {done.stderr[-2000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    return json.loads(lines[-1])


def run(
    name: str,
    *,
    scratch: Path,
    peers: int = 0,
    end_epoch: int = 0,
    seconds: float = 600.0,
    line_mbit: float | None = None,
    delay_ms: float | None = None,
) -> dict[str, Any]:
    """The profile from its first epoch to its last; what it came to."""
    own_peers, own_line, own_delay = SITES.get(name, (2, 0.0, 0.0))
    peers, line_mbit = peers or own_peers, own_line if line_mbit is None else line_mbit
    delay_ms = own_delay if delay_ms is None else delay_ms
    folder = scratch / name
    shutil.copytree(
        HERE / name, folder, ignore=shutil.ignore_patterns("__pycache__", "tokens", "*.parquet", "letters.txt")
    )
    if (folder / "make_data.py").exists():
        subprocess.run([sys.executable, folder / "make_data.py", folder], check=True)
    file = folder / "tiny.toml"
    if end_epoch:
        words = [
            f"end_epoch = {end_epoch}" if line.startswith("end_epoch") else line
            for line in file.read_text().splitlines()
        ]
        file.write_text("\n".join(words) + "\n")
    ends = tomllib.loads(file.read_text())["end_epoch"]
    if "tokenized = true" in file.read_text():
        subprocess.run([*POTLUCK, "tokenize", file], check=True)
    began, used = time.monotonic(), processor_seconds()
    options = ("--batch-size", str(BATCH_SIZES.get(name, 16)))
    with (
        places(peers, line_mbit, delay_ms) as nodes,
        running(scratch, file, nodes, ends, options) as (host, looks, *trainers),
    ):
        trainers[0].until("progress", seconds)
        started = time.monotonic() - began
        trained = [trainer.until("trained", seconds) for trainer in trainers]
        link = host.until("ready", 1)["link"]
        took = time.monotonic() - began
        shown = ask(host, "visualize", link, "--once")
        previews = [each for each in looks.events() if each["event"] == "preview"]
        worth = downstream(host, folder, scratch) if (folder / "downstream.py").exists() else {}
    curve = [
        (each["epoch"], each["loss"]) for each in trainers[0].events() if each["event"] == "progress" and each["steps"]
    ]
    shares = {trainer.name: each["given"] for trainer, each in zip(trainers, trained, strict=True)}
    evaluations = [
        {key: value for key, value in each.items() if key not in ("event", "text")} for each in [*previews, shown]
    ]
    return {
        "experiment": name,
        "peers": peers,
        "seconds": round(took, 1),
        "seconds_to_first_step": round(started, 1),
        "processor_seconds": round(processor_seconds() - used, 1),
        "load": [round(each, 1) for each in os.getloadavg()],
        "epoch": trained[0]["epoch"],
        "samples": shares,
        "evaluations": evaluations,
        **worth,
        "text": shown["text"],
        "curve": curve,
    }


def downstream(host: Command, folder: Path, scratch: Path) -> dict[str, Any]:
    """What the run's checkpoint is worth for other tasks, beside the same model with new values."""
    model = scratch / "model"
    ask(host, "checkpoint", "export", model, "--folder", scratch / "hub", "--format", "hf")
    argv = [sys.executable, folder / "downstream.py", model, "--tiny"]
    found: dict[str, Any] = {}
    for task in ("ner", "ncc"):
        for name, options in ((task, []), (f"{task}_untrained", ["--untrained"])):
            said = subprocess.run([*argv, "--task", task, *options], check=True, capture_output=True, text=True)
            found[name] = json.loads(said.stdout.splitlines()[-1])["right"]
    return {"downstream": found}


def processor_seconds() -> float:
    """What all commands that have ended have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Run one, or all."""
    names = sorted(each.parent.name for each in HERE.glob("*/tiny.toml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*names, "all"])
    parser.add_argument("--peers", type=int, default=0, help="unless given, 2; four sites have 4")
    parser.add_argument("--end-epoch", type=int, default=0, help="end earlier than the profile says")
    parser.add_argument("--seconds", type=float, default=600.0, help="give up after so long")
    parser.add_argument("--line-mbit", type=float, help="a line of this speed for each peer, in the lab; 0: none")
    parser.add_argument("--delay-ms", type=float, help="… and such a delay each way")
    parser.add_argument("--pictures", type=Path, help="write the loss of each as a PNG into this folder")
    parser.add_argument("--keep", type=Path, help="keep what the runs leave in this folder")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its processes end with it
    for name in names if arguments.name == "all" else [arguments.name]:
        scratch = Path(tempfile.mkdtemp(prefix="potluck-experiment-")) if not arguments.keep else arguments.keep / name
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            found = run(
                name,
                scratch=scratch,
                peers=arguments.peers,
                end_epoch=arguments.end_epoch,
                seconds=arguments.seconds,
                line_mbit=arguments.line_mbit,
                delay_ms=arguments.delay_ms,
            )
        finally:
            if arguments.keep is None:
                shutil.rmtree(scratch, ignore_errors=True)
        text, curve = found.pop("text"), found.pop("curve")
        if arguments.pictures is not None:
            from potluck.monitor.lossplot import plot_loss

            title = f"{name}, tiny: training loss of one of {found['peers']} peers"
            (arguments.pictures / f"experiment-{name.removeprefix('diloco-')}.png").write_bytes(
                plot_loss(curve, title=title)
            )
        late = f", more than the {LONGEST_SECONDS:.0f} s meant for it" if found["seconds"] > LONGEST_SECONDS else ""
        print(json.dumps(found))
        print(f"{text}\n\n{name}: {found['seconds']:.0f} s{late}\n", flush=True)


if __name__ == "__main__":
    main()
