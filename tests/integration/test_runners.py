"""What every runner promises, on each of them: processes, and containers of a real engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from potluck.errors import ConfigurationError, RetryableError
from potluck.fleet.agent import jobfolder
from potluck.fleet.agent.jobfolder import JobFolder
from potluck.fleet.agent.reconciler import Exit, Instance
from potluck.fleet.agent.runners.explaining import last_words
from potluck.fleet.agent.runners.process import ProcessRunner
from potluck.fleet.agent.runners.runner import Launch, Runner
from potluck.fleet.jobs.job import Job, Limits, Mount
from potluck.hub.keys import new_seed, public_key
from potluck.testing.podman import IMAGE, podman_service, why_no_engine
from potluck.testing.polling import poll_until
from potluck.testing.smalldisk import fill

MACHINE = public_key(new_seed("user"))
PATIENCE_SECONDS = 60.0
TRAP = "trap 'echo told; exit 0' TERM; echo ready; while true; do sleep 0.1; done"
DEAF = "trap '' TERM; echo ready; while true; do sleep 0.1; done"


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    if reason := why_no_engine():
        pytest.skip(reason)
    with podman_service() as url:
        yield url


class Stage:
    """A runner, and another one like it after it is gone."""

    def __init__(self, folder: Path, image: str, make: Callable[[Path], Runner]) -> None:
        self.folder = folder
        self.image = image
        self._make = make
        self.runner = make(folder)

    def job(self, script: str, name: str = "walker", **changes: Any) -> Job:
        usual = {"command": ("sh", "-c", script), "image": self.image, "network": "host" if self.image else ""}
        return Job(**{"name": name, "machine": MACHINE, "stop_seconds": 5.0, **usual, **changes})

    async def start(self, job: Job, *, failures: int = 0, restarts: int = 0, **environment: str) -> None:
        launch = Launch(
            job=job,
            folder=JobFolder(self.folder, job.name),
            environment={"PATH": os.environ["PATH"] if not self.image else "/bin", **environment},
            failures=failures,
            restarts=restarts,
        )
        await self.runner.start(launch)

    async def until_ended(self, name: str = "walker") -> Instance:
        return await self._until(lambda instance: instance.state == "ended", name)

    async def until_said(self, text: str, name: str = "walker") -> str:
        async def said() -> str | None:
            data = await self.runner.read_log(name, 100)
            return data.decode() if text in data.decode() else None

        found = await poll_until(said, PATIENCE_SECONDS, f"{name} to say {text}")
        assert found is not None
        return found

    async def _until(self, fits: Callable[[Instance], bool], name: str) -> Instance:
        async def look() -> Instance | None:
            found = (await self.runner.instances()).get(name)
            return found if found is not None and fits(found) else None

        instance = await poll_until(look, PATIENCE_SECONDS, f"{name} to be so")
        assert instance is not None
        return instance

    async def replace_runner(self) -> None:
        await self.runner.close()
        self.runner = self._make(self.folder)

    async def clear(self) -> None:
        for name, instance in (await self.runner.instances()).items():
            if instance.state == "running":
                await self.runner.stop(name, 0.0)
                await self.until_ended(name)
            await self.runner.remove(name)
        await self.runner.close()


def let_others_in(folder: Path) -> None:
    """Containers run as somebody else, who has to get to the job's folder."""
    for path in (folder, *folder.parents):
        if path == folder or "pytest" in path.name:
            path.chmod(0o755)


@pytest.fixture(params=["process", "container"])
async def stage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stage]:
    if request.param == "process":
        stage = Stage(tmp_path / "jobs", "", ProcessRunner)
    else:
        from potluck.fleet.agent.runners.container import ContainerRunner

        url = request.getfixturevalue("engine")
        let_others_in(tmp_path)
        stage = Stage(tmp_path / "jobs", IMAGE, lambda folder: ContainerRunner.open(folder, MACHINE, url))
    try:
        yield stage
    finally:
        await stage.clear()


async def test_a_job_runs_to_its_end(stage: Stage) -> None:
    job = stage.job('echo "hello $COLOUR"; pwd; touch here; exit 7')
    await stage.start(job, failures=2, restarts=3, COLOUR="blue")
    ended = await stage.until_ended()
    assert (ended.digest, ended.failures, ended.restarts) == (job.digest, 2, 3)
    assert (ended.exit.code, ended.exit.out_of_memory, ended.stopped) == (7, False, False)
    assert 0 < ended.started_at <= ended.ended_at
    said = await stage.runner.read_log("walker", 100)
    assert said.startswith(b"hello blue\n")
    assert (stage.folder / "walker" / "work" / "here").exists()
    assert "exit code 7" in last_words(job, ended, said.decode())
    await stage.runner.remove("walker")
    assert await stage.runner.instances() == {}
    await stage.runner.remove("walker")


