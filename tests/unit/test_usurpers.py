"""One that may coordinate and does not hold the lease writes what it likes: the run goes on without noticing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from roundlab import Lab, Member, assert_same_average, lab, mean_of

from potluck.hub.leaserecord import KEY, LeaseRecord
from potluck.messages import encode
from potluck.peer.lease import TTL_SECONDS
from potluck.round.lineage import HEAD, Head
from potluck.round.plan.messages import Commit, RoundKey
from potluck.round.plan.signing import sign_commit
from potluck.sim.virtualloop import in_virtual_time

NEVER = 2**62


def next_commit(usurper: Member, term: int) -> Commit:
    lineage = usurper.averager.lineage
    assert lineage.head is not None
    epoch = lineage.epoch + 1
    return msgspec.structs.replace(
        lineage.head,
        epoch=epoch,
        key=RoundKey(epoch=epoch, token=term, attempt=0),
        term=term,
        coordinator=usurper.id,
        parent=lineage.parent_digest(),
        digest="0" * 32,
    )


async def write_head(usurper: Member, term: int, commit: Commit | None) -> None:
    session = usurper.peer.session
    signed = sign_commit(commit, session.identity, session.subjects.run) if commit is not None else None
    await session.hub.store("lineage").put(HEAD, encode(Head(term=term, commit=signed)))


async def commit_in_the_holders_term(usurper: Member) -> None:
    term = usurper.averager.lease.view.token
    await write_head(usurper, term, next_commit(usurper, term))


async def commit_in_a_term_to_come(usurper: Member) -> None:
    await write_head(usurper, NEVER, next_commit(usurper, NEVER))


async def open_a_term_to_come(usurper: Member) -> None:
    await write_head(usurper, NEVER, None)


async def claim_a_token_to_come(usurper: Member) -> None:
    record = LeaseRecord(holder=usurper.id, session=usurper.peer.session.card.session, token=NEVER)
    await usurper.peer.session.hub.store("lease").put(KEY, encode(record), ttl_seconds=TTL_SECONDS)


async def epoch_of(there: Lab, epoch: int) -> None:
    """Everybody makes this epoch together."""
    results = await there.average()
    assert {result.commit.epoch for result in results} == {epoch}
    assert all(result.holds for result in results)
    assert_same_average(there.members, mean_of(there.members))


@pytest.mark.parametrize(
    "deed", [commit_in_the_holders_term, commit_in_a_term_to_come, open_a_term_to_come, claim_a_token_to_come]
)
@in_virtual_time
async def test_the_run_goes_on_and_so_does_the_next_coordinator(deed: Callable[[Member], Awaitable[None]]) -> None:
    async with lab(4, all_coordinate=True) as there:
        await epoch_of(there, 1)
        usurper = next(member for member in there.members if not member.averager.lease.is_held)
        await deed(usurper)
        await asyncio.sleep(0.1)
        assert {member.averager.epoch for member in there.members} == {1}
        await epoch_of(there, 2)
        await there.kill(usurper)
        await epoch_of(there, 3)
        await deed(next(member for member in there.members if not member.averager.lease.is_held))
        await there.kill(there.coordinator())
        newcomer = await there.join(number=5)
        await epoch_of(there, 4)
        assert newcomer.averager.epoch == 4
