"""How much of a claimed weight counts."""

from __future__ import annotations

from gatheringroom import commit_of
from hypothesis import given
from hypothesis import strategies as st

from potluck.round.plan.weights import DEFAULT_CAP, WeightBook

CAP = DEFAULT_CAP


def counted(book: WeightBook, **claims: float) -> dict[str, float]:
    return book.counted(claims, cap=CAP, exempt=())


def book_after(epochs: int, **given: float) -> WeightBook:
    book = WeightBook()
    for epoch in range(epochs):
        book.committed(commit_of(epoch, **given), CAP)
    return book


def test_a_liar_counts_sixteen_times_what_the_others_give() -> None:
    claims = {"a": 30.0, "b": 40.0, "c": 50.0, "liar": 1e9}
    assert counted(WeightBook(), **claims) == {"a": 30.0, "b": 40.0, "c": 50.0, "liar": 640.0}
    assert counted(book_after(5, a=30.0, b=40.0, c=50.0, liar=640.0), **claims)["liar"] == 640.0
    assert WeightBook().counted(claims, cap=None, exempt=()) == claims
    assert WeightBook().counted(claims, cap=CAP, exempt={"liar"}) == claims
    assert counted(WeightBook()) == {}


@given(speeds=st.lists(st.floats(1.0, 10.0), min_size=1, max_size=12), epochs=st.integers(0, 3))
def test_honest_peers_of_speed_one_to_ten_are_never_cut(speeds: list[float], epochs: int) -> None:
    claims = {f"p{number}": 7.0 * speed for number, speed in enumerate(speeds)}
    assert counted(book_after(epochs, **claims), **claims) == claims


@given(
    honest=st.lists(st.floats(1.0, 1e3), min_size=2, max_size=12),
    lies=st.lists(st.floats(1.0, 1e12), min_size=1, max_size=5),
    epochs=st.integers(0, 30),
)
def test_no_minority_of_liars_gets_beyond_the_honest(honest: list[float], lies: list[float], epochs: int) -> None:
    """Over any number of epochs: what counted of a lie does not make room for a larger one."""
    lies = lies[: (len(honest) - 1) // 2 or 1]
    claims = {f"h{n}": weight for n, weight in enumerate(honest)} | {f"l{n}": weight for n, weight in enumerate(lies)}
    book = WeightBook()
    for epoch in range(epochs):
        book.committed(commit_of(epoch, **counted(book, **claims)), CAP)
    found = counted(book, **claims)
    for name, claim in claims.items():
        if name.startswith("h"):
            assert found[name] <= claim
        else:
            assert found[name] <= CAP * max(honest) * (1 + 1e-9)


def test_who_was_there_before_is_not_cut_because_newcomers_have_just_begun() -> None:
    book = book_after(3, old=1000.0)
    assert counted(book, old=1000.0, new=1.0, newer=2.0) == {"old": 1000.0, "new": 1.0, "newer": 2.0}
    book = book_after(3, old=1000.0, elder=800.0)
    claims = {"old": 1000.0, "elder": 800.0, "n1": 1.0, "n2": 1.0, "n3": 1.0, "n4": 1e9}
    assert counted(book, **claims) == claims | {"n4": CAP * 900.0}


def test_in_the_first_epoch_who_made_its_batch_is_not_cut_beside_who_has_just_begun() -> None:
    claims = {"fast": 300.0, "new": 1.0, "liar": 1e9}
    first = WeightBook().counted(claims, cap=CAP, exempt=(), batch=256.0)
    assert first == {"fast": 300.0, "new": 1.0, "liar": CAP * 150.5}
    assert WeightBook().counted({"new": 1.0, "liar": 1e9}, cap=CAP, exempt=(), batch=256.0)["liar"] == 512.0
    later = book_after(1, fast=300.0, new=1.0).counted({"new": 2.0, "liar": 1e9}, cap=CAP, exempt=(), batch=256.0)
    assert later["liar"] == CAP * 2.0, "from then on the others are known"


def test_one_short_epoch_of_the_others_does_not_cut_anybody() -> None:
    book = book_after(5, a=64.0, b=64.0, c=64.0)
    assert counted(book, a=1.0, b=1.0, c=512.0)["c"] == 512.0


def test_who_is_alone_is_measured_by_those_who_were_here() -> None:
    assert counted(book_after(3, a=10.0, b=10.0), a=1e9) == {"a": 160.0}
    assert counted(WeightBook(), a=1e9) == {"a": 1e9}, "nobody can tell"


def test_over_time_no_more_counts_than_the_ledger_allows() -> None:
    book = book_after(3, a=10.0, b=10.0, liar=10.0)
    book.allowances = {"liar": 2.0}  # as fast as the others, and twice that is allowed
    total = 0.0
    for epoch in range(100):
        found = counted(book, a=10.0, b=10.0, liar=1e9)
        total += found["liar"]
        book.committed(commit_of(epoch, **found), CAP)
    assert total <= (2.0 * 100 + CAP) * 10.0
    assert total >= 2.0 * 100 * 10.0, "an honest peer of twice the speed would get all of its samples"


def test_honest_counts_may_differ_from_epoch_to_epoch() -> None:
    """Twice what the ledger shows is allowed over time; an epoch may have eight times as much as another."""
    book = book_after(3, a=10.0, b=10.0, bursty=10.0)
    book.allowances = {"bursty": 2.0}
    for epoch in range(60):
        claim = 80.0 if epoch % 8 == 0 else 1.0
        found = counted(book, a=10.0, b=10.0, bursty=claim)
        assert found["bursty"] == claim
        book.committed(commit_of(epoch, **found), CAP)


def test_without_any_shard_on_lease_a_peer_counts_as_much_as_the_median() -> None:
    book = book_after(3, a=10.0, b=10.0, c=10.0)
    book.allowances = {"c": 0.0}
    for epoch in range(50):
        book.committed(commit_of(epoch, a=10.0, b=10.0, c=10.0), CAP)
    assert counted(book, a=10.0, b=10.0, c=10.0)["c"] == 10.0
