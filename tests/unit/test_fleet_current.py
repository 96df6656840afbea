"""Inside of a job: figures, checkpoints, the notice to end; also where no agent is."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from potluck.errors import ConfigurationError
from potluck.fleet import currentjob
from potluck.fleet.currentjob import CurrentJob

PROGRAM = """
import os, signal, potluck.fleet
job = potluck.fleet.current()
assert job is potluck.fleet.current()
print(job.name, job.stopping.is_set(), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
assert job.stopping.wait(10)
print(0 < job.seconds_left <= 7, flush=True)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CurrentJob:
    monkeypatch.setenv("POTLUCK_JOB", "walker")
    monkeypatch.setenv("POTLUCK_JOB_FOLDER", str(tmp_path))
    monkeypatch.delenv("POTLUCK_LINK", raising=False)
    monkeypatch.chdir(tmp_path)
    with CurrentJob() as job:
        return job


def test_figures(job: CurrentJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job.log({"reward": 12, "loss": 0.5}, step=3)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["reward"], line["loss"], line["step"]) for line in lines] == [(12.0, 0.5, 3)]
    monkeypatch.setattr(currentjob, "METRICS_BYTES", 10)
    job.log({"reward": 13})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    with pytest.raises((TypeError, ValueError)):
        job.log({"reward": "high"})  # type: ignore[dict-item]


def test_checkpoints_are_whole(job: CurrentJob, tmp_path: Path) -> None:
    Path("model.bin").write_bytes(b"1")
    assert job.checkpoint("model.bin") == Path("checkpoints/model.bin")
    Path("model.bin").write_bytes(b"2")
    job.checkpoint("model.bin")
    assert Path("checkpoints/model.bin").read_bytes() == b"2"
    assert os.listdir("checkpoints") == ["model.bin"]  # noqa: PTH208
    assert job.checkpoint("checkpoints/model.bin").read_bytes() == b"2"
    with pytest.raises(ConfigurationError, match="cannot be kept"):
        job.checkpoint("nothing.bin")


def test_a_job_without_queues_says_how_to_have_some(job: CurrentJob) -> None:
    with pytest.raises(ConfigurationError, match="has no queues"):
        job.queue("experience")
    assert job.seconds_left == math.inf


def test_notice_and_a_program_run_by_hand(tmp_path: Path) -> None:
    environment = {**os.environ, "POTLUCK_JOB": "walker", "POTLUCK_STOP_SECONDS": "7"}
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=100)
    assert said.stdout.split() == ["walker", "False", "True"], said.stderr
    by_hand = "import potluck.fleet; potluck.fleet.current().log({'reward': 1.5})"
    plain = {name: value for name, value in os.environ.items() if not name.startswith("POTLUCK_")}
    said = subprocess.run([sys.executable, "-c", by_hand], capture_output=True, text=True, env=plain, timeout=100)
    assert json.loads(said.stdout)["reward"] == 1.5
    code = "import sys; sys.modules['torch'] = None; import potluck.fleet, potluck.fleet.agent.agent"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert said.returncode == 0, said.stderr


def test_the_handler_of_before_is_back(job: CurrentJob) -> None:
    assert signal.getsignal(signal.SIGTERM) is not job._told_to_end
