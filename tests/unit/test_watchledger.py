"""Merging changes and snapshots: each version once, in order, none missed, whatever the order of arrival."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from potluck.hub.connection import Entry
from potluck.hub.nats.watchledger import MAX_DEAD_KEYS, WatchLedger


def entry(key: str, value: bytes | None, revision: int, written_at: float | None = None) -> Entry:
    return Entry(
        key=key, value=value, revision=revision, written_at=float(revision) if written_at is None else written_at
    )


def synced(*snapshot: Entry) -> WatchLedger:
    ledger = WatchLedger()
    ledger.begin_sync()
    ledger.end_sync(snapshot)
    return ledger


def test_a_version_is_told_once() -> None:
    ledger = WatchLedger()
    assert ledger.observe(entry("a", b"1", 1))
    assert not ledger.observe(entry("a", b"1", 1))
    assert ledger.observe(entry("a", b"2", 2))
    assert not ledger.observe(entry("a", b"1", 1))


def test_a_deletion_is_told_only_of_what_was_told() -> None:
    ledger = synced(entry("a", b"1", 1))
    assert not ledger.observe(entry("unknown", None, 2))
    assert ledger.observe(entry("a", None, 3))
    assert not ledger.observe(entry("a", None, 4))
    assert ledger.observe(entry("a", b"2", 5))


def test_the_snapshot_tells_in_order_of_writing_and_leaves_out_marks() -> None:
    ledger = WatchLedger()
    ledger.begin_sync()
    told = ledger.end_sync([entry("b", b"2", 5), entry("gone", None, 4), entry("a", b"1", 3)])
    assert [each.key for each in told] == ["a", "b"]
    assert ledger.horizon == 5


def test_a_change_during_a_snapshot_wins_over_what_the_snapshot_says() -> None:
    ledger = synced(entry("a", b"1", 1), entry("b", b"1", 2))
    ledger.begin_sync()
    assert ledger.observe(entry("a", b"3", 3))
    assert ledger.observe(entry("new", b"4", 4))
    assert ledger.observe(entry("b", None, 5))
    assert ledger.trusts([entry("a", b"1", 1), entry("b", b"1", 2)])
    assert ledger.end_sync([entry("a", b"1", 1), entry("b", b"1", 2)]) == []
    assert ledger.horizon == 5


def test_what_has_vanished_is_told_as_deleted_with_a_newer_revision() -> None:
    ledger = synced(entry("a", b"1", 1), entry("b", b"1", 2))
    ledger.begin_sync()
    assert not ledger.trusts([entry("a", b"1", 1)])
    [gone] = ledger.end_sync([entry("a", b"1", 1)])
    assert (gone.key, gone.value) == ("b", None)
    assert gone.revision > 2
    assert ledger.observe(entry("b", b"2", 9))


def test_a_snapshot_that_lags_behind_is_not_trusted() -> None:
    ledger = synced(entry("a", b"1", 1))
    ledger.observe(entry("a", b"2", 7))
    ledger.begin_sync()
    assert not ledger.trusts([entry("a", b"1", 1)])
    assert ledger.trusts([entry("a", b"2", 7)])


def test_a_change_whose_forerunner_is_unknown_shows_a_gap() -> None:
    ledger = synced(entry("a", b"1", 1), entry("dead", None, 2))
    assert not ledger.shows_gap("a", 1)
    assert not ledger.shows_gap("new", 0)
    assert not ledger.shows_gap("dead", 2)
    assert ledger.shows_gap("a", 3)
    assert ledger.shows_gap("new", 3)
    ledger.begin_sync()
    assert not ledger.shows_gap("a", 3)
    ledger.abort_sync()
    assert ledger.shows_gap("a", 3)


def test_when_the_hub_has_lost_its_data_revisions_may_start_again() -> None:
    ledger = synced(entry("a", b"1", 100, 50.0), entry("b", b"1", 101, 51.0))
    ledger.begin_sync()
    told = ledger.end_sync([entry("a", b"new", 1, 60.0)])
    assert [(each.key, each.value) for each in told] == [("a", b"new"), ("b", None)]
    assert ledger.horizon == 1
    assert ledger.observe(entry("a", b"newer", 2, 61.0))
    assert ledger.observe(entry("b", b"newer", 3, 62.0))


def test_deleted_keys_are_not_remembered_for_ever() -> None:
    ledger = synced(entry("kept", b"1", 1))
    for number in range(3 * MAX_DEAD_KEYS):
        ledger.observe(entry(f"key{number}", b"1", 2 * number + 2))
        ledger.observe(entry(f"key{number}", None, 2 * number + 3))
    assert len(ledger._known) <= MAX_DEAD_KEYS + 1
    assert not ledger.observe(entry("kept", b"1", 1))


writes = st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30)


@given(writes=writes, data=st.data())
def test_however_changes_and_snapshots_interleave_the_watcher_ends_up_right(
    writes: list[tuple[str, bool]], data: st.DataObject
) -> None:
    """The store changes; each change is delivered late, or lost and then followed by a snapshot."""
    store: dict[str, Entry] = {}
    ledger = WatchLedger()
    told: dict[str, list[Entry]] = {}
    on_the_way: list[Entry] = []
    synced_up = False

    def tell(entries: list[Entry]) -> None:
        for each in entries:
            told.setdefault(each.key, []).append(each)

    def deliver() -> None:
        change = on_the_way.pop(0)
        tell([change] if ledger.observe(change) else [])

    def sync() -> None:
        ledger.begin_sync()
        snapshot = list(store.values())
        while on_the_way and data.draw(st.booleans()):
            deliver()
        tell(ledger.end_sync(snapshot))

    for revision, (key, is_deletion) in enumerate(writes, start=1):
        store[key] = entry(key, None if is_deletion else b"%d" % revision, revision)
        on_the_way.append(store[key])
        while on_the_way and data.draw(st.booleans()):
            deliver()
        if data.draw(st.integers(0, 5)) == 0:
            if data.draw(st.booleans()):
                on_the_way.clear()  # an outage
            sync()
            synced_up = True
    if not synced_up:
        sync()
    while on_the_way:
        deliver()
    for entries in told.values():
        revisions = [each.revision for each in entries]
        assert revisions == sorted(set(revisions))
    shown = {key: entries[-1].value for key, entries in told.items() if entries[-1].value is not None}
    assert shown == {key: each.value for key, each in store.items() if each.value is not None}
