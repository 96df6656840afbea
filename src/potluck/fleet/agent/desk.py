"""What an organiser asks of a machine over a link: a job's log, and files that it has left.

The requester shows a warrant: an organiser's signature over the requester's peer id. Links authenticate their peers, so
no other peer can use it.
"""

from __future__ import annotations

import asyncio
import logging
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, Any

from potluck import tasks
from potluck.errors import PotluckError
from potluck.fleet.agent.jobfolder import JobFolder
from potluck.fleet.agent.runners.runner import Runner
from potluck.fleet.jobs.job import NAME
from potluck.fleet.jobs.parcels import ITEM_BYTES, ITEM_SECONDS, send_file
from potluck.hub.keys import Signer, verify
from potluck.link.links import Links, Stream
from potluck.messages import Message

logger = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 1.0
MAX_LINES = 100_000
WARRANT_SECONDS = 3600.0


class Warrant(Message, frozen=True, kw_only=True):
    """An organiser lets a peer look into jobs, until then."""

    organiser: str
    until: float  # hub time
    signature: bytes


def issue(signer: Signer, run: str, peer: str, until: float) -> Warrant:
    """A warrant for this peer."""
    return Warrant(organiser=signer.public_key, until=until, signature=signer.sign(_claim(run, peer, until)))


def is_valid(warrant: Warrant, run: str, peer: str, now: float) -> bool:
    """Whether the organiser that it names has signed it for this peer, and it has not run out."""
    return now < warrant.until and verify(warrant.organiser, _claim(run, peer, warrant.until), warrant.signature)


def _claim(run: str, peer: str, until: float) -> bytes:
    return f"potluck fleet warrant 1\n{run}\n{peer}\n{until!r}".encode()


class ReadLog(Message, frozen=True, kw_only=True, tag=True):
    """Opens a stream: the last lines of a job's log, and with `follow` what it writes from now on."""

    warrant: Warrant
    job: str
    num_lines: int = 100
    follow: bool = False


class ReadFiles(Message, frozen=True, kw_only=True, tag=True):
    """Opens a stream: an archive of a file or folder below a job's working folder."""

    warrant: Warrant
    job: str
    path: str = "."


class AgentDesk:
    """Answers over a machine's links."""

    def __init__(
        self, folder: Path, runner_of: Callable[[str], Runner], may_look: Callable[[Warrant, str], bool]
    ) -> None:
        """`runner_of` has the runner of a job; `may_look` gets a warrant and the peer that shows it."""
        self._folder = folder
        self._runner_of = runner_of
        self._may_look = may_look

    def open(self, links: Links) -> None:
        """Answer from now on."""
        links.handle_stream(ReadLog, self._checked(self._send_log))
        links.handle_stream(ReadFiles, self._checked(self._send_files))

    def _checked(self, work: Callable[[Stream, Any], Awaitable[None]]) -> Callable[[Stream], Awaitable[None]]:
        async def handle(stream: Stream) -> None:
            request = stream.message
            assert isinstance(request, ReadLog | ReadFiles)
            if not self._may_look(request.warrant, stream.peer):
                await stream.cancel("only an organiser of the run may look into jobs")
            elif not NAME.fullmatch(request.job) or not (self._folder / request.job).is_dir():
                await stream.cancel(f"there is no job {request.job[:60]} on this machine")
            else:
                try:
                    await work(stream, request)
                except PotluckError as error:
                    await stream.cancel(str(error))

        return handle

    async def _send_log(self, stream: Stream, request: ReadLog) -> None:
        runner, num_lines = self._runner_of(request.job), min(max(request.num_lines, 0), MAX_LINES)
        if not request.follow:
            if data := await runner.read_log(request.job, num_lines):
                for at in range(0, len(data), ITEM_BYTES):
                    await stream.send([data[at : at + ITEM_BYTES]], timeout_seconds=ITEM_SECONDS)
            await stream.close()
            return
        following = runner.follow_log(request.job, num_lines)
        news = asyncio.ensure_future(anext(following))
        try:
            while not stream.is_over:  # a reader that has gone is noticed, though the job says nothing
                done, _ = await asyncio.wait({news}, timeout=LOOK_EVERY_SECONDS)
                if done:
                    await stream.send([news.result()], timeout_seconds=ITEM_SECONDS)
                    news = asyncio.ensure_future(anext(following))
        finally:
            await tasks.end(news)
            await following.aclose()

    async def _send_files(self, stream: Stream, request: ReadFiles) -> None:
        work = JobFolder(self._folder, request.job).work.resolve()
        wanted = (work / request.path).resolve()
        if not wanted.is_relative_to(work):
            await stream.cancel("only what is below the job's working folder can be had")
            return
        if not wanted.exists():
            await stream.cancel(f"there is no {request.path[:200]} in the working folder of {request.job}")
            return
        archive = JobFolder(self._folder, request.job).path / f".cp-{stream.number}.tar"
        try:
            await asyncio.to_thread(_archive, wanted, archive)
            await send_file(stream, archive)
        finally:
            archive.unlink(missing_ok=True)


def _archive(source: Path, target: Path) -> None:
    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return entry if entry.isfile() or entry.isdir() else None

    file: IO[bytes]
    with target.open("wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(source, arcname=source.name, filter=plain)
