"""The key that a peer is known by.

An identity is an Ed25519 nkey in a file of mode 600. Its public half is the peer's id, so an id cannot be taken by
anybody else. A running peer locks its file: two processes with one id would throw each other out of the run.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

import platformdirs

from potluck.errors import ConfigurationError
from potluck.hub.keys import Signer, new_seed, public_key

MAX_DEFAULT_IDENTITIES = 64


class Identity:
    """A peer's key pair, locked for this process while it is open."""

    def __init__(self, seed: bytes, lock: IO[bytes] | None = None, *, is_temporary: bool = False) -> None:
        """`is_temporary`: nobody keeps the seed, and it is gone with this process."""
        self.seed = seed
        self.is_temporary = is_temporary
        self._signer = Signer(seed)
        self.peer_id = self._signer.public_key
        self._lock = lock

    def sign(self, data: bytes) -> bytes:
        """A signature that `potluck.hub.keys.verify` accepts for this identity's peer id."""
        return self._signer.sign(data)

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    @classmethod
    def temporary(cls) -> Identity:
        """A new identity that is nowhere on disk."""
        return cls(new_seed("user"), is_temporary=True)

    @classmethod
    def open(cls, path: Path, option: str = "--identity-path") -> Identity:
        """The identity in `path`, made on first use. ConfigurationError when it is in use, unreadable or damaged.

        `option` is how the user chooses another one.
        """
        identity = cls._try_open(path)
        if identity is None:
            raise ConfigurationError(
                f"another peer on this machine is running with the identity in {path}: "
                f"stop it first, or give this one a place of its own with {option}"
            )
        return identity

    @classmethod
    def open_default(cls, folder: Path | None = None) -> Identity:
        """The first identity in the user's data folder that no other process uses, made if need be."""
        folder = folder or default_folder()
        for number in range(MAX_DEFAULT_IDENTITIES):
            identity = cls._try_open(folder / f"identity-{number}.nkey")
            if identity is not None:
                return identity
        raise ConfigurationError(
            f"all {MAX_DEFAULT_IDENTITIES} identities in {folder} are in use: name another file with --identity-path"
        )

    @classmethod
    def _try_open(cls, path: Path) -> Identity | None:
        """The identity in `path`; None when another process has it."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            lock = os.fdopen(descriptor, "r+b", buffering=0)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls(_read_or_write_seed(lock, path), lock)
        except BlockingIOError:
            lock.close()
            return None
        except OSError as error:
            lock.close()
            raise _unusable(path, error) from error
        except BaseException:
            lock.close()
            raise


def _read_or_write_seed(file: IO[bytes], path: Path) -> bytes:
    os.fchmod(file.fileno(), 0o600)
    text = file.read(1024).strip()
    if not text:  # new, or a crash came between making and filling it
        text = new_seed("user")
        _write_seed(file, text)
    try:
        if public_key(text).startswith("U"):
            return text
    except ConfigurationError:
        pass
    raise ConfigurationError(
        f"{path} is not an identity (it should hold one line that starts with SU): "
        "restore it from a copy, or remove it and join as somebody new"
    )


def _write_seed(file: IO[bytes], seed: bytes) -> None:
    try:
        file.write(seed + b"\n")
        os.fsync(file.fileno())
    except OSError:
        file.truncate(0)  # half a seed would look like a damaged one
        raise


def _unusable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"cannot use the identity file {path} ({error.strerror}): "
        "choose a place that can be written, with --identity-path"
    )


def default_folder() -> Path:
    """Where identities live when nobody says otherwise."""
    return Path(platformdirs.user_data_dir("potluck")) / "identities"
