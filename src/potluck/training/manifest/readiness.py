"""Whether there is something to train here: all that can be told from the manifest, before torch is imported."""

from __future__ import annotations

from pathlib import Path

import potluck
from potluck.errors import ConfigurationError, RetryableError
from potluck.hub.connection import Store
from potluck.messages import PROTOCOL_VERSION
from potluck.recipes.approval import approved_copy
from potluck.recipes.reference import check_copy
from potluck.round.lineage import Lineage
from potluck.training.manifest.manifest import Manifest


def check_ready(manifest: Manifest, recipe: Path | None) -> None:
    """ConfigurationError when this Potluck does not know what the run speaks of, or has not its recipe."""
    _check_protocol(manifest)
    check_copy(manifest.recipe, recipe or approved_copy(manifest.recipe, manifest.files))


async def last_epoch(store: Store, manifest: Manifest) -> int | None:
    """The epoch that a run has ended with, by its store `lineage`; None while it goes on."""
    if not any(settings.end_epoch for settings in manifest.settings):
        return None
    lineage = Lineage(store, manifest.run)
    try:
        await lineage.start()
    except RetryableError:  # trainers wait for a hub that is away, and then it is seen
        return None
    finally:
        await lineage.close()
    return lineage.epoch if manifest.is_over(lineage.epoch) else None


def _check_protocol(manifest: Manifest) -> None:
    if manifest.protocol > PROTOCOL_VERSION:
        raise ConfigurationError(
            f"this Potluck ({potluck.__version__}, protocol {PROTOCOL_VERSION}) is too old for the run, which speaks "
            f"protocol {manifest.protocol}: install the version of its host. `potluck join` with a new link from the "
            "organiser prints the command"
        )
    if manifest.protocol < PROTOCOL_VERSION:
        raise ConfigurationError(
            f"the run speaks protocol {manifest.protocol}, and this Potluck ({potluck.__version__}) protocol "
            f"{PROTOCOL_VERSION}: ask the organiser to update, or install their version"
        )
