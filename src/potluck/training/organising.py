"""What a host does with run.toml: put it up at the first start, and later what has changed in it.

What was changed by command meanwhile (steering.py) stays: the manifest remembers what run.toml said, and only what it
says anew counts.
"""

from __future__ import annotations

import getpass
import logging
import time

import msgspec

from potluck.errors import ConfigurationError
from potluck.hub.address import HubAddress
from potluck.hub.keys import HubKeys
from potluck.training.changes import described, differences, with_values
from potluck.training.manifest import Manifest, Settings
from potluck.training.steering import NOTICE_EPOCHS, steering

logger = logging.getLogger(__name__)

NOT_OF_THE_FILE = ("revision", "protocol", "settings", "written", "rollback", "history")


async def put_up(wanted: Manifest, address: HubAddress, keys: HubKeys, *, by: str = "run.toml") -> Manifest:
    """Have the hub show this manifest, as a change of the one before if there is one; returns what it shows."""

    def next_one(present: Manifest | None, epoch: int) -> Manifest | None:
        if present is None:
            return msgspec.structs.replace(wanted, written=wanted.newest)
        return taken_over(present, wanted, epoch=epoch, by=by, at=time.time())

    async with steering(address, keys, wanted.run) as helm:
        return await helm.revise(next_one)


def taken_over(present: Manifest, wanted: Manifest, *, epoch: int, by: str, at: float) -> Manifest | None:
    """The next revision, by what has changed in run.toml; None where it says nothing new."""
    names = [field.name for field in msgspec.structs.fields(Manifest) if field.name not in NOT_OF_THE_FILE]
    fixed = [name for name in names if getattr(wanted, name) != getattr(present, name)]
    if type(wanted.newest.training) is not type(present.newest.training):
        fixed.append("training.algorithm")
    if fixed:
        raise ConfigurationError(
            f"run.toml differs from what run {present.run} trains since its start, in: {', '.join(fixed)}. Put that "
            "back, or start a run with another name"
        )
    values = differences(present.written or present.newest, wanted.newest)
    if not values:
        return None
    starts = epoch + NOTICE_EPOCHS
    logger.info("run.toml has changed; that counts from epoch %d on", starts)

    def change(settings: Settings) -> Settings:
        return with_values(settings, values)

    amended = present.amended(change, from_epoch=starts, epoch=epoch)
    recorded = amended.recorded(f"run.toml: {described(values)}", by=by, at=at, from_epoch=starts)
    return msgspec.structs.replace(recorded, written=wanted.newest)


def own_name() -> str:
    """What the person at this machine is called, where nobody says."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without users
        return "somebody"
