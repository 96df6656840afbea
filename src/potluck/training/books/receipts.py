"""Receipts: the coordinator's signed word that a peer gave so many samples to an epoch.

After each commit the coordinator sends every peer that contributed its receipt. The peer keeps it on its own disk, one
line of JSON each: so what somebody gave can be shown and checked long after the run, by anybody who knows which keys
coordinated it (the run's book names them, contributions.py).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import platformdirs

from potluck import tasks
from potluck.errors import ConfigurationError, PotluckError
from potluck.hub.keys import verify
from potluck.link.links import Incoming
from potluck.messages import Message, encode
from potluck.peer.identity import Identity
from potluck.peer.lease import LeaseView
from potluck.round.plan.messages import Commit, CommittedMember
from potluck.training.books.commitdesk import CommitDesk

if TYPE_CHECKING:
    from potluck.round.averager import Averager, RoundPeer

logger = logging.getLogger(__name__)

CONTEXT = b"potluck receipt\0"
SEND_SECONDS = 5.0
WRITE_EVERY_SECONDS = 1.0
MAX_WAITING = 1000  # receipts that are to be written
MAX_FILE_BYTES = 64 * 1024 * 1024  # a quarter of a million receipts; then the file becomes the old one
MAX_LINE_BYTES = 4096
LONGEST_NAME = 64

Word = Annotated[str, msgspec.Meta(max_length=128)]


class Receipt(Message, frozen=True, kw_only=True, tag="receipts.receipt"):
    """So many samples of a peer went into an epoch."""

    run: Word
    peer: Word
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    samples: Annotated[float, msgspec.Meta(ge=0.0)]
    at: float  # hub time of the commit
    coordinator: Word  # who signs
    name: Word = ""  # as the peer called itself
    signature: str = ""  # hexadecimal

    def signed(self, identity: Identity) -> Receipt:
        """With the coordinator's signature."""
        return msgspec.structs.replace(self, signature=identity.sign(_signed_bytes(self)).hex())

    def is_genuine(self) -> bool:
        """Whether the coordinator that it names signed just this."""
        try:
            signature = bytes.fromhex(self.signature)
        except ValueError:
            return False
        return verify(self.coordinator, _signed_bytes(self), signature)


def receipts_of(commit: Commit, run: str, coordinator: str, names: dict[str, str]) -> list[Receipt]:
    """One for each that contributed, not signed yet (pure)."""

    def receipt(member: CommittedMember) -> Receipt:
        return Receipt(
            run=run,
            peer=member.peer,
            epoch=commit.epoch,
            samples=member.weight,
            at=commit.committed_at,
            coordinator=coordinator,
            name=names.get(member.peer, "")[:LONGEST_NAME],
        )

    return [receipt(member) for member in commit.members if member.weight > 0]


class ReceiptDesk(CommitDesk):
    """Gives receipts while this peer holds the coordinator's lease."""

    def __init__(self, peer: RoundPeer, averager: Averager) -> None:
        super().__init__(averager, "receipts")
        self._session = peer.session
        self._links = peer.links

    async def see_to(self, commits: list[Commit]) -> None:
        """Send everybody its receipts."""
        names = {presence.peer: presence.card.name for presence in self._session.roster}
        run, own = self._session.subjects.run, self._session.peer_id
        for commit in commits:
            for receipt in receipts_of(commit, run, own, names):
                await self._give(receipt.signed(self._session.identity))

    async def _give(self, receipt: Receipt) -> None:
        try:
            await self._links.send(receipt.peer, receipt, timeout_seconds=SEND_SECONDS)
        except PotluckError as error:  # it has left, or its queue is full: the book still has its samples
            self.counts["not_given"] += 1
            logger.debug("%s gets no receipt for epoch %d: %s", receipt.peer, receipt.epoch, error)
        else:
            self.counts["given"] += 1


