"""Chunks of a fetch that is under way, on disk: a joiner that is killed goes on where it was.

Chunks are appended as they come, each behind its hash and length. Nothing else has to be true of the file: what does
not match its hash when it is read again was torn, and what a later state does not need is passed over.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from potluck.state.inventory import MAX_CHUNK_BYTES

logger = logging.getLogger(__name__)

_RECORD = struct.Struct(">32sI")


class ChunkLog:
    """One file. Safe to use from several threads; a disk that is full or broken only costs the chance to resume."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._is_closed = False
        self._is_broken = False
        self._good_bytes = 0  # from there on the file is torn, or not read yet
        self._lock = threading.Lock()

    def read(self, wanted: Collection[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Chunks that are there and wanted, with their hashes. To be read to the end before anything is appended.

        A log that was closed takes chunks again after this.
        """
        self._good_bytes, self._is_closed = 0, False
        try:
            with self._path.open("rb") as file:
                yield from self._records(file, wanted)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("%s cannot be read, so its chunks are fetched again: %s", self._path, error)

    def _records(self, file: BinaryIO, wanted: Collection[bytes]) -> Iterator[tuple[bytes, bytes]]:
        while len(head := file.read(_RECORD.size)) == _RECORD.size:
            expected, length = _RECORD.unpack(head)
            data = file.read(length) if length <= MAX_CHUNK_BYTES else b""
            if len(data) != length:
                break  # torn: whatever follows cannot be told apart
            self._good_bytes = file.tell()
            if expected in wanted and hashlib.sha256(data).digest() == expected:
                yield expected, data

    def append(self, chunk_hash: bytes, data: memoryview) -> None:
        """Note a chunk that has come and is right; not after `close`, when a worker may still check the last ones."""
        with self._lock:
            if self._is_broken or self._is_closed:
                return
            try:
                if self._file is None:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    self._file = self._open()
                self._file.write(_RECORD.pack(chunk_hash, len(data)))
                self._file.write(data)
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self._is_broken:
            logger.warning("chunks cannot be noted in %s, so a restart would fetch anew: %s", self._path, error)
        self._is_broken = True

    def _open(self) -> BinaryIO:
        file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        try:
            file.truncate(self._good_bytes)
            file.seek(0, os.SEEK_END)
        except BaseException:
            file.close()
            raise
        return file

    @property
    def num_bytes(self) -> int:
        """How much of the file is good."""
        return self._good_bytes

    def start_anew(self) -> None:
        """Forget what is there."""
        with self._lock:
            self._close()
            self._good_bytes = 0
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave the file as it is."""
        with self._lock:
            self._is_closed = True
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()  # writes what is left in its buffer
            except OSError as error:
                self._give_up(error)
