"""The lineage: one chain, moved by one coordinator at a time, whatever wakes up late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from potluck.errors import HubUnavailableError, ProtocolError, RevisionConflictError
from potluck.messages import decode, encode
from potluck.peer.identity import Identity
from potluck.round.lineage import HEAD, Head, Lineage
from potluck.round.plan import Abort, Commit, CommittedMember, Participant, Plan, RoundKey
from potluck.round.signing import Signed, read_commit, read_word, sign_commit, sign_word
from potluck.testing.memoryhub import MemoryHub
from potluck.testing.memorystore import MemoryStore

RUN = "test"


class Run:
    """A hub with a lineage, and coordinators who would like to move it."""

    def __init__(self) -> None:
        self.hub = MemoryHub(RUN)
        self.followers: list[Lineage] = []

    def store(self, name: str) -> MemoryStore:
        return self.hub.connect(name).store("lineage")

    async def follow(self, name: str = "F", **options: Any) -> Lineage:
        lineage = Lineage(self.store(name), RUN, **options)
        await lineage.start()
        self.followers.append(lineage)
        return lineage


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    run = Run()
    yield run
    for lineage in run.followers:
        await lineage.close()
    for connection in list(run.hub._connections):
        await connection.close()


@pytest.fixture
def alice() -> Identity:
    return Identity.temporary()


@pytest.fixture
def bob() -> Identity:
    return Identity.temporary()


def commit_after(lineage: Lineage, who: Identity, term: int, **changes: Any) -> Commit:
    values: dict[str, Any] = {
        "epoch": lineage.epoch + 1,
        "key": RoundKey(epoch=lineage.epoch + 1, token=term, attempt=0),
        "term": term,
        "coordinator": who.peer_id,
        "members": (CommittedMember(peer=who.peer_id, weight=1.0, holds=True),),
        "digest": "d",
        "parent": lineage.parent_digest(),
        "layout": "l",
    }
    return Commit(**{**values, **changes})


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_epochs_follow_each_other_and_everybody_hears_of_each_once(run: Run, alice: Identity) -> None:
    heard: list[int] = []
    lineage = await run.follow("A")
    await run.follow("B", on_commit=lambda commit: heard.append(commit.epoch))
    await lineage.open_term(5)
    for _ in range(3):
        await lineage.commit(commit_after(lineage, alice, 5), alice)
    await settle()
    assert lineage.epoch == 3
    assert heard == [1, 2, 3]
    late = await run.follow("C")
    assert late.epoch == 3
    assert late.parent_digest() == lineage.parent_digest()


async def test_a_commit_before_the_term_is_open_is_refused(run: Run, alice: Identity) -> None:
    lineage = await run.follow()
    with pytest.raises(RevisionConflictError, match="is not open"):
        await lineage.commit(commit_after(lineage, alice, 5), alice)
    assert lineage.epoch == 0


async def test_an_earlier_coordinator_cannot_commit_however_late_it_wakes_up(
    run: Run, alice: Identity, bob: Identity
) -> None:
    sleeper, successor = await run.follow("A"), await run.follow("B")
    await sleeper.open_term(5)
    held = run.hub.hold(run.hub.subjects.store_change("lineage", ">"))  # the sleeper hears of nothing
    await successor.open_term(6)
    stale = commit_after(sleeper, alice, 5)
    with pytest.raises(RevisionConflictError):
        await sleeper.commit(stale, alice)
    await successor.commit(commit_after(successor, bob, 6), bob)
    held.release()
    await settle()
    assert sleeper.epoch == successor.epoch == 1
    assert sleeper.head is not None
    assert sleeper.head.coordinator == bob.peer_id
    with pytest.raises(RevisionConflictError, match="a lease of term 5 is over"):
        await sleeper.open_term(5)


async def test_of_two_commits_for_an_epoch_one_is_made(run: Run, alice: Identity, bob: Identity) -> None:
    one, two = await run.follow("A"), await run.follow("B")
    await one.open_term(5)
    await settle()
    run.hub.hold(run.hub.subjects.store_change("lineage", ">"))
    await one.commit(commit_after(one, alice, 5), alice)
    with pytest.raises(RevisionConflictError):
        await two.commit(commit_after(two, bob, 5), bob)
    assert two.head is not None
    assert two.head.coordinator == alice.peer_id, "who lost learns who won"


class LosingStore:
    """A store whose next answer to a write is lost: the hub has done it, and the writer does not know."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.num_to_lose = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def put(self, key: str, value: bytes, **options: Any) -> int:
        revision = await self._store.put(key, value, **options)
        if self.num_to_lose:
            self.num_to_lose -= 1
            raise HubUnavailableError("the answer was lost")
        return revision


