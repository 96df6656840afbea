"""States of paths, kept by others: so a path's inner optimizer survives its peer.

After a phase its trainer tells the keepers, aux peers such as the host's own, or where there is none one other trainer,
that there is a newer state. They fetch it piece by piece, for a tenth of the time at most, and only the newest of each
path: an inner optimizer is four times as large as a path's change in float16, and phases may be short. Who
takes the path over asks the one who trained it last, and then the keepers; it goes on with the newest that it gets, and
if it gets none, the inner optimizer begins anew and says so. An aux peer writes them to disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path as FilePath
from typing import Annotated

import msgspec

from potluck import tasks
from potluck.errors import PotluckError, ProtocolError, RetryableError
from potluck.link.dispatch import Incoming
from potluck.messages import Message
from potluck.paths.grid import MAX_PATHS, Grid
from potluck.paths.pathstate import PathState, read_state
from potluck.run.group import Group
from potluck.run.joined import Joined

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
MAX_BYTES = 64 << 30
ASK_SECONDS = 5.0
PIECE_SECONDS = 60.0
PAUSE_FACTOR = 9  # a fetch that took a second is followed by nine without
LONGEST_PAUSE_SECONDS = 60.0

Number = Annotated[int, msgspec.Meta(ge=0, lt=MAX_PATHS)]


class NewerState(Message, frozen=True, kw_only=True, tag="paths.newer"):
    """I have the state of this path after so many phases."""

    path: Number
    phase: Annotated[int, msgspec.Meta(ge=0)]


class AskState(Message, frozen=True, kw_only=True, tag="paths.ask"):
    """Give me this piece of what you have of a path's state."""

    path: Number
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    digest: Annotated[str, msgspec.Meta(max_length=64)] = ""  # of the state that pieces before were of


class StatePiece(Message, frozen=True, kw_only=True, tag="paths.piece"):
    """The piece is the frame beside it."""

    phase: Annotated[int, msgspec.Meta(ge=0)]
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
    digest: Annotated[str, msgspec.Meta(max_length=64)]


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    phase: int
    data: bytes
    digest: str


