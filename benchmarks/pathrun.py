"""A run with paths in processes, for bench_paths.py: where time goes, what travels, how it goes on after a kill.

Two aux peers lease phases and coordinate, so that one may die; trainers have one thread each. The model is a small
transformer on the standard library's source.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench_groups import process, until
from harness import say
from potluck.paths.grid import Grid

START_SECONDS = 240.0
RECOVERY_SECONDS = 60.0
LEAST_PHASES = 3  # of each path
MODEL = {"layers": 4, "width": 64, "heads": 4, "context": 64}
SMALL = {"layers": 2, "width": 32, "heads": 2, "context": 48}
ENDS = ("embedding", "head")


class Member:
    """A process, and what it has told."""

    def __init__(self, started: subprocess.Popen[str]) -> None:
        self.process = started
        self.told: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.told.append(json.loads(line))

    def of(self, key: str, since: float = 0.0) -> list[dict[str, Any]]:
        """What it has told of something since then."""
        return [each for each in list(self.told) if key in each and each["at"] >= since]

    @property
    def peer(self) -> str:
        return str(self.of("event")[0]["peer"])


@contextmanager
def company(
    num_trainers: int, *, levels: Sequence[int], shared: Sequence[str], inner_steps: int, model: dict[str, int]
) -> Iterator[tuple[list[Member], list[Member]]]:
    """Aux peers and trainers, all at work."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        host = stack.enter_context(process("group_host.py", str(folder)))
        assert host.stdout is not None
        links = json.loads(host.stdout.readline())
        what = {"levels": list(levels), "shared": list(shared), "inner_steps": inner_steps, "model": model}

        def start(role: str, name: str, link: str) -> Member:
            arguments = {**what, "link": link, "role": role, "name": name}
            return Member(stack.enter_context(process("path_member.py", json.dumps(arguments))))

        aux = [start("aux", f"aux {n}", links["link"]) for n in range(2)]
        until(lambda: all(each.of("event") for each in aux), START_SECONDS, "the aux peers")
        trainers = [start("trainer", f"trainer {n}", links["volunteers"]) for n in range(num_trainers)]
        until(lambda: all(len(each.of("path")) > 1 for each in trainers), START_SECONDS, "phases of all trainers")
        modules = set(Grid(tuple(levels), tuple(shared)).modules)
        # What only one trainer has would be lost with it.
        until(lambda: modules <= {m for a in aux for m in a.of("kept")[-1]["kept"]}, START_SECONDS, "kept states")
        yield aux, trainers


def shares(seconds: float, inner_steps: int) -> dict[str, Any]:
    """With a trainer for each core, which carry two paths each: the share of time outside inner steps, and bytes."""
    settings = {"levels": (2, 2), "shared": ENDS, "inner_steps": inner_steps, "model": MODEL}
    with company(2, **settings) as (_, trainers):
        began = time.time()
        before = [each.of("inner")[-1] for each in trainers]

        def gained(key: str) -> float:
            after = [each.of("inner")[-1] for each in trainers]
            return float(sum(a[key] - b[key] for a, b in zip(after, before, strict=True)))

        until(lambda: gained("phases") >= 4 * LEAST_PHASES, START_SECONDS, "phases")
        time.sleep(max(0.0, began + seconds - time.time()))
        inner, outside, phases = (gained(key) for key in ("inner", "outside", "phases"))
        parameters = trainers[0].of("event")[0]["parameters"]
        return {
            "inner_steps": inner_steps,
            "phases": phases,
            "phase_seconds": inner / phases,
            "share_outside_inner_steps": outside / (inner + outside),
            "parameters_of_a_path": parameters,
            "bytes_per_path_and_outer_step": gained("sent") / phases,
            "bytes_of_a_path_as_float16": 2 * parameters,
            "bytes_per_path_with_states_for_keepers": gained("wire") / phases,
        }


