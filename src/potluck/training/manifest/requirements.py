"""What a volunteer needs before it can train: packages, the run's files, downloads, and consent to run others' code.

All of it is in the manifest, which the organiser signs. The host's file server shows the manifest to everybody with a
link (run/fileserver.py), so that everything can be looked at, asked and fetched before anybody asks to be let in:

    fetch_manifest ─▶ missing_requirements ─▶ consent (cli/requirements.py) ─▶ fetch_all
"""

from __future__ import annotations

import importlib.metadata
import logging
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import httpx
from packaging.requirements import InvalidRequirement, Requirement

from potluck.errors import ConfigurationError, ProtocolError, RetryableError
from potluck.hub.joinlink import JoinLink
from potluck.peer.machinecheck import Check, Level
from potluck.peer.organisers import checking
from potluck.recipes.approval import is_approved
from potluck.recipes.downloads import Download, Progress, fetch, path_of
from potluck.recipes.reference import FileRef
from potluck.recipes.shipped import as_download
from potluck.training.manifest import noticeboard
from potluck.training.manifest.manifest import Manifest

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
STARTING_SECONDS = 20.0  # a host that has just started imports torch first
RETRY_SECONDS = 0.5
MANIFEST = "manifest"
FILES = "files/"
KEPT_FILE = "manifest.signed"


def offer_of(board: noticeboard.NoticeBoard) -> Callable[[str], bytes | Path | None]:
    """What a host serves of its run: the newest manifest, and the files that it names."""

    def find(name: str) -> bytes | Path | None:
        manifest = board.manifest
        if manifest is None:
            return None
        if name == MANIFEST:
            return board.signed
        ref = next((ref for ref in manifest.files if name == FILES + ref.sha256), None)
        path = path_of(as_download(ref)) if ref is not None else None
        return path if path is not None and path.is_file() else None

    return find


def keep_manifest(folder: Path, board: noticeboard.NoticeBoard) -> None:
    """Leave the newest manifest in the host's folder, for commands that come when no hub is there."""
    if board.signed:
        part = folder / f"{KEPT_FILE}.part"
        part.write_bytes(board.signed)
        part.replace(folder / KEPT_FILE)


def fetch_manifest(link: JoinLink) -> Manifest | None:
    """What the run trains, from the host's file server; None where that does not say: the hub will.

    ConfigurationError where somebody else than the organiser signed it.
    """
    url = link.files_url(MANIFEST)
    if not url:
        return None
    end = time.monotonic() + STARTING_SECONDS
    try:
        with httpx.Client(timeout=CONNECT_SECONDS, trust_env=False) as client:
            while (answer := client.get(url)).status_code == httpx.codes.SERVICE_UNAVAILABLE and time.monotonic() < end:
                time.sleep(RETRY_SECONDS)
    except httpx.HTTPError as error:
        logger.info("the host's files cannot be reached, the hub is asked instead: %s", error)
        return None
    if answer.status_code != httpx.codes.OK:
        return None
    try:
        manifest, organiser = noticeboard.read(answer.content[: noticeboard.LIMIT_BYTES], link.run)
    except ProtocolError as error:
        raise ConfigurationError(f"the host's description of the run is not valid: {error}") from error
    checking(link)(organiser)
    return manifest


# Packages


def missing_requirements(manifest: Manifest) -> list[str]:
    """What the run needs and this machine has not, or in another version."""
    return [each for each in manifest.requirements if not _is_met(each)]


def _is_met(text: str) -> bool:
    try:
        wanted = Requirement(text)
        found = importlib.metadata.version(wanted.name)
    except InvalidRequirement as error:
        raise ConfigurationError(f"the run needs {text!r}, which pip does not understand: {error}") from error
    except importlib.metadata.PackageNotFoundError:
        return False
    return wanted.specifier.contains(found, prereleases=True)


def pip_line(requirements: Sequence[str]) -> str:
    """The one command that installs them."""
    return "pip install " + " ".join(shlex.quote(each) for each in requirements)