class ReceiptKeeper:
    """Takes this peer's receipts, and writes them down. Lives on the event loop."""

    def __init__(self, peer: RoundPeer, coordinators: LeaseView, path: Path) -> None:
        """`coordinators` tells who holds the lease, and held it before."""
        self.counts: Counter[str] = Counter()
        self.samples = 0.0  # that this process has receipts for
        self._run = peer.session.subjects.run
        self._peer = peer.session.peer_id
        self._coordinators = coordinators
        self._path = path
        self._unwritten: list[Receipt] = []
        self._is_failing = False
        peer.links.handle(Receipt, self._came)
        self._task = asyncio.create_task(self._keep_writing(), name="receipts: writing")

    async def close(self) -> None:
        """Write what has come. Idempotent."""
        await tasks.end(self._task)
        await self._write()

    def _came(self, incoming: Incoming[Receipt]) -> None:
        receipt = incoming.message
        view = self._coordinators
        is_from_coordinator = incoming.sender == receipt.coordinator and (
            incoming.sender == view.holder or incoming.sender in view.past_holders.values()
        )
        is_ours = receipt.peer == self._peer and receipt.run == self._run
        if not (is_from_coordinator and is_ours and receipt.is_genuine()) or len(self._unwritten) >= MAX_WAITING:
            self.counts["passed_over"] += 1
            return
        self.counts["taken"] += 1
        self.samples += receipt.samples
        self._unwritten.append(receipt)

    async def _keep_writing(self) -> None:
        while True:
            await asyncio.sleep(WRITE_EVERY_SECONDS)
            await self._write()

    async def _write(self) -> None:
        receipts, self._unwritten = self._unwritten, []
        if not receipts:
            return
        try:
            await asyncio.to_thread(append_receipts, self._path, receipts)
        except OSError as error:
            self._unwritten = [*receipts, *self._unwritten]
            self.counts["failed_writes"] += 1
            if not self._is_failing:
                logger.warning(
                    "%d receipts could not be written to %s: %s. It is tried again; training goes on. Make room there",
                    len(receipts),
                    self._path,
                    error.strerror or error,
                )
            self._is_failing = True
            return
        self.counts["written"] += len(receipts)
        if self._is_failing:
            logger.warning("receipts are written to %s again: none is missing", self._path)
        self._is_failing = False


# On disk


def receipts_folder() -> Path:
    """Where this user's receipts are."""
    return Path(platformdirs.user_data_dir("potluck")) / "receipts"


def receipts_path(folder: Path, run: str) -> Path:
    """Where this machine's receipts of a run are."""
    return folder / f"{run}.jsonl"


def append_receipts(path: Path, receipts: Iterable[Receipt]) -> None:
    """Add lines to a file; one that has grown too large is put aside, in place of what was put aside before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > MAX_FILE_BYTES:
        path.replace(path.with_suffix(".old.jsonl"))
    lines = b"".join(msgspec.json.encode(receipt) + b"\n" for receipt in receipts)
    with path.open("ab", buffering=0) as file:  # one write, so that lines of several processes do not mix
        size = file.seek(0, os.SEEK_END)
        if file.write(lines) < len(lines):  # the disk is full: half a line would spoil the next one as well
            if os.fstat(file.fileno()).st_size < size + len(lines):
                file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass(slots=True)
class Checked:
    """What a file of receipts comes to, for one peer of one run."""

    run: str
    peer: str
    name: str = ""
    epochs: set[int] = field(default_factory=set)
    samples: float = 0.0
    coordinators: set[str] = field(default_factory=set)


def check_receipts(lines: Iterable[bytes]) -> tuple[list[Checked], int]:
    """Sums by run and peer of the receipts that are genuine, and how many lines are not. An epoch counts once."""
    found: dict[tuple[str, str], Checked] = {}
    num_bad = 0
    for line in lines:
        receipt = _read(line)
        if receipt is None or not receipt.is_genuine():
            num_bad += 1
            continue
        checked = found.setdefault((receipt.run, receipt.peer), Checked(receipt.run, receipt.peer))
        if receipt.epoch not in checked.epochs:
            checked.epochs.add(receipt.epoch)
            checked.samples += receipt.samples
            checked.coordinators.add(receipt.coordinator)
        checked.name = receipt.name or checked.name
    return sorted(found.values(), key=lambda checked: (checked.run, -checked.samples, checked.peer)), num_bad


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file of receipts; ConfigurationError when it cannot be read."""
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES):
                if line.strip():
                    yield line
    except OSError as error:
        raise ConfigurationError(f"the receipts in {path} cannot be read: {error.strerror}") from error


def _read(line: bytes) -> Receipt | None:
    try:
        return msgspec.json.decode(line, type=Receipt)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _signed_bytes(receipt: Receipt) -> bytes:
    return CONTEXT + encode(msgspec.structs.replace(receipt, signature=""))
