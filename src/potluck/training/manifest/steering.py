"""An organiser's hand on a run: pause, resume, change settings, roll back; each written down with who did it and when.

    async with steering(address, keys, run) as helm:
        await helm.pause(by="Ada", reason="the loss rises")
        await helm.roll_back(backup, by="Ada")
        await helm.change({"optimizer.learning_rate": 1e-4}, by="Ada")
        await helm.resume(by="Ada")

All of it is one thing: the next revision of the manifest, signed, put up by compare-and-set, and followed by everybody.
Pausing counts at once: it changes nothing that is computed, and who hears of it later joins in a moment later.
Settings count from an epoch that lies a little ahead, so that all have heard of them by then. A rollback is an order to
the coordinator, which commits it (restoring.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from potluck.errors import ConfigurationError, RetryableError
from potluck.hub.access.organise import Organiser
from potluck.hub.address import HubAddress
from potluck.hub.connection import HubConnection
from potluck.hub.keys import HubKeys, Signer
from potluck.hub.nats.connection import ConnectionConfig, NatsConnection
from potluck.hub.stores import MANIFEST_KEY
from potluck.hub.subjects import MAIN, Subjects
from potluck.peer.groupsession import STORE as GROUPS
from potluck.round.lineage import Lineage
from potluck.round.plan.messages import Commit
from potluck.run.cutboard import Cut, CutBoard
from potluck.training.manifest import noticeboard
from potluck.training.manifest.changes import Value, described, full_name, with_values
from potluck.training.manifest.earlier import EarlierState, announced, merged, saved
from potluck.training.manifest.manifest import Manifest, Rollback, Settings

if TYPE_CHECKING:
    from potluck.state.backupfile import BackupInfo

logger = logging.getLogger(__name__)

ATTEMPTS = 20
RETRY_SECONDS = 0.5

Revision = Callable[[Manifest | None, int], Manifest | None]
"""From the manifest that stands there, and the run's epoch, to the next one; None or the same: nothing to do."""


