"""Who is there, with many peers on one hub: joins, leaves and deaths seen by all, and what the beacons cost.

Real peers in four processes on this machine, each with its own connections and roster. All join; then a fifth of them
says good-bye; then a process with another fifth is killed. Each time counts from the order until the last roster of all
has it. `missed` counts entries that some roster lacked or had too many when patience ended, `false_doubts` how often
anybody who lived was called suspect or dead; on a machine that is too slow for so many, whole processes are late
(`longest_lag_seconds`), and more than 2 s of that make such doubts. `cores` is what hub and guard use while everybody
only sends beacons.

    scripts/bench presence --peers 200 --json
    scripts/bench presence --peers 1000 --watchers 20      for the budget: hub and guard under one core

A thousand rosters with a thousand entries are too much for one machine, though not for a thousand: so with `--watchers`
only so many peers keep one. The others connect, hand in their cards and send beacons, which is all that the hub sees of
anybody.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil

from harness import ROOT, parser, report, say

CROWDS = 4  # one of them is killed
KILLED_SHARE = LEAVING_SHARE = 0.2


class Child:
    """A process of the benchmark, spoken to by lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self.ids: list[str] = []
        self._input, self._output = process.stdin, process.stdout

    def tell(self, **order: object) -> None:
        """Have it do something."""
        self._input.write(json.dumps(order) + "\n")
        self._input.flush()

    def hear(self) -> Any:
        """What it says next."""
        line = self._output.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark has ended early, with code {self.process.wait()}")
        return json.loads(line)

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()


