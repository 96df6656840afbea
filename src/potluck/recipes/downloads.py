"""Files that a recipe needs: fetched once, checked by their hash, and found again by every recipe that names the same.

A download that breaks off goes on where it was. What does not match its hash is never used, and said so.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import platformdirs

from potluck.errors import ConfigurationError, RetryableError
from potluck.peer import environment

TIMEOUT_SECONDS = 30.0
MAY_PASS = (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_EARLY, httpx.codes.TOO_MANY_REQUESTS)
SPARE_BYTES = 100 * 1000 * 1000  # on the disk, beside the file
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\w.-]{1,100}")

Progress = Callable[[int, int | None], None]
"""Bytes that are there, and all of them where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """One file."""

    name: str
    """What the recipe calls it."""

    url: str
    """Its address, by http or https."""

    sha256: str
    """Of its bytes, in hexadecimal."""

    num_bytes: int | None = None
    """How large it is, where that is known."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name.startswith("."):
            raise ConfigurationError(f"{self.name!r} cannot name a file: use letters, digits, . - and _")
        if not _SHA256.fullmatch(self.sha256):
            raise ConfigurationError(f"the sha256 of {self.name} is not 64 hexadecimal characters: {self.sha256!r}")
        if not self.url.startswith(("https://", "http://")):
            raise ConfigurationError(f"{self.url!r} is not where {self.name} can be fetched: http:// or https:// is")
        try:
            httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ConfigurationError(f"{self.url!r} is no address that {self.name} could be at: {error}") from error


def data_folder() -> Path:
    """Where files are kept; POTLUCK_DATA names another place."""
    return environment.data_path() or Path(platformdirs.user_data_dir("potluck")) / "data"


def path_of(download: Download, folder: Path | None = None) -> Path:
    """Where a file is, once it is there. Its hash is in the name: two recipes may call different files the same."""
    return (folder or data_folder()) / f"{download.sha256[:16]}-{download.name}"


def fetch(download: Download, folder: Path | None = None, progress: Progress | None = None) -> Path:
    """The file, fetched unless it is there. RetryableError: try again later, it goes on; ConfigurationError: no use.

    A file that is there is believed: it got its name after its hash was checked. `is_whole` checks it again.
    """
    path = path_of(download, folder)
    if path.exists():
        return path
    tell = progress or (lambda _there, _total: None)
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_room(download, path.parent, part)
        _fetch_rest(download, part, tell)
        found = _hash(part)
        if found != download.sha256:
            part.unlink()
            raise ConfigurationError(
                f"what {download.url} gave is not {download.name}: its sha256 is {found[:12]}…, and should be "
                f"{download.sha256[:12]}…. It was removed; ask the author of the recipe"
            )
        part.replace(path)
    except httpx.HTTPStatusError as error:
        if error.response.status_code in MAY_PASS or error.response.is_server_error:
            raise _try_again(download, part, error) from error
        raise ConfigurationError(
            f"{download.url} does not give {download.name}: it answers {error.response.status_code} "
            f"{error.response.reason_phrase}. Ask the author of the recipe"
        ) from error
    except httpx.HTTPError as error:
        raise _try_again(download, part, error) from error
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}. Name another folder") from error
    return path


def _try_again(download: Download, part: Path, error: httpx.HTTPError) -> RetryableError:
    there = part.stat().st_size if part.exists() else 0
    return RetryableError(
        f"{download.name} could not be fetched from {download.url}: {error or type(error).__name__}. "
        f"{there / 1e6:.1f} MB are there; the same command goes on with it"
    )


def is_whole(download: Download, folder: Path | None = None) -> bool:
    """Whether the file is there with the right bytes."""
    path = path_of(download, folder)
    return path.exists() and _hash(path) == download.sha256


def _check_room(download: Download, folder: Path, part: Path) -> None:
    if download.num_bytes is None:
        return
    missing = download.num_bytes - (part.stat().st_size if part.exists() else 0)
    free = shutil.disk_usage(folder).free
    if free < missing + SPARE_BYTES:
        raise ConfigurationError(
            f"{download.name} needs another {missing / 1e6:.0f} MB, and {folder} has {free / 1e6:.0f} MB free: make "
            "room, or name another folder"
        )


def _fetch_rest(download: Download, part: Path, tell: Progress) -> None:
    there = part.stat().st_size if part.exists() else 0
    if download.num_bytes is not None and there > download.num_bytes:
        part.unlink()
        there = 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={there}-"} if there else {})
    with httpx.stream("GET", download.url, headers=headers, follow_redirects=True, timeout=TIMEOUT_SECONDS) as response:
        if there and response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # all of it is there already
        response.raise_for_status()
        if there and response.status_code != httpx.codes.PARTIAL_CONTENT:
            there = 0  # the server knows nothing of parts, and begins anew
        total = _total_bytes(response, there) or download.num_bytes
        with part.open("ab" if there else "wb") as file:
            tell(there, total)
            for piece in response.iter_raw():  # as it comes, so that nothing is lost when it breaks off
                there += len(piece)
                if download.num_bytes is not None and there > download.num_bytes:
                    raise ConfigurationError(
                        f"{download.url} gives more than the {download.num_bytes} bytes that {download.name} has"
                    )
                file.write(piece)
                tell(there, total)


def _total_bytes(response: httpx.Response, there: int) -> int | None:
    with contextlib.suppress(KeyError, ValueError):
        return there + int(response.headers["Content-Length"])
    return None


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
