"""A machine's agent: keeps exactly those jobs running that an organiser signed and the machine's owner allows.

    hub store ──▶ desired.py (signature, revision) ──▶ file on disk ──▶ reconciler.py ──▶ runners
         ▲                                                                  │
    reports every few seconds ◀── what runs, how the machine is doing ◀─────┘

The agent dials out and nothing else. The hub may be away, at the start too: the document on disk counts until there is
a newer one. The agent may die: jobs go on, and its successor finds them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from potluck import tasks
from potluck.errors import AccessError, ConfigurationError, PotluckError, ProtocolError, RetryableError
from potluck.fleet.agent.desk import AgentDesk, Warrant, is_valid
from potluck.fleet.agent.jobfolder import JobFolder
from potluck.fleet.agent.reconciler import Exit, Instance, Remove, Start, Stop, reconcile
from potluck.fleet.agent.reporting import Reporter, Standing
from potluck.fleet.agent.runners.runner import Launch, Runner
from potluck.fleet.jobs import desired as documents
from potluck.fleet.jobs.desired import Desired
from potluck.fleet.jobs.job import Allowance, Job, Parcel
from potluck.fleet.jobs.machine import ASK_TOPIC, TOPIC, MachineReport
from potluck.fleet.jobs.parcels import ParcelFolder
from potluck.fleet.jobs.sealing import unseal
from potluck.hub.connection import Delivery, Entry
from potluck.hub.joinlink import JoinLink, fetch_address
from potluck.messages import encode
from potluck.peer import environment
from potluck.peer.identity import Identity
from potluck.peer.organisers import checking
from potluck.run.peer import Peer, PeerConfig

logger = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 0.5
REPORT_EVERY_SECONDS = 5.0
REPORT_GAP_SECONDS = 0.5  # between two reports, however often somebody asks
FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 15.0
REFUSED_RETRY_SECONDS = 30.0
DOCUMENT_FILE = "desired.bin"
JOBS = "jobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What a machine's owner chooses."""

    name: str
    """What the machine is called in fleet.toml and in lists."""

    folder: Path
    """Where jobs have their folders, and the agent what it must not forget."""

    allow: Allowance = field(default_factory=Allowance)
    """What jobs may do here."""

    websocket_only: bool = False
    relay_only: bool = False
    keeps_jobs: bool = False
    """Leave jobs running when the agent is told to end."""


