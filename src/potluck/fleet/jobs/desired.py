"""What shall run on a fleet: one document in the hub, signed by an organiser.

The guard lets only organisers put it up, and each machine checks the signature for itself: a hub that belongs to
somebody else can withhold a document, but neither change one nor bring back an old one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from potluck.errors import ConfigurationError, ProtocolError
from potluck.fleet.jobs.job import Job
from potluck.hub.keys import Signer, verify
from potluck.messages import Message, decode, encode

STORE = "fleet"
LIMIT_BYTES = 48 * 1024
MAX_JOBS = 200


class Desired(Message, frozen=True, kw_only=True):
    """All jobs of a fleet."""

    run: str
    revision: int = 0  # grows; a machine never goes back to an earlier one
    shelf: str = ""  # the peer that has files and images
    jobs: Annotated[tuple[Job, ...], msgspec.Meta(max_length=MAX_JOBS)] = ()

    def __post_init__(self) -> None:
        names = [job.name for job in self.jobs]
        if len(set(names)) != len(names):
            raise ConfigurationError("two jobs have the same name")

    def of_machine(self, machine: str) -> dict[str, Job]:
        """The jobs of one machine, by name."""
        return {job.name: job for job in self.jobs if job.machine == machine}

    def job(self, name: str) -> Job:
        """The job of that name; ConfigurationError when there is none."""
        for job in self.jobs:
            if job.name == name:
                return job
        known = ", ".join(sorted(job.name for job in self.jobs)) or "none"
        raise ConfigurationError(f"there is no job {name[:60]!r} (there are: {known}). `potluck fleet ps` lists them")

    def with_jobs(self, jobs: Iterable[Job]) -> Desired:
        """The next revision, with these jobs."""
        return msgspec.structs.replace(
            self, revision=self.revision + 1, jobs=tuple(sorted(jobs, key=lambda job: job.name))
        )


class SignedDesired(Message, frozen=True, kw_only=True):
    """What stands in the store."""

    body: bytes
    organiser: str
    signature: bytes


def sign(desired: Desired, signer: Signer) -> bytes:
    """The document as it is put up; ConfigurationError when it is too large."""
    body = encode(desired)
    if len(body) > LIMIT_BYTES - 1024:
        raise ConfigurationError(
            f"all jobs together take {len(body)} bytes, of {LIMIT_BYTES - 1024} at most: put long texts into files"
        )
    signature = signer.sign(_context(desired.run) + body)
    return encode(SignedDesired(body=body, organiser=signer.public_key, signature=signature))


def read(data: bytes, run: str) -> tuple[Desired, str]:
    """The document and who signed it; ProtocolError unless somebody did, for this run."""
    signed = decode(SignedDesired, data, limit_bytes=LIMIT_BYTES)
    if not verify(signed.organiser, _context(run) + signed.body, signed.signature):
        raise ProtocolError(f"the jobs of {run} are not signed by {signed.organiser[:60]}: ignored")
    desired = decode(Desired, signed.body, limit_bytes=LIMIT_BYTES)
    if desired.run != run:
        raise ProtocolError(f"these jobs are of {desired.run}, not of {run}: ignored")
    return desired, signed.organiser


def _context(run: str) -> bytes:
    return f"potluck fleet jobs 1\n{run}\n".encode()
