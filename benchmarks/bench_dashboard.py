"""The dashboard with many peers and several open pages: how much of a core it takes, and how soon a page answers.

A run of simulated trainers on this machine (dashboard_crowd.py), a real dashboard, and chromium with real pages: half
of them the overview, the others peers, rounds and leaderboard. `cores` is the processor time of the dashboard's process
over wall time while all pages are open; the crowd and the browser are not part of it. `million_points_seconds` is what
drawing the loss of a run with a million points takes, from memory to what a page is sent. `page_seconds` is the time
from asking for a page until it lives, the quickest of all.

    scripts/bench dashboard --peers 200 --pages 10 --json
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from playwright.sync_api import sync_playwright

from harness import ROOT, parser, report, say
from potluck.monitor.dashboard import charts
from potluck.monitor.past import Past
from potluck.training.books.history import PAGE_POINTS, POINT

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip
PATHS = ("/", "/peers", "/", "/rounds", "/", "/leaderboard")
SETTLING_SECONDS = 10.0


@contextmanager
def started(event: str, *command: object) -> Iterator[tuple[psutil.Process, dict[str, Any]]]:
    """A process that says this event, and ends when its input does."""
    process = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for line in process.stdout:
            told = json.loads(line)
            if told.get("event") == event:
                yield psutil.Process(process.pid), told
                return
        raise SystemExit(f"{command} ended without saying {event}")
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def million_points_seconds() -> float:
    """From a million points in memory to the chart that a page is sent."""
    points = np.zeros(1_000_000, POINT)
    points["at"] = 1.7e9 + np.arange(len(points))
    points["epoch"] = np.arange(len(points))
    points["loss"] = np.exp(-np.arange(len(points)) / 2e5) + np.random.default_rng(0).normal(0, 0.05, len(points))
    past = Past()
    for number in range(-(-len(points) // PAGE_POINTS)):
        past.put(number, points[number * PAGE_POINTS : (number + 1) * PAGE_POINTS])
    began = time.perf_counter()
    series = past.series("loss", "epoch")
    line = charts.line("loss", charts.pairs(series.x, series.mean, "epoch"), charts.TOMATO)
    json.dumps(charts.chart([*charts.band(series, "epoch", charts.TOMATO), line]))
    return time.perf_counter() - began


def measure(peers: int, pages: int, seconds: float) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="potluck-bench-")))
        say(f"{peers} peers join")
        stack.enter_context(started("ready", sys.executable, ROOT / "benchmarks" / "dashboard_crowd.py", folder, peers))
        command = (sys.executable, "-m", "potluck.cli", "dashboard", "--run", "crowd", "--folder", folder)
        process, told = stack.enter_context(started("dashboard", *command, "--port", 0, "--while-read", "--json"))
        say("a dashboard without visitors")
        time.sleep(SETTLING_SECONDS / 2)
        idle = _cores(process, seconds / 3)
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        stack.callback(browser.close)
        say(f"{pages} pages open")
        opened = []
        for number in range(pages):
            page = browser.new_page()
            began = time.perf_counter()
            page.goto(told["url"] + PATHS[number % len(PATHS)], timeout=120_000)
            page.wait_for_selector(".pill:not(:empty)", timeout=120_000)
            opened.append(time.perf_counter() - began)
        time.sleep(SETTLING_SECONDS)
        cores = _cores(process, seconds)
        return {
            "peers": peers,
            "pages": pages,
            "cores": round(cores, 3),
            "cores_without_pages": round(idle, 3),
            "megabytes": round(process.memory_info().rss / 1e6),
            "page_seconds": round(min(opened), 3),
            "million_points_seconds": round(million_points_seconds(), 4),
        }


def _cores(process: psutil.Process, seconds: float) -> float:
    before, began = process.cpu_times(), time.perf_counter()
    time.sleep(seconds)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / (time.perf_counter() - began)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--peers", type=int, default=200)
    arguments.add_argument("--pages", type=int, default=10)
    arguments.add_argument("--seconds", type=float, default=30.0, help="how long it is measured")
    options = arguments.parse_args()
    if shutil.which("chromium") is None:
        raise SystemExit("there is no chromium: apt-get install chromium")
    figures = measure(options.peers, options.pages, options.seconds)
    report(figures, as_json=options.json, title="the dashboard")


if __name__ == "__main__":
    main()
