"""From the organiser to a machine, over a link: a job's log, and files that it has left.

Directly where one side can be reached, through the hub otherwise. For the time of a command there is a peer of its own,
which only looks.
"""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

from potluck.errors import ConfigurationError, DeadlineExceededError, PeerUnreachableError, RetryableError
from potluck.fleet.agent.desk import WARRANT_SECONDS, ReadFiles, ReadLog, Warrant, issue
from potluck.fleet.jobs.job import Job
from potluck.fleet.jobs.parcels import ParcelFolder
from potluck.hub.access.member import Scopes
from potluck.hub.access.organise import Organiser
from potluck.hub.address import HubAddress
from potluck.hub.keys import Signer
from potluck.link.links import Stream
from potluck.peer.identity import Identity
from potluck.run.peer import Peer, PeerConfig

LINK_SECONDS = 20.0
INVITE_SECONDS = 300.0
LOG_IDLE_SECONDS = 24 * 3600.0


class MachineLinks:
    """Links to the machines of one fleet, in an organiser's name."""

    def __init__(self, organiser: Organiser, address: HubAddress, run: str, signer: Signer) -> None:
        self._organiser = organiser
        self._address = address
        self._run = run
        self._signer = signer
        self._peer: Peer | None = None

    async def close(self) -> None:
        """Leave. Idempotent."""
        peer, self._peer = self._peer, None
        if peer is not None:
            await peer.close()

    async def read_log(self, job: Job, *, num_lines: int, follow: bool) -> AsyncIterator[bytes]:
        """What a job wrote, from its machine."""
        peer = await self._linked(job.machine)
        request = ReadLog(warrant=self._warrant(peer), job=job.name, num_lines=num_lines, follow=follow)
        async with await self._open(peer, job, request) as stream:
            while (frames := await stream.receive(timeout_seconds=LOG_IDLE_SECONDS)) is not None:
                for frame in frames:
                    yield bytes(frame)

    async def copy(self, job: Job, path: str, target: Path, parcels: ParcelFolder) -> list[str]:
        """Bring a file or folder of a job's working folder here; the names of what came."""
        peer = await self._linked(job.machine)
        request = ReadFiles(warrant=self._warrant(peer), job=job.name, path=path)
        draft = parcels.draft()
        try:
            with draft.open("wb") as file:
                async with await self._open(peer, job, request) as stream:
                    async for frames in stream:
                        await asyncio.to_thread(file.writelines, frames)
            return await asyncio.to_thread(_unpack, draft, target)
        finally:
            draft.unlink(missing_ok=True)

    async def _open(self, peer: Peer, job: Job, request: ReadLog | ReadFiles) -> Stream:
        try:
            return await peer.links.open_stream(job.machine, request, timeout_seconds=LINK_SECONDS)
        except (PeerUnreachableError, DeadlineExceededError) as error:
            raise RetryableError(f"the machine of {job.name} cannot be reached now: {error}") from error

    def _warrant(self, peer: Peer) -> Warrant:
        return issue(self._signer, self._run, peer.peer_id, peer.session.now() + WARRANT_SECONDS)

    async def _linked(self, machine: str) -> Peer:
        """A peer for the time of this command, which sees the machine."""
        if self._peer is None:
            _, invite = await self._organiser.create_invite(
                scopes=Scopes(roles=("observer",)), uses=1, lifetime_seconds=INVITE_SECONDS, note="a command"
            )
            config = PeerConfig(role="observer", name="potluck fleet", invite=invite, client_mode=True)
            peer = Peer(self._address, self._run, Identity.temporary(), config)
            await peer.start()
            self._peer = peer
        presence = self._peer.session.roster.get(machine)
        if presence is None or presence.state != "alive":
            raise RetryableError(f"the machine {machine[:12]} is away: its logs and files can be had when it is back")
        return self._peer


def _unpack(archive: Path, target: Path) -> list[str]:
    target.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive) as files:
            names = files.getnames()
            files.extractall(target, filter="data")
    except (tarfile.TarError, OSError) as error:
        raise ConfigurationError(f"what the machine sent cannot be unpacked to {target}: {error}") from error
    return names
