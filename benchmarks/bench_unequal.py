"""Unequal machines on unequal lines, with kills: seconds to a loss against hivemind, and whose work counts.

    scripts/bench unequal [--json] [--seconds 90] [--only diloco,hivemind]

A small internet (potluck.testing.natlab, needs root) with three volunteers of speed 10 : 3 : 1:

    fast     a step takes 0.1 s     a line of 100 Mbit/s
    medium   a step takes 0.3 s     a line of  10 Mbit/s     killed after a third of the time, and started again
    slow     a step takes 1.0 s     a line of   2 Mbit/s     ATEN_CPU_CAPABILITY=default: another arithmetic

Lines take 20 ms each way. All contenders train the same model on the same text for the same time; losses are measured
afterwards, of the shared parameters that the fast peer had each second, without local steps that nobody else has yet.
Time counts from the moment when the peers are launched: Potluck's load the run's state first, and begin one by one as
they are there; hivemind's begin together with what they have.

  sync      `potluck host`, volunteers as `potluck join` has them: a shared batch
  diloco    the same with local steps in the background; in the end all trainers are killed, and the run goes on
  hivemind  hivemind.Optimizer, the shared batch in float16

Of Potluck's it also says: the share of each peer's samples that the run's book counts (a kill loses what was done since
the last round), bytes of states that were fetched because of rounding, and how many epochs were lost when all trainers
were killed, which should be at most the interval of backups.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import HIVEMIND, ROOT, environment_with, parser, report, say
from potluck.testing.natlab import Host, NatLab
from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import ManagedProcess
from toylm import corpus

START_SECONDS, END_SECONDS = 150.0, 120.0
BATCH_SIZE = 8
SHARED_BATCH_SIZE = 240
BACKUP_EVERY = 2
TARGET_LOSS = 3.5
WARM_UP_EPOCHS = 2  # of a shared batch: there is time for some twenty epochs
DELAY_MS = 20.0
PEERS: dict[str, tuple[float, float, dict[str, str]]] = {  # seconds of a step, Mbit/s, environment
    "fast": (0.1, 100.0, {}),
    "medium": (0.3, 10.0, {}),
    "slow": (1.0, 2.0, {"ATEN_CPU_CAPABILITY": "default"}),
}
MODEL = {"width": 128, "num_layers": 2, "length": 32}
RUN_FILE = """\
name = "unequal"
recipe = "recipe.py"
[model]
width = {width}
layers = {num_layers}
length = {length}
[training]
{training}
[optimizer]
learning_rate = {learning_rate}
[schedule]
warmup_epochs = {warm_up}
"""
TRAINING = {
    "sync": (f'algorithm = "sync"\ntarget_batch_size = {SHARED_BATCH_SIZE}', 3e-3, WARM_UP_EPOCHS),
    "diloco": ('algorithm = "diloco"\ninner_steps = 100\noverlap_steps = 80\nouter_momentum = 0.5', 1e-3, 0),
}
CONTENDERS = ("diloco", "sync", "hivemind")


def events(process: ManagedProcess, event: str) -> list[dict[str, Any]]:
    """What a process has said of this so far."""
    lines = [json.loads(line) for line in process.output().splitlines() if line.startswith('{"event":')]
    return [told for told in lines if told["event"] == event]


def told(process: ManagedProcess, event: str, within_seconds: float) -> dict[str, Any]:
    """What a process says of this event first."""
    process.wait_for_line(rf'"event": ?"{event}"', within_seconds)
    return events(process, event)[0]


class Place:
    """The lab with its lines, and a folder."""

    def __init__(self, lab: NatLab, folder: Path) -> None:
        self.folder = folder
        self.hub = lab.public("hub")
        self.nodes: dict[str, Host] = {}
        for name, (_, rate_mbit, _) in PEERS.items():
            self.nodes[name] = lab.public(name)
            self.nodes[name].shape(rate_mbit=rate_mbit, delay_ms=DELAY_MS)
        self.text = folder / "text"
        self.text.write_bytes(corpus(2_000_000))


class Potluck:
    """A run with the real host, and three volunteers."""

    def __init__(self, place: Place, kind: str) -> None:
        self._place = place
        self._recipe = place.folder / "run" / "recipe.py"
        self._environment = {
            "UNEQUAL_CODE": str(ROOT / "benchmarks"),
            "UNEQUAL_TEXT": str(place.text),
            "OMP_NUM_THREADS": "1",
            "XDG_DATA_HOME": str(place.folder / "data"),
        }
        self._recipe.parent.mkdir()
        self._recipe.write_bytes((ROOT / "benchmarks" / "unequal_recipe.py").read_bytes())
        training, learning_rate, warm_up = TRAINING[kind]
        text = RUN_FILE.format(**MODEL, training=training, learning_rate=learning_rate, warm_up=warm_up)
        (self._recipe.parent / "run.toml").write_text(text)
        where = ("--folder", place.folder / "hub", "--listen", place.hub.address, "--announce", place.hub.address)
        what = ("--no-dashboard", "--no-wheel", "--backup-every", str(BACKUP_EVERY), "--json")
        self._potluck = (sys.executable, "-m", "potluck.cli")
        argv = [*self._potluck, "host", self._recipe.parent, *where, *what]
        self.host = place.hub.popen(argv, name="host", env=self._environment)
        self.link = str(told(self.host, "ready", START_SECONDS)["link"])

    def start(self, name: str) -> ManagedProcess:
        """A volunteer, with the key that it always has."""
        step_seconds, _, environment = PEERS[name]
        node, key = self._place.nodes[name], self._place.folder / f"{name}.nkey"
        argv = [sys.executable, ROOT / "benchmarks" / "unequal_peer.py", self.link, key, name, node.address]
        environment = {**self._environment, **environment, "STEP_SECONDS": str(step_seconds)}
        return node.popen([*argv, str(BATCH_SIZE), self._recipe], name="peer", env=environment, stdin=True)

    def book(self) -> dict[str, float]:
        """The samples of each peer, by name."""
        argv = [*self._potluck, "leaderboard", self.link, "--json"]
        said = self._place.hub.run(argv, env=self._environment, deadline_seconds=START_SECONDS).output()
        answer = next(line for line in said.splitlines() if line.startswith("{"))
        return {row["name"]: row["samples"] for row in json.loads(answer)["peers"]}

    def train(self, seconds: float) -> dict[str, Any]:
        """Train for so long after all are there, with one killed on the way."""
        launched = time.time()
        peers = {name: self.start(name) for name in PEERS}
        began = {name: told(peer, "training", START_SECONDS)["at"] for name, peer in peers.items()}
        started = time.monotonic()
        time.sleep(seconds / 3)
        killed = peers["medium"]
        killed.kill()
        peers["medium"] = self.start("medium")
        time.sleep(max(0.0, started + seconds - time.monotonic()))
        for peer in peers.values():
            if events(peer, "training"):
                peer.send_line("stop")
            else:  # it was not back in time
                peer.kill()
        ends = {name: told(peer, "trained", END_SECONDS) for name, peer in peers.items() if events(peer, "training")}
        for name in ends:  # their keys are free then
            peers[name].wait(END_SECONDS)
        computed = {name: end["samples"] for name, end in ends.items()}
        before = events(killed, "progress")
        computed["medium"] = computed.get("medium", 0) + (before[-1]["samples"] if before else 0)
        lost_by_the_kill = before[-1]["samples"] - before[-1]["given"] if before else 0
        last = ends.get("medium", {"samples": 0, "given": 0})
        since_restart = last["given"] / last["samples"] if last["samples"] else None
        given = self.book()
        return {
            "losses": [(at - launched, loss) for at, loss in ends["fast"]["losses"]],
            "seconds_until_ready": max(began.values()) - launched,
            "samples_lost_by_the_kill": lost_by_the_kill,
            "epochs": max(end["epoch"] for end in ends.values()),
            "samples": sum(computed.values()),
            "counted_share": {name: given.get(name, 0.0) / max(1, computed[name]) for name in computed},
            "counted_share_since_restart": since_restart,
            "told_as_the_book_says": all(
                ends[name]["given"] == given.get(name, 0.0) for name in ends if name != "medium"
            ),
            "states_fetched": {name: end["statistics"].get("caught_up", 0) for name, end in ends.items()},
            "states_mended": {name: end["statistics"].get("mended", 0) for name, end in ends.items()},
            "rounding_bytes": sum(end["statistics"].get("states_rounding_bytes", 0) for end in ends.values()),
            "repair_bytes": sum(end["statistics"].get("states_repair_bytes", 0) for end in ends.values()),
        }

    def lose_all_trainers(self) -> dict[str, Any]:
        """Kill all trainers at once, start one again, and see what is lost."""
        peers = {name: self.start(name) for name in PEERS}
        begun_at = told(peers["fast"], "training", START_SECONDS)["epoch"]  # the slow line may take minutes to load

        def epoch() -> int:
            return max((each["epoch"] for peer in peers.values() for each in events(peer, "progress")), default=0)

        wanted = begun_at + BACKUP_EVERY + 2
        poll_until_sync(lambda: epoch() >= wanted, START_SECONDS, lambda: f"epoch {wanted}, at {epoch()}")
        for peer in peers.values():
            peer.kill()
        killed_at, started, said_before = epoch(), time.monotonic(), len(self.host.output())
        peer = self.start("fast")
        again = told(peer, "training", START_SECONDS)
        seconds = time.monotonic() - started
        poll_until_sync(lambda: len(events(peer, "progress")) > 2, START_SECONDS, lambda: "training goes on")
        said = self.host.output()[said_before:] + peer.output()
        peer.kill()
        return {
            "killed_at_epoch": killed_at,
            "resumed_at_epoch": again["epoch"],
            "epochs_lost": epochs_lost(said),
            "backup_every": BACKUP_EVERY,
            "seconds_to_resume": seconds,
        }


def epochs_lost(said: str) -> int:
    """How many updates a host or a peer says to be lost; in a terminal its lines are broken anywhere."""
    words = " ".join(said.split())
    several = [
        int(end) - int(begin) + 1 for begin, end in re.findall(r"updates of epochs (\d+) to (\d+) are lost", words)
    ]
    one = [1 for _ in re.findall(r"updates of epoch \d+ are lost", words)]
    return max(several + one, default=0)


def hivemind(place: Place, seconds: float) -> dict[str, Any]:
    """The same with hivemind.Optimizer: the peer that is killed comes back with nothing but the DHT's address."""
    python = str(environment_with("hivemind", [HIVEMIND]))
    program = str(ROOT / "benchmarks" / "baselines" / "hivemind_train.py")
    first = place.hub.popen([python, program, "bootstrap", place.hub.address], name="dht", stdin=True)
    addresses = told(first, "ready", START_SECONDS)["addresses"]
    task = {
        **MODEL,
        "kind": "hivemind",
        "num_peers": len(PEERS),
        "batch_size": BATCH_SIZE,
        "steps_per_epoch": 0,
        "shared_batch_size": SHARED_BATCH_SIZE,
        "num_steps": 1_000_000,
        "lr": 3e-3,
        "local_lr": 0.0,
        "warm_up_epochs": WARM_UP_EPOCHS,
        "kept_every": round(1 / PEERS["fast"][0]),
        "text": str(place.text),
        "options": {"matchmaking_seconds": 3.0, "averaging_timeout_seconds": 30.0, "average_state_every": 20},
    }

    def start(name: str, number: int, seconds: float) -> ManagedProcess:
        step_seconds, _, environment = PEERS[name]
        told_task = json.dumps({**task, "number": number, "step_seconds": step_seconds, "seconds": seconds})
        argv = [python, program, told_task, place.nodes[name].address, *addresses]
        return place.nodes[name].popen(argv, name="peer", env={**environment, "OMP_NUM_THREADS": "1"}, stdin=True)

    launched = time.monotonic()
    peers = {name: start(name, number, seconds) for number, name in enumerate(PEERS)}
    for peer in peers.values():
        told(peer, "ready", START_SECONDS)
    ready_seconds = time.monotonic() - launched
    for peer in peers.values():
        peer.send_line("go")
    time.sleep(seconds / 3)
    peers["medium"].kill()
    peers["medium"] = start("medium", 3, 2 * seconds / 3)
    peers["medium"].send_line("go")
    told(peers["fast"], "trained", seconds + END_SECONDS)
    peers["fast"].send_line("stop")
    end = told(peers["fast"], "finished", END_SECONDS)
    return {
        "losses": [(ready_seconds + at, loss) for at, _, loss in end["losses"]],
        "epochs": end["epoch"],
        "seconds_until_ready": ready_seconds,
    }