class Steering:
    """One organiser's orders to one run."""

    def __init__(self, hub: HubConnection, run: str, signer: Signer, *, wall: Callable[[], float] = time.time) -> None:
        """`hub` is a connection in the organiser's name, and `signer` its key."""
        self.hub = hub
        self._run = run
        self._signer = signer
        self._organiser = Organiser(hub, Subjects(run), signer.public_key)
        self._wall = wall

    async def manifest(self) -> Manifest:
        """What stands there now; ConfigurationError where the run trains nothing."""
        manifest, _revision = await self._read()
        return self._existing(manifest)

    async def head(self) -> Commit | None:
        """The newest epoch that is committed."""
        lineage = Lineage(self.hub.store("lineage"), self._run)
        await lineage.start()
        await lineage.close()
        return lineage.head

    # Orders

    async def pause(self, *, by: str, reason: str = "") -> Manifest:
        """Have all trainers wait, from now on. What they have computed so far is kept."""
        return await self._set_paused(True, by=by, reason=reason)

    async def resume(self, *, by: str, reason: str = "") -> Manifest:
        """Have them go on."""
        return await self._set_paused(False, by=by, reason=reason)

    async def _set_paused(self, paused: bool, *, by: str, reason: str) -> Manifest:
        def change(settings: Settings) -> Settings:
            return msgspec.structs.replace(settings, paused=paused)

        def next_one(present: Manifest | None, epoch: int) -> Manifest | None:
            manifest = self._existing(present)
            if all(entry.paused == paused for entry in _counting(manifest, epoch)):
                return None
            what = "paused" if paused else "resumed"
            amended = manifest.amended(change, from_epoch=epoch, epoch=epoch)
            return amended.recorded(what, by=by, at=self._wall(), from_epoch=epoch, reason=reason)

        return await self.revise(next_one)

    async def change(
        self,
        values: Mapping[str, Value],
        *,
        by: str,
        from_epoch: int | None = None,
        reason: str = "",
        check_data: Callable[[Manifest, Settings], None] | None = None,
    ) -> Manifest:
        """Change settings by name, from an epoch on; unless named, from the first that all hear of in time.

        `check_data` is asked about settings with other data: ConfigurationError where the recipe cannot use them.
        """

        def next_one(present: Manifest | None, epoch: int) -> Manifest | None:
            manifest = self._existing(present)
            named = {full_name(name, manifest.newest): value for name, value in values.items()}
            soonest = manifest.soonest_change(epoch)
            if from_epoch is not None and from_epoch < soonest:
                raise ConfigurationError(
                    f"the run is at epoch {epoch}, and not everybody would hear of a change at {from_epoch} in time: "
                    f"name epoch {soonest} or a later one, or none"
                )
            starts = soonest if from_epoch is None else from_epoch
            _check_end(manifest, named, starts)
            amended = manifest.amended(lambda entry: with_values(entry, named), from_epoch=starts, epoch=epoch)
            if all(with_values(entry, named) == entry for entry in _counting(manifest, starts)):
                return None
            if check_data is not None and any(name.startswith("data.") for name in named):
                for entry in amended.settings:
                    if entry.from_epoch >= starts:
                        check_data(amended, entry)
            return amended.recorded(described(named), by=by, at=self._wall(), from_epoch=starts, reason=reason)

        return await self.revise(next_one)

    async def earlier(self, backups: Iterable[BackupInfo]) -> list[EarlierState]:
        """What the run could go back to: these backups of the host's, and what others say that they hold."""
        others = await announced(self.hub, Subjects(self._run), self._signer.public_key)
        return merged(saved(backups), others)

    async def cut(self, number: int) -> Cut:
        """A cut by its number; ConfigurationError where the hub knows of none, or `main` has no part in it."""
        board = CutBoard(self.hub.store(GROUPS))
        await board.start()
        await board.close()
        safe = board.safe.number if board.safe is not None else 0
        there = [each for each, cut in sorted(board.made.items()) if each <= safe and MAIN in cut.parts]
        if number not in there:
            known = ", ".join(map(str, there)) or "none"
            raise ConfigurationError(f"the run has no cut {number} on trusted disks: there are {known}")
        return board.made[number]

    async def roll_back(
        self, backup: BackupInfo | EarlierState, *, by: str, reason: str = "", cut: int = 0
    ) -> Manifest:
        """Have the run go on from the state of an earlier epoch; `until_restored` waits for that.

        With `cut`, of which that state is the part of `main`, all other groups go back to theirs.
        """
        given: Rollback | None = None  # in an attempt whose answer was lost

        def next_one(present: Manifest | None, epoch: int) -> Manifest | None:
            nonlocal given
            manifest = self._existing(present)
            if given is not None and manifest.rollback == given:
                return None
            if backup.epoch > epoch:
                raise ConfigurationError(
                    f"the run is at epoch {epoch}: it cannot go back to epoch {backup.epoch}, which it has not reached"
                )
            number = manifest.rollback.number + 1 if manifest.rollback is not None else 1
            given = Rollback(number=number, to_epoch=backup.epoch, digest=backup.digest, given_at_epoch=epoch, cut=cut)
            ordered = msgspec.structs.replace(manifest, rollback=given)
            what = f"all groups back to cut {cut}" if cut else f"back to epoch {backup.epoch}"
            return ordered.recorded(what, by=by, at=self._wall(), from_epoch=epoch, reason=reason)

        return await self.revise(next_one)

    async def until_restored(self, order: Rollback, timeout_seconds: float) -> Commit | None:
        """The newest commit once the order is carried out; None when it is not in time (it may be later)."""
        done: asyncio.Future[Commit] = asyncio.get_running_loop().create_future()

        def committed(commit: Commit) -> None:
            if commit.num_restored >= order.number and not done.done():
                done.set_result(commit)

        lineage = Lineage(self.hub.store("lineage"), self._run, committed)
        await lineage.start()
        try:
            async with asyncio.timeout(timeout_seconds):
                return await done
        except TimeoutError:
            return None
        finally:
            await lineage.close()

    # The manifest

    async def revise(self, next_one: Revision) -> Manifest:
        """Put up the next revision, made of what stands there; again, if another organiser came first."""
        left = ATTEMPTS
        while True:
            try:
                return await self._revise(next_one)
            except RetryableError:  # another came first, or the store has no leader for a moment
                left -= 1
                if not left:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def _revise(self, next_one: Revision) -> Manifest:
        present, revision = await self._read()
        head = await self.head()
        wanted = next_one(present, head.epoch if head is not None else 0)
        if wanted is None or wanted == present:
            return self._existing(present)
        await self._organiser.put_up_manifest(noticeboard.sign(wanted, self._signer), replaces=revision)
        logger.info("revision %d of the manifest is put up", wanted.revision)
        return wanted

    async def _read(self) -> tuple[Manifest | None, int]:
        entry = await self.hub.store("manifest").get(MANIFEST_KEY)
        if entry is None or entry.value is None:
            return None, 0
        manifest, _organiser = noticeboard.read(entry.value, self._run)
        return manifest, entry.revision

    def _existing(self, manifest: Manifest | None) -> Manifest:
        if manifest is None:
            raise ConfigurationError(
                f"the run {self._run} has no manifest, so there is nothing to steer: start its host with a run.toml"
            )
        return manifest


@asynccontextmanager
async def steering(address: HubAddress, keys: HubKeys, run: str) -> AsyncIterator[Steering]:
    """Connect in the organiser's name, with the keys of the run's host."""
    config = ConnectionConfig(stores="guard")
    hub = await NatsConnection.connect(address, seed=keys.organiser_seed, run=run, name="main", config=config)
    try:
        yield Steering(hub, run, Signer(keys.organiser_seed))
    finally:
        await hub.close()


def _check_end(manifest: Manifest, values: Mapping[str, Value], starts: int) -> None:
    """ConfigurationError where the end would lie behind: what was typed for a number of further epochs ends the run."""
    if "end_epoch" in values:
        end = with_values(manifest.at(starts), {"end_epoch": values["end_epoch"]}).end_epoch
        if 0 < end < starts:
            raise ConfigurationError(
                f"end_epoch={end} lies behind: the change counts from epoch {starts} on. To end the run then, say "
                f"end_epoch={starts}; to have all wait, `potluck run pause`"
            )


def _counting(manifest: Manifest, from_epoch: int) -> list[Settings]:
    """What counts at that epoch and later."""
    return [manifest.at(from_epoch), *(entry for entry in manifest.settings if entry.from_epoch > from_epoch)]
