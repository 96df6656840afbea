"""Small files that nobody else may read, written whole or not at all.

Keys, certificates and the server's configuration go through here: a crash half-way leaves the old file, and a file is
never readable by others, not even for an instant.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
from pathlib import Path

from potluck.errors import ConfigurationError

logger = logging.getLogger(__name__)


def make_private_folder(folder: Path) -> Path:
    """The folder, made with mode 700 where it is missing; ConfigurationError when it cannot be used.

    The mode of a folder that exists is left alone: it may be the user's home, and the files in it are private anyway.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise unusable(folder, error) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"the folder {folder} is not writable: choose another one, or give this user the right to write there"
        )
    return folder


def write_private(path: Path, text: str) -> None:
    """Replace the file by one with this text and mode 600, in one step that survives a power failure."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                draft.unlink()
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise unusable(path, error) from error


def read_private(path: Path) -> str | None:
    """The file's text; None when there is none. A file that others could read is closed to them, and we say so."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            logger.warning("%s had mode %o, so others could read it: now 600", path, mode)
            path.chmod(0o600)
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is damaged (it is not text): restore it from a backup") from error
    except OSError as error:
        raise unusable(path, error) from error


def unusable(path: Path, error: OSError) -> ConfigurationError:
    """How we say that the file system refused."""
    return ConfigurationError(
        f"cannot use {path}: {error.strerror or error}. Choose another folder, or make this one writable"
    )


def _sync_folder(folder: Path) -> None:
    """Make a rename durable: the folder's own entry list has to reach the disk too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
