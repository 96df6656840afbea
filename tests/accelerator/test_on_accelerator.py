"""The pretend accelerator registers once per process, for good: tests on it are those of a child.

Beside cases of its own (cases_device.py) these are the tests of the optimizers, with their models on the device.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
UNIT = HERE.parent / "unit"


def run_on_device(path: Path, *options: str) -> int:
    """How many tests of a file passed with their models on the device; all that ran must."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(UNIT), os.environ.get("PYTHONPATH", "")]),
    }
    for name in [name for name in environment if name.startswith("PYTEST_XDIST")]:
        del environment[name]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "onpretend", "-p", "no:cacheprovider", "-rfE", str(path)]
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None, done.stdout
    return int(found[1])


@pytest.mark.timeout(1000)
def test_the_device_and_what_stands_on_it() -> None:
    assert run_on_device(HERE / "cases_device.py") > 50


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("name", "at_least"), [("test_diloco.py", 35), ("test_optimizer.py", 50)])
def test_tests_of_the_optimizers_pass_on_the_device(name: str, at_least: int) -> None:
    # Fifty epochs of a transformer say nothing more here, and take as long as all the others.
    assert run_on_device(UNIT / name, "-k", "not fifty_epochs") >= at_least