def own_modules(inner_steps: int) -> dict[str, Any]:
    """Paths that share nothing send nothing."""
    settings = {"levels": (2,), "shared": (), "inner_steps": inner_steps, "model": SMALL}
    with company(2, **settings) as (aux, _):
        until(lambda: len(aux[0].of("commit")) >= 8, START_SECONDS, "outer steps")
        return {"bytes_per_outer_step_of_modules_of_one_path": sum(each["sent"] for each in aux[0].of("commit"))}


def recoveries(repeats: int, inner_steps: int) -> dict[str, Any]:
    """Seconds from a kill until the dead trainer's phase is begun by another; the same for the coordinator."""
    workers, coordinators, leases, lengths = [], [], [], []
    settings = {"levels": (2, 2), "shared": ENDS, "inner_steps": inner_steps, "model": SMALL}
    for number in range(repeats):
        with company(3, **settings) as (aux, trainers):
            workers.append(_kill_worker(trainers))
            lengths += [_phase_seconds(each) for each in trainers[1:]]
            found = _kill_coordinator(aux, trainers[1:])
            coordinators.append(found[0])
            leases.append(found[1])
            say(f"{number}: worker {workers[-1]:.2f} s, coordinator {found[0]:.2f} s, leases {found[1]:.2f} s")
    return {
        "phase_seconds_when_killed": statistics.median(lengths),
        "worker_recovery_seconds": statistics.median(workers),
        "worker_recovery_seconds_most": max(workers),
        "coordinator_recovery_seconds": statistics.median(coordinators),
        "coordinator_recovery_seconds_most": max(coordinators),
        "lease_recovery_seconds": statistics.median(leases),
    }


def _phase_seconds(trainer: Member) -> float:
    told = trainer.of("inner")[-1]
    return float(told["inner"] / max(told["phases"], 1))


def _kill_worker(trainers: list[Member]) -> float:
    """In the middle of a phase."""
    dying, others = trainers[0], trainers[1:]
    seen = len(dying.of("path"))
    until(lambda: len(dying.of("path")) > seen, RECOVERY_SECONDS, "its next phase")
    lost = dying.of("path")[-1]
    killed_at = time.time()
    dying.process.kill()

    def taken() -> list[float]:
        begun = [each for other in others for each in other.of("path", since=killed_at)]
        return [each["at"] for each in begun if each["path"] == lost["path"] and each["phase"] >= lost["phase"]]

    until(taken, RECOVERY_SECONDS, f"phase {lost['phase']} of path {lost['path']}, begun by another")
    return min(taken()) - killed_at


def _kill_coordinator(aux: list[Member], trainers: list[Member]) -> tuple[float, float]:
    """Of phases and of some modules: until each of these has an outer step, and until a phase is begun."""
    until(lambda: any(each.of("leads") and each.of("leads")[-1]["leads"] for each in aux), 30, "a leader")
    dying = next(each for each in aux if each.of("leads")[-1]["leads"])
    witness = next(each for each in aux if each is not dying)
    newest = {commit["commit"]: commit["coordinator"] for commit in witness.of("commit")}
    orphans = {name for name, coordinator in newest.items() if coordinator == dying.peer}
    killed_at = time.time()
    dying.process.kill()

    def stepped() -> dict[str, float]:
        later = [c for c in witness.of("commit", since=killed_at) if c["coordinator"] != dying.peer]
        return {commit["commit"]: commit["at"] for commit in reversed(later)}

    until(lambda: stepped().keys() >= (orphans or {"shared"}), RECOVERY_SECONDS, f"outer steps of {sorted(orphans)}")

    def begun() -> list[float]:
        return [each["at"] for trainer in trainers for each in trainer.of("path", since=killed_at)]

    until(begun, RECOVERY_SECONDS, "a phase")
    return max(stepped()[name] for name in (orphans or {"shared"})) - killed_at, min(begun()) - killed_at