def measure(kind: str, seconds: float, log_folder: Path | None) -> dict[str, Any]:
    """One contender from start to end."""
    if log_folder is not None:
        log_folder = log_folder / kind
        log_folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder, NatLab(log_folder=log_folder) as lab:
        place = Place(lab, Path(folder))
        if kind == "hivemind":
            outcome = hivemind(place, seconds)
        else:
            run = Potluck(place, kind)
            outcome = run.train(seconds)
            if kind == "diloco":
                outcome |= run.lose_all_trainers()
    losses = outcome["losses"]
    reached = next((at for at, loss in losses if loss <= TARGET_LOSS), None)
    figures = {
        **{name: value for name, value in outcome.items() if name != "losses"},
        "seconds": seconds,
        "seconds_to_loss": reached,
        "final_loss": losses[-1][1] if losses else math.nan,
        "losses": [(round(at, 1), round(loss, 3)) for at, loss in losses[:: max(1, len(losses) // 25)]],
        "load": round(os.getloadavg()[0], 1),
    }
    shown = {name: value for name, value in figures.items() if name != "losses"}
    say(f"{kind:10} {json.dumps(shown)}")
    return figures


def figures_of(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All figures in one table, and how much longer hivemind took."""
    figures: dict[str, Any] = {
        f"{kind}_{name}": value for kind, result in results.items() for name, value in result.items()
    }
    if "hivemind" in results:
        reached = results["hivemind"]["seconds_to_loss"]
        name, base = ("ratio", reached) if reached is not None else ("ratio_at_least", results["hivemind"]["seconds"])
        for kind, result in results.items():
            if kind != "hivemind" and result["seconds_to_loss"] is not None:
                figures[f"{name}_{kind}"] = base / result["seconds_to_loss"]
    return {"target_loss": TARGET_LOSS, **figures}


def main() -> None:
    options = parser(__doc__, repeats=None)
    options.add_argument("--only", default="", help="some contenders, with commas")
    options.add_argument("--seconds", type=float, default=90.0, help="of training, for each contender")
    options.add_argument("--log-folder", type=Path, help="keep what the processes say")
    arguments = options.parse_args()
    chosen = [kind for kind in CONTENDERS if not arguments.only or kind in arguments.only.split(",")]
    results = {kind: measure(kind, arguments.seconds, arguments.log_folder) for kind in chosen}
    report(figures_of(results), as_json=arguments.json, title="unequal machines on unequal lines, with kills")


if __name__ == "__main__":
    main()