def check_requirements(manifest: Manifest) -> None:
    """ConfigurationError, with the command that helps, where a package is missing."""
    require(manifest.requirements, "join")


def require(requirements: Iterable[str], then: str) -> None:
    """ConfigurationError, with the command that helps, where one of these packages is missing."""
    if missing := [each for each in requirements if not _is_met(each)]:
        raise ConfigurationError(
            f"this run needs {', '.join(missing)}, which this machine does not have. Install it, and {then} again:\n\n"
            f"  {pip_line(missing)}\n"
        )


# Files


def fetches_of(manifest: Manifest, link: JoinLink) -> list[Download]:
    """What has to be fetched for a run, of its host and from elsewhere, and is not here yet."""
    wanted = [*_shipped(manifest, link), *_declared(manifest)]
    return [each for each in wanted if not path_of(each).exists()]


def _shipped(manifest: Manifest, link: JoinLink) -> Iterator[Download]:
    for ref in manifest.files:
        yield as_download(ref, link.files_url(FILES + ref.sha256) or "http://unknown.invalid/")


def _declared(manifest: Manifest) -> Iterator[Download]:
    for each in manifest.downloads:
        yield Download(name=each.name, url=each.url, sha256=each.sha256, num_bytes=each.num_bytes)


def fetch_recipe(manifest: Manifest, link: JoinLink) -> Path | None:
    """The organiser's own recipe, so that it can be looked at; None for one that is built in."""
    ref = recipe_ref(manifest)
    if ref is None:
        return None
    if not link.files_url(""):
        return None
    return fetch(as_download(ref, link.files_url(FILES + ref.sha256)))


def recipe_ref(manifest: Manifest) -> FileRef | None:
    """The file among those that the host serves which is the recipe."""
    if not manifest.recipe.digest:
        return None
    short = manifest.recipe.name
    return next((ref for ref in manifest.files if ref.name.rpartition("/")[2] == short), None)


def fetch_all(downloads: Sequence[Download], tell: Callable[[Download], Progress], folder: Path | None = None) -> None:
    """Fetch what is missing; a file that breaks off goes on where it was when it is fetched again."""
    for each in downloads:
        progress = tell(each)
        try:
            fetch(each, folder, progress)
        except RetryableError:
            fetch(each, folder, progress)  # once more at once: lines break off


def checks_of(link: JoinLink) -> Iterator[Check]:
    """What `potluck doctor` tells of all this; nothing is fetched but the manifest, and nothing runs."""
    if not link.files_url(MANIFEST):  # a host on an existing hub serves no files: there is nothing to check
        return
    try:
        manifest = fetch_manifest(link)
    except ConfigurationError as error:
        yield Check(name="what it trains", level="red", found="not signed by its organiser", remedy=str(error))
        return
    if manifest is None:
        remedy = "the hub will say what the run trains; files that it ships cannot be fetched before"
        yield Check(name="what it trains", level="yellow", found="the host's files cannot be reached", remedy=remedy)
        return
    code = "built in" if not manifest.recipe.digest else "the organiser's own code, signed"
    asks = "" if is_approved(manifest.recipe) else "potluck join shows you the code, and asks before it runs"
    level: Level = "yellow" if asks else "green"
    yield Check(name="what it trains", level=level, found=f"{manifest.recipe.name}, {code}", remedy=asks)
    if missing := missing_requirements(manifest):
        remedy = pip_line(missing)
        yield Check(name="packages", level="red", found=f"missing: {', '.join(missing)}", remedy=remedy)
    elif manifest.requirements:
        yield Check(name="packages", level="green", found=", ".join(manifest.requirements))
    if fetches := fetches_of(manifest, link):
        size = sum(each.num_bytes or 0 for each in fetches) / 1e6
        found = f"{len(fetches)} files to fetch, {size:.1f} MB"
        yield Check(
            name="files", level="yellow", found=found, remedy="potluck join fetches them, before it asks to be in"
        )
    elif manifest.files or manifest.downloads:
        yield Check(name="files", level="green", found="all here")
