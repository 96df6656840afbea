"""How a manifest names its recipe, and whether this machine has it.

Apart from the recipes themselves, so that who only watches a run, or has yet to import torch, can tell.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import CodeType
from typing import Annotated

import msgspec

import potluck
from potluck.errors import ConfigurationError
from potluck.messages import Message

BUILT_IN = {
    "digits": "potluck.recipes.digits",
    "hf-albert": "potluck.recipes.huggingface.albert",
    "hf-causal-lm": "potluck.recipes.huggingface.causal",
    "hf-masked-lm": "potluck.recipes.huggingface.masked",
    "image-classifier": "potluck.recipes.images",
    "stdlib-lm": "potluck.recipes.stdlib_lm",
}
MAX_FILE_BYTES = 1024 * 1024
MAX_FILES = 128  # that a run ships, or has fetched from elsewhere
MAX_SHIPPED_BYTES = 2 * 1000 * 1000 * 1000  # of one file that a host serves
MAX_REQUIREMENTS = 32

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
FileName = Annotated[str, msgspec.Meta(pattern=r"^(?!\.)[\w.-]+(/(?!\.)[\w.-]+){0,4}$", max_length=200)]
Requirement = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][\w.-]*(\[[\w,.-]+\])?( ?[<>=!~]=?[\w.*+!<>=~, -]*)?$")]
"""As pip reads them, without addresses: nobody can have a volunteer install from a place of their own."""


class FileRef(Message, frozen=True, kw_only=True):
    """A file that the host serves: the recipe, a tokenizer, a small set of data."""

    name: FileName  # as the recipe calls it, by its place in the organiser's folder
    sha256: Digest
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_SHIPPED_BYTES)]


class DownloadRef(Message, frozen=True, kw_only=True):
    """A file from elsewhere that the recipe declares (downloads.py)."""

    name: FileName
    url: Annotated[str, msgspec.Meta(pattern="^https?://", max_length=2000)]
    sha256: Digest
    num_bytes: int | None = None


class RecipeRef(Message, frozen=True, kw_only=True):
    """A recipe as a manifest names it."""

    name: str
    digest: str = ""  # SHA-256 of the file; empty for a recipe that is built in
    version: str = ""  # of Potluck, for a recipe that is built in


def check_copy(ref: RecipeRef, file: Path | None) -> bytes:
    """The text of the recipe that a manifest names, none for one that is built in; `file` is this machine's copy.

    ConfigurationError if it is not here.
    """
    if not ref.digest:
        if ref.name not in BUILT_IN:
            known = ", ".join(sorted(BUILT_IN))
            raise ConfigurationError(
                f"this Potluck ({potluck.__version__}) has no recipe {ref.name!r}, only {known}: the run was made with "
                f"version {ref.version or 'unknown'}, install that one"
            )
        return b""
    if file is None:
        raise ConfigurationError(
            f"this run trains a recipe of its organiser's own, {ref.name}. Its host serves the file where it can be "
            "reached: join with --yes to let it run. Else get the file from the organiser, look at it, and name it by "
            "--recipe"
        )
    source = read_source(file)
    if digest_of(source) != ref.digest:
        raise ConfigurationError(
            f"{file} is not the recipe of this run: its digest is {digest_of(source)[:12]}…, the run's is "
            f"{ref.digest[:12]}…. Get the file again from the organiser"
        )
    return source


def read_source(path: Path) -> bytes:
    """The text of a recipe in a file; ConfigurationError where there is none that could be one."""
    try:
        source = path.read_bytes()
    except OSError as error:
        known = ", ".join(sorted(BUILT_IN))
        raise ConfigurationError(
            f"there is no recipe {path.name!r}: it is neither built in ({known}) nor a file that can be read ({error})"
        ) from error
    if len(source) > MAX_FILE_BYTES:
        raise ConfigurationError(
            f"{path} has {len(source)} bytes: a recipe is one small file, of {MAX_FILE_BYTES} at most"
        )
    return source


def compile_source(source: bytes, path: Path) -> CodeType:
    """The recipe ready to be executed, which this does not do; ConfigurationError where it is no Python."""
    try:
        return compile(source, str(path), "exec")
    except (SyntaxError, ValueError) as error:
        raise ConfigurationError(f"the recipe {path} cannot be used: {type(error).__name__}: {error}") from error


def digest_of(source: bytes) -> str:
    """What a manifest pins a recipe by."""
    return hashlib.sha256(source.replace(b"\r\n", b"\n")).hexdigest()  # the same text on every system
