"""What a host leaves in its folder, for commands on the same machine: `host.json`.

Kept apart from host.py, so that a command can look without importing all that a host is made of.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from potluck.errors import ConfigurationError
from potluck.hub.privatefiles import read_private, write_private

HOST_FILE = "host.json"


class HostRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run's hub is, and how others get in."""

    run: str
    servers: tuple[str, ...]
    ca_pem: str
    link: str  # without an invite
    invite: str = ""  # for volunteers, made at the first start; it may have been revoked since
    recipe_file: str = ""  # the organiser's own recipe on this machine; empty for one that is built in
    is_tried: bool = False  # whether the recipe has learned from a sample on this machine


def read_record(folder: Path) -> HostRecord | None:
    """What the host of this folder left there; None when there never was one."""
    text = read_private(folder / HOST_FILE)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=HostRecord)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(
            f"{folder / HOST_FILE} cannot be read ({error}): remove it, and the next start writes it anew"
        ) from error


def write_record(folder: Path, record: HostRecord) -> None:
    """Leave it there; it holds an invite, so nobody else may read it."""
    write_private(folder / HOST_FILE, msgspec.json.encode(record).decode())
