"""The audit's pure parts: the tree of hashes, the draw, and the verdict in whatever order witnesses speak."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from roundworld import World
from roundworld import make_plan as make_round

from potluck.errors import ConfigurationError, ProtocolError
from potluck.messages import decode, encode
from potluck.peer.identity import Identity
from potluck.round.audit import testimony as words
from potluck.round.audit.auditcore import Action, AskWitnesses, Audit, AuditConfig, AuditResult, Recompute, draw_chunks
from potluck.round.audit.disputes import Holding, read_holding, settle
from potluck.round.audit.exclusions import MAX_EXCLUSIONS, PATIENT_ATTEMPTS, Absences, Exclusions, why_excluded
from potluck.round.audit.merkle import NOTHING, is_under, merkle_path, merkle_root
from potluck.round.audit.seals import Notary, Sealer, sealed_hash
from potluck.round.audit.testimony import Challenge, FalseTestimony, WitnessAccount, examine, reducer_of
from potluck.round.coordinator.director import Finish, GiveUp
from potluck.round.plan.messages import Commit, Exclusion, Part, Participant, Plan, Report, RoundKey

KEY = RoundKey(epoch=1, token=7, attempt=0)

hashes = st.binary(min_size=32, max_size=32)


# One hash for many


@given(leaves=st.lists(hashes, min_size=1, max_size=40), data=st.data())
def test_every_leaf_can_be_shown_and_no_other(leaves: list[bytes], data: st.DataObject) -> None:
    root = merkle_root(leaves)
    index = data.draw(st.integers(0, len(leaves) - 1))
    path = merkle_path(leaves, index)
    assert is_under(root, len(leaves), index, leaves[index], path)
    assert len(path) <= len(leaves).bit_length()
    other = data.draw(hashes.filter(lambda leaf: leaf != leaves[index]))
    assert not is_under(root, len(leaves), index, other, path)
    elsewhere = data.draw(st.integers(-1, len(leaves)))
    if elsewhere != index and not (0 <= elsewhere < len(leaves) and leaves[elsewhere] == leaves[index]):
        assert not is_under(root, len(leaves), elsewhere, leaves[index], path)
    assert not is_under(root, len(leaves) + 1, index, leaves[index], path)
    assert not is_under(root, len(leaves), index, leaves[index], (*path, bytes(32)))
    if path:
        assert not is_under(root, len(leaves), index, leaves[index], path[:-1])


@given(leaves=st.lists(hashes, max_size=20), data=st.data())
def test_roots_differ_where_leaves_do(leaves: list[bytes], data: st.DataObject) -> None:
    others = data.draw(st.lists(hashes, max_size=20))
    assert (merkle_root(leaves) == merkle_root(others)) == (leaves == others)
    assert merkle_root(leaves) != merkle_root([*leaves, NOTHING])


@pytest.mark.parametrize("num_leaves", range(1, 10))
def test_no_leaf_stands_beside_the_tree(num_leaves: int) -> None:
    leaves = [bytes([number]) * 32 for number in range(num_leaves)]
    root = merkle_root(leaves)
    for index, leaf in enumerate(leaves):
        path = merkle_path(leaves, index)
        for elsewhere in {*range(-num_leaves, 4 * num_leaves)} - {index}:
            assert not is_under(root, num_leaves, elsewhere, leaf, path), (index, elsewhere)


def test_a_root_is_the_same_for_every_version_of_potluck() -> None:
    def sha256(*parts: bytes) -> bytes:
        return hashlib.sha256(b"".join(parts)).digest()

    leaves = [bytes([number]) * 32 for number in range(3)]
    first, second, third = (sha256(b"\0", leaf) for leaf in leaves)
    left = sha256(b"\1", first, second)
    assert merkle_root(leaves) == sha256(b"\2", (3).to_bytes(8, "big"), sha256(b"\1", left, third))
    assert merkle_path(leaves, 1) == (first, third)
    assert merkle_path(leaves, 2) == (left,)


# Plans


def make_plan(num_members: int, chunks_each: int, *, aux: int = 0, reducers: int | None = None) -> Plan:
    """Members of which the first `aux` contribute nothing; the first `reducers` reduce."""
    members = tuple(
        Participant(peer=f"peer{i}", session="s", weight=float(i >= aux), sends=i >= aux) for i in range(num_members)
    )
    parts = tuple(
        Part(reducer=i, start=i * chunks_each, stop=(i + 1) * chunks_each) for i in range(reducers or num_members)
    )
    return Plan(key=KEY, members=members, parts=parts, layout="x", deadline=1e9, audit=True)


# The draw


def test_so_many_chunks_of_each_reducer_are_drawn() -> None:
    plan = make_plan(4, 10)
    for chunks in (1, 2, 10, 99):
        drawn = draw_chunks(plan, AuditConfig(chunks_per_reducer=chunks), random.Random(1))
        assert len(set(drawn)) == len(drawn) == 4 * min(chunks, 10)
        assert [sum(reducer_of(plan, chunk) == i for chunk in drawn) for i in range(4)] == [min(chunks, 10)] * 4


@pytest.mark.parametrize("num_drawn", [1, 2, 5])
def test_one_spoilt_chunk_in_ten_is_drawn_with_the_odds_that_the_docs_state(num_drawn: int) -> None:
    plan = make_plan(2, 10)
    rng = random.Random(num_drawn)
    trials = 4000
    found = sum(13 in draw_chunks(plan, AuditConfig(chunks_per_reducer=num_drawn), rng) for _ in range(trials))
    expected = num_drawn / 10
    assert expected >= 1 - 0.9**num_drawn
    assert abs(found / trials - expected) < 5 * (expected * (1 - expected) / trials) ** 0.5


def test_an_audit_of_many_members_is_kept_within_its_bytes_and_everybody_is_drawn_in_turn() -> None:
    plan = make_plan(64, 4)
    affordable = 10
    config = AuditConfig(most_bytes=affordable * 64 * plan.chunk_bytes)
    rng = random.Random(3)
    seen: set[int] = set()
    for _ in range(100):
        drawn = draw_chunks(plan, config, rng)
        assert len(drawn) == affordable
        seen |= {reducer_of(plan, chunk) for chunk in drawn}
    assert seen == set(range(64))
    assert len(draw_chunks(plan, AuditConfig(most_bytes=0), rng)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunks_per_reducer": -1},
        {"most_bytes": -1},
        {"answer_seconds": 0.0},
        {"exclusion_seconds": -1.0},
        {"silence_seconds": -1.0},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        AuditConfig(**wrong)  # type: ignore[arg-type]


# The verdict, in any order of events


def contribution_hash(member: int, chunk: int) -> bytes:
    return sealed_hash(b"contribution %d %d" % (member, chunk))


def average_hash(chunk: int) -> bytes:
    return sealed_hash(b"average %d" % chunk)


@dataclass
class Court:
    """An audit whose witnesses speak in random order, some of them liars."""

    plan: Plan
    holders: set[int]
    rng: random.Random
    altering: set[int]  # reducers
    censoring: set[int]  # reducers
    two_faced: set[int]  # contributors
    faulty: set[int]
    mute: set[int]

    def account(self, member: int, chunk: int) -> WitnessAccount | FalseTestimony | None:
        if member in self.mute:
            return None
        if member in self.faulty:
            return FalseTestimony("it contradicts itself")
        reducer = reducer_of(self.plan, chunk)
        sends = self.plan.members[member].weight > 0
        inputs = None
        if member == reducer:
            inputs = {i: self.sent(i, chunk) for i, m in enumerate(self.plan.members) if m.weight > 0}
            if member in self.censoring:
                del inputs[min(i for i in inputs if i in self.holders and self.plan.members[i].sends)]
        spoilt = reducer in self.altering
        average = sealed_hash(average_hash(chunk)) if spoilt else average_hash(chunk)
        shown = contribution_hash(member, chunk) if sends else b""
        return WitnessAccount(average=average, contribution=shown, inputs=inputs)

    def sent(self, member: int, chunk: int) -> bytes:
        shown = contribution_hash(member, chunk)
        return sealed_hash(shown) if member in self.two_faced else shown

    def hold(self, chunks: list[int]) -> AuditResult:
        audit = Audit(self.plan, self.holders, chunks)
        events: list[tuple[str, int, int]] = []
        verdicts: list[AuditResult] = []

        def carry_out(actions: list[Action]) -> None:
            for action in actions:
                match action:
                    case AskWitnesses(chunk, members):
                        events.extend(("answer", chunk, member) for member in members)
                    case Recompute(chunk, contributors):
                        assert not set(contributors) & (self.two_faced | self.mute | self.faulty)
                        events.append(("recomputed", chunk, 0))
                    case AuditResult():
                        verdicts.append(action)

        carry_out(audit.start())
        while events:
            what, chunk, member = events.pop(self.rng.randrange(len(events)))
            if what == "recomputed":
                carry_out(audit.recomputed(chunk, average_hash(chunk)))
                assert audit.is_closed(chunk)
                continue
            account = self.account(member, chunk)
            for _ in range(self.rng.choice([1, 1, 2])):  # what is said twice counts once
                if account is None:
                    carry_out(audit.unheard(member, chunk, "it was silent"))
                else:
                    carry_out(audit.testified(member, chunk, account))
        assert len(verdicts) == 1, "an audit ends, and once"
        assert all(audit.is_closed(chunk) for chunk in chunks)
        return verdicts[0]


@settings(max_examples=300)
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_the_verdict_names_the_liars_and_nobody_else(data: st.DataObject, seed: int) -> None:
    num_members = data.draw(st.integers(2, 6))
    aux = data.draw(st.integers(0, num_members - 1))
    plan = make_plan(num_members, data.draw(st.integers(1, 3)), aux=aux)
    some = st.sets(st.integers(0, num_members - 1), max_size=2)
    senders = set(range(aux, num_members))
    gone = data.draw(some)
    if len(gone) == num_members:
        gone.pop()
    holders = set(range(num_members)) - gone
    court = Court(
        plan=plan,
        holders=holders,
        rng=random.Random(seed),
        altering=data.draw(some),
        censoring=data.draw(some) if senders & holders else set(),
        two_faced=data.draw(some) & senders,
        faulty=data.draw(some),
        mute=data.draw(some),
    )
    court.mute -= court.faulty
    verdict = court.hold(list(range(plan.num_chunks)))
    may_lie = (court.altering | court.censoring | court.two_faced | court.faulty) & holders
    assert verdict.liars.keys() <= may_lie - court.mute
    assert verdict.missing.keys() <= court.mute & holders
    assert not verdict.liars.keys() & verdict.missing.keys()
    out = verdict.liars.keys() | verdict.missing.keys()
    if verdict.is_good:
        assert not (may_lie | gone | court.mute) or verdict.num_good == plan.num_chunks
        assert not (court.altering | court.censoring | court.two_faced) - court.mute & senders & holders
    for part in plan.parts:
        chunks = set(range(part.start, part.stop))
        if part.reducer in out | gone:
            assert chunks <= verdict.stale, "what somebody made who is out is done again"
    if any(member in senders for member in out):
        assert verdict.stale == set(range(plan.num_chunks)), "so is what a contributor who is out had a part in"
    # Everybody who can speak, and lies, is found when all chunks are looked at and nobody else disturbs.
    if not gone and not court.mute and not court.faulty:
        assert verdict.liars.keys() >= court.censoring
        if not court.censoring:
            assert verdict.liars.keys() >= court.two_faced
            if not court.two_faced:
                assert verdict.liars.keys() == court.altering


def test_what_rests_on_a_contributor_that_is_gone_is_done_again_and_nobody_is_blamed() -> None:
    plan = make_plan(3, 1, aux=1, reducers=1)
    members = list(plan.members)
    members[2] = msgspec.structs.replace(members[2], sends=False, receives=False)
    plan = msgspec.structs.replace(plan, members=tuple(members))
    audit = Audit(plan, {0, 1}, [0])
    audit.start()
    audit.testified(1, 0, WitnessAccount(average=average_hash(0), contribution=contribution_hash(1, 0)))
    inputs = {i: contribution_hash(i, 0) for i in (1, 2)}
    assert audit.testified(0, 0, WitnessAccount(average=average_hash(0), inputs=inputs)) == [
        AuditResult(stale=frozenset({0}))
    ]


def test_a_witness_is_heard_once() -> None:
    audit = Audit(make_plan(2, 1, aux=1, reducers=1), {0, 1}, [0])
    audit.start()
    audit.testified(1, 0, WitnessAccount(average=average_hash(0), contribution=contribution_hash(1, 0)))
    assert audit.testified(1, 0, FalseTestimony("it changes its mind")) == []
    assert audit.unheard(1, 0, "it says no more") == []
    inputs = {1: contribution_hash(1, 0)}
    assert audit.testified(0, 0, WitnessAccount(average=average_hash(0), inputs=inputs)) == [Recompute(0, (1,))]
    assert audit.recomputed(0, average_hash(0)) == [AuditResult(num_good=1)]


def test_who_lies_about_one_chunk_and_is_silent_about_another_is_a_liar() -> None:
    audit = Audit(make_plan(1, 2), {0}, [0, 1])
    audit.start()
    assert audit.unheard(0, 0, "it was silent") == []
    [verdict] = audit.testified(0, 1, FalseTestimony("it lied"))
    assert isinstance(verdict, AuditResult)
    assert verdict.liars == {0: "it lied"}
    assert verdict.missing == {}, "nobody has to ask whether it was lost"


# What an answer amounts to


RUN = "kitchen"


class Hall:
    """Three members with real keys, of whom the first reduces one of two chunks."""

    def __init__(self) -> None:
        self.identities = sorted((Identity.temporary() for _ in range(3)), key=lambda identity: identity.peer_id)
        self.plan = msgspec.structs.replace(
            make_plan(3, 1, reducers=2),
            members=tuple(Participant(peer=i.peer_id, session="s", weight=1.0) for i in self.identities),
        )
        self.notary = Notary(RUN, KEY)
        self.challenge = Challenge(key=KEY, chunk=0, generation=0)
        self.frames = [b"values of %d" % i for i in range(3)]
        self.averages = [average_hash(0), average_hash(1)]
        self.committed = [[sealed_hash(frame), NOTHING] for frame in self.frames]

    def report(self, member: int) -> Report:
        return Report(
            key=KEY,
            revision=0,
            digest=merkle_root(self.averages).hex(),
            commitment=merkle_root(self.committed[member]).hex(),
        )

    def testimony(self, member: int) -> words.Testimony:
        inputs = ()
        if member == 0:
            inputs = tuple(
                words.Input(member=i, frame_hash=h[0], seal=self.seal(i)) for i, h in enumerate(self.committed)
            )
        return words.Testimony(
            average=self.averages[0],
            average_path=merkle_path(self.averages, 0),
            contribution=self.committed[member][0],
            contribution_path=merkle_path(self.committed[member], 0),
            inputs=inputs,
        )

    def seal(self, member: int, chunk: int = 0, run: str = RUN, key: RoundKey = KEY) -> bytes:
        return Sealer(self.identities[member], run, key).seal_contribution(chunk, self.committed[member][0])

    def examine(self, member: int, **changes: object) -> WitnessAccount | FalseTestimony:
        frames = changes.pop("frames", [self.frames[member]])
        testimony = msgspec.structs.replace(self.testimony(member), **changes)
        return examine(
            self.plan,
            self.notary,
            self.challenge,
            member,
            self.report(member),
            testimony,
            frames,  # type: ignore[arg-type]
        )


def test_honest_answers_are_facts() -> None:
    hall = Hall()
    hashes_sent = {i: sealed_hash(frame) for i, frame in enumerate(hall.frames)}
    assert hall.examine(0) == WitnessAccount(average=average_hash(0), contribution=hashes_sent[0], inputs=hashes_sent)
    assert hall.examine(1) == WitnessAccount(average=average_hash(0), contribution=hashes_sent[1])


def test_who_contributed_nothing_says_so() -> None:
    hall = Hall()
    hall.committed[1] = [NOTHING, NOTHING]
    assert hall.examine(1, frames=[]) == WitnessAccount(average=average_hash(0))


def test_answers_that_speak_against_themselves_are_faults() -> None:
    hall = Hall()
    assert isinstance(hall.examine(1, average=average_hash(1)), FalseTestimony)
    assert isinstance(hall.examine(1, average_path=()), FalseTestimony)
    assert isinstance(hall.examine(1, contribution=sealed_hash(b"other")), FalseTestimony)
    assert isinstance(hall.examine(1, frames=[b"other"]), FalseTestimony)
    assert isinstance(hall.examine(1, frames=[]), FalseTestimony)
    assert isinstance(hall.examine(1, frames=[hall.frames[1], b""]), FalseTestimony)
    assert isinstance(hall.examine(1, contribution=NOTHING), FalseTestimony), "it did commit to something"


def test_a_reducer_needs_a_good_seal_for_every_input() -> None:
    hall = Hall()
    first, *rest = hall.testimony(0).inputs
    for seal in (
        b"",
        bytes(64),
        hall.seal(1),
        hall.seal(0, chunk=1),
        hall.seal(0, run="elsewhere"),
        hall.seal(0, key=RoundKey(epoch=1, token=7, attempt=1)),
    ):
        inputs = (msgspec.structs.replace(first, seal=seal), *rest)
        assert isinstance(hall.examine(0, inputs=inputs), FalseTestimony)
    assert isinstance(hall.examine(0, inputs=(first, first)), FalseTestimony)
    assert isinstance(hall.examine(0, inputs=(msgspec.structs.replace(first, member=3),)), FalseTestimony)


def test_a_reducer_cannot_add_the_sealed_values_of_a_member_without_weight() -> None:
    hall = Hall()
    helper = msgspec.structs.replace(hall.plan.members[2], weight=0.0, sends=False)
    hall.plan = msgspec.structs.replace(hall.plan, members=(*hall.plan.members[:2], helper))
    fault = hall.examine(0)
    assert isinstance(fault, FalseTestimony)
    assert "somebody who made none" in fault.reason
    assert isinstance(hall.examine(0, inputs=hall.testimony(0).inputs[:2]), WitnessAccount)


def test_seals_of_averages_belong_to_their_generation() -> None:
    identity = Identity.temporary()
    sealer, notary = Sealer(identity, RUN, KEY), Notary(RUN, KEY)
    seal = sealer.seal_average(3, 1, average_hash(3))
    notary.require_average(identity.peer_id, 3, 1, average_hash(3), seal)
    for chunk, generation, frame_hash in ((2, 1, 3), (3, 0, 3), (3, 1, 4)):
        with pytest.raises(ProtocolError, match="did not seal"):
            notary.require_average(identity.peer_id, chunk, generation, average_hash(frame_hash), seal)
    assert not notary.is_contribution(identity.peer_id, 3, average_hash(3), seal)


def test_an_average_cannot_be_passed_off_as_a_contribution_nor_the_other_way_round() -> None:
    identity = Identity.temporary()
    sealer, notary = Sealer(identity, RUN, KEY), Notary(RUN, KEY)
    average = sealer.seal_average(3, 0, average_hash(3))
    contribution = sealer.seal_contribution(3, average_hash(3))
    assert notary.is_average(identity.peer_id, 3, 0, average_hash(3), average)
    assert notary.is_contribution(identity.peer_id, 3, average_hash(3), contribution)
    assert not notary.is_average(identity.peer_id, 3, 0, average_hash(3), contribution)
    assert not notary.is_contribution(identity.peer_id, 3, average_hash(3), average)


def test_messages_of_an_audit_are_bounded() -> None:
    testimony = Hall().testimony(0)
    assert decode(words.Testimony, encode(testimony)) == testimony
    for wrong in ({"average": b"short"}, {"average_path": (bytes(32),) * 33}, {"inputs": testimony.inputs * 86}):
        with pytest.raises(ProtocolError):
            decode(words.Testimony, encode(msgspec.structs.replace(testimony, **wrong)))


# Exclusions


def commit_with(**excluded: float) -> Commit:
    return Commit(
        epoch=1,
        key=KEY,
        term=7,
        coordinator="c",
        members=(),
        digest="",
        parent="",
        layout="",
        excluded={peer: Exclusion(until=until, reason="it lied") for peer, until in excluded.items()},
    )


def test_exclusions_come_from_the_lineage_and_from_what_was_found_and_end() -> None:
    exclusions = Exclusions()
    exclusions.add("found", "it spoilt a chunk", 0.0, 100.0)
    head = commit_with(known=150.0, over=10.0)
    assert exclusions.current(head, 50.0).keys() == {"found", "known"}
    assert exclusions.current(None, 50.0).keys() == {"found"}
    assert exclusions.current(head, 120.0).keys() == {"known"}
    assert exclusions.current(head, 151.0) == {}
    assert "0.5 h" in why_excluded(Exclusion(until=1800.0, reason="it lied"), 0.0)
    assert "59 s" in why_excluded(Exclusion(until=60.0, reason="it did not testify"), 1.0)


def test_of_two_exclusions_of_a_peer_the_longer_counts() -> None:
    exclusions = Exclusions()
    exclusions.add("peer", "it did not testify", 0.0, 60.0)
    assert exclusions.current(commit_with(peer=1000.0), 1.0)["peer"].until == 1000.0
    assert exclusions.current(commit_with(peer=10.0), 1.0)["peer"].until == 60.0


def test_a_pardon_lifts_what_was_found_before_it_and_nothing_after() -> None:
    exclusions = Exclusions()
    exclusions.add("peer", "it lied", 10.0, 1000.0)
    head = commit_with(peer=2000.0, other=2000.0)
    assert exclusions.current(head, 20.0, {"peer": 9.0}).keys() == {"peer", "other"}  # of the two, what was found
    assert exclusions.current(head, 20.0, {"peer": 15.0}).keys() == {"other"}
    exclusions.add("peer", "it lied again", 30.0, 1000.0)
    assert exclusions.current(head, 40.0, {"peer": 15.0})["peer"].reason == "it lied again"
    assert exclusions.current(None, 40.0, {"peer": 30.0}) == {}


def test_an_epoch_goes_on_without_those_who_were_lost_in_attempt_after_attempt() -> None:
    absences = Absences()
    for _ in range(PATIENT_ATTEMPTS):
        assert absences.barred(["a", "b"]) == {}
        absences.note(["b"])
    assert absences.barred(["a", "b"]).keys() == {"b"}
    assert absences.barred(["b"]) == {}, "nobody else is there"
    for _ in range(PATIENT_ATTEMPTS):
        absences.note(["c"])
    assert absences.barred(["a", "b", "c"]) == {}, "it may be us who cannot reach the others"
    assert absences.barred(["a", "b", "c", "d"]).keys() == {"b", "c"}
    absences.clear()
    assert absences.barred(["a", "b"]) == {}


def test_a_commit_has_room_for_so_many_exclusions() -> None:
    exclusions = Exclusions()
    for number in range(2 * MAX_EXCLUSIONS):
        exclusions.add(f"peer{number}", "x" * 1000, float(number), 10_000.0)
    current = exclusions.current(None, 200.0)
    assert current.keys() == {f"peer{number}" for number in range(MAX_EXCLUSIONS, 2 * MAX_EXCLUSIONS)}
    assert len(encode(current)) < 64 * 1024


# Members that hold different averages


class Dispute:
    """Two chunks, reduced by members 0 and 1; members 2 and 3 hold what they were given."""

    def __init__(self) -> None:
        self.identities = [Identity.temporary() for _ in range(4)]
        self.plan = msgspec.structs.replace(
            make_plan(4, 1, reducers=2),
            members=tuple(Participant(peer=i.peer_id, session="s", weight=1.0) for i in self.identities),
        )
        self.notary = Notary(RUN, KEY)

    def holding(self, member: int, *values: bytes, forged: bool = False) -> Holding:
        made = [sealed_hash(value) for value in values]
        signers = [self.identities[3] if forged else self.identities[chunk] for chunk in range(2)]
        seals = [
            Sealer(s, RUN, KEY).seal_average(chunk, self.plan.parts[chunk].generation, made[chunk])
            for chunk, s in enumerate(signers)
        ]
        return Holding(member, tuple(made), tuple(seals))


def test_a_reducer_that_sealed_two_averages_of_a_chunk_lied() -> None:
    there = Dispute()
    one, other = there.holding(2, b"a", b"b"), there.holding(3, b"a", b"c")
    assert settle(there.plan, there.notary, one, other).keys() == {1}
    assert settle(there.plan, there.notary, other, one).keys() == {1}
    assert settle(there.plan, there.notary, one, one) == {}


def test_who_has_no_seal_for_what_it_holds_lied() -> None:
    there = Dispute()
    one, other = there.holding(2, b"a", b"b"), there.holding(3, b"a", b"c", forged=True)
    assert settle(there.plan, there.notary, one, other).keys() == {3}
    assert settle(there.plan, there.notary, other, one).keys() == {3}


def test_a_reducer_that_holds_something_else_than_it_gave_out_lied() -> None:
    there = Dispute()
    one, other = there.holding(2, b"a", b"b"), there.holding(1, b"a", b"c", forged=True)
    liars = settle(there.plan, there.notary, one, other)
    assert liars.keys() == {1}
    assert "two different averages" in liars[1], "it needs no seal of its own to be held to what it gave out"


def test_of_chunks_that_were_done_again_the_newest_seals_count() -> None:
    there = Dispute()
    older = there.holding(3, b"a", b"c")
    parts = tuple(msgspec.structs.replace(part, generation=part.reducer + 1) for part in there.plan.parts)
    there.plan = msgspec.structs.replace(there.plan, parts=parts)
    one, other = there.holding(2, b"a", b"b"), there.holding(3, b"a", b"c")
    assert settle(there.plan, there.notary, one, other).keys() == {1}
    assert settle(there.plan, there.notary, one, older).keys() == {3}, "it holds what was to be discarded"


def test_what_a_member_holds_must_be_what_it_reported() -> None:
    there = Dispute()
    holding = there.holding(2, b"a", b"b")
    digest = merkle_root(holding.hashes).hex()
    frames = [b"".join(holding.hashes), b"".join(holding.seals)]
    assert read_holding(there.plan, 2, digest, frames) == holding
    assert read_holding(there.plan, 2, merkle_root(holding.hashes[:1]).hex(), frames) is None
    for wrong in ([], frames[:1], [frames[0][1:], frames[1]], [frames[0], frames[1] + b"x"], [*frames, b""]):
        assert read_holding(there.plan, 2, digest, wrong) is None


# The round goes on after a verdict


class PatientWorld(World):
    """Where a message that is ahead of its plan waits for it, as in the incoming_frames."""

    def deliver(self, pair: tuple[Any, Any]) -> None:
        source, target = pair
        if isinstance(source, int) and isinstance(target, int):
            _kind, chunk, generation, _content = self.queues[pair][0]
            if generation > self.members[target].exchange.generation(chunk):
                return
        super().deliver(pair)


@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_after_any_verdict_the_round_is_done_again_without_whoever_is_out(data: st.DataObject, seed: int) -> None:
    plan = make_round(data.draw(st.integers(3, 6)), data.draw(st.integers(1, 3)), 2, aux=data.draw(st.integers(0, 1)))
    world = PatientWorld(plan, random.Random(seed))
    world.settle()
    for _ in range(2):
        assert isinstance(world.outcome, Finish)
        before = world.outcome
        members = st.sampled_from(before.holders)
        liars = data.draw(st.sets(members, max_size=1))
        missing = data.draw(st.sets(members, max_size=1)) - liars
        stale = data.draw(st.sets(st.integers(0, plan.num_chunks - 1), max_size=3))
        for part in before.plan.parts:
            if part.reducer in liars:
                stale |= set(range(part.start, part.stop))
        if not (liars or missing or stale):
            continue
        generations = {n: part.generation for part in before.plan.parts for n in range(part.start, part.stop)}
        world.outcome = None
        world.suspects |= liars | missing
        why = dict.fromkeys(liars, "it lied")
        world.decide(world.director.overrule(why, dict.fromkeys(missing, "it was silent"), stale, world.now))
        world.settle()
        world.check()
        if isinstance(world.outcome, GiveUp):
            assert "left" in world.outcome.reason or "lost" in world.outcome.reason
            return
        assert isinstance(world.outcome, Finish)
        after = world.outcome
        assert set(after.holders) == set(before.holders) - liars - missing
        assert {after.plan.members[index].trouble for index in liars} <= {"it lied"}
        for part in after.plan.parts:
            for chunk in range(part.start, part.stop):
                again = part.generation > generations[chunk]
                assert again == (chunk in stale), "what was spoilt is done again, and nothing else"
                if again:
                    assert part.reducer in after.holders
                    assert not set(world.members[after.holders[0]].averages[chunk][1]) & (liars | missing)
