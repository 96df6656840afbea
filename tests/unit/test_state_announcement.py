"""Who is believed about a state."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ProtocolError
from potluck.hub.presence import Card, Presence, Role
from potluck.peer.roster import Roster
from potluck.state.announcement import Announcements, Claim, Kept, KeptState, describe_claims, judge

TRUE, FALSE, OTHER = "a" * 64, "b" * 64, "c" * 64


def said(digest: str, epoch: int = 5, **options: object) -> KeptState:
    return KeptState(epoch=epoch, digest=digest, num_bytes=10, made_at=epoch, **options)  # type: ignore[arg-type]


def claim(peer: str, digest: str | None, *, tier: int = 2, person: str = "") -> Claim:
    return Claim(peer, person or peer, tier, said(digest) if digest else None)


def believed(claims: Iterable[Claim]) -> str | None:
    verdict = judge(5, claims)
    return verdict.digest if verdict is not None else None


def test_nobody_speaks() -> None:
    assert judge(5, []) is None
    assert judge(5, [claim("p", None)]) is None


def test_one_trusted_peer_outweighs_any_number_of_strangers() -> None:
    crowd = [claim(f"s{number}", FALSE) for number in range(50)]
    verdict = judge(5, [*crowd, claim("host", TRUE, tier=1)])
    assert verdict is not None
    assert (verdict.digest, verdict.keepers, verdict.is_trusted) == (TRUE, ("host",), True)
    assert len(verdict.dissenters) == 50


def test_strangers_wait_for_a_trusted_keeper_that_has_not_spoken_yet() -> None:
    assert believed([claim("s", FALSE), claim("host", None, tier=1)]) is None


def test_holders_of_the_epoch_come_before_others() -> None:
    crowd = [claim(f"s{number}", FALSE, tier=3) for number in range(50)]
    assert believed([*crowd, claim("h", TRUE, tier=2)]) == TRUE


def test_strangers_are_believed_by_more_than_half_of_all_that_keep() -> None:
    assert believed([claim("a", TRUE), claim("b", TRUE), claim("c", FALSE)]) == TRUE
    assert believed([claim("a", TRUE), claim("b", FALSE)]) is None
    assert believed([claim("liar", FALSE), claim("a", None), claim("b", None)]) is None
    assert believed([claim("a", TRUE), claim("b", TRUE), claim("c", None), claim("d", None)]) is None


def test_a_person_has_one_vote_however_many_peers_it_runs() -> None:
    army = [claim(f"m{number}", FALSE, person="mallory") for number in range(20)]
    assert believed([*army, claim("a", TRUE, person="alice"), claim("b", TRUE, person="bob")]) == TRUE


def test_trusted_peers_agree_on_one_of_two_even_in_a_tie() -> None:
    assert believed([claim("x", FALSE, tier=1), claim("y", TRUE, tier=1)]) == FALSE
    assert believed([claim("y", FALSE, tier=1), claim("x", TRUE, tier=1)]) == TRUE
    claims = [claim("x", FALSE, tier=1), claim("y", FALSE, tier=1), claim("z", TRUE, tier=1)]
    assert believed(claims) == FALSE


@given(
    st.lists(
        st.tuples(st.sampled_from([TRUE, FALSE, OTHER, None]), st.integers(1, 3), st.sampled_from("pqrst")), max_size=12
    )
)
def test_the_order_of_speaking_does_not_matter(words: list[tuple[str | None, int, str]]) -> None:
    claims = [claim(f"n{n}", digest, tier=tier, person=person) for n, (digest, tier, person) in enumerate(words)]
    verdict = judge(5, claims)
    assert believed(reversed(claims)) == (verdict.digest if verdict else None)
    if verdict is not None:
        assert set(verdict.keepers) | set(verdict.dissenters) == {c.peer for c in claims if c.state is not None}
        assert verdict.keepers


def presence(peer: str, session: str = "s1", role: Role = "trainer", **options: object) -> Presence:
    return Presence(
        peer=peer,
        card=Card(session=session, role=role),
        state="alive",
        host="h",
        person=peer,
        **options,  # type: ignore[arg-type]
    )


def roster(*presences: Presence) -> Roster:
    made = Roster()
    for one in presences:
        made.apply(one)
    return made


def test_only_present_peers_count_and_only_for_this_life() -> None:
    announcements = Announcements()
    for peer in ("here", "gone", "restarted"):
        announcements.take(peer, Kept(session="s1", states=(said(TRUE),)))
    there = roster(presence("here"), presence("restarted", "s2"))
    assert [c.peer for c in announcements.claims(5, there)] == ["here"]
    assert announcements.epochs(there) == [5]


def test_tiers_come_from_the_guard_and_the_commit() -> None:
    announcements = Announcements()
    for peer in ("coordinator", "trusted", "holder", "stranger"):
        announcements.take(peer, Kept(session="s1", states=(said(TRUE),)))
    there = roster(
        presence("coordinator", coordinates=True),
        presence("trusted", trusted=True),
        presence("holder"),
        presence("stranger"),
    )
    tiers = {c.peer: c.tier for c in announcements.claims(5, there, ["holder"])}
    assert tiers == {"coordinator": 1, "trusted": 1, "holder": 2, "stranger": 3}


def test_who_is_far_behind_has_no_say() -> None:
    announcements = Announcements()
    announcements.take("new", Kept(session="s1", states=(said(TRUE, 5),)))
    announcements.take("late", Kept(session="s1", states=(said(OTHER, 4),)))
    announcements.take("old", Kept(session="s1", states=(said(OTHER, 3),)))
    there = roster(*(presence(peer, trusted=True) for peer in ("new", "late", "old")))
    claims = announcements.claims(5, there)
    assert [(c.peer, c.state is not None, c.is_late) for c in claims] == [
        ("late", False, False),
        ("new", True, False),
        ("old", False, True),
    ]
    announcements.forget("late")
    verdict = judge(5, announcements.claims(5, there))
    assert verdict is not None, "it is not waited for"
    assert not verdict.is_settled, "but it may yet tell another story"


def test_an_aux_peer_that_follows_does_not_silence_the_trainers() -> None:
    announcements = Announcements()
    for trainer in ("ada", "grace"):
        announcements.take(trainer, Kept(session="s1", states=(said(TRUE, 5),)))
    announcements.take("host", Kept(session="s1", states=(said(OTHER, 4),)))  # it takes a state over every ten epochs
    there = roster(presence("ada"), presence("grace"), presence("host", role="aux", trusted=True))
    verdict = judge(5, announcements.claims(5, there, ["ada", "grace"]))
    assert verdict is not None
    assert (verdict.digest, verdict.keepers) == (TRUE, ("ada", "grace"))


def test_backups_are_told_apart_and_all_who_offer_one_have_a_say() -> None:
    announcements = Announcements()
    announcements.take("disk", Kept(session="s1", states=(said(TRUE, 90, is_backup=True), said(OTHER, 2))))
    announcements.take("older", Kept(session="s1", states=(said(FALSE, 10, is_backup=True),)))
    there = roster(presence("disk"), presence("older"))
    assert announcements.epochs(there) == [2]
    assert announcements.epochs(there, backups=True) == [90, 10]
    assert judge(90, announcements.claims(90, there, backups=True)) is None, "one of two strangers is no majority"


def test_two_states_for_one_epoch_are_refused() -> None:
    with pytest.raises(ProtocolError):
        Announcements().take("p", Kept(session="s1", states=(said(TRUE), said(FALSE))))


def test_most_votes_decide_among_strangers_where_nothing_is_trained_yet() -> None:
    claims = [claim("a", TRUE), claim("b", FALSE), claim("c", OTHER)]
    assert judge(5, claims) is None
    verdict = judge(0, claims)
    assert verdict is not None
    assert verdict.digest == TRUE
    assert judge(0, [*claims, claim("d", None)]) is None, "who has not spoken may tip the balance"


@pytest.mark.parametrize(
    ("said_by_others", "is_settled"),
    [([], True), ([None], False), ([TRUE, None], True), ([FALSE], True), ([FALSE, TRUE, None], False)],
)
def test_a_verdict_is_settled_when_nobody_could_change_it(said_by_others: list[str | None], is_settled: bool) -> None:
    claims = [claim("a", TRUE, tier=1)]
    claims += [claim(f"p{number}", digest, tier=1) for number, digest in enumerate(said_by_others)]
    verdict = judge(5, claims)
    assert verdict is not None
    assert (verdict.digest, verdict.is_settled) == (TRUE, is_settled)


def test_what_a_peer_had_counts_and_is_not_asked_for() -> None:
    announcements = Announcements()
    announcements.take("past", Kept(session="s1", states=(said(TRUE, 4, is_served=False), said(TRUE, 5))))
    announcements.take("now", Kept(session="s1", states=(said(TRUE, 4),)))
    there = roster(presence("past", trusted=True), presence("now", trusted=True))
    verdict = judge(4, announcements.claims(4, there))
    assert verdict is not None
    assert verdict.keepers == ("now",)
    announcements.forget("now")
    assert announcements.epochs(there) == [5]


def test_what_is_each_peers_own_takes_no_part_in_the_vote() -> None:
    claims = [Claim(peer, peer, 2, said(peer * 64, common=TRUE)) for peer in "def"]
    claims.append(Claim("a", "a", 3, said(OTHER, common=TRUE)))
    verdict = judge(5, claims)
    assert verdict is not None
    assert (verdict.common, verdict.keepers, verdict.dissenters) == (TRUE, ("d", "e", "f", "a"), ())
    assert verdict.digest == "d" * 64  # of one of those who hold the epoch
    asked_in_vain = judge(5, claims, {"d": 2, "e": 1})
    assert asked_in_vain is not None
    assert asked_in_vain.digest == "f" * 64
    liar = Claim("0", "0", 2, said(FALSE, common=TRUE))
    whole = judge(5, [liar, claim("g", TRUE), claim("h", TRUE)])
    assert whole is not None
    assert whole.digest == TRUE  # what can be checked by its own digest comes first


def test_a_disagreement_is_described() -> None:
    text = describe_claims([claim("alice", TRUE), claim("bob", FALSE), claim("carol", None)])
    assert "alice" in text
    assert "bob" in text
    assert "carol" not in text
