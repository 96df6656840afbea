"""What benchmarks share: environments of their own for the baselines, medians, a report with its circumstances."""

from __future__ import annotations

import argparse
import atexit
import datetime
import json
import os
import platform
import secrets
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from potluck.testing.processes import kill_descendants

ROOT = Path(__file__).resolve().parent.parent
HIVEMIND = "hivemind==1.1.12"
TOKEN_VARIABLE = "POTLUCK_BENCHMARK"  # in the environment of all that a benchmark starts


def say(text: str) -> None:
    """Tell the person who waits; never mixed into the JSON."""
    print(text, file=sys.stderr, flush=True)


def parser(description: str | None, *, repeats: int | None = 5) -> argparse.ArgumentParser:
    """Arguments that all benchmarks have, `--repeats` only where it has a default. From now on nothing outlives us."""
    _end_with_everything()
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    if repeats is not None:
        help_text = "how often each figure is taken; medians are reported"
        result.add_argument("--repeats", type=int, default=repeats, help=help_text)
    return result


def _end_with_everything() -> None:
    """Have SIGTERM and SIGHUP do what Ctrl-C does, so that labs close, and kill every descendant that is left then.

    A shell starts what runs in its background with Ctrl-C ignored; a benchmark has to hear it all the same.
    """
    token = os.environ[TOKEN_VARIABLE] = secrets.token_hex(16)
    atexit.register(kill_descendants, token, TOKEN_VARIABLE)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    say(f"ending, because of {signal.Signals(signum).name}")
    signal.raise_signal(signal.SIGINT)


def environment_with(name: str, requirements: Sequence[str], *, torch: bool = True) -> Path:
    """The Python of a virtual environment that has `requirements`; made on first use, beside the project's own."""
    folder = ROOT / f".bench-{name}"
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    wanted = "\n".join(requirements)
    if not (stamp.exists() and stamp.read_text() == wanted):
        say(f"making an environment for {', '.join(requirements)} (once, some minutes)")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", "constraints.txt"]
        common = ["torch", "setuptools<80"] if torch else []
        subprocess.run([*install, *common, *requirements], cwd=ROOT, check=True, stdout=sys.stderr)
        stamp.write_text(wanted)
    return python


def run_baseline(python: Path | str, script: str, *arguments: object, timeout_seconds: float = 600) -> Any:
    """Run a script of benchmarks/baselines in another environment; its last line of output is JSON."""
    command = [str(python), str(ROOT / "benchmarks" / "baselines" / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{script} failed with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def median_of(measure: Callable[[], float], repeats: int) -> float:
    """The median of several measurements."""
    return statistics.median(measure() for _ in range(repeats))


def circumstances() -> dict[str, Any]:
    """Where and when a figure was taken."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def report(figures: dict[str, Any], *, as_json: bool, title: str) -> None:
    """Print the figures with their circumstances."""
    if as_json:
        print(json.dumps({**figures, "circumstances": circumstances()}))
        return
    print(title)
    for name, value in figures.items():
        print(f"  {name:32} {value:.3f}" if isinstance(value, float) else f"  {name:32} {value}")
    print("  " + ", ".join(f"{key} {value}" for key, value in circumstances().items()))
