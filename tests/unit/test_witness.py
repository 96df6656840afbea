"""A member's answers in an audit: what is not asked for does not travel."""

from __future__ import annotations

from typing import Any, ClassVar

from gatheringroom import KEY, RUNS

from potluck.link.dispatch import Incoming
from potluck.round.audit.merkle import HASH_BYTES, NOTHING
from potluck.round.audit.testimony import Challenge
from potluck.round.audit.witness import Witness
from potluck.round.member.messenger import ReportTarget
from potluck.round.member.tensorwork import SealedWork
from potluck.round.plan.chunks import ChunkGrid
from potluck.sim.inlineworkers import InlineWorkers

GRID = ChunkGrid(runs=RUNS, chunk_bytes=512 * 1024)


class Handlers:
    """Links that only keep what handles which kind of message."""

    def __init__(self) -> None:
        self.by_kind: dict[type, Any] = {}

    def handle(self, kind: type, handler: Any) -> None:
        self.by_kind[kind] = handler


class CompletedRound:
    """A round of which this peer has all averages."""

    key, digest, grid = KEY, "d", GRID
    index_by_peer: ClassVar[dict[str, int]] = {}
    tensors = object()  # it has values, but they were not wanted

    def __init__(self, work: SealedWork) -> None:
        self.work = work
        self.averages = self.exchange = self
        self.hashes = [bytes([1]) * HASH_BYTES] * len(GRID)

    def generation(self, _chunk: int) -> int:
        """It was exchanged once."""
        return 0


async def test_of_a_chunk_that_it_has_contributed_nothing_to_a_witness_shows_no_values() -> None:
    links = Handlers()
    work = SealedWork(None, None)  # type: ignore[arg-type]
    work.committed = [NOTHING] * len(GRID)
    target = ReportTarget("C", CompletedRound(work))  # type: ignore[arg-type]
    witness = Witness(links, InlineWorkers(), lambda: target)  # type: ignore[arg-type]
    question = Incoming("C", Challenge(key=KEY, chunk=0, generation=0), [])
    testimony, frames = await links.by_kind[Challenge](question)
    assert (testimony.contribution, testimony.inputs, frames) == (NOTHING, (), ())
    assert witness.counts["challenges"] == 1