async def test_a_job_runs_once_and_outlives_its_runner(stage: Stage) -> None:
    job = stage.job("echo $$ >> started; echo ready; sleep 1000")
    await stage.start(job)
    await stage.until_said("ready")
    with pytest.raises(RetryableError, match="runs already"):
        await stage.start(job)
    await stage.replace_runner()
    [instance] = (await stage.runner.instances()).values()
    assert (instance.state, instance.digest) == ("running", job.digest)
    with pytest.raises(RetryableError, match="runs already"):
        await stage.start(job)
    assert len((stage.folder / "walker" / "work" / "started").read_text().split()) == 1
    await stage.runner.remove("walker")  # nothing that runs is forgotten
    assert "walker" in await stage.runner.instances()
    await stage.runner.stop("walker", 0.0)
    assert (await stage.until_ended()).stopped


async def test_notice_before_the_end(stage: Stage) -> None:
    await stage.start(stage.job(TRAP))
    await stage.until_said("ready")
    await stage.runner.stop("walker", 30.0)
    await stage.runner.stop("walker", 30.0)
    ended = await stage.until_ended()
    assert ended.stopped
    assert ended.exit.code == 0
    assert "told" in await stage.until_said("told")


async def test_who_does_not_listen_is_killed(stage: Stage) -> None:
    await stage.start(stage.job(DEAF))
    await stage.until_said("ready")
    await stage.runner.stop("walker", 1.0)
    ended = await stage.until_ended()
    assert ended.stopped
    assert ended.exit.signal == signal.SIGKILL or ended.exit.code == 128 + signal.SIGKILL


async def test_a_limit_of_memory(stage: Stage) -> None:
    job = stage.job("echo ready; tail /dev/zero", limits=Limits(memory_bytes=64 * 10**6))
    await stage.start(job)
    ended = await stage.until_ended()
    assert ended.exit.out_of_memory
    assert "killed for memory: it wanted more than its limit of 64 MB" in last_words(job, ended, "")


async def test_a_command_that_is_not_there(stage: Stage) -> None:
    job = stage.job("", command=("no-such-program",))
    if stage.image:
        with pytest.raises(ConfigurationError, match="no program no-such-program"):
            await stage.start(job)
    else:
        await stage.start(job)
        assert "no program no-such-program" in (await stage.until_ended()).exit.reason


async def test_logs_are_followed_over_restarts(stage: Stage) -> None:
    job = stage.job("for i in 1 2 3 4; do echo line $i; sleep 0.2; done")
    await stage.start(job)
    following, said = stage.runner.follow_log("walker", 100), b""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while b"line 4\n" not in said:
            said += await anext(following)
        assert said == b"line 1\nline 2\nline 3\nline 4\n"
        await stage.until_ended()
        await stage.runner.remove("walker")
        await stage.start(job)
        while said.count(b"line 4\n") < 2:
            said += await anext(following)
    assert said == 2 * b"line 1\nline 2\nline 3\nline 4\n"
    await following.aclose()
    assert await stage.runner.read_log("walker", 2) == b"line 3\nline 4\n"


async def test_what_it_uses(stage: Stage) -> None:
    await stage.start(stage.job("echo ready; while true; do :; done"))
    await stage.until_said("ready")

    async def busy() -> bool:
        usage = await stage.runner.usage("walker")
        return usage.memory_bytes > 0 and usage.cpu_percent > 1.0

    await poll_until(busy, PATIENCE_SECONDS, "some use")
    assert (await stage.runner.usage("nobody")).memory_bytes == 0


# Of processes alone


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_what_a_process_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "jobs", "", ProcessRunner)
    await stage.start(stage.job("setsid sleep 1000 & echo $! > left; sleep 0.3"))
    await stage.until_ended()
    assert has_ended(int((stage.folder / "walker" / "work" / "left").read_text()))
    await stage.clear()


async def test_a_process_whose_keeper_was_killed_still_counts_and_can_be_ended(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "jobs", "", ProcessRunner)
    job = stage.job("setsid sleep 1000 & echo $! > left; echo ready; sleep 1000")
    await stage.start(job)
    await stage.until_said("ready")
    shim = json.loads((stage.folder / "walker" / "run" / "running.json").read_text())["shim"]
    os.kill(shim, signal.SIGKILL)
    await asyncio.sleep(0.2)
    assert (await stage.runner.instances())["walker"].state == "running"
    with pytest.raises(RetryableError):
        await stage.start(job)
    await stage.runner.stop("walker", 5.0)
    ended = await stage.until_ended()
    assert "stopped" in last_words(job, ended, "")
    assert has_ended(int((stage.folder / "walker" / "work" / "left").read_text())), "also what left its process group"
    await stage.clear()


