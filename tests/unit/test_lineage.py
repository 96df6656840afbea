"""The lineage: one chain, moved by one coordinator at a time, whatever wakes up late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from potluck.errors import HubUnavailableError, ProtocolError, RetryableError, RevisionConflictError
from potluck.hub.connection import Entry
from potluck.hub.leaserecord import KEY, LeaseRecord
from potluck.messages import decode, encode
from potluck.peer.identity import Identity
from potluck.peer.lease import LeaseView
from potluck.round.lineage import HEAD, Head, Lineage
from potluck.round.plan.messages import Abort, Commit, CommittedMember, Participant, Plan, RoundKey
from potluck.round.plan.signing import Signed, read_commit, read_word, sign_commit, sign_word
from potluck.sim.memoryhub import MemoryHub
from potluck.sim.memorystore import MemoryStore
from potluck.sim.virtualclock import VirtualClock

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
    for connection in list(run.hub.connections):
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


# Who held the lease


class Tenure:
    """A peer's lease and what it has been told of the others', as far as a lineage asks for it."""

    def __init__(self, token: int = 0) -> None:
        self.view = LeaseView()
        self.token = token
        self.proven_at = 0.0
        self.clock = VirtualClock()

    def told(self, revision: int, who: Identity, token: int = 0) -> None:
        """A change of the lease; without a token somebody takes it, with one it is renewed."""
        record = encode(LeaseRecord(holder=who.peer_id, token=token))
        self.view.apply(Entry(key=KEY, value=record, revision=revision, written_at=0.0))

    def renew(self) -> None:
        self.clock.advance(0.5)
        self.proven_at = self.clock.monotonic()


async def usurp(run: Run, commit: Commit | None, who: Identity, term: int) -> None:
    """Write a head, as everybody can who may coordinate."""
    signed = sign_commit(commit, who, RUN) if commit is not None else None
    await run.store("M").put(HEAD, encode(Head(term=term, commit=signed)))
    await settle()


async def one_epoch(run: Run, who: Identity, term: int, lease: Tenure) -> Lineage:
    """A coordinator that has committed an epoch."""
    lease.told(term, who)
    lease.told(term + 3, who, term)
    lineage = await run.follow("A", lease=lease)
    await lineage.open_term(term)
    await lineage.commit(commit_after(lineage, who, term), who)
    await settle()
    return lineage


@pytest.mark.parametrize(("term", "opened"), [(5, 5), (7, 7), (4, 5), (9, 5)])
async def test_a_commit_of_one_that_did_not_hold_the_lease_is_passed_over_and_overwritten(
    run: Run, alice: Identity, bob: Identity, term: int, opened: int
) -> None:
    """With the holder's token, that of a renewal, an earlier one, and one that was never opened."""
    lease, others = Tenure(5), Tenure()
    lineage = await one_epoch(run, alice, 5, lease)
    others.told(5, alice)
    others.told(8, alice, 5)
    follower = await run.follow("F", lease=others)
    await usurp(run, commit_after(lineage, bob, term), bob, opened)
    assert [(each.epoch, each.bad_heads) for each in (lineage, follower)] == [(1, 1), (1, 1)]
    lease.renew()
    commit = commit_after(lineage, alice, 5)
    await lineage.commit(commit, alice)
    await settle()
    assert follower.head == lineage.head == commit


async def test_a_commit_of_a_lease_that_was_not_heard_of_waits_for_the_news(
    run: Run, alice: Identity, bob: Identity
) -> None:
    heard: list[int] = []
    lease, knowing = Tenure(), Tenure()
    lineage = await one_epoch(run, alice, 5, lease)
    follower = await run.follow("F", lease=lease, on_commit=lambda commit: heard.append(commit.epoch))
    knowing.token = 12
    knowing.told(12, bob)
    successor = await run.follow("B", lease=knowing)
    await successor.open_term(12)
    await successor.commit(commit_after(successor, bob, 12), bob)
    await settle()
    assert (follower.epoch, heard) == (1, [1])
    lease.told(10, alice, 5)
    follower.lease_changed()
    assert follower.epoch == 1
    lease.told(12, bob)
    follower.lease_changed()
    assert (follower.epoch, follower.bad_heads, heard) == (2, 0, [1, 2])
    assert lineage.epoch == 1, "nobody has told it of the lease"


