"""Chunks of a fetch on disk."""

from __future__ import annotations

import hashlib
import resource
from pathlib import Path

import pytest

from potluck.state.chunklog import ChunkLog


def test_a_disk_that_is_full_costs_the_chance_to_resume_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel refuses to write beyond a limit, in the middle of a chunk: what is left in the buffer too."""
    chunks = [bytes([number]) * 6_000 for number in range(4)]
    log = ChunkLog(tmp_path / "fetching.chunks")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        for chunk in chunks:
            log.append(hashlib.sha256(chunk).digest(), memoryview(chunk))
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len([record for record in caplog.records if "cannot be noted" in record.getMessage()]) == 1
    wanted = [hashlib.sha256(chunk).digest() for chunk in chunks]
    again = ChunkLog(tmp_path / "fetching.chunks")
    assert [data for _, data in again.read(wanted)] == chunks[:1]
    again.append(wanted[1], memoryview(chunks[1]))  # there is room again
    again.close()
    assert [data for _, data in ChunkLog(tmp_path / "fetching.chunks").read(wanted)] == chunks[:2]


def test_a_chunk_that_comes_after_the_end_of_its_fetch_is_not_noted(tmp_path: Path) -> None:
    """A fetch is cancelled while a worker still checks a chunk: nothing is left open, and what was noted stays."""
    chunks = [bytes([number]) * 6_000 for number in range(3)]
    wanted = [hashlib.sha256(chunk).digest() for chunk in chunks]
    log = ChunkLog(tmp_path / "fetching.chunks")
    log.append(wanted[0], memoryview(chunks[0]))
    log.close()
    log.append(wanted[1], memoryview(chunks[1]))
    open_files = {str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    assert str(tmp_path / "fetching.chunks") not in open_files
    assert [data for _, data in log.read(wanted)] == chunks[:1]
    log.append(wanted[2], memoryview(chunks[2]))  # the fetch is taken up again
    log.close()
    assert [data for _, data in ChunkLog(tmp_path / "fetching.chunks").read(wanted)] == [chunks[0], chunks[2]]