@contextmanager
def child(*arguments: object) -> Iterator[Child]:
    """Start one; it ends when its input does."""
    command = [sys.executable, str(ROOT / "benchmarks" / "crowd.py"), *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Child(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def processor_seconds(*pids: int) -> list[float]:
    """What these processes have used so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return [each.user + each.system for each in times]


class Presence:
    """One run of the benchmark."""

    def __init__(self, host: Child, crowds: list[Child], hub_pid: int) -> None:
        self.figures: dict[str, Any] = {}
        self._host = host
        self._crowds = crowds  # the first is the one to be killed
        self._hub_pid = hub_pid
        self._killed: list[str] = []
        self._missed = 0

    def all_join(self) -> None:
        """Until every roster has everybody."""
        for crowd in self._crowds:
            crowd.hear()  # it is ready
        began = time.time()
        self._order(do="join")
        for crowd in self._crowds:
            crowd.ids = crowd.hear()["peers"]
        self._order(do="until present", count=sum(len(crowd.ids) for crowd in self._crowds))
        heard = self._hear_all()
        self.figures["join_seconds"] = max(each["at"] for each in heard) - began

    def idle(self, seconds: float) -> None:
        """What beacons alone cost."""
        pids = self._hub_pid, self._host.process.pid
        before, began = processor_seconds(*pids), time.monotonic()
        time.sleep(seconds)
        elapsed = time.monotonic() - began
        used = [(after - earlier) / elapsed for earlier, after in zip(before, processor_seconds(*pids), strict=True)]
        self.figures |= {"hub_cores": used[0], "guard_cores": used[1], "cores": sum(used)}

    def some_leave(self, count: int) -> None:
        """Good-byes, from all processes but the one to be killed."""
        leaving = self._crowds[1:]
        shares = [count // len(leaving) + (number < count % len(leaving)) for number in range(len(leaving))]
        began = time.time()
        for crowd, share in zip(leaving, shares, strict=True):
            crowd.tell(do="leave", count=share)
        gone = []
        for crowd in leaving:
            left = crowd.hear()["peers"]
            gone += left
            crowd.ids = [peer for peer in crowd.ids if peer not in left]
        self._order(do="until gone", peers=gone)
        heard = self._hear_all()
        self.figures["leave_seconds"] = max(each["at"] for each in heard) - began
        self.figures["leaves_told_as_deaths"] = sum(each["told"]["dead"] for each in heard)
        self.figures["num_left"] = len(gone)

    def some_die(self) -> None:
        """SIGKILL to a whole process."""
        victim = self._crowds.pop(0)
        began = time.time()
        victim.kill()
        self._order(do="until gone", peers=victim.ids)
        self.figures["death_seconds"] = max(each["at"] for each in self._hear_all()) - began
        self.figures["num_killed"] = len(victim.ids)
        self._killed = victim.ids

    def look_back(self) -> None:
        """Whether the rosters are right in the end, and were so all the time."""
        alive = [peer for crowd in self._crowds for peer in crowd.ids]
        self._order(do="report", peers=alive)
        heard = self._hear_all()
        doubts: Counter[str] = Counter()
        for each in heard:
            doubts.update(each["doubted"])
        self.figures["join_retries"] = sum(each["retries"] for each in heard)
        self.figures["longest_lag_seconds"] = max(each["lag"] for each in heard)
        self.figures["missed"] = self._missed
        self.figures["false_doubts"] = sum(count for peer, count in doubts.items() if peer not in self._killed)

    def _order(self, **order: object) -> None:
        for crowd in self._crowds:
            crowd.tell(**order)

    def _hear_all(self) -> list[Any]:
        heard = [crowd.hear() for crowd in self._crowds]
        self._missed += sum(each["missed"] for each in heard)
        return heard


def measure(num_peers: int, num_watchers: int, *, with_links: bool, idle_seconds: float) -> dict[str, Any]:
    """All of it, with a host of its own."""
    killed, leaving = round(num_peers * KILLED_SHARE), round(num_peers * LEAVING_SHARE)
    rest = num_peers - killed
    sizes = [killed, *(rest // (CROWDS - 1) + (number < rest % (CROWDS - 1)) for number in range(CROWDS - 1))]
    flags = () if with_links else ("--no-links",)
    blind = [max(0, size - num_watchers // CROWDS) for size in sizes]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        host = stack.enter_context(child("host", folder))
        ready = host.hear()
        crowds = [
            stack.enter_context(child("join", ready["link"], size, "--blind", few, *flags))
            for size, few in zip(sizes, blind, strict=True)
        ]
        presence = Presence(host, crowds, ready["hub"])
        presence.figures["num_peers"] = num_peers
        presence.all_join()
        say(f"{num_peers} peers know each other after {presence.figures['join_seconds']:.1f} s")
        presence.idle(idle_seconds)
        say(f"hub and guard use {presence.figures['cores']:.2f} cores for their beacons")
        presence.some_leave(leaving)
        say(f"{leaving} good-byes are seen by all after {presence.figures['leave_seconds']:.2f} s")
        presence.some_die()
        say(f"{killed} deaths are seen by all after {presence.figures['death_seconds']:.2f} s")
        presence.look_back()
        return presence.figures


def main() -> None:
    options = parser(__doc__, repeats=None)
    options.add_argument("--peers", type=int, default=200, help="how many there are, at least 10")
    options.add_argument("--no-links", action="store_true", help="sessions only: no relay, no packets")
    options.add_argument("--watchers", type=int, help="how many of them keep a roster, at least 4; all unless given")
    options.add_argument("--idle-seconds", type=float, default=10.0, help="how long the cost of beacons is measured")
    arguments = options.parse_args()
    if arguments.peers < 10:
        options.error("--peers must be at least 10")
    num_watchers = arguments.peers * CROWDS if arguments.watchers is None else arguments.watchers
    if num_watchers < CROWDS:
        options.error(f"--watchers must be at least {CROWDS}, one for each process")
    figures = measure(
        arguments.peers, num_watchers, with_links=not arguments.no_links, idle_seconds=arguments.idle_seconds
    )
    report(figures, as_json=arguments.json, title="presence on one hub")
    if figures["missed"] or figures["false_doubts"]:
        raise SystemExit("some peers were missed, or doubted although they lived")


if __name__ == "__main__":
    main()