async def test_a_commit_that_waited_is_passed_over_when_the_lease_turns_out_to_be_another_s(
    run: Run, alice: Identity, bob: Identity
) -> None:
    lease = Tenure()
    lineage = await one_epoch(run, alice, 5, lease)
    await usurp(run, commit_after(lineage, bob, 12), bob, 12)
    assert (lineage.epoch, lineage.bad_heads) == (1, 0)
    lease.told(12, alice)
    lineage.lease_changed()
    assert (lineage.epoch, lineage.bad_heads) == (1, 1)
    lineage.lease_changed()
    assert lineage.bad_heads == 1


async def test_a_newcomer_believes_what_it_finds_of_terms_before_its_time(
    run: Run, alice: Identity, bob: Identity
) -> None:
    await one_epoch(run, alice, 5, Tenure())
    for told in ((), (7,), (7, 9)):  # nobody coordinates now, somebody else does, and has renewed
        lease = Tenure()
        for revision in told:
            lease.told(revision, bob, 7 if revision > 7 else 0)
        newcomer = await run.follow("N", lease=lease)
        assert (newcomer.epoch, newcomer.bad_heads) == (1, 0)


@pytest.mark.parametrize("with_commit", [False, True])
async def test_a_term_that_nobody_was_given_shuts_out_nobody(
    run: Run, alice: Identity, bob: Identity, with_commit: bool
) -> None:
    lease = Tenure(5)
    lineage = await one_epoch(run, alice, 5, lease)
    lease.renew()
    lie = commit_after(lineage, bob, 2**62) if with_commit else None
    lease.clock.advance(0.1)
    await usurp(run, lie, bob, 2**62)
    commit = commit_after(lineage, alice, 5)
    with pytest.raises(RetryableError, match="once renewed"):  # there might be a later holder
        await lineage.commit(commit, alice)
    lease.renew()
    await lineage.commit(commit, alice)
    assert (lineage.epoch, lineage.term, lineage.bad_heads) == (2, 5, 1)
    later = Tenure(20)
    later.told(20, bob)
    await usurp(run, None, bob, 2**62)
    successor = await run.follow("S", lease=later)
    later.renew()
    await successor.open_term(20)
    assert successor.term == 20


async def test_a_later_term_that_was_given_to_somebody_shuts_out_those_before(
    run: Run, alice: Identity, bob: Identity
) -> None:
    lease, later = Tenure(5), Tenure(12)
    lineage = await one_epoch(run, alice, 5, lease)
    lease.renew()
    later.told(12, bob)
    successor = await run.follow("B", lease=later)
    lease.clock.advance(0.1)
    await successor.open_term(12)
    await settle()
    commit = commit_after(lineage, alice, 5)
    with pytest.raises(RetryableError):
        await lineage.commit(commit, alice)
    lease.token = 0  # it cannot be renewed
    with pytest.raises(RevisionConflictError, match="a lease of term 5 is over"):
        await lineage.commit(commit, alice)
    assert lineage.epoch == 1


async def test_who_takes_the_lease_takes_over_what_was_committed_under_one_that_it_never_heard_of(
    run: Run, alice: Identity, bob: Identity
) -> None:
    lease, other = Tenure(), Tenure(9)
    mine = await one_epoch(run, alice, 5, lease)
    other.told(9, bob)
    theirs = await run.follow("B", lease=other)
    await theirs.open_term(9)
    await theirs.commit(commit_after(theirs, bob, 9), bob)
    await settle()
    assert mine.epoch == 1
    lease.token = lease.view.newest_revision = 12  # taken, and the change is not told yet
    mine.lease_changed()
    await mine.open_term(12)
    assert (mine.epoch, mine.parent_digest()) == (2, theirs.parent_digest())


async def test_a_newcomer_puts_nothing_in_the_place_of_what_it_can_only_doubt(
    run: Run, alice: Identity, bob: Identity
) -> None:
    lineage = await one_epoch(run, alice, 5, Tenure())
    await usurp(run, commit_after(lineage, bob, 2**62), bob, 2**62)
    lease = Tenure(20)
    lease.told(20, alice)
    newcomer = await run.follow("N", lease=lease)
    lease.renew()
    with pytest.raises(RetryableError, match="nothing better"):
        await newcomer.open_term(20)
    assert newcomer.epoch == 0


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
