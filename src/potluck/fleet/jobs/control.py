"""The organiser's side of a fleet: what machines there are, and what they shall run.

    async with fleet_control(folder, record) as control:
        await control.up(read_fleet_file(path))
        for job in await control.jobs(): ...

Works with the keys in the host's folder, on the host. Orders are one thing: the next revision of the signed document
(desired.py). Logs and files come straight from the machines, over links.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from potluck.errors import (
    ConfigurationError,
    ProtocolError,
    RetryableError,
)
from potluck.fleet.jobs import desired as documents
from potluck.fleet.jobs import sealing
from potluck.fleet.jobs.desired import Desired
from potluck.fleet.jobs.fleetfile import FleetFile, JobPlan
from potluck.fleet.jobs.job import Job, Parcel
from potluck.fleet.jobs.machine import ASK_TOPIC, MAX_REPORT_BYTES, TOPIC, JobReport, MachineReport
from potluck.fleet.jobs.machinelinks import MachineLinks
from potluck.fleet.jobs.parcels import ParcelFolder, pack
from potluck.fleet.jobs.placement import KnownMachine, place
from potluck.fleet.member import FleetMember
from potluck.hub.access.member import Scopes
from potluck.hub.access.organise import Done, Organiser
from potluck.hub.access.queueing import CreateQueue
from potluck.hub.address import HubAddress
from potluck.hub.connection import Delivery
from potluck.hub.joinlink import JoinLink
from potluck.hub.keys import HubKeys, Signer
from potluck.hub.nats.connection import ConnectionConfig, NatsConnection
from potluck.hub.queues import QueueDefinition
from potluck.hub.stores import FLEET_KEY
from potluck.hub.subjects import PEER_ID, Subjects
from potluck.messages import decode
from potluck.peer import environment
from potluck.peer.identity import Identity
from potluck.plaintext import clean_all
from potluck.run.hostrecord import HostRecord

logger = logging.getLogger(__name__)

REPORTS_SECONDS = 3.0  # for machines to answer; most do at once
ATTEMPTS = 10
FOLDER = "fleet"

Change = Literal["new", "changed", "moved", "removed", "same", "stopped", "started"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine and what it said last."""

    known: KnownMachine
    report: MachineReport | None = None
    """None: it is away, or does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A job as it shall be, and as its machine says it is."""

    job: Job
    machine: str
    """Its name."""

    report: JobReport | None = None


@asynccontextmanager
async def fleet_control(folder: Path, record: HostRecord) -> AsyncIterator[FleetControl]:
    """In the organiser's name, with the keys in the host's folder."""
    keys = HubKeys.load_or_create(folder / "identity")
    address = HubAddress(servers=record.servers, ca_pem=record.ca_pem)
    async with AsyncExitStack() as parts:
        hub = await NatsConnection.connect(
            address, seed=keys.organiser_seed, run=record.run, name="main", config=ConnectionConfig(stores="guard")
        )
        parts.push_async_callback(hub.close)
        control = FleetControl(hub, address, keys, record, folder)
        parts.push_async_callback(control.close)
        yield control


