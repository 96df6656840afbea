"""Images where `potluck fleet up` runs: found or built there, and made a parcel for machines that lack them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from potluck.errors import ConfigurationError
from potluck.fleet.agent.runners import engine
from potluck.fleet.jobs.fleetfile import JobPlan
from potluck.fleet.jobs.job import Parcel
from potluck.fleet.jobs.parcels import ParcelFolder

logger = logging.getLogger(__name__)

KNOWN_FILE = "images.json"


class Images:
    """The images of the engine on this machine."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def image_for(self, plan: JobPlan, parcels: ParcelFolder) -> tuple[str, Parcel | None]:
        """The image's name, and the image itself where it is here."""
        from docker.errors import APIError, BuildError, ImageNotFound

        name = plan.image
        try:
            if plan.build is not None:
                name = f"potluck-{plan.name}:latest"
                image, _said = self._client.images.build(path=str(plan.build), tag=name, rm=True)
            else:
                image = self._client.images.get(name)
        except ImageNotFound:
            return name, None  # the machine may have it, or its registry
        except (BuildError, APIError, TypeError) as error:
            raise ConfigurationError(f"the image of {plan.name} cannot be built from {plan.build}: {error}") from error
        return name, self._saved(image, parcels)

    def _saved(self, image: Any, parcels: ParcelFolder) -> Parcel:
        """The image as a parcel; each is written once."""
        path = parcels.folder.parent / KNOWN_FILE
        known = _read(path)
        parcel = known.get(image.id)
        if parcel is not None and parcels.has(parcel):
            return parcel
        draft = parcels.draft()
        with draft.open("wb") as file:
            file.writelines(image.save(named=True))
        parcel = parcels.add(draft)
        path.write_bytes(msgspec.json.encode({**known, image.id: parcel}))
        return parcel


def find_images(url: str = "") -> Images | None:
    """The engine's images; None where there is no engine."""
    try:
        return Images(engine.connect(url))
    except ConfigurationError as error:
        logger.info("images are not looked for here: %s", error)
        return None


def _read(path: Path) -> dict[str, Parcel]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Parcel])
    except (OSError, msgspec.MsgspecError):
        return {}
