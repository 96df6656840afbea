"""The history that a coordinator writes: points, pages, rounds, and the next coordinator that goes on."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from potluck.clock import SystemClock
from potluck.messages import decode, encode
from potluck.monitor.follower import RunFollower
from potluck.peer.identity import Identity
from potluck.round.averager import Averager
from potluck.round.outcome import FailedRound
from potluck.round.plan.messages import Commit, CommittedMember, RoundKey
from potluck.sim.memoryrun import MemoryRun
from potluck.testing.polling import poll_until
from potluck.training.books.history import (
    PAGE_POINTS,
    POINT,
    TAIL_KEY,
    HistoryTail,
    RoundRecord,
    mean_loss,
    page_key,
    record_of,
    round_key,
)
from potluck.training.books.historydesk import HistoryDesk


def commit(epoch: int, *, at: float = 100.0, seconds: float = 2.0, **members: float) -> Commit:
    return Commit(
        epoch=epoch,
        key=RoundKey(epoch=epoch, token=1, attempt=0),
        term=1,
        coordinator="alice",
        members=tuple(
            CommittedMember(peer=peer, weight=1.0, holds=True, seconds=taken, sent_bytes=1000)
            for peer, taken in members.items()
        ),
        digest="d",
        parent="p",
        layout="l",
        committed_at=at,
        seconds=seconds,
        left_out={"carol": "it was gone"},
    )


def failed(epoch: int, *members: str) -> FailedRound:
    return FailedRound(
        key=RoundKey(epoch=epoch, token=1, attempt=1),
        phase="exchanging",
        reason=f"too many members were lost: {members[-1]}: was gone",
        members=members,
        troubles={members[-1]: "was gone"},
        seconds=4.0,
    )


def test_a_commit_becomes_a_record() -> None:
    first, second = commit(1, at=100.0), commit(2, at=110.0, alice=0.5, bob=1.5)
    record = record_of(second, {"alice": "Alice"}, first)
    assert (record.since_last_seconds, record.seconds, record.coordinator) == (8.0, 2.0, "Alice")
    assert [(m.name, m.seconds) for m in record.members] == [("Alice", 0.5), ("bob", 1.5)]
    assert record.left_out == {"carol": "it was gone"}
    assert record_of(second, {}, None).since_last_seconds is None
    assert record_of(commit(9), {}, first).since_last_seconds is None  # what was between is not known


def test_losses_count_by_speed() -> None:
    assert mean_loss([(1.0, 3.0), (3.0, 1.0), (None, 5.0), (math.nan, 9.0)]) == 1.5
    assert mean_loss([(1.0, 0.0)]) is None


async def test_the_coordinator_writes_the_history_and_a_newcomer_reads_all_of_it() -> None:
    run = MemoryRun(clock=SystemClock())
    await run.open()
    members = {}
    for name in ("alice", "bob"):
        peer = await run.join(name, identity=Identity.temporary(), coordinates=True)
        averager = Averager(peer)
        await averager.start()
        members[name] = (peer, averager, HistoryDesk(peer.session, averager))
    (alice, first, first_desk), (bob, second, second_desk) = members["alice"], members["bob"]
    await poll_until(lambda: bool(first.lease.token), 60, "a coordinator")
    bob.session.update_beacon(samples_per_second=5.0, loss=2.0)
    for averager in (first, second):
        averager._committed(commit(1, **{alice.peer_id: 0.5, bob.peer_id: 1.5}))
    await poll_until(lambda: first_desk.counts["written"] > 0 and first_desk.counts["rounds"] == 1, 60, "the history")
    assert second_desk.counts["written"] == 0
    await first_desk.close()
    await first.close()
    await run.kill(alice)
    await poll_until(lambda: bool(second.lease.token), 60, "another coordinator")
    second._committed(commit(2, at=110.0, **{bob.peer_id: 1.0}))
    second._coordinator.on_failure(failed(3, bob.peer_id, alice.peer_id))
    await poll_until(lambda: second_desk.counts["rounds"] == second_desk.counts["failures"] == 1, 60, "another round")
    await second_desk.close()
    newcomer = await run.join("newcomer", identity=Identity.temporary(), role="observer")
    follower = await RunFollower.start(newcomer.session)
    assert [record.epoch for record in follower.past.rounds()] == [1, 2]
    [failure] = follower.past.failures()
    assert (failure.epoch, failure.attempt, failure.phase, failure.seconds) == (3, 2, "exchanging", 4.0)
    assert failure.members == ("bob", "alice")  # though she is in nobody's roster any more
    assert failure.reason == "too many members were lost: alice: was gone"
    assert follower.past.points["epoch"].tolist()[-1] == 2
    assert follower.past.total("sent_bytes") == 3000.0
    entry = await newcomer.session.hub.store("history").get(round_key(2))
    assert entry is not None
    assert entry.value is not None
    assert msgspec.structs.asdict(decode(RoundRecord, entry.value))["members"][0].name == "bob"
    await follower.close()
    await second.close()
    await run.close()


async def test_a_page_that_fills_up_while_one_looks_is_fetched_whole() -> None:
    run = MemoryRun(clock=SystemClock())
    await run.open()
    host = await run.join("host", identity=Identity.temporary(), coordinates=True, role="aux")
    newcomer = await run.join("newcomer", identity=Identity.temporary(), role="observer")
    store = host.session.hub.store("history")
    points = np.zeros(PAGE_POINTS, POINT)
    points["at"] = 1.0 + np.arange(PAGE_POINTS)
    await store.put(TAIL_KEY, encode(HistoryTail(page=0, points=points[:3].tobytes())))
    follower = await RunFollower.start(newcomer.session)
    assert len(follower.past) == 3
    await store.put(page_key(0), points.tobytes())  # the tail was never seen that long
    await store.put(TAIL_KEY, encode(HistoryTail(page=1, points=points[:1].tobytes())))
    await poll_until(lambda: len(follower.past.points) == PAGE_POINTS + 1, 60, "the whole page")
    await store.put(TAIL_KEY, b"scribble")
    await store.put(round_key(1), b"scribble")
    await poll_until(lambda: follower.counts == {"bad_pages": 1, "bad_rounds": 1}, 60, "what cannot be read")
    assert len(follower.past.points) == PAGE_POINTS + 1
    await follower.close()
    await run.close()
