"""Whose word counts for a run: the organiser's key, as the join link names it or as it was seen first.

Everybody checks that the manifest is signed. The join link says by which key; where an older link does
not, the key that this machine sees first is remembered, in a file beside the identities, and another one is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from potluck.errors import ConfigurationError
from potluck.hub.joinlink import JoinLink, organiser_hash
from potluck.hub.privatefiles import make_private_folder, read_private, write_private
from potluck.peer.identity import default_folder

FILE_NAME = "known-organisers.json"
MAX_RUNS = 1000


def checking(link: JoinLink | None) -> Callable[[str], None]:
    """The check of an organiser's key by this join link; without a link there is nothing to check it by."""
    if link is None:
        return lambda _organiser: None
    return lambda organiser: KnownOrganisers().check(link, organiser)


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """An organiser's key, and since when it is known here."""

    organiser: str
    since: float


class KnownOrganisers:
    """The organisers that this machine has seen."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_folder() / FILE_NAME

    def check(self, link: JoinLink, organiser: str) -> None:
        """ConfigurationError unless this is the organiser of the link's run, as far as can be told."""
        if link.organiser_hash:
            if organiser_hash(organiser) != link.organiser_hash:
                raise ConfigurationError(
                    f"what the run {link.run} trains is signed by {organiser[:12]}…, who is not the organiser that the "
                    "join link names: somebody may be posing as them. Nothing was started. Ask the organiser for a "
                    "new link"
                )
            return
        known = self._read()
        name = f"{link.run} {link.ca_hash or link.places[0]}"
        if name not in known:
            known[name] = Known(organiser=organiser, since=time.time())
            self._write(known)
        elif known[name].organiser != organiser:
            day = time.strftime("%Y-%m-%d", time.localtime(known[name].since))
            raise ConfigurationError(
                f"what the run {link.run} trains is signed by {organiser[:12]}…, and since {day} this machine knows "
                f"{known[name].organiser[:12]}… as its organiser: somebody may be posing as them. Nothing was started. "
                f"Ask the organiser; if their key has changed, take the line of {name!r} out of {self.path}, or join "
                "by a new link"
            )

    def _read(self) -> dict[str, Known]:
        text = read_private(self.path)
        if text is None:
            return {}
        try:
            return msgspec.json.decode(text, type=dict[str, Known])
        except msgspec.MsgspecError as error:
            raise ConfigurationError(
                f"{self.path} cannot be read ({error}): mend it, or remove it to forget all organisers"
            ) from error

    def _write(self, known: dict[str, Known]) -> None:
        newest = sorted(known.items(), key=lambda item: -item[1].since)[:MAX_RUNS]
        make_private_folder(self.path.parent)
        write_private(self.path, msgspec.json.format(msgspec.json.encode(dict(newest)), indent=1).decode())