async def test_a_commit_whose_answer_was_lost_is_found_to_be_made(run: Run, alice: Identity) -> None:
    store = LosingStore(run.store("A"))
    lineage = Lineage(store, RUN)
    await lineage.start()
    run.followers.append(lineage)
    await lineage.open_term(5)
    store.num_to_lose = 1
    commit = commit_after(lineage, alice, 5)
    await lineage.commit(commit, alice)
    assert lineage.epoch == 1
    await lineage.commit(commit, alice)  # once more does no harm
    assert lineage.epoch == 1


async def test_a_commit_that_does_not_follow_is_refused(run: Run, alice: Identity) -> None:
    lineage = await run.follow()
    await lineage.open_term(5)
    for wrong in ({"epoch": 2}, {"parent": "x"}):
        with pytest.raises(RevisionConflictError, match="does not follow"):
            await lineage.commit(commit_after(lineage, alice, 5, **wrong), alice)


@pytest.mark.parametrize("how", ["garbage", "forged", "again", "fork", "deleted"])
async def test_a_bad_head_is_passed_over_and_the_next_term_restores_the_good_one(
    run: Run, alice: Identity, bob: Identity, how: str
) -> None:
    lineage, follower = await run.follow("A"), await run.follow("B")
    await lineage.open_term(5)
    await lineage.commit(commit_after(lineage, alice, 5), alice)
    await settle()
    good = follower.parent_digest()
    store = run.store("M")
    forged = sign_commit(commit_after(lineage, alice, 5), bob, RUN)
    again = sign_commit(msgspec.structs.replace(lineage.head, digest="other"), alice, RUN)  # type: ignore[type-var]
    fork = sign_commit(commit_after(lineage, alice, 5, parent="elsewhere"), alice, RUN)
    match how:
        case "garbage":
            await store.put(HEAD, b"\xc1")
        case "deleted":
            await store.delete(HEAD)
        case _:
            signed = {"forged": forged, "again": again, "fork": fork}[how]
            await store.put(HEAD, encode(Head(term=5, commit=signed)))
    await settle()
    assert (follower.epoch, follower.parent_digest(), follower.bad_heads) == (1, good, 1)
    await lineage.open_term(6)
    await lineage.commit(commit_after(lineage, bob, 6), bob)
    newcomer = await run.follow("N")
    assert newcomer.epoch == 2
    await settle()
    assert follower.epoch == 2


async def test_opening_a_term_is_not_a_commit(run: Run, alice: Identity) -> None:
    heard: list[int] = []
    lineage = await run.follow("A")
    await lineage.open_term(5)
    await lineage.commit(commit_after(lineage, alice, 5), alice)
    await run.follow("B", on_commit=lambda commit: heard.append(commit.epoch))
    await lineage.open_term(6)
    await settle()
    assert heard == [1]
    entry = await run.store("R").get(HEAD)
    assert entry is not None
    assert decode(Head, entry.value or b"").term == 6


# Signatures


def plan() -> Plan:
    members = (Participant(peer="P", session="s", weight=1.0),)
    return Plan(key=RoundKey(epoch=1, token=2, attempt=0), members=members, parts=(), layout="l", deadline=0.0)


def test_plans_and_aborts_are_read_as_what_they_are(alice: Identity) -> None:
    abort = Abort(key=plan().key, reason="because")
    assert read_word(sign_word(plan(), alice, RUN), alice.peer_id, RUN) == plan()
    assert read_word(sign_word(abort, alice, RUN), alice.peer_id, RUN) == abort


def test_a_word_counts_only_from_its_signer_in_its_run_and_unchanged(alice: Identity, bob: Identity) -> None:
    data = sign_word(plan(), alice, RUN)
    signed = decode(Signed, data)
    changed = encode(msgspec.structs.replace(signed, body=encode(msgspec.structs.replace(plan(), deadline=9.0))))
    for bad, sender, run in [
        (data, bob.peer_id, RUN),
        (data, alice.peer_id, "other-run"),
        (changed, alice.peer_id, RUN),
        (encode(msgspec.structs.replace(signed, signature=b"")), alice.peer_id, RUN),
        (b"\xc1", alice.peer_id, RUN),
    ]:
        with pytest.raises(ProtocolError):
            read_word(bad, sender, run)


async def test_a_signed_commit_is_no_plan_and_a_plan_no_commit(run: Run, alice: Identity) -> None:
    lineage = await run.follow()
    signed = sign_commit(commit_after(lineage, alice, 1), alice, RUN)
    assert read_commit(signed, RUN).epoch == 1
    with pytest.raises(ProtocolError):
        read_word(encode(signed), alice.peer_id, RUN)
    with pytest.raises(ProtocolError):
        read_commit(decode(Signed, sign_word(plan(), alice, RUN)), RUN)
