"""The pretend accelerator registers once per process, for good: tests on it are those of a child.

Beside cases of its own (cases_device.py) these are the tests of the optimizers and of what stands for the integrations,
with their models on the device.
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


# Fifty epochs of a transformer say nothing more here, and take as long as all the others. Lightning and transformers
# know bfloat16 of CPUs and CUDA alone. Who is first, trainer or coordinator, depends on a slow device's speed.
LEFT_OUT = "fifty_epochs or bf16 or far_from_the_coordinator"
AT_LEAST = {
    "cases_device.py": 51,
    "test_diloco.py": 35,
    "test_optimizer.py": 50,
    "test_lightning.py": 14,
    "test_transformers.py": 4,
}
CHOSEN = {
    "test_lightning.py": (
        "test_alone_it_is_plain_lightning",
        "test_training_goes_on_from_a_checkpoint_to_the_same_bits",
        "test_two_trainers_make_one_large_batch_and_know_of_each_other",
        "test_diloco_is_that_of_a_plain_loop",
        "test_every_algorithm_trains",
    ),
    "test_transformers.py": (
        "test_alone_it_is_the_plain_trainer",
        "test_training_goes_on_from_a_checkpoint_to_the_same_bits",
        "test_two_trainers_make_one_large_batch",
    ),
}


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
    files = [str((HERE if name.startswith("cases") else UNIT) / name) for name in AT_LEAST]
    paths = [f"{file}::{test}" if test else file for file in files for test in CHOSEN.get(Path(file).name, ("",))]
    options = [
        "-v",
        "-p",
        "onpretend",
        "-p",
        "no:cacheprovider",
        "-rfE",
        "-k",
        "not fifty_epochs and not bf16 and not far_from_the_coordinator",
    ]
    command = [sys.executable, "-m", "pytest", *options, *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    passed = Counter(re.findall(r"(\w+\.py)::.* PASSED", done.stdout))
    assert all(passed[name] >= number for name, number in AT_LEAST.items()), passed