async def test_on_a_full_disk_jobs_are_not_started_and_are_ended(
    mount_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = mount_disk(2**20)
    stage = Stage(disk / "jobs", "", ProcessRunner)
    talker = stage.job("yes | head -c 20000; echo ready; sleep 1000", name="talker")
    await stage.start(talker)
    await stage.until_said("ready", "talker")
    filler = stage.job("cat /dev/zero > zeros; sleep 0.3; exit 9", name="filler")
    await stage.start(filler)  # it fills the disk, and how it ended is known all the same
    ended = await stage.until_ended("filler")
    assert ended.exit.code == 9
    ballast = fill(disk)
    walker = stage.job("echo ready; sleep 1000")
    with pytest.raises((RetryableError, OSError), match="No space left") as failure:
        await stage.start(walker)
    words = last_words(walker, dataclasses.replace(ended, exit=Exit(reason=str(failure.value))), "")
    assert "the machine's disk is full: make room, then `potluck fleet restart walker`" in words
    monkeypatch.setattr(jobfolder, "LOG_BYTES", 100)
    await stage.runner.stop("talker", 0.0)
    await stage.until_ended("talker")
    assert (stage.folder / "talker" / "log").stat().st_size <= 100, "what could not be kept made room"
    ballast.unlink()
    (stage.folder / "filler" / "work" / "zeros").unlink()
    await stage.start(walker)
    await stage.until_said("ready")
    await stage.clear()


# Of containers alone


@pytest.fixture
async def box(engine: str, tmp_path: Path) -> AsyncIterator[Stage]:
    from potluck.fleet.agent.runners.container import ContainerRunner

    let_others_in(tmp_path)
    stage = Stage(tmp_path / "jobs", IMAGE, lambda folder: ContainerRunner.open(folder, MACHINE, engine))
    try:
        yield stage
    finally:
        await stage.clear()


async def test_a_container_is_not_root_and_sees_only_what_was_named(box: Stage, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "book").write_text("read me\n")
    (tmp_path / "secret").write_text("not for jobs")
    job = box.job(
        f"id -u; cat /data/book; touch /data/x || echo read only; ls {tmp_path}; touch /root/x || echo no; ls /",
        mounts=(Mount(source=str(tmp_path / "data"), target="/data"),),
    )
    await box.start(job)
    await box.until_ended()
    said = (await box.runner.read_log("walker", 100)).decode()
    assert said.splitlines()[0] == "10001"
    assert "read me" in said
    assert "read only" in said
    assert "No such file" in said
    assert "secret" not in said.replace(str(tmp_path), "")
    capabilities = box.job("cat /proc/self/status", name="caps")
    await box.start(capabilities)
    await box.until_ended("caps")
    status = (await box.runner.read_log("caps", 100)).decode()
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status


async def test_an_image_that_is_not_there(box: Stage) -> None:
    missing = box.job("true", image="localhost:1/nothing:1")
    with pytest.raises(ConfigurationError, match="is missing on this machine"):
        await box.runner.prepare(missing, lambda _parcel, _what: asyncio.Future())


async def test_an_image_travels_as_a_parcel(box: Stage, engine: str, tmp_path: Path) -> None:
    from potluck.fleet.agent.runners.images import find_images
    from potluck.fleet.jobs.fleetfile import JobPlan
    from potluck.fleet.jobs.job import Parcel
    from potluck.fleet.jobs.parcels import ParcelFolder

    images, parcels = find_images(engine), ParcelFolder(tmp_path / "host")
    assert images is not None
    name, parcel = images.image_for(JobPlan(name="walker", image=IMAGE), parcels)
    assert parcel is not None
    assert images.image_for(JobPlan(name="walker", image=IMAGE), parcels) == (name, parcel)
    assert images.image_for(JobPlan(name="walker", image="localhost/other:1"), parcels) == ("localhost/other:1", None)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "Dockerfile").write_text(f'FROM {IMAGE}\nENV MADE=here\nCMD ["sh", "-c", "echo $MADE"]\n')
    built, built_parcel = images.image_for(JobPlan(name="built", build=tmp_path / "build"), parcels)
    assert built_parcel is not None
    assert built_parcel != parcel
    fetched: list[str] = []

    async def fetch(wanted: Parcel, what: str) -> Path:
        fetched.append(what)
        return parcels.path(wanted.digest)

    job = box.job("", name="built", image=built, command=(), image_parcel=built_parcel)
    await box.runner.prepare(job, fetch)
    await box.runner.prepare(job, fetch)
    assert len(fetched) == 1
    await box.start(job)
    await box.until_ended("built")
    assert (await box.runner.read_log("built", 10)) == b"here\n"
