"""From who is ready to a plan: who is taken, what each does, when it starts, and what a dead coordinator left."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from gatheringroom import KEY, RUNS, Room, commit_of, presence, ready

from potluck.errors import ConfigurationError, RetryableError
from potluck.peer.identity import Identity
from potluck.round.audit.auditcore import AuditConfig
from potluck.round.codecs import CodecSpec
from potluck.round.coordinator.adoption import CompletionClaim, find_adoption, read_claims
from potluck.round.coordinator.gathering import READY_SECONDS, GatherConfig, alive_trainers, senders
from potluck.round.coordinator.trigger import Quorum, ReadySender
from potluck.round.plan.chunks import ChunkGrid
from potluck.round.plan.messages import Completed, Part, Participant, Plan
from potluck.round.plan.signing import sign_word
from potluck.round.plan.specs import CodecSpan

FAST = 100e6

# Who is a candidate


def test_candidates_are_alive_in_the_same_session_at_the_same_epoch_and_under_the_same_lease() -> None:
    room = Room()
    for peer in "ABCDEFGH":
        room.add(peer)
    room.roster["B"] = presence("B", state="suspect")
    room.roster["C"] = presence("C", session="another life")
    room.add("D", epoch=2)
    room.add("E", token=6)
    room.add("F", card={"role": "observer"})
    room.gathering.take("G", ready("G", withdrawn=True), 0.0)
    del room.roster["H"]
    assert room.names() == ["A"]


def test_who_does_not_repeat_itself_is_not_ready_any_more() -> None:
    room = Room()
    room.add("A", now=0.0)
    room.add("B", now=READY_SECONDS)
    assert room.names(now=READY_SECONDS + 0.1) == ["B"]


def test_waiting_counts_from_the_first_word_and_starts_again_with_the_next_epoch() -> None:
    room = Room()
    room.add("A", now=10.0)
    room.add("A", now=11.0, weight=2.0)
    [candidate] = room.candidates(now=11.0)
    assert (candidate.since, candidate.ready.weight) == (10.0, 2.0)
    room.add("A", now=12.0, epoch=2)
    [candidate] = room.candidates(now=12.0, epoch=2)
    assert candidate.since == 12.0


def test_waiting_starts_again_under_another_lease() -> None:
    """Else, after an outage of the hub, the first peer to come back would find that all have had their time."""
    room = Room()
    room.add("A", now=10.0)
    room.add("A", now=20.0, token=8)
    room.add("A", now=21.0, token=8)
    [candidate] = room.candidates(now=21.0, token=8)
    assert candidate.since == 20.0


def test_a_commit_forgets_those_who_were_ready_for_it_or_before() -> None:
    room = Room()
    room.add("A", epoch=1)
    room.add("B", epoch=2)
    room.gathering.committed(commit_of(1))
    assert room.names() == []
    assert [c.peer for c in room.candidates(epoch=2)] == ["B"]


# Who stands by


def test_who_stands_by_is_ready_when_all_have_the_weight_together_that_it_awaits() -> None:
    room = Room()
    room.add("A", weight=16.0, awaits=48.0)
    room.add("B", weight=16.0, awaits=48.0)
    room.add("H", card={"role": "aux"}, sends=False, weight=1e6)
    assert room.names() == ["H"], "32 of 48, whatever an aux peer says of itself"
    room.add("C", weight=16.0)
    assert room.names() == ["A", "B", "C", "H"]


def test_waiting_of_who_stands_by_counts_from_when_the_weight_was_there() -> None:
    room = Room()
    room.add("A", now=1.0, weight=16.0, awaits=32.0)
    room.add("B", now=2.0, weight=16.0, awaits=32.0)
    room.add("C", now=3.0, weight=16.0)
    assert {candidate.peer: candidate.since for candidate in room.candidates(now=3.0)} == {"A": 2.0, "B": 2.0, "C": 3.0}


def test_nobody_is_planned_with_who_has_stopped_to_stand_by() -> None:
    room = Room()
    room.add("A", weight=16.0, awaits=32.0, until=100.0)
    room.add("B", weight=16.0, awaits=32.0)
    assert room.names(hub_now=100.0) == ["A", "B"]
    assert room.names(hub_now=100.1) == [], "without A there is too little weight for B"
    room.add("A", weight=16.0)
    assert room.names(hub_now=100.1) == ["A", "B"], "the epoch is due, as A has heard: it waits on"


# What the plan says


def test_members_stand_in_the_order_of_their_ids_and_all_chunks_are_shared_out() -> None:
    room = Room()
    for peer in "CAB":
        room.add(peer, weight=float(ord(peer)))
    plan = room.plan()
    assert [member.peer for member in plan.members] == ["A", "B", "C"]
    assert [member.weight for member in plan.members] == [65.0, 66.0, 67.0]
    assert all(member.sends and member.reduces and member.receives for member in plan.members)
    assert plan.num_chunks == len(ChunkGrid(runs=plan.runs, chunk_bytes=plan.chunk_bytes))
    assert {part.reducer for part in plan.parts} == {0, 1, 2}
    assert (plan.layout, plan.runs, plan.key) == ("l", RUNS, KEY)
    assert plan.deadline > 1000.0


def test_aux_peers_reduce_without_weight_and_clients_do_not_reduce() -> None:
    room = Room()
    room.add("A", card={"role": "aux"}, sends=False, layout="", runs=(), weight=0.0)
    room.add("C", card={"addresses": ()})
    room.add("T")
    aux, client, trainer = room.plan().members
    assert (aux.sends, aux.reduces, aux.weight) == (False, True, 0.0)
    assert (client.sends, client.reduces) == (True, False)
    assert (trainer.sends, trainer.reduces) == (True, True)
    assert {part.reducer for part in room.plan().parts} <= {0, 2}


def test_an_aux_peer_that_claims_to_contribute_does_not() -> None:
    room = Room()
    room.add("A", card={"role": "aux"}, weight=1e9)
    room.add("T")
    assert not room.plan().members[0].sends


def test_a_trainer_without_weight_only_receives() -> None:
    room = Room()
    room.add("A", weight=0.0)
    room.add("B")
    assert [member.sends for member in room.plan().members] == [False, True]


def test_where_only_trusted_peers_reduce_others_do_not() -> None:
    room = Room(trusted_reducers=True)
    room.add("A")
    room.add("B", card={"trusted": True})
    assert {part.reducer for part in room.plan().parts} == {1}


def test_a_lone_client_reduces_for_itself() -> None:
    room = Room()
    room.add("A", card={"addresses": ()})
    plan = room.plan()
    assert plan.members[0].reduces
    assert {part.reducer for part in plan.parts} == {0}


@pytest.mark.parametrize("is_held_twice", [False, True])
def test_what_one_peer_alone_contributes_goes_to_one_helper_if_so_wished(is_held_twice: bool) -> None:
    room = Room(is_held_twice=is_held_twice)
    room.add("A")
    room.add("B", card={"role": "aux"}, sends=False, layout="")
    room.add("C", card={"role": "aux"}, sends=False, layout="")
    assert [member.peer for member in room.plan().members] == (["A", "B"] if is_held_twice else ["A"])
    room.add("D")
    assert len(room.plan().members) == 4


def test_the_helper_of_a_lone_peer_is_trusted_first_and_never_keeps_it_from_going_on() -> None:
    room = Room(is_held_twice=True, trusted_reducers=True)
    room.add("A")
    room.add("B", card={"role": "aux"}, sends=False, layout="")
    assert [member.peer for member in room.plan().members] == ["A"], "neither of the two may reduce"
    room.add("C", card={"role": "aux", "trusted": True}, sends=False, layout="")
    assert [member.peer for member in room.plan().members] == ["A", "C"]
    assert [member.peer for member in room.plan(attempt=1).members] == ["A"], "a helper may fail, or lie, for ever"


def test_two_batches_count_in_the_first_epoch_alone_also_where_the_coordinator_is_new() -> None:
    room = Room(batch_weight=256.0)
    for epoch, counts in {1: 512.0, 2: 16.0}.items():
        room.add("A", weight=1.0, epoch=epoch)
        room.add("B", weight=1e9, epoch=epoch)
        assert room.candidates(epoch=epoch)[1].weight == counts


def test_when_all_are_clients_the_error_says_what_to_do() -> None:
    room = Room()
    room.add("A", card={"addresses": ()})
    room.add("B", card={"addresses": ()})
    with pytest.raises(RetryableError, match="potluck aux"):
        room.plan()


def test_without_anybody_who_contributes_there_is_no_plan() -> None:
    room = Room()
    room.add("A", card={"role": "aux"}, sends=False)
    with pytest.raises(RetryableError, match="nobody is ready to contribute"):
        room.plan()


def test_who_holds_other_tensors_than_most_is_left_out_and_named() -> None:
    room = Room()
    room.add("A", layout="other", weight=1e9)  # no weight makes up for being alone with it
    room.add("B", weight=2.0)
    room.add("C", weight=2.0)
    plan = room.plan()
    assert [member.peer for member in plan.members] == ["B", "C"]
    assert list(plan.left_out) == ["A"]
    assert "other tensors" in plan.left_out["A"]


@pytest.mark.parametrize(
    ("config", "others", "is_audited"),
    [
        ({}, [{"trusted": False}], True),
        ({}, [{"trusted": True}], False),
        ({}, [{"trusted": False, "addresses": ()}], False),
        ({"audit": AuditConfig(chunks_per_reducer=0)}, [{"trusted": False}], False),
    ],
    ids=["a stranger reduces", "all are trusted", "the stranger cannot reduce", "audits are off"],
)
def test_a_round_is_audited_where_somebody_might_reduce_whom_nobody_vouches_for(
    config: dict[str, Any], others: list[dict[str, Any]], is_audited: bool
) -> None:
    room = Room(**config)
    room.add("A", card={"trusted": True})
    for number, card in enumerate(others):
        room.add(f"B{number}", card=card)
    assert room.plan().audit == is_audited


def test_a_stranger_alone_has_nobody_to_deceive() -> None:
    for trusted_reducers in (False, True):
        room = Room(trusted_reducers=trusted_reducers)
        room.add("A", card={"trusted": False})
        plan = room.plan()
        assert not plan.audit
        assert plan.members[0].reduces


def test_who_says_that_it_sends_nothing_only_receives() -> None:
    room = Room()
    room.add("A")
    room.add("B", sends=False)
    assert [(member.sends, member.weight) for member in room.plan().members] == [(True, 1.0), (False, 0.0)]


@pytest.mark.parametrize("layouts", [("a", "b"), ("b", "a")])
def test_of_two_layouts_with_the_same_weight_the_first_by_name_counts(layouts: tuple[str, str]) -> None:
    room = Room()
    for peer, layout in zip("AB", layouts, strict=True):
        room.add(peer, layout=layout)
    assert room.plan().layout == "a"


def test_a_chunk_takes_as_long_as_its_copies_need() -> None:
    room = Room()
    for peer in "ABCD":
        room.add(peer)
    assert not room.propose().is_measured
    for peer in "ABCD":
        room.add(peer, card={"upload_bytes_per_second": FAST, "download_bytes_per_second": FAST})
    proposal = room.propose()
    assert proposal.is_measured
    assert proposal.chunk_seconds == pytest.approx(3 * proposal.plan.chunk_bytes / FAST, rel=0.01)


def test_an_aux_peer_on_a_slow_line_does_not_make_chunks_small() -> None:
    sizes = []
    for speed in (FAST, 1e4):
        room = Room()
        for peer in "AB":
            room.add(peer, card={"upload_bytes_per_second": FAST, "download_bytes_per_second": FAST})
        aux = {"role": "aux", "upload_bytes_per_second": speed, "download_bytes_per_second": speed, "addresses": ()}
        room.add("C", card=aux)
        sizes.append(room.plan().chunk_bytes)
    assert sizes[0] == sizes[1]


def test_who_is_barred_has_no_part_and_no_say_and_is_told_why() -> None:
    room = Room()
    room.add("A")
    room.add("B", weight=9.0, layout="other")
    room.add("C")
    candidates = room.candidates()
    barred = {"B": "it lied", "Z": "it is not even here"}
    plan = room.gathering.propose(candidates, KEY, hub_now=0.0, barred=barred).plan
    assert [member.peer for member in plan.members] == ["A", "C"]
    assert plan.layout == "l"
    assert plan.left_out == {"B": "it lied"}


def test_a_claim_counts_up_to_the_cap_and_stands_in_the_plan() -> None:
    room = Room()
    for peer, weight in zip("ABC", (1.0, 10.0, 1e9), strict=True):
        room.add(peer, weight=weight)
    assert [(member.weight, member.claimed) for member in room.plan().members] == [(1.0, 0.0), (10.0, 0.0), (88.0, 1e9)]
    assert [sender.weight for sender in senders(room.candidates())] == [1.0, 10.0, 88.0]


@pytest.mark.parametrize(("config", "card"), [({"weight_cap": None}, {}), ({}, {"trusted": True})])
def test_nobody_is_cut_where_the_run_or_an_invite_says_so(config: dict[str, Any], card: dict[str, Any]) -> None:
    room = Room(**config)
    for peer, weight in zip("ABC", (1.0, 1.0, 1e9), strict=True):
        room.add(peer, weight=weight, card=card)
    assert [(member.weight, member.claimed) for member in room.plan().members] == [(1.0, 0.0), (1.0, 0.0), (1e9, 0.0)]


def test_a_claim_beyond_the_cap_does_not_make_those_ready_who_stand_by() -> None:
    room = Room()
    room.gathering.committed(commit_of(0, A=10.0, B=10.0, C=10.0))
    room.add("A", weight=10.0, awaits=500.0, until=100.0)
    room.add("B", weight=10.0)
    room.add("C", weight=1e9)
    assert room.names() == ["B", "C"]


def test_a_cap_below_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="1 or more"):
        GatherConfig(weight_cap=0.5)


def test_faster_peers_reduce_more() -> None:
    room = Room()
    for peer in "ABC":
        speed = FAST if peer == "A" else FAST / 4
        room.add(peer, card={"upload_bytes_per_second": speed, "download_bytes_per_second": speed})
    sizes = {part.reducer: part.stop - part.start for part in room.plan().parts}
    assert sizes[0] > 2 * sizes.get(1, 0)


def test_chunks_are_small_where_a_sender_is_slow() -> None:
    room = Room()
    for peer in "ABCD":
        room.add(peer)
    usual = room.plan().chunk_bytes
    room.add("D", card={"upload_bytes_per_second": 100e3, "download_bytes_per_second": 1e6})
    slow = room.plan().chunk_bytes
    assert slow <= 100e3 * 0.5
    assert slow < usual


def test_the_deadline_grows_with_what_has_to_move_and_is_bounded() -> None:
    room = Room(least_round_seconds=20.0, most_round_seconds=100.0)
    slow = {"upload_bytes_per_second": 1e6, "download_bytes_per_second": 1e6}
    for peer in "AB":
        room.add(peer, card=slow)
    assert room.propose().is_measured
    small = (CodecSpan(codec=CodecSpec(name="float32"), elements=1000),)
    for peer in "AB":
        room.add(peer, card=slow, runs=small)
    assert room.plan().deadline == pytest.approx(1020.0)
    large = (CodecSpan(codec=CodecSpec(name="float32"), elements=10**5),)
    for peer in "AB":
        room.add(peer, card=slow, runs=large)
    slowest_seconds = 4e5 / room.gathering.config.least_bytes_per_second
    assert room.plan().deadline == pytest.approx(1010.0 + 5 * slowest_seconds), "lines may be slower than they seem"
    huge = (CodecSpan(codec=CodecSpec(name="float32"), elements=10**10),)
    for peer in "AB":
        room.add(peer, card=slow, runs=huge)
    assert room.plan().deadline == pytest.approx(1100.0)


def test_tensors_without_elements_can_be_agreed_on_too() -> None:
    room = Room()
    for peer in "AB":
        room.add(peer, runs=())
    plan = room.plan()
    assert (plan.num_chunks, plan.parts) == (0, ())


def test_a_plan_has_a_limit_of_members() -> None:
    room = Room()
    for number in range(260):
        room.add(f"P{number:03}")
    plan = room.plan()
    assert len(plan.members) == 256
    assert set(plan.left_out) == {"P256", "P257", "P258", "P259"}


def test_what_the_trigger_sees() -> None:
    room = Room()
    room.add("A", now=3.0, weight=2.0)
    room.add("B", card={"role": "aux"}, sends=False)
    room.roster["C"] = presence("C")
    room.roster["D"] = presence("D", state="suspect")
    candidates = room.candidates(now=3.0)
    assert senders(candidates) == [ReadySender(peer="A", weight=2.0, since=3.0)]
    assert alive_trainers(room.roster.values()) == {"A", "C"}


def test_a_deadline_is_required() -> None:
    with pytest.raises(ConfigurationError):
        GatherConfig(least_round_seconds=0.0)


def test_peers_of_about_the_same_speed_reduce_the_same() -> None:
    def parts(*speeds: float) -> tuple[Part, ...]:
        room = Room()
        for name, speed in zip("ABCD", speeds, strict=True):
            room.add(name, card={"upload_bytes_per_second": speed, "download_bytes_per_second": speed})
        return room.plan().parts

    assert parts(7.3e6, 6.3e6, 6.2e6, 6.9e6) == parts(6.6e6, 6.6e6, 6.6e6, 6.6e6)
    assert parts(6.6e6, 6.6e6, 6.6e6, 3e6) != parts(6.6e6, 6.6e6, 6.6e6, 6.6e6)


# When to start


def waiting(*since: float, weight: float = 1.0) -> list[ReadySender]:
    return [ReadySender(peer=f"P{i}", weight=weight, since=at) for i, at in enumerate(since)]


def test_a_quorum_starts_at_once_when_nobody_is_left_to_wait_for() -> None:
    assert Quorum().due_at(waiting(5.0, 6.0), frozenset({"P0", "P1"})) == -math.inf


def test_a_quorum_gives_the_others_a_while_from_when_it_was_reached() -> None:
    quorum = Quorum(min_senders=2, grace_seconds=3.0)
    trainers = frozenset({"P0", "P1", "P2", "P3"})
    assert quorum.due_at(waiting(5.0), trainers) is None
    assert quorum.due_at(waiting(5.0, 6.0), trainers) == 9.0
    assert quorum.due_at(waiting(7.0, 5.0, 6.0), trainers) == 9.0


def test_a_quorum_can_ask_for_weight() -> None:
    quorum = Quorum(min_weight=5.0, grace_seconds=1.0)
    trainers = frozenset({"P0", "P1", "P2"})
    assert quorum.due_at(waiting(1.0, weight=4.0), trainers) is None
    assert quorum.due_at(waiting(1.0, 2.0, weight=4.0), trainers) == 3.0
    assert quorum.due_at(waiting(1.0, weight=4.0), frozenset({"P0"})) is None, "too little, though all are ready"


def test_nobody_is_no_quorum() -> None:
    assert Quorum().due_at([], frozenset()) is None
    with pytest.raises(ConfigurationError):
        Quorum(min_senders=0)
    with pytest.raises(ConfigurationError):
        Quorum(grace_seconds=-1.0)


# What a dead coordinator left


def finished_plan(revision: int = 0, token: int = 7, **troubles: str) -> Plan:
    members = tuple(
        Participant(
            peer=peer,
            session=f"{peer}1",
            weight=1.0,
            sends=peer not in troubles,
            receives=peer not in troubles,
            trouble=troubles.get(peer, ""),
        )
        for peer in "ABC"
    )
    key = msgspec.structs.replace(KEY, token=token)
    part = Part(reducer=0, start=0, stop=1)
    return Plan(key=key, revision=revision, members=members, parts=(part,), layout="l", deadline=0.0)


ALIVE = {peer: f"{peer}1" for peer in "ABC"}


def claims(peers: str, *, digest: str = "d", **plan: Any) -> list[CompletionClaim]:
    return [CompletionClaim(peer, finished_plan(**plan), digest) for peer in peers]


def test_claims_are_of_this_epoch_signed_by_who_coordinated_then_and_not_to_be_audited() -> None:
    old, other = Identity.temporary(), Identity.temporary()

    def completed(signer: Identity = old, run: str = "run", **changes: Any) -> Completed:
        plan = msgspec.structs.replace(finished_plan(), **changes)
        return Completed(coordinator=signer.peer_id, plan=sign_word(plan, signer, run), digest="d")

    said = {
        "good": completed(),
        "other epoch": completed(key=msgspec.structs.replace(KEY, epoch=2)),
        "audited": completed(audit=True),
        "never coordinated": completed(other),
        "other run": completed(run="elsewhere"),
        "other term": completed(key=msgspec.structs.replace(KEY, token=8)),
        "no plan": Completed(coordinator=old.peer_id, plan=b"x", digest="d"),
    }
    read, bad = read_claims(said, "run", {KEY.token: old.peer_id}, epoch=KEY.epoch)
    assert [(claim.peer, claim.digest) for claim in read] == [("good", "d")]
    assert bad.keys() == {"never coordinated", "other run", "other term", "no plan"}


def test_a_round_that_all_members_completed_is_adopted() -> None:
    adoption = find_adoption(claims("ABC"), alive=ALIVE, waiting="ABC", is_late=False)
    assert adoption is not None
    assert (adoption.digest, adoption.holders) == ("d", (0, 1, 2))


def test_the_dead_and_those_who_were_out_are_not_waited_for() -> None:
    alive = {"A": "A1", "B": "another life"}
    adoption = find_adoption(claims("A"), alive=alive, waiting="AB", is_late=False)
    assert adoption is not None
    assert adoption.holders == (0,)
    assert find_adoption(claims("AB", C="out"), alive=ALIVE, waiting="ABC", is_late=False) is not None


def test_a_member_that_lives_and_has_not_completed_it_means_a_new_round() -> None:
    assert find_adoption(claims("AB"), alive=ALIVE, waiting="ABC", is_late=False) is None
    assert find_adoption(claims("AB"), alive=ALIVE, waiting="ABC", is_late=True) is None


def test_a_member_that_lives_and_says_nothing_is_waited_for_only_a_while() -> None:
    assert find_adoption(claims("AB"), alive=ALIVE, waiting="AB", is_late=False) is None
    adoption = find_adoption(claims("AB"), alive=ALIVE, waiting="AB", is_late=True)
    assert adoption is not None
    assert adoption.holders == (0, 1)


def test_different_averages_are_not_adopted() -> None:
    mixed = [*claims("AB"), *claims("C", digest="other")]
    assert find_adoption(mixed, alive=ALIVE, waiting="ABC", is_late=True) is None


def test_the_newest_round_and_its_newest_revision_count() -> None:
    both = [*claims("AB", revision=1, C="dead"), *claims("C", token=6)]
    adoption = find_adoption(both, alive=ALIVE, waiting="ABC", is_late=False)
    assert adoption is not None
    assert (adoption.plan.key.token, adoption.plan.revision, adoption.holders) == (7, 1, (0, 1))
    assert find_adoption([], alive=ALIVE, waiting="", is_late=True) is None
