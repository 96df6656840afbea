"""The pretend accelerator registers once per process, for good: tests on it are those of a child.

Beside cases of its own (cases_device.py) these are the tests of the optimizers, with their models on the device.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
UNIT = HERE.parent / "unit"


# Fifty epochs of a transformer say nothing more here, and take as long as all the others.
AT_LEAST = {"cases_device.py": 51, "test_diloco.py": 35, "test_optimizer.py": 50}


@pytest.mark.timeout(1000)
def test_the_device_and_what_stands_on_it() -> None:
    """In one child: each would import torch, and install the device, anew."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(UNIT), os.environ.get("PYTHONPATH", "")]),
        "POTLUCK_TEST_FRESH": "1",  # these tests start no processes
    }
    for name in [name for name in environment if name.startswith("PYTEST_XDIST")]:
        del environment[name]
    paths = [str((HERE if name.startswith("cases") else UNIT) / name) for name in AT_LEAST]
    options = ["-v", "-p", "onpretend", "-p", "no:cacheprovider", "-rfE", "-k", "not fifty_epochs"]
    command = [sys.executable, "-m", "pytest", *options, *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    passed = Counter(re.findall(r"(\w+\.py)::.* PASSED", done.stdout))
    assert all(passed[name] >= number for name, number in AT_LEAST.items()), passed
