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
