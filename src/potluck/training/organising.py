"""What an organiser does with a manifest: put it up at the first start, and later what has changed in run.toml."""

from __future__ import annotations

import asyncio
import itertools
import logging

import msgspec

from potluck.errors import ConfigurationError, RetryableError
from potluck.hub.address import HubAddress
from potluck.hub.connection import HubConnection
from potluck.hub.guard.organise import Organiser
from potluck.hub.keys import HubKeys, Signer
from potluck.hub.nats.connection import ConnectionConfig, NatsConnection
from potluck.hub.stores import MANIFEST_KEY
from potluck.hub.subjects import Subjects
from potluck.round.lineage import Lineage
from potluck.training import notice
from potluck.training.manifest import Manifest

logger = logging.getLogger(__name__)

ATTEMPTS = 20
RETRY_SECONDS = 0.5
NOTICE_EPOCHS = 2  # a change counts from so many epochs later: by then everybody has heard of it


async def put_up(wanted: Manifest, address: HubAddress, keys: HubKeys) -> Manifest:
    """Have the hub show this manifest, as a change of the one before if there is one; returns what it shows."""
    hub = await NatsConnection.connect(
        address, seed=keys.organiser_seed, run=wanted.run, name="main", config=ConnectionConfig(stores="guard")
    )
    try:
        for attempt in itertools.count(1):
            try:
                return await _put_up(wanted, hub, keys)
            except RetryableError:  # another host of the run came first, or the store has no leader for a moment
                if attempt == ATTEMPTS:
                    raise
            await asyncio.sleep(RETRY_SECONDS)
        raise AssertionError("unreachable")
    finally:
        await hub.close()


async def _put_up(wanted: Manifest, hub: HubConnection, keys: HubKeys) -> Manifest:
    organiser = Organiser(hub, Subjects(wanted.run), keys.organiser_public)
    entry = await hub.store("manifest").get(MANIFEST_KEY)
    if entry is None or entry.value is None:
        next_one, replaces = wanted, 0
    else:
        present, _ = notice.read(entry.value, wanted.run)
        next_one, replaces = await _changed(present, wanted, hub), entry.revision
        if next_one is present:
            return present
    await organiser.put_up_manifest(notice.sign(next_one, Signer(keys.organiser_seed)), replaces=replaces)
    return next_one


async def _changed(present: Manifest, wanted: Manifest, hub: HubConnection) -> Manifest:
    """The next revision; the present one where run.toml says nothing new."""
    numbering = ("revision", "protocol", "settings")
    names = [field.name for field in msgspec.structs.fields(Manifest) if field.name not in numbering]
    if fixed := [name for name in names if getattr(wanted, name) != getattr(present, name)]:
        raise ConfigurationError(
            f"run.toml differs from what run {present.run} trains since its start, in: {', '.join(fixed)}. Put that "
            "back, or start a run with another name"
        )
    newest = present.newest
    settings = msgspec.structs.replace(wanted.newest, from_epoch=newest.from_epoch, paused=newest.paused)
    if settings == newest:
        return present
    lineage = Lineage(hub.store("lineage"), present.run)
    await lineage.start()
    await lineage.close()
    logger.info("run.toml has changed; that counts from epoch %d on", lineage.epoch + NOTICE_EPOCHS)
    settings = msgspec.structs.replace(settings, from_epoch=lineage.epoch + NOTICE_EPOCHS)
    return present.changed(settings, epoch=lineage.epoch)