class PathKeeper:
    """The states of paths that this peer has, for itself and for others. Lives on the event loop."""

    def __init__(self, group: Group, grid: Grid, folder: FilePath | None = None) -> None:
        """`folder`: where they are written too; None: they are kept in memory alone."""
        self.counts: Counter[str] = Counter()
        self._session = group.session
        self._links = group.links
        self._clock = group.session.clock
        self._grid = grid
        self._folder = folder
        self._kept: dict[int, _Kept] = {}
        self._wanted: dict[int, tuple[str, int]] = {}
        self._wake = asyncio.Event()
        self._pulling: asyncio.Task[None] | None = None
        self._links.handle(AskState, self._asked)
        self._links.handle(NewerState, self._heard)
        if folder is not None:
            self._read_all(folder)

    @classmethod
    def open(cls, run: Joined, grid: Grid) -> PathKeeper:
        """A trainer's own: started, and closed when the run is left."""

        async def start() -> PathKeeper:
            keeper = cls(Group(run.peer), grid)
            keeper.start()
            return keeper

        keeper = run.call(start())
        run.attach(keeper.close)
        return keeper

    def start(self) -> None:
        """Fetch what others tell of, from now on."""
        self._pulling = asyncio.create_task(self._pull(), name="paths: keeping states")

    async def close(self) -> None:
        """Idempotent."""
        await tasks.end(self._pulling)

    def put(self, path: int, phase: int, data: bytes) -> None:
        """This peer has trained a path so far."""
        self._keep(path, _Kept(phase=phase, data=data, digest=hashlib.sha256(data).hexdigest()))

    async def tell(self, path: int, phase: int) -> None:
        """Have others keep it too."""
        for keeper in self.keepers(path):
            try:
                await self._links.send(keeper, NewerState(path=path, phase=phase), timeout_seconds=ASK_SECONDS)
            except PotluckError as error:
                logger.debug("%s does not hear of a path's state: %s", keeper, error)

    def keepers(self, path: int) -> list[str]:
        """Who keeps the states of a path beside its trainer: aux peers, or one other trainer."""
        own = self._session.peer_id
        others = [p for p in self._session.roster.alive() if p.peer != own]
        aux = sorted(p.peer for p in others if p.card.role == "aux")
        trainers = sorted(
            (p.peer for p in others if p.card.role == "trainer"),
            key=lambda peer: hashlib.sha256(f"{path}\0{peer}".encode()).digest(),
        )
        return aux or trainers[:1]

    async def find(self, path: int, last: str, phase: int) -> PathState | None:
        """The newest state of a path that somebody has; None: nobody has one. `phase` is how far the path is."""
        own = self._kept.get(path)
        if own is None or own.phase < phase:
            for peer in dict.fromkeys([last, *self.keepers(path)]):
                if not peer or peer == self._session.peer_id or peer not in self._session.roster:
                    continue
                try:
                    found = await self._fetch(peer, path, newer_than=own.phase if own is not None else -1)
                except PotluckError as error:
                    self.counts["not_fetched"] += 1
                    logger.debug("%s does not give the state of path %d: %s", peer, path, error)
                    continue
                if found is not None:
                    self._keep(path, found)
                    own = found
                    if found.phase >= phase:
                        break
        if own is None:
            return None
        self.counts["found"] += 1
        return await asyncio.to_thread(read_state, own.data)

    async def _asked(self, incoming: Incoming[AskState]) -> tuple[StatePiece, list[memoryview]]:
        asked = incoming.message
        kept = self._kept.get(asked.path)
        if kept is None or (asked.digest and asked.digest != kept.digest):
            raise RetryableError(f"this peer has no such state of path {asked.path}")
        piece = memoryview(kept.data)[asked.offset : asked.offset + PIECE_BYTES]
        return StatePiece(phase=kept.phase, num_bytes=len(kept.data), digest=kept.digest), [piece]

    async def _heard(self, incoming: Incoming[NewerState]) -> None:
        told = incoming.message
        kept = self._kept.get(told.path)
        if told.path < self._grid.num_paths and (kept is None or kept.phase < told.phase):
            self._wanted[told.path] = (incoming.sender, told.phase)
            self._wake.set()

    async def _pull(self) -> None:
        while True:
            while self._wanted:
                path = next(iter(self._wanted))
                peer, _ = self._wanted.pop(path)
                began = self._clock.monotonic()
                try:
                    found = await self._fetch(peer, path)
                    if found is not None:
                        self._keep(path, found)
                        self.counts["kept"] += 1
                except PotluckError as error:
                    self.counts["not_kept"] += 1
                    logger.debug("the state of path %d could not be fetched from %s: %s", path, peer, error)
                busy_seconds = self._clock.monotonic() - began
                await asyncio.sleep(min(PAUSE_FACTOR * busy_seconds, LONGEST_PAUSE_SECONDS))
            self._wake.clear()
            await self._wake.wait()

    async def _fetch(self, peer: str, path: int, newer_than: int = -1) -> _Kept | None:
        data, digest = bytearray(), ""
        while True:
            asked = AskState(path=path, offset=len(data), digest=digest)
            answer = await self._links.request(
                peer, asked, reply=StatePiece, timeout_seconds=PIECE_SECONDS if data else ASK_SECONDS
            )
            piece = answer.message
            if piece.phase <= newer_than:
                return None
            if len(answer.frames) != 1 or (digest and piece.digest != digest):
                raise ProtocolError("pieces of a path's state do not fit each other")
            data, digest = data + answer.frames[0], piece.digest
            if len(data) >= piece.num_bytes or not answer.frames[0].nbytes:
                break
        if hashlib.sha256(data).hexdigest() != digest:
            raise ProtocolError("a path's state is not what its sender said")
        self.counts["fetched_bytes"] += len(data)
        await asyncio.to_thread(read_state, bytes(data))
        return _Kept(phase=piece.phase, data=bytes(data), digest=digest)

    def _keep(self, path: int, kept: _Kept) -> None:
        known = self._kept.get(path)
        if known is not None and known.phase > kept.phase:
            return
        self._kept[path] = kept
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                beside = self._folder / f"{path}.new"
                beside.write_bytes(kept.data)
                beside.replace(self._folder / f"{path}.safetensors")
            except OSError as error:
                self.counts["not_written"] += 1
                logger.error("the state of path %d could not be written to %s: %s", path, self._folder, error)  # noqa: TRY400

    def _read_all(self, folder: FilePath) -> None:
        for path in range(self._grid.num_paths):
            file = folder / f"{path}.safetensors"
            if file.is_file():
                try:
                    data = file.read_bytes()
                    state = read_state(data)
                except (OSError, ProtocolError) as error:
                    logger.warning("%s is left out, the path's inner optimizer begins anew: %s", file, error)
                    continue
                self._kept[path] = _Kept(phase=state.phase, data=data, digest=hashlib.sha256(data).hexdigest())

    def states(self, numbers: Iterable[int]) -> dict[int, PathState]:
        """What this peer has of these paths."""
        return {number: read_state(self._kept[number].data) for number in numbers if number in self._kept}
