"""Rounds with strangers among the reducers, in memory and in virtual time: who lies is found, named, and done without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import torch
from roundlab import Lab, Member, assert_same_average, at_point, lab, mean_of

from potluck.errors import RoundFailedError
from potluck.round import participation as participation_module
from potluck.round.aggregators import AggregatorSpec
from potluck.round.audit import AuditConfig
from potluck.round.codecs import CodecChoice
from potluck.round.codecs.memory import Buffer
from potluck.round.gathering import GatherConfig
from potluck.round.tensorwork import SealedWork
from potluck.testing.virtualloop import in_virtual_time

EVERY_CHUNK = AuditConfig(chunks_per_reducer=10_000)


@asynccontextmanager
async def strangers(num_strangers: int, *, audit: AuditConfig | None = None, **options: Any) -> AsyncIterator[Lab]:
    """A trusted member that coordinates, and others that nobody vouches for."""
    gather = options.pop("gather", GatherConfig(audit=audit or AuditConfig()))
    async with lab(1, gather=gather, **options) as there:
        for _ in range(num_strangers):
            await there.join(trusted=False)
        yield there


@in_virtual_time
async def test_honest_rounds_pass_the_audit() -> None:
    async with strangers(3, audit=EVERY_CHUNK) as there:
        for epoch in (1, 2):
            results = await there.average()
            assert_same_average(there.members, mean_of(there.members))
            commit = results[0].commit
            assert (commit.epoch, commit.left_out, commit.excluded, commit.revisions) == (epoch, {}, {}, 0)
            assert commit.audited >= 8
        assert there.members[0].averager.statistics()["coordinator_audits"] == 2
