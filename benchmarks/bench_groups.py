"""Several groups on one hub: rounds per second in all, what hub and guard cost, and how long a coordinator is missed.

Four peers in processes of their own are members of every group, and average small tensors in all of them as fast as
they can, for 1, 4 and 16 groups. Then the peer that coordinates most of 32 groups (about 8) is killed:
`replace_seconds` is the time from then until each of its groups has an epoch under another coordinator.

    scripts/bench groups --json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from harness import ROOT, parser, report, say

NUM_MEMBERS = 4
NUM_GROUPS = (1, 4, 16)
GROUPS_OF_KILLED = 32
WARM_SECONDS = 12.0  # groups settle with their coordinators
START_SECONDS = 180.0
REPLACE_SECONDS = 60.0


class Member:
    """A process that averages, and what it has told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.peer = ""
        self.commits: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told = json.loads(line)
            if told.get("event") == "in":
                self.peer = told["peer"]
            else:
                self.commits.append(told)


@contextmanager
def process(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            assert started.stdin is not None
            started.stdin.close()
            try:
                started.wait(30)
            except subprocess.TimeoutExpired:
                started.kill()


@contextmanager
def company(groups: Sequence[str], elements: int) -> Iterator[tuple[list[Member], list[int]]]:
    """Members of these groups, and the processes of hub and guard."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        host = stack.enter_context(process("group_host.py", str(folder)))
        assert host.stdout is not None
        told = json.loads(host.stdout.readline())
        arguments = {"link": told["link"], "groups": list(groups), "elements": elements, "members": NUM_MEMBERS}
        members = [
            Member(stack.enter_context(process("group_member.py", json.dumps(arguments)))) for _ in range(NUM_MEMBERS)
        ]
        until(lambda: all(commits_by_group(member) >= set(groups) for member in members), START_SECONDS, "all groups")
        yield members, [told["hub"], host.pid]


def until(condition: Any, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"waited {seconds:g} s in vain for {what}")
        time.sleep(0.02)


def commits_by_group(member: Member) -> set[str]:
    return {commit["commit"] for commit in list(member.commits) if commit["members"] == NUM_MEMBERS}


def processor_seconds(pids: list[int]) -> list[float]:
    """What these processes have used so far."""
    return [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]


def names(count: int) -> list[str]:
    return ["main", *(f"group-{number}" for number in range(1, count))]


def throughput(count: int, elements: int, seconds: float) -> dict[str, Any]:
    with company(names(count), elements) as (members, pids):
        time.sleep(WARM_SECONDS)
        before = processor_seconds(pids)
        first, began = len(members[0].commits), time.monotonic()
        time.sleep(seconds)
        elapsed = time.monotonic() - began
        made = len(members[0].commits) - first
        used = [(now - was) / elapsed for now, was in zip(processor_seconds(pids), before, strict=True)]
        newest = {commit["commit"]: commit["coordinator"] for commit in members[0].commits}
        return {
            f"rounds_per_second_{count}": made / elapsed,
            f"hub_cores_{count}": used[0],
            f"guard_cores_{count}": used[1],
            f"coordinators_{count}": len(set(newest.values())),
        }


def replacement(elements: int) -> dict[str, Any]:
    with company(names(GROUPS_OF_KILLED), elements) as (members, _):
        time.sleep(WARM_SECONDS)
        newest = {commit["commit"]: commit["coordinator"] for commit in members[0].commits}
        held = Counter(newest.values())
        dying = max(members, key=lambda member: held[member.peer])
        groups = {group for group, coordinator in newest.items() if coordinator == dying.peer}
        witness = next(member for member in members if member is not dying)
        killed_at = time.time()
        dying.process.kill()

        def heirs() -> dict[str, dict[str, Any]]:
            later = [c for c in list(witness.commits) if c["at"] > killed_at and c["coordinator"] != dying.peer]
            return {commit["commit"]: commit for commit in reversed(later) if commit["commit"] in groups}

        until(lambda: heirs().keys() >= groups, REPLACE_SECONDS, "other coordinators")
        found = heirs().values()
        return {
            "groups_of_killed": len(groups),
            "replace_seconds": max(commit["at"] for commit in found) - killed_at,
            "heirs": len({commit["coordinator"] for commit in found}),
        }


def main() -> None:
    options = parser(__doc__, repeats=None)
    options.add_argument("--seconds", type=float, default=20.0, help="how long rounds are counted")
    options.add_argument("--elements", type=int, default=10_000, help="values that are averaged in each round")
    arguments = options.parse_args()
    figures: dict[str, Any] = {}
    for count in NUM_GROUPS:
        figures |= throughput(count, arguments.elements, arguments.seconds)
        say(f"{count} groups: {figures[f'rounds_per_second_{count}']:.1f} rounds per second in all")
    figures |= replacement(arguments.elements)
    say(f"{figures['groups_of_killed']} groups are coordinated again after {figures['replace_seconds']:.2f} s")
    report(figures, as_json=arguments.json, title="groups on one hub")


if __name__ == "__main__":
    main()
