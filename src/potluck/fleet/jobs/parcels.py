"""Parcels by digest: files that jobs send along, and images. They lie on the host and travel to machines over links.

`potluck fleet up` puts them into a folder of the host. The host's peer hands them to machines; a
machine keeps what it has fetched, and fetches nothing twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import tarfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from potluck.errors import ConfigurationError, ProtocolError, RetryableError
from potluck.fleet.jobs.job import DIGEST, Parcel
from potluck.link.links import Links, Stream
from potluck.messages import Message

logger = logging.getLogger(__name__)

ITEM_BYTES = 1024 * 1024
OPEN_SECONDS = 15.0
ITEM_SECONDS = 60.0
FOLDER = "parcels"


class FetchParcel(Message, frozen=True, kw_only=True, tag=True):
    """Opens a stream: the bytes of this parcel, please."""

    digest: str
    offset: int = 0


class ParcelFolder:
    """A folder of parcels."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        self._fetching: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def path(self, digest: str) -> Path:
        """Where a parcel is, or would be."""
        if not DIGEST.fullmatch(digest):
            raise ConfigurationError("that is not a digest")
        return self.folder / digest

    def has(self, parcel: Parcel) -> bool:
        """Whether it is here, whole."""
        try:
            return self.path(parcel.digest).stat().st_size == parcel.num_bytes
        except FileNotFoundError:
            return False

    def draft(self) -> Path:
        """Where to write something whose digest is not known yet."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.folder / f".{secrets.token_hex(8)}"

    def add(self, draft: Path) -> Parcel:
        """Put a file into the folder, under its digest; the draft is gone afterwards."""
        with draft.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        parcel = Parcel(digest=digest, num_bytes=draft.stat().st_size)
        draft.replace(self.path(digest))
        return parcel

    def keep_only(self, parcels: set[str]) -> None:
        """Throw away all others. Drafts of a process that was killed go too."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name not in parcels:
                    path.unlink(missing_ok=True)

    # Handing out

    def serve(self, links: Links, may_fetch: Callable[[str], bool]) -> None:
        """Hand parcels to peers that may have them."""

        async def hand_out(stream: Stream) -> None:
            request = stream.message
            assert isinstance(request, FetchParcel)
            if not may_fetch(stream.peer) or not DIGEST.fullmatch(request.digest):
                await stream.cancel("only machines of the fleet may fetch parcels")
                return
            async with stream:
                await send_file(stream, self.path(request.digest), request.offset)

        links.handle_stream(FetchParcel, hand_out)

    # Fetching

    async def fetch(self, parcel: Parcel, links: Links, peer: str) -> Path:
        """The parcel, from the peer that has it, unless it is here. What was broken off goes on where it was."""
        async with self._fetching[parcel.digest]:  # two jobs may want the same one
            return self.path(parcel.digest) if self.has(parcel) else await self._fetch(parcel, links, peer)

    async def _fetch(self, parcel: Parcel, links: Links, peer: str) -> Path:
        path = self.path(parcel.digest)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_suffix(".part")
        at = part.stat().st_size if part.exists() else 0
        request = FetchParcel(digest=parcel.digest, offset=at)
        stream = await links.open_stream(peer, request, timeout_seconds=OPEN_SECONDS)
        with part.open("ab") as file:
            async with stream:
                async for frames in stream:
                    at += sum(map(len, frames))
                    if at > parcel.num_bytes:
                        raise ProtocolError(f"{peer} sent more than the {parcel.num_bytes} bytes of a parcel")
                    await asyncio.to_thread(file.writelines, frames)
        if at < parcel.num_bytes:
            raise RetryableError(f"{peer[:12]} sent {at} of the {parcel.num_bytes} bytes of a parcel")
        found = await asyncio.to_thread(self._digest_of, part)
        if found != parcel.digest:
            part.unlink()
            raise ProtocolError(f"{peer[:12]} sent a parcel whose digest is {found[:12]}…, not {parcel.digest[:12]}…")
        part.replace(path)
        return path

    @staticmethod
    def _digest_of(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


async def send_file(stream: Stream, path: Path, offset: int = 0) -> None:
    """A file's bytes, as items of a stream."""
    try:
        file = path.open("rb")
    except OSError as error:
        await stream.cancel(f"it cannot be read: {error.strerror}")
        return
    with file:
        file.seek(max(offset, 0))
        while data := await asyncio.to_thread(file.read, ITEM_BYTES):
            await stream.send([data], timeout_seconds=ITEM_SECONDS)
    await stream.close()


def pack(files: list[tuple[str, Path]], target: Path) -> None:
    """An archive of files and folders under these names: the same bytes for the same content, at any time."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (entry.isfile() or entry.isdir()):
            raise ConfigurationError(f"{entry.name} is neither a file nor a folder: it cannot be sent along")
        if entry.isdir() and Path(entry.name).name in ("__pycache__", ".git", ".venv"):
            return None
        entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
        return entry

    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in sorted(files):
            archive.add(path, arcname=name, filter=plain)