class FleetControl:
    """One organiser's orders to one fleet."""

    def __init__(
        self, hub: NatsConnection, address: HubAddress, keys: HubKeys, record: HostRecord, folder: Path
    ) -> None:
        self._hub = hub
        self._address = address
        self._keys = keys
        self._record = record
        self._signer = Signer(keys.organiser_seed)
        self._subjects = Subjects(record.run)
        self._organiser = Organiser(hub, self._subjects, keys.organiser_public)
        self._folder = folder
        self._links = MachineLinks(self._organiser, address, record.run, self._signer)
        self.parcels = ParcelFolder(folder / FOLDER)

    async def close(self) -> None:
        """Leave. Idempotent."""
        await self._links.close()

    # Looking

    async def machines(self, wait_seconds: float = REPORTS_SECONDS) -> list[Machine]:
        """All machines, and what those that are there report."""
        members = [state for state in await self._organiser.list_members() if state.member.role == "machine"]
        awaited = {state.member.peer for state in members if state.state == "alive"}
        reports = await self._reports(awaited, wait_seconds)
        found = []
        for state in members:
            member, report = state.member, reports.get(state.member.peer)
            known = KnownMachine(
                peer=member.peer,
                name=report.name if report is not None else member.name,
                is_there=report is not None,
                facts=report.facts if report is not None else None,
            )
            found.append(Machine(known=known, report=report))
        return sorted(found, key=lambda machine: (machine.known.name, machine.known.peer))

    async def _reports(self, awaited: set[str], wait_seconds: float) -> dict[str, MachineReport]:
        """What these machines say when they are asked."""
        reports: dict[str, MachineReport] = {}
        complete = asyncio.Event()

        def heard(delivery: Delivery) -> None:
            peer = delivery.subject.split(".")[3]
            try:
                reports[peer] = read_report(delivery.payload)
            except ProtocolError as error:
                logger.warning("the report of %s cannot be read: %s", peer[:12], error)
            if awaited <= set(reports):
                complete.set()

        if not awaited:
            return {}
        listening = await self._hub.subscribe(self._subjects.news("*", TOPIC), heard)
        try:
            await self._hub.publish(self._subjects.news(self._keys.organiser_public, ASK_TOPIC), b"")
            async with asyncio.timeout(wait_seconds):
                await complete.wait()
        except TimeoutError:
            logger.info("not every machine has answered")
        finally:
            await listening.cancel()
        return reports

    async def desired(self) -> Desired:
        """What shall run now."""
        return (await self._read())[0]

    async def _read(self) -> tuple[Desired, int]:
        entry = await self._hub.store(documents.STORE).get(FLEET_KEY)
        if entry is None or entry.value is None:
            return Desired(run=self._record.run), 0
        document, _organiser = documents.read(entry.value, self._record.run)
        return document, entry.revision

    async def jobs(self) -> list[JobStatus]:
        """All jobs, and how they are."""
        return (await self.overview())[1]

    async def overview(self) -> tuple[list[Machine], list[JobStatus]]:
        """All machines and jobs, and how they are."""
        document = await self.desired()
        listed = await self.machines()
        machines = {machine.known.peer: machine for machine in listed}
        statuses = []
        for job in document.jobs:
            machine = machines.get(job.machine)
            reports = (
                {each.name: each for each in machine.report.jobs} if machine is not None and machine.report else {}
            )
            name = machine.known.name if machine is not None else job.machine[:12]
            statuses.append(JobStatus(job=job, machine=name, report=reports.get(job.name)))
        return listed, statuses

    # Ordering

    async def revise(self, change: Callable[[Desired], Desired]) -> Desired:
        """Put up the next revision; what `change` returns unchanged is not put up."""
        for _ in range(ATTEMPTS):
            present, revision = await self._read()
            wanted = change(present)
            if wanted.jobs == present.jobs and wanted.shelf == present.shelf:
                return present
            newest = msgspec.structs.replace(wanted, revision=present.revision + 1)
            try:
                await self._organiser.put_up_jobs(documents.sign(newest, self._signer), replaces=revision)
            except RetryableError as error:
                logger.info("somebody else changed the jobs, trying again: %s", error)
                continue
            return newest
        raise RetryableError("others change the jobs all the time: try again later")

    async def restart(self, name: str) -> None:
        """Start a job anew, at once."""
        await self._change_job(
            name, lambda job: msgspec.structs.replace(job, state="running", generation=job.generation + 1)
        )

    async def stop(self, name: str) -> None:
        """End a job, with notice; it stays ended until `up` or `restart`."""
        await self._change_job(name, lambda job: msgspec.structs.replace(job, state="stopped"))

    async def _change_job(self, name: str, change: Callable[[Job], Job]) -> None:
        def next_one(present: Desired) -> Desired:
            changed = change(present.job(name))
            return present.with_jobs([changed if job.name == name else job for job in present.jobs])

        await self.revise(next_one)

    async def down(self) -> list[str]:
        """End and forget all jobs; their names. Their folders stay on the machines."""
        before = await self.desired()
        await self.revise(lambda present: present.with_jobs(()))
        await self._revoke({job.invite for job in before.jobs})
        self.parcels.keep_only(set())
        return [job.name for job in before.jobs]

    async def up(
        self, file: FleetFile, images: ImageMaker | None = None, *, dry_run: bool = False
    ) -> dict[str, Change]:
        """Make it so: what changes, by the job's name. What does not differ is left alone."""
        before = await self.desired()
        machines = [machine.known for machine in await self.machines()]
        secrets = {plan.name: self._secrets_of(plan) for plan in file.jobs}
        places = place(file.jobs, machines, {job.name: job.machine for job in before.jobs})
        jobs: list[Job] = []
        kept = {job.name: job for job in before.jobs}
        for plan in file.jobs:
            draft = await asyncio.to_thread(self._draft, plan, places[plan.name], file.folder, images)
            mark = sealing.mark(secrets[plan.name], self._keys.organiser_seed)
            draft = msgspec.structs.replace(draft, sealed_mark=mark)
            jobs.append(await self._settled(draft, kept.get(plan.name), secrets[plan.name], plan, dry_run))
        changes = changes_between(before.jobs, jobs)
        if dry_run:
            return changes
        await self._make_queues(file.queues)
        shelf = await self._shelf_peer()
        newest = await self.revise(
            lambda present: msgspec.structs.replace(present.with_jobs(jobs), shelf=shelf if jobs else present.shelf)
        )
        await self._revoke({job.invite for job in before.jobs} - {job.invite for job in newest.jobs})
        self.parcels.keep_only({parcel.digest for job in newest.jobs for parcel in parcels_of(job)})
        return changes

    async def _settled(
        self, draft: Job, before: Job | None, secrets: Mapping[str, str], plan: JobPlan, dry_run: bool
    ) -> Job:
        """The job with all that is made for it anew only where it differs from the one before."""
        if before is not None and before.machine == draft.machine:
            draft = msgspec.structs.replace(draft, generation=before.generation)
            if draft.digest == before.digest:
                return msgspec.structs.replace(draft, sealed=before.sealed, invite=before.invite)
        if dry_run:
            return draft
        invite, hidden = "", dict(secrets)
        if (plan.queues or plan.groups) and not plan.run:
            made, secret = await self._organiser.create_invite(
                scopes=_scopes(plan), uses=None, note=f"the job {plan.name}"
            )
            invite = made.id
            hidden["POTLUCK_LINK"] = str(replace(JoinLink.parse(self._record.link), invite=secret))
        return msgspec.structs.replace(
            draft, invite=invite, sealed=sealing.seal(hidden, draft.machine) if hidden else b""
        )

    def _draft(self, plan: JobPlan, machine: str, folder: Path, images: ImageMaker | None) -> Job:
        files = None
        if plan.files:
            draft = self.parcels.draft()
            pack([(name, folder / name) for name in plan.files], draft)
            files = self.parcels.add(draft)
        image, image_parcel = plan.image, None
        if plan.is_container:
            if images is not None:
                image, image_parcel = images.image_for(plan, self.parcels)
            elif plan.build is not None:
                raise ConfigurationError(
                    f"{plan.name} is built from {plan.build}, and there is no container engine here: start Docker or "
                    "Podman, or name an image that the machine has"
                )
        return Job(
            name=plan.name,
            machine=machine,
            image=image,
            image_parcel=image_parcel,
            command=plan.command,
            environment=plan.environment,
            mounts=plan.mounts,
            limits=plan.limits,
            restart=plan.restart,
            network=plan.network,
            files=files,
            queues=plan.queues,
            groups=plan.groups,
            stop_seconds=plan.stop_seconds,
        )

    def _secrets_of(self, plan: JobPlan) -> dict[str, str]:
        """The values of a job's secrets, from the environment or from files; those of the run it trains too."""
        found: dict[str, str] = {}
        for name, file in plan.secrets.items():
            if file:
                try:
                    found[name] = Path(file).expanduser().read_text().strip()
                except OSError as error:
                    raise ConfigurationError(f"the secret {name} of {plan.name} cannot be read: {error}") from error
            elif (value := environment.secret(name)) is not None:
                found[name] = value
            else:
                raise ConfigurationError(
                    f"the secret {name} of {plan.name} is not there: set the environment variable {name}, then run "
                    "`potluck fleet up` again"
                )
        if plan.run:
            found["POTLUCK_LINK"] = self._link_of_run(plan)
        return found

    def _link_of_run(self, plan: JobPlan) -> str:
        """The link of the run that a job trains: a link itself, or this hub's own run."""
        if plan.run.startswith("potluck://"):
            return str(JoinLink.parse(plan.run))
        if plan.run == self._record.run:
            return str(replace(JoinLink.parse(self._record.link), invite=self._record.invite))
        raise ConfigurationError(
            f"{plan.name} trains the run {plan.run!r}: write its join link, or {self._record.run!r} for this hub's own"
        )

    async def _make_queues(self, wanted: tuple[QueueDefinition, ...]) -> None:
        if not wanted:
            return
        member = FleetMember(self._address, self._record.run, Identity(self._keys.organiser_seed))
        await member.open(is_member=True)
        try:
            known = {depth.definition.name: depth.definition for depth in await member.list_queues()}
            for definition in wanted:
                if known.get(definition.name) != definition:
                    await member.ask("create", CreateQueue(definition=definition), Done)
        finally:
            await member.close()

    async def _revoke(self, invites: set[str]) -> None:
        for invite in invites - {""}:
            try:
                await self._organiser.revoke_invite(invite)
            except ConfigurationError as error:
                logger.info("an invite was gone already: %s", error)

    async def _shelf_peer(self) -> str:
        """The host's own peer, which hands out parcels."""
        names = {state.member.peer: state.member.name for state in await self._organiser.list_members()}
        path = self._folder / "identity" / "peer.nkey"
        try:
            peer = Signer(path.read_bytes().strip()).public_key
        except OSError as error:
            raise ConfigurationError(f"the host's own peer is not known ({error}): start the host first") from error
        if peer not in names or not PEER_ID.fullmatch(peer):
            raise ConfigurationError("the host's own peer is not in the run: start the host first")
        return peer

    # Over links

    async def read_log(self, name: str, *, num_lines: int, follow: bool) -> AsyncIterator[bytes]:
        """What a job wrote, from its machine."""
        job = (await self.desired()).job(name)
        async for data in self._links.read_log(job, num_lines=num_lines, follow=follow):
            yield data

    async def copy(self, name: str, path: str, target: Path) -> list[str]:
        """Bring a file or folder of a job's working folder here; the names of what came."""
        job = (await self.desired()).job(name)
        return await self._links.copy(job, path, target, self.parcels)


