"""What a host does with run.toml: put it up at the first start, and later what has changed in it.

What was changed by command meanwhile (steering.py) stays: the manifest remembers what run.toml said, and only what it
says anew counts.
"""

from __future__ import annotations

import getpass
import logging
import time
from collections.abc import Mapping

import msgspec

import potluck
from potluck.errors import ConfigurationError
from potluck.hub.address import HubAddress
from potluck.hub.keys import HubKeys
from potluck.training.manifest.changes import Value, described, differences, with_values
from potluck.training.manifest.manifest import Manifest, Settings, counting_at
from potluck.training.manifest.steering import steering

logger = logging.getLogger(__name__)

PLANNING = ("weight_cap", "audit_chunks")  # of the exchange
NOT_OF_THE_FILE = ("revision", "protocol", "recipe", "settings", "written", "rollback", "history", "routes")


async def put_up(wanted: Manifest, address: HubAddress, keys: HubKeys, *, by: str = "run.toml") -> Manifest:
    """Have the hub show this manifest, as a change of the one before if there is one; returns what it shows."""

    def next_one(present: Manifest | None, epoch: int) -> Manifest | None:
        if present is None:
            return msgspec.structs.replace(wanted, written=wanted.settings)
        return taken_over(present, wanted, epoch=epoch, by=by, at=time.time())

    async with steering(address, keys, wanted.run) as helm:
        return await helm.revise(next_one)


def taken_over(present: Manifest, wanted: Manifest, *, epoch: int, by: str, at: float) -> Manifest | None:
    """The next revision, by what has changed in run.toml or in Potluck; None where neither has."""
    before, present = present, _with_planning(present, wanted)
    names = [field.name for field in msgspec.structs.fields(Manifest) if field.name not in NOT_OF_THE_FILE]
    at_first = _before_rerouting(present)
    fixed = [name for name in names if getattr(wanted, name) != getattr(at_first, name)]
    if (wanted.recipe.name, wanted.recipe.digest) != (present.recipe.name, present.recipe.digest):
        fixed.append("recipe")
    if type(wanted.newest.training) is not type(present.newest.training):
        fixed.append("training.algorithm")
    if fixed:
        raise ConfigurationError(
            f"run.toml differs from what run {present.run} trains since its start, in: {', '.join(fixed)}. Put that "
            "back, or start a run with another name"
        )
    renewed = msgspec.structs.replace(present, protocol=wanted.protocol, recipe=wanted.recipe)  # with Potluck itself
    said = present.written or (present.newest,)
    starts = present.soonest_change(epoch)
    turns = sorted({starts, *(e.from_epoch for e in (*said, *wanted.settings) if e.from_epoch > starts)})

    def news(epoch: int) -> dict[str, Value]:
        """What run.toml says anew of an epoch: what was planned for it by command stays."""
        return differences(counting_at(said, epoch), counting_at(wanted.settings, epoch))

    def change(settings: Settings) -> Settings:
        return with_values(settings, news(settings.from_epoch))

    if what := _told({turn: news(turn) for turn in turns}):
        logger.info("run.toml has changed; the changes count from epoch %d on", starts)
        amended = renewed.amended(change, from_epoch=starts, epoch=epoch, turns=turns)
        recorded = amended.recorded(f"run.toml: {what}", by=by, at=at, from_epoch=starts)
        return msgspec.structs.replace(recorded, written=wanted.settings)
    if what := _planning(before, renewed):
        return renewed.recorded(f"run.toml: {what}", by=by, at=at, from_epoch=epoch)
    if renewed != present:
        return renewed.recorded(f"Potluck {potluck.__version__}", by=by, at=at, from_epoch=epoch)
    return None


def _before_rerouting(manifest: Manifest) -> Manifest:
    """Without the routings that `potluck paths reroute` has added since."""
    later = {route.name for route in manifest.routes if route.from_phase}
    return msgspec.structs.replace(manifest, files=tuple(file for file in manifest.files if file.name not in later))


def _with_planning(manifest: Manifest, wanted: Manifest) -> Manifest:
    """What else may change: it affects planning, audits, evaluation and waiting, but no tensors."""
    planning = {name: getattr(wanted.exchange, name) for name in PLANNING}
    exchange = msgspec.structs.replace(manifest.exchange, **planning)
    return msgspec.structs.replace(manifest, exchange=exchange, evaluation=wanted.evaluation, patience=wanted.patience)


def _planning(before: Manifest, after: Manifest) -> str:
    """What of that has changed, in words."""
    told = [
        f"{section}.{name}={value:g}"
        for section in ("exchange", "evaluation", "patience")
        for name in getattr(after, section).__struct_fields__
        if (value := getattr(getattr(after, section), name)) != getattr(getattr(before, section), name)
    ]
    return ", ".join(told)


def _told(news: Mapping[int, Mapping[str, Value]]) -> str:
    """What is new from which epoch on, in words; the first of them needs no naming."""
    told: list[str] = []
    before: Mapping[str, Value] = {}
    for epoch, values in news.items():
        if fresh := {name: value for name, value in values.items() if before.get(name) != value}:
            told.append(f"from epoch {epoch} on {described(fresh)}" if epoch != min(news) else described(fresh))
        before = values
    return "; ".join(told)


def own_name() -> str:
    """What the person at this machine is called, where nobody says."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without users
        return "somebody"
