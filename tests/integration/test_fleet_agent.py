"""Whose orders a machine takes, and who may look into its jobs: with a real hub and real links."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from runhouse import PATIENCE_SECONDS, RUN, RunHouse, open_run

from potluck import tasks
from potluck.errors import ConfigurationError, PeerError, PermissionDeniedError, RetryableError
from potluck.fleet.agent.agent import Agent, AgentConfig
from potluck.fleet.agent.desk import ReadFiles, ReadLog, Warrant, issue
from potluck.fleet.agent.jobfolder import JobFolder
from potluck.fleet.agent.reconciler import Instance
from potluck.fleet.agent.reporting import Reporter, Standing, newest_metrics
from potluck.fleet.agent.runners.process import ProcessRunner
from potluck.fleet.agent.service import install, unit_text
from potluck.fleet.jobs import desired as documents
from potluck.fleet.jobs.control import FOLDER, FleetControl, fleet_control
from potluck.fleet.jobs.desired import Desired
from potluck.fleet.jobs.fleetfile import FleetFile, parse
from potluck.fleet.jobs.job import Allowance, Job, Restart
from potluck.fleet.jobs.parcels import FetchParcel, ParcelFolder
from potluck.hub.access.member import Scopes
from potluck.hub.access.organise import Organiser
from potluck.hub.connection import Entry
from potluck.hub.joinlink import JoinLink, organiser_hash
from potluck.hub.keys import HubKeys, Signer, new_seed
from potluck.hub.stores import FLEET_KEY
from potluck.peer.identity import Identity
from potluck.testing.polling import poll_until

ORGANISER = Signer(new_seed("user"))


def entry(value: bytes | None) -> Entry:
    return Entry(key=FLEET_KEY, value=value, revision=1, written_at=0.0)


async def test_only_the_organisers_newest_document_counts(tmp_path: Path) -> None:
    identity = Identity.temporary()
    link = JoinLink(host="127.0.0.1", port=1, run=RUN, ca_hash="", organiser_hash=organiser_hash(ORGANISER.public_key))
    config = AgentConfig(name="anna", folder=tmp_path, allow=Allowance(process=True))
    agent = Agent(link, identity, config, {})

    def document(revision: int, signer: Signer = ORGANISER, run: str = RUN) -> bytes:
        job = Job(name=f"job-{revision}", machine=identity.peer_id, command=("true",))
        return documents.sign(Desired(run=run, revision=revision, jobs=(job,)), signer)

    def of_now() -> list[str]:
        return list(agent.desired.of_machine(identity.peer_id))

    agent._heard(entry(document(5)))
    assert of_now() == ["job-5"]
    for other in (
        document(6, Signer(new_seed("user"))),  # anybody's
        document(6, run="another"),
        document(4),  # an old one, brought back by the hub
        document(6)[:-1] + b"\0",
        b"nonsense",
        None,  # removed: nobody has signed that
    ):
        agent._heard(entry(other))
        assert of_now() == ["job-5"]
    successor = Agent(link, identity, config, {})
    successor._load()
    assert list(successor.desired.of_machine(identity.peer_id)) == ["job-5"]
    agent._heard(entry(document(6)))
    assert of_now() == ["job-6"]
    (tmp_path / "desired.bin").write_bytes(b"damaged")
    with pytest.raises(ConfigurationError, match="damaged"):
        successor._load()

    def warrant(signer: Signer = ORGANISER, peer: str = "Uanna", until: float = 2e9) -> Warrant:
        return issue(signer, RUN, peer, until)

    for wrong, shown_by in (
        (warrant(Signer(new_seed("user"))), "Uanna"),
        (warrant(), "Ubert"),
        (warrant(until=1.0), "Uanna"),
        (msgspec.structs.replace(warrant(until=1.0), until=2e9), "Uanna"),
    ):
        assert not agent._may_look(wrong, shown_by)
    assert agent._may_look(warrant(until=9e9), "Uanna")


class AbsentEngine(ProcessRunner):
    """A runner whose engine has gone away."""

    async def instances(self) -> dict[str, Instance]:
        raise RetryableError("the container engine does not answer")


async def test_an_engine_that_is_away_holds_up_no_other_jobs(tmp_path: Path) -> None:
    identity = Identity.temporary()
    link = JoinLink(host="127.0.0.1", port=1, run=RUN, ca_hash="", organiser_hash=organiser_hash(ORGANISER.public_key))
    allow = Allowance.parse(["process", "images=*"])
    runners = {"container": AbsentEngine(tmp_path / "none"), "process": ProcessRunner(tmp_path / "jobs")}
    agent = Agent(link, identity, AgentConfig(name="anna", folder=tmp_path, allow=allow), runners)
    jobs = (
        Job(name="boxed", machine=identity.peer_id, image="box:1"),
        Job(name="plain", machine=identity.peer_id, command=("sleep", "1000"), stop_seconds=1),
    )
    agent._heard(entry(documents.sign(Desired(run=RUN, revision=1, jobs=jobs), ORGANISER)))
    try:

        async def states() -> dict[str, str]:
            await agent._act()
            return {job.name: job.state for job in (await agent._report()).jobs}

        async def both() -> bool:
            return await states() == {"boxed": "preparing", "plain": "running"}

        await poll_until(both, PATIENCE_SECONDS, "the plain job")
    finally:
        await agent._end_jobs()
        assert all(each.state == "ended" for each in (await agent._look()).values())


@asynccontextmanager
async def machine(house: RunHouse, folder: Path, name: str = "anna") -> AsyncIterator[Agent]:
    """An agent in this process, which leaves its jobs running when it ends."""
    _, secret = await (await house.organiser()).create_invite(scopes=Scopes(roles=("machine",)), uses=None)
    link = replace(house.host.link, invite=secret)
    identity = Identity.open(folder / "identity.nkey")
    config = AgentConfig(name=name, folder=folder, allow=Allowance(process=True))
    agent = Agent(link, identity, config, {"process": ProcessRunner(folder / "jobs")})
    stop, connected = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(agent.run(stop, connected.set))
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await connected.wait()
        yield agent
    finally:
        stop.set()
        await asyncio.wait([running], timeout=PATIENCE_SECONDS)
        await tasks.end(running)
        identity.close()


def plan(text: str, folder: Path) -> FleetFile:
    import tomllib

    return parse(tomllib.loads(text), folder)


async def until_state(control: FleetControl, *states: str) -> Any:
    async def found() -> Any:
        [status] = await control.jobs()
        return status.report if status.report is not None and status.report.state in states else None

    return await poll_until(found, PATIENCE_SECONDS, f"the job to be {states}")


async def test_a_member_cannot_order_jobs_or_look_into_them(tmp_path: Path) -> None:
    (tmp_path / "greeting").write_text("hello")
    async with open_run(tmp_path / "run") as house, machine(house, tmp_path / "anna") as agent:
        ParcelFolder(house.folder / FOLDER).serve(house.own_peer.links, lambda peer: peer == agent.peer_id)
        async with fleet_control(house.folder, house.host.record) as control:
            await control.up(
                plan(
                    "[jobs.a]\ncommand = ['sh', '-c', 'cat greeting; sleep 1000']\nmachine = 'anna'\n"
                    "files = ['greeting']",
                    tmp_path,
                )
            )
            await until_state(control, "running")
            [status] = await control.jobs()
            stranger = await house.join("mallory", link=None, role="trainer", client_mode=True)
            await poll_until(lambda: agent.peer_id in stranger.session.roster, PATIENCE_SECONDS, "the machine")
            hub, subjects = stranger.session.hub, stranger.session.subjects
            own = Signer(stranger.identity.seed)
            forged = documents.sign(Desired(run=RUN, revision=99), own)
            with pytest.raises(PermissionDeniedError):
                await Organiser(hub, subjects, stranger.peer_id).put_up_jobs(forged, replaces=0)
            with pytest.raises(PermissionDeniedError):
                await hub.request(subjects.write(stranger.peer_id, "fleet", FLEET_KEY), forged, timeout_seconds=5)
            warrant = issue(own, RUN, stranger.peer_id, 9e9)
            keys = HubKeys.load_or_create(house.folder / "identity")
            stolen = issue(Signer(keys.organiser_seed), RUN, house.own_peer.peer_id, 9e9)
            requests = [
                (agent.peer_id, ReadLog(warrant=warrant, job="a")),
                (agent.peer_id, ReadLog(warrant=stolen, job="a")),
                (agent.peer_id, ReadFiles(warrant=warrant, job="a")),
                (house.own_peer.peer_id, FetchParcel(digest=status.job.files.digest)),
            ]
            for peer, request in requests:
                stream = await stranger.links.open_stream(peer, request, timeout_seconds=10)
                with pytest.raises(PeerError, match="only"):
                    await stream.receive(timeout_seconds=10)
            said = b""
            async for data in control.read_log("a", num_lines=5, follow=False):
                said += data
            assert said == b"hello"
            with pytest.raises(PeerError, match="below the job's working folder"):
                await control.copy("a", "../../../identity.nkey", tmp_path / "copied")
            await control.down()
            await poll_until(lambda: not agent._instances, PATIENCE_SECONDS, "the end of the job")


def test_a_unit_passes_systemds_own_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow = Allowance.parse(["process", "images=potluck-*", "mounts=/data:rw"])
    config = AgentConfig(name="Anna's 100% laptop", folder=tmp_path, allow=allow)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    link = str(JoinLink(host="127.0.0.1", port=1, run=RUN, ca_hash="", invite="very-secret"))
    path = install(link, config, "unix:///run/podman/podman.sock")
    text = path.read_text()
    assert text == unit_text(config, "unix:///run/podman/podman.sock")
    assert "very-secret" not in text
    assert (tmp_path / "agent.env").stat().st_mode & 0o077 == 0
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (scripts/test installs it, as root on Debian)")
    said = subprocess.run(["systemd-analyze", "verify", "--user", path], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    assert not said.stderr.strip(), said.stderr
    broken = path.with_name("broken.service")
    broken.write_text(text.replace("ExecStart=", "ExecStrat="))
    said = subprocess.run(["systemd-analyze", "verify", "--user", broken], capture_output=True, text=True, timeout=60)
    assert said.returncode != 0 or said.stderr.strip()  # the check itself can fail


async def test_times_in_reports_are_the_hubs(tmp_path: Path) -> None:
    job = Job(name="walker", machine=Identity.temporary().peer_id, command=("true",), restart=Restart(when="never"))
    instance = Instance(job="walker", digest=job.digest, state="ended", started_at=100.0, ended_at=160.0)
    standing = Standing(
        revision=1,
        allowed={"walker": job},
        refused={},
        instances={"walker": instance},
        preparing={},
        clock_behind_seconds=7200.0,
    )
    reporter = Reporter("anna", Allowance(process=True), tmp_path, {"process": ProcessRunner(tmp_path)})
    [report] = (await reporter.report(standing)).jobs
    assert report.since == 7360.0


def test_figures_of_a_job_are_read_with_care(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert newest_metrics(path) == {}
    path.write_bytes(b'{"at": 1, "reward": 1}\n{"reward": 2.5, "loss": 1}\nnonsense\n[1]\n{"x": "y"}\n\xff\n{"rew')
    assert newest_metrics(path) == {"reward": 2.5, "loss": 1.0}
    path.rename(tmp_path / "other")
    path.symlink_to(tmp_path / "other")
    assert newest_metrics(path) == {}
    path.unlink()
    os.mkfifo(path)  # would be waited for without end
    assert newest_metrics(path) == {}


async def test_a_job_can_be_a_trainer_of_a_run(tmp_path: Path) -> None:
    async with (
        open_run(tmp_path / "run") as house,
        machine(house, tmp_path / "anna") as agent,
        fleet_control(house.folder, house.host.record) as control,
    ):
        file = f"[jobs.helper]\nrun = '{RUN}'\nmachine = 'anna'"
        assert await control.up(plan(file, tmp_path), dry_run=True) == {"helper": "new"}
        assert (await control.desired()).jobs == ()
        with pytest.raises(ConfigurationError, match="write its join link"):
            await control.up(plan(file.replace(RUN, "elsewhere"), tmp_path))
        await control.up(plan(file, tmp_path))
        [job] = (await control.desired()).jobs
        assert house.host.record.invite.encode() not in documents.sign(await control.desired(), ORGANISER)
        environment = agent._environment(job, JobFolder(tmp_path / "jobs", "helper"))
        assert JoinLink.parse(environment["POTLUCK_LINK"]).invite == house.host.record.invite
        organiser = await house.organiser()

        async def came() -> bool:
            members = [state.member for state in await organiser.list_members()]
            return any((member.name, member.role) == ("helper", "trainer") for member in members)

        await poll_until(came, 2 * PATIENCE_SECONDS, "the trainer")  # it imports torch first
        await control.down()
        await poll_until(lambda: not agent._instances, PATIENCE_SECONDS, "its end")