class Agent:
    """One machine of a fleet."""

    def __init__(self, link: JoinLink, identity: Identity, config: AgentConfig, runners: dict[str, Runner]) -> None:
        """`runners` by kind: process, container. `identity` stays the caller's."""
        self.config = config
        self.peer_id = identity.peer_id
        self.desired = Desired(run=link.run)
        self.is_connected = False
        self._link = link
        self._identity = identity
        self._check_organiser = checking(link)
        self._runners = runners
        self._jobs = config.folder / JOBS
        self._jobs.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._parcels = ParcelFolder(config.folder)
        self._peer: Peer | None = None
        self._wake, self._report_wanted = asyncio.Event(), asyncio.Event()
        self._works: dict[str, asyncio.Task[None]] = {}
        self._preparing: dict[str, str] = {}  # what a job waits for before it can start
        self._unstarted: dict[str, Instance] = {}  # starts that failed before a runner had anything of them
        self._instances: dict[str, Instance] = {}
        self._seen: dict[str, dict[str, Instance]] = {}  # by kind of runner, as each has told last
        self._silent: set[str] = set()  # runners that tell nothing now
        self._desk = AgentDesk(self._jobs, self._runner_of, self._may_look)
        self._reporter = Reporter(config.name, config.allow, self._jobs, runners)

    # Its life

    async def run(self, stop: asyncio.Event, on_connected: Callable[[], None] = lambda: None) -> None:
        """Be this machine's agent until the event. ConfigurationError or AccessError when the hub never lets it in."""
        self._load()
        parts = [
            asyncio.create_task(self._keep_jobs(), name="jobs"),
            asyncio.create_task(self._stay_connected(on_connected), name="connection"),
            asyncio.create_task(self._keep_reporting(), name="reports"),
            asyncio.create_task(stop.wait(), name="stop"),
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await tasks.end(*parts, *self._works.values())
            if not self.config.keeps_jobs:
                await self._end_jobs()
            await self._leave()
            for runner in self._runners.values():
                await runner.close()

    async def _end_jobs(self) -> None:
        """The owner takes the machine back: all jobs end, with notice."""
        while True:
            running = [each for each in (await self._look()).values() if each.state == "running"]
            if not running:
                return
            for instance in running:
                job = self.desired.of_machine(self.peer_id).get(instance.job)
                grace = job.stop_seconds if job is not None else 0.0
                for kind, runner in self._runners.items():
                    if kind not in self._silent:
                        await runner.stop(instance.job, grace)
            await asyncio.sleep(LOOK_EVERY_SECONDS / 2)

    # What shall run

    def _load(self) -> None:
        path = self.config.folder / DOCUMENT_FILE
        if path.exists():
            try:
                self.desired, _ = documents.read(path.read_bytes(), self._link.run)
            except ProtocolError as error:
                raise ConfigurationError(
                    f"{path} is damaged ({error}): remove it, and the hub sends it anew"
                ) from error

    def _heard(self, entry: Entry) -> None:
        if entry.value is None:
            return  # nobody has signed that: what runs goes on
        try:
            newest, organiser = documents.read(entry.value, self._link.run)
            self._check_organiser(organiser)
        except (ProtocolError, ConfigurationError) as error:
            logger.warning("the jobs in the hub do not count: %s", error)
            return
        if newest.revision > self.desired.revision:
            try:
                self._keep(entry.value)
            except OSError as error:  # a full disk: it counts all the same, until the agent ends
                logger.warning("the jobs could not be written down: %s", error)
            self.desired = newest
            self._unstarted.clear()
            self._wake.set()
            logger.info("revision %d: %d jobs here", newest.revision, len(newest.of_machine(self.peer_id)))

    def _keep(self, data: bytes) -> None:
        path = self.config.folder / DOCUMENT_FILE
        draft = path.with_suffix(".new")
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)

    def _allowed(self) -> tuple[dict[str, Job], dict[str, str]]:
        """The jobs that may run here, and why the others may not."""
        allowed: dict[str, Job] = {}
        refused: dict[str, str] = {}
        for name, job in self.desired.of_machine(self.peer_id).items():
            why = self.config.allow.refusal(job)
            if not why and job.kind not in self._runners:
                why = "this machine has no container engine that the agent can reach"
            if why:
                refused[name] = why
            else:
                allowed[name] = job
        return allowed, refused

    # What runs

    async def _keep_jobs(self) -> None:
        while True:
            look_at: float | None = None
            try:
                look_at = await self._act()
            except (PotluckError, OSError) as error:
                logger.warning("the jobs cannot be looked at now: %s", error)
            pause = LOOK_EVERY_SECONDS if look_at is None else min(max(look_at - time.time(), 0.01), LOOK_EVERY_SECONDS)
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def _look(self) -> dict[str, Instance]:
        """All that there is, but for runners that tell nothing now."""
        found: dict[str, Instance] = {}
        for kind in self._runners:
            for name, instance in (await self._instances_of(kind) or {}).items():
                if name not in found or instance.state == "running":
                    found[name] = instance
        return found

    async def _instances_of(self, kind: str) -> dict[str, Instance] | None:
        """What a runner has; None while it cannot tell, as when its engine is away. The others go on."""
        try:
            found = self._seen[kind] = await self._runners[kind].instances()
        except (PotluckError, OSError) as error:
            if kind not in self._silent:
                logger.warning("jobs of the kind %s cannot be looked at now: %s", kind, error)
                self._silent.add(kind)
                self._report_wanted.set()
            return None
        if kind in self._silent:
            logger.info("jobs of the kind %s can be looked at again", kind)
            self._silent.discard(kind)
        return found

    async def _act(self) -> float | None:
        """Look, decide, begin what has to be done. When to look again at the latest."""
        allowed, _ = self._allowed()
        look_at: list[float] = []
        seen: dict[str, Instance] = {}
        for kind, runner in self._runners.items():
            instances = await self._instances_of(kind)
            if instances is None:
                seen = {**self._seen.get(kind, {}), **seen}
                continue
            mine = {name: job for name, job in allowed.items() if job.kind == kind}
            merged = {**{name: each for name, each in self._unstarted.items() if name in mine}, **instances}
            decision = reconcile(mine, merged, time.time())
            look_at += [decision.look_at] if decision.look_at is not None else []
            for action in decision.actions:
                name = action.job.name if isinstance(action, Start) else action.name
                if name not in self._works:
                    self._begin(name, self._carry_out(runner, action))
            seen = {**merged, **seen, **{name: each for name, each in instances.items() if each.state == "running"}}
        if self._states_of(seen) != self._states_of(self._instances):
            self._report_wanted.set()
        self._instances = seen
        return min(look_at, default=None)

    @staticmethod
    def _states_of(instances: dict[str, Instance]) -> dict[str, tuple[str, int]]:
        return {name: (each.state, each.restarts) for name, each in instances.items()}

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        async def to_the_end() -> None:
            try:
                await work
            except (PotluckError, OSError) as error:  # it is decided anew at the next look
                logger.warning("nothing can be done about %s now: %s", name, error)
            finally:
                self._works.pop(name, None)
                self._preparing.pop(name, None)
                self._wake.set()

        self._works[name] = asyncio.create_task(to_the_end(), name=f"job {name}")

    async def _carry_out(self, runner: Runner, action: Start | Stop | Remove) -> None:
        match action:
            case Stop():
                await runner.stop(action.name, action.grace_seconds)
                await asyncio.sleep(LOOK_EVERY_SECONDS)
            case Remove():
                await runner.remove(action.name)
                self._unstarted.pop(action.name, None)
            case Start():
                await self._start(runner, action)

    async def _start(self, runner: Runner, start: Start) -> None:
        job = start.job
        for kind, seen in self._seen.items():  # what was a process and is a container now, or the other way round
            before = seen.get(job.name)
            if kind != job.kind and before is not None and before.state == "running":
                return
        try:
            folder = JobFolder(self._jobs, job.name)
            await self._prepare(job, folder)
            environment_of_job = self._environment(job, folder)
            await runner.remove(job.name)
            launch = Launch(
                job=job,
                folder=folder,
                environment=environment_of_job,
                restarts=start.restarts,
                failures=start.failures,
            )
            await runner.start(launch)
            self._unstarted.pop(job.name, None)
            logger.info("started %s", job.name)
        except (PotluckError, OSError) as error:
            logger.warning("%s cannot be started: %s", job.name, error)
            self._unstarted[job.name] = Instance(
                job=job.name,
                digest=job.digest,
                state="ended",
                restarts=max(start.restarts - 1, 0),  # this one was none
                failures=start.failures,
                started_at=time.time(),
                ended_at=time.time(),
                exit=Exit(reason=str(error)),
            )
            self._report_wanted.set()

    async def _prepare(self, job: Job, folder: JobFolder) -> None:
        """All that a job needs before it can start."""
        folder.make()
        if job.files is not None:
            await asyncio.to_thread(folder.unpack, await self._parcel(job, job.files, "its files"))
        await self._runners[job.kind].prepare(job, lambda parcel, what: self._parcel(job, parcel, what))

    async def _parcel(self, job: Job, parcel: Parcel, what: str) -> Path:
        if self._parcels.has(parcel):
            return self._parcels.path(parcel.digest)
        self._preparing[job.name] = f"fetches {what} ({parcel.num_bytes / 1e6:.1f} MB)"
        self._report_wanted.set()
        if self._peer is None or not self.desired.shelf:
            raise RetryableError(f"it waits for the hub, from which it gets {what}")
        return await self._parcels.fetch(parcel, self._peer.links, self.desired.shelf)

    def _environment(self, job: Job, folder: JobFolder) -> dict[str, str]:
        own = "/potluck" if job.image else str(folder.own)
        base = {} if job.image else environment.for_job()
        if not job.image:  # `python` and `potluck` are the agent's own
            programs = str(Path(sys.executable).parent)
            base["PATH"] = f"{programs}:{base.get('PATH', os.defpath)}"
        return {
            **base,
            "PYTHONUNBUFFERED": "1",
            **job.environment,
            **unseal(job.sealed, self._identity.seed),
            "POTLUCK_JOB": job.name,
            "POTLUCK_JOB_FOLDER": own,
            "POTLUCK_IDENTITY": f"{own}/job.nkey",
            "POTLUCK_NAME": job.name,
            "POTLUCK_STOP_SECONDS": str(job.stop_seconds),
        }

    # The hub

    async def _stay_connected(self, on_connected: Callable[[], None]) -> None:
        """Be in the run; where that fails, try again for ever. Only who never got in is told why not."""
        retry_seconds = FIRST_RETRY_SECONDS
        while True:
            try:
                await self._connect()
                self.is_connected = True
                retry_seconds = FIRST_RETRY_SECONDS
                on_connected()
                assert self._peer is not None
                await asyncio.shield(self._peer.session.ended)
            except RetryableError as error:
                logger.warning("the hub cannot be reached, trying on: %s", error)
            except (AccessError, ConfigurationError) as error:
                if not self.is_connected and not self.desired.revision:
                    raise
                logger.warning("the hub does not let this machine in; its jobs go on: %s", error)
                retry_seconds = REFUSED_RETRY_SECONDS
            await self._leave()
            await asyncio.sleep(retry_seconds)
            retry_seconds = min(2 * retry_seconds, LONGEST_RETRY_SECONDS)

    async def _connect(self) -> None:
        config = PeerConfig(
            role="machine",
            name=self.config.name,
            link=self._link,
            relay_only=self.config.relay_only,
            websocket_only=self.config.websocket_only,
        )
        address = await fetch_address(self._link, websocket_only=self.config.websocket_only)
        peer = Peer(address, self._link.run, Identity(self._identity.seed), config)
        self._desk.open(peer.links)
        await peer.start()
        self._peer = peer
        subjects, hub = peer.session.subjects, peer.session.hub
        await hub.subscribe(subjects.news("*", ASK_TOPIC), self._asked)
        await hub.store(documents.STORE).watch(self._heard)
        self._report_wanted.set()

    async def _leave(self) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            await peer.close()

    def _asked(self, _delivery: Delivery) -> None:
        self._report_wanted.set()

    def _may_look(self, warrant: Warrant, peer: str) -> bool:
        try:
            self._check_organiser(warrant.organiser)
        except ConfigurationError:
            return False
        return is_valid(warrant, self._link.run, peer, self._hub_time())

    def _hub_time(self) -> float:
        """The hub's clock, by which all machines tell times: one of theirs may be wrong by hours."""
        return self._peer.session.now() if self._peer is not None else time.time()

    # Telling

    async def _keep_reporting(self) -> None:
        while True:
            try:
                async with asyncio.timeout(REPORT_EVERY_SECONDS):
                    await self._report_wanted.wait()
            except TimeoutError:
                pass
            self._report_wanted.clear()
            peer = self._peer
            if peer is not None:
                try:
                    report = encode(await self._report())
                    await peer.session.hub.publish(peer.session.subjects.news(self.peer_id, TOPIC), report)
                except (PotluckError, OSError) as error:
                    logger.debug("no report this time: %s", error)
            await asyncio.sleep(REPORT_GAP_SECONDS)

    async def _report(self) -> MachineReport:
        allowed, refused = self._allowed()
        standing = Standing(
            revision=self.desired.revision,
            allowed=allowed,
            refused=refused,
            instances=self._instances,
            preparing=self._preparing,
            clock_behind_seconds=self._hub_time() - time.time(),
        )
        return await self._reporter.report(standing)

    def _runner_of(self, name: str) -> Runner:
        job = self.desired.of_machine(self.peer_id).get(name)
        kind = job.kind if job is not None else "process"
        return self._runners.get(kind) or next(iter(self._runners.values()))
