"""What a run could go back to, and who has it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from potluck.errors import ConfigurationError
from potluck.messages import encode
from potluck.sim.memoryrun import MemoryPeer, MemoryRun
from potluck.sim.virtualloop import LoopClock, in_virtual_time
from potluck.state.announcement import KEPT, WANTED, Kept, KeptState
from potluck.training.manifest.earlier import HOST, EarlierState, announced, chosen, merged

A, B = "a" * 64, "b" * 64
SAVED = EarlierState(epoch=20, digest=A, num_bytes=5, keepers=(HOST,), saved_at=1.0)
IN_MEMORY = EarlierState(epoch=31, digest=B, num_bytes=5, keepers=("Ada",), is_on_disk=False)


async def keeps(run: MemoryRun, peer: MemoryPeer, *states: KeptState, saved: tuple[KeptState, ...] = ()) -> None:
    """It says what it keeps when it is asked, as a directory does."""
    hub, subjects = peer.session.hub, run.hub.subjects
    kept = encode(Kept(session=peer.session.card.session, states=states, saved=saved))

    async def asked(_delivery: object) -> None:
        await hub.publish(subjects.news(peer.peer_id, KEPT), kept)

    await hub.subscribe(subjects.news("*", WANTED), asked)


def state(epoch: int, digest: str, **options: bool) -> KeptState:
    return KeptState(epoch=epoch, digest=digest, num_bytes=5, made_at=epoch, **options)


@asynccontextmanager
async def trusted_and_stranger() -> AsyncIterator[tuple[MemoryRun, MemoryPeer, MemoryPeer]]:
    """A run with Alan, who is trusted, and Mallory, who is not."""
    run = MemoryRun(clock=LoopClock())
    await run.open()
    yield run, await run.join("Alan", role="aux"), await run.join("Mallory", coordinates=False, trusted=False)
    await run.close()


async def found_in(run: MemoryRun) -> list[EarlierState]:
    listener = run.hub.connect("ORGANISER")
    found = await announced(listener, run.hub.subjects, "ORGANISER")
    await listener.close()
    return found


@in_virtual_time
async def test_whoever_is_there_is_asked_what_it_holds() -> None:
    async with trusted_and_stranger() as (run, alan, mallory):
        await keeps(run, alan, state(31, A), state(30, A, is_served=False), state(20, A, is_backup=True))
        await keeps(run, mallory, state(31, B), state(29, B))
        found = await found_in(run)
    told = {(each.epoch, each.digest, each.keepers) for each in found}
    assert told == {(31, A, ("Alan",)), (20, A, ("Alan",)), (29, B, ("Mallory",))}, "whom we trust outweighs strangers"


@in_virtual_time
async def test_what_trusted_peers_have_on_disk_is_found_and_what_strangers_say_to_have_is_not() -> None:
    async with trusted_and_stranger() as (run, alan, mallory):
        await keeps(run, alan, state(31, A), saved=(state(30, A, is_backup=True), state(20, A, is_backup=True)))
        await keeps(run, mallory, saved=(state(20, B, is_backup=True), state(10, B, is_backup=True)))
        found = await found_in(run)
    told = {(each.epoch, each.digest, each.keepers, each.is_on_disk) for each in found}
    assert told == {(31, A, ("Alan",), False), (30, A, ("Alan",), True), (20, A, ("Alan",), True)}


def test_the_hosts_own_backup_counts_where_there_is_one() -> None:
    other = EarlierState(epoch=20, digest=B, num_bytes=5, keepers=("Ada",))
    assert merged([SAVED], [other, IN_MEMORY]) == [IN_MEMORY, SAVED]


def test_what_can_be_gone_back_to() -> None:
    there = [IN_MEMORY, SAVED]
    assert chosen(there, 20, digest="", is_paused=False) == SAVED
    assert chosen(there, 31, digest="", is_paused=True) == IN_MEMORY
    elsewhere = EarlierState(epoch=12, digest=A, num_bytes=5, keepers=("Alan",))
    assert chosen([elsewhere], 12, digest="", is_paused=False) == elsewhere
    assert chosen([], 7, digest=B, is_paused=False).digest == B
    with pytest.raises(ConfigurationError, match="pause"):
        chosen(there, 31, digest="", is_paused=False)
    with pytest.raises(ConfigurationError, match=r"31 \(Ada\); 20 \(this host\)"):
        chosen(there, 7, digest="", is_paused=True)
    with pytest.raises(ConfigurationError, match="64 characters"):
        chosen(there, 7, digest="abc", is_paused=True)
