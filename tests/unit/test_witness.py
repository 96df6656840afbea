"""A member's answers in an audit: what is not asked for does not travel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gatheringroom import KEY, RUNS

from potluck.round.audit.merkle import HASH_BYTES, NOTHING
from potluck.round.audit.testimony import Challenge
from potluck.round.audit.witness import Witness
from potluck.round.member.tensorwork import SealedWork
from potluck.round.plan.chunks import ChunkGrid

GRID = ChunkGrid(runs=RUNS, chunk_bytes=512 * 1024)


async def test_of_a_chunk_that_it_has_contributed_nothing_to_a_witness_shows_no_values() -> None:
    handlers: dict[type, Any] = {}
    work = SealedWork(None, None)  # type: ignore[arg-type]
    work.committed = [NOTHING] * len(GRID)
    round_work = SimpleNamespace(
        key=KEY,
        digest="d",
        work=work,
        grid=GRID,
        averages=SimpleNamespace(hashes=[bytes([1]) * HASH_BYTES] * len(GRID)),
        exchange=SimpleNamespace(generation=lambda _chunk: 0),
        index_by_peer={},
        tensors=object(),  # it has values, but they were not wanted
    )
    target = SimpleNamespace(coordinator="C", round_work=round_work)
    links: Any = SimpleNamespace(handle=handlers.__setitem__)
    witness = Witness(links, None, lambda: target)  # type: ignore[arg-type, return-value]
    question = SimpleNamespace(sender="C", message=Challenge(key=KEY, chunk=0, generation=0))
    testimony, frames = await handlers[Challenge](question)
    assert (testimony.contribution, testimony.inputs, frames) == (NOTHING, (), ())
    assert witness.counts["challenges"] == 1