class ImageMaker(Protocol):
    """Finds or builds images where `potluck fleet up` runs."""

    def image_for(self, plan: JobPlan, parcels: ParcelFolder) -> tuple[str, Parcel | None]:
        """The image's name, and the image itself where it is here."""
        ...


def _scopes(plan: JobPlan) -> Scopes:
    """What a job may do in the run: use its queues, train in its groups. It is ours, so it may coordinate there."""
    if not plan.groups:
        return Scopes(roles=("worker",), queues=plan.queues)
    return Scopes(roles=("worker", "trainer"), queues=plan.queues, groups=plan.groups, coordinates=True, trusted=True)


def read_report(data: bytes) -> MachineReport:
    """A machine's report; ProtocolError for what is none."""
    return clean_all(decode(MachineReport, data, limit_bytes=MAX_REPORT_BYTES))


def parcels_of(job: Job) -> list[Parcel]:
    """What a job needs of the parcels."""
    return [parcel for parcel in (job.files, job.image_parcel) if parcel is not None]


def changes_between(before: tuple[Job, ...], after: list[Job]) -> dict[str, Change]:
    """What becomes of each job."""
    old = {job.name: job for job in before}
    changes: dict[str, Change] = {job.name: "removed" for job in before}
    for job in after:
        known = old.get(job.name)
        if known is None:
            changes[job.name] = "new"
        elif known.machine != job.machine:
            changes[job.name] = "moved"
        elif known.digest != job.digest:
            changes[job.name] = "changed"
        elif known.state != job.state:
            changes[job.name] = "started" if job.state == "running" else "stopped"
        else:
            changes[job.name] = "same"
    return changes
