"""Receipts: given by the coordinator, kept by who gave, and checked by anybody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from potluck.clock import SystemClock
from potluck.errors import ConfigurationError
from potluck.peer.identity import Identity
from potluck.peer.lease import LeaseView
from potluck.round.averager import Averager
from potluck.round.plan.messages import Commit, CommittedMember, RoundKey
from potluck.sim.memoryrun import MemoryRun
from potluck.testing.polling import poll_until
from potluck.training.books import receipts
from potluck.training.books.receipts import (
    Receipt,
    ReceiptDesk,
    ReceiptKeeper,
    append_receipts,
    check_receipts,
    read_lines,
    receipts_of,
)


def receipt(identity: Identity, epoch: int = 3, samples: float = 64.0) -> Receipt:
    given = Receipt(
        run="bakery", peer="ada", epoch=epoch, samples=samples, at=1.5, coordinator=identity.peer_id, name="Ada"
    )
    return given.signed(identity)


def commit(epoch: int, coordinator: str, **weights: float) -> Commit:
    return Commit(
        epoch=epoch,
        key=RoundKey(epoch=epoch, token=1, attempt=1),
        term=1,
        coordinator=coordinator,
        members=tuple(CommittedMember(peer=peer, weight=weight, holds=True) for peer, weight in weights.items()),
        digest="d",
        parent="p",
        layout="l",
        committed_at=7.0,
    )


CHANGES: list[Callable[[Receipt], Receipt]] = [
    lambda given: msgspec.structs.replace(given, samples=65.0),
    lambda given: msgspec.structs.replace(given, epoch=4),
    lambda given: msgspec.structs.replace(given, peer="mallory"),
    lambda given: msgspec.structs.replace(given, run="brewery"),
    lambda given: msgspec.structs.replace(given, name="Mallory"),
    lambda given: msgspec.structs.replace(given, coordinator=Identity.temporary().peer_id),
    lambda given: msgspec.structs.replace(given, signature=""),
    lambda given: msgspec.structs.replace(given, signature="nonsense"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_receipt_says_what_was_signed_and_nothing_else(change: Callable[[Receipt], Receipt]) -> None:
    given = receipt(Identity.temporary())
    assert given.is_genuine()
    assert not change(given).is_genuine()


def test_only_those_who_contributed_get_one() -> None:
    found = receipts_of(commit(5, "host", ada=64.0, host=0.0), "bakery", "host", {"ada": "A" * 100})
    assert [(each.peer, each.samples, each.epoch, each.at, len(each.name)) for each in found] == [
        ("ada", 64.0, 5, 7.0, 64)
    ]


def test_a_file_is_added_up_and_forgeries_are_counted(tmp_path: Path) -> None:
    path, signer = tmp_path / "deep" / "bakery.jsonl", Identity.temporary()
    append_receipts(path, [receipt(signer, 1), receipt(signer, 2, 0.5)])
    append_receipts(path, [receipt(signer, 2, 0.5), CHANGES[0](receipt(signer, 3))])  # one twice, one forged
    with path.open("ab") as file:
        file.write(b"scribble\n\xff\n" + b"x" * 5000 + b"\n")
    [checked], num_bad = check_receipts(read_lines(path))
    assert (checked.run, checked.peer, checked.name, checked.epochs) == ("bakery", "ada", "Ada", {1, 2})
    assert checked.samples == 64.5
    assert checked.coordinators == {signer.peer_id}
    assert num_bad == 5  # the long line is read in two pieces
    with pytest.raises(ConfigurationError, match="cannot be read"):
        list(read_lines(tmp_path / "none"))


def test_a_file_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "MAX_FILE_BYTES", 1000)
    path, signer = tmp_path / "bakery.jsonl", Identity.temporary()
    for epoch in range(20):
        append_receipts(path, [receipt(signer, epoch)])
    assert path.stat().st_size < 2000
    assert path.with_suffix(".old.jsonl").stat().st_size < 2000


async def test_the_coordinator_gives_and_the_peer_keeps(tmp_path: Path) -> None:
    run = MemoryRun(clock=SystemClock())
    await run.open()
    host = await run.join("host", role="aux", identity=Identity.temporary())
    ada = await run.join("Ada", coordinates=False, identity=Identity.temporary())
    mallory = await run.join("Mallory", coordinates=False, identity=Identity.temporary())
    averager = Averager(host)
    await averager.start()
    await poll_until(lambda: averager.lease.token > 0, 30.0, "a coordinator")
    view = LeaseView()
    watch = await ada.session.hub.store("lease").watch(view.apply)
    path = tmp_path / "receipts.jsonl"
    keeper, desk = ReceiptKeeper(ada, view, path), ReceiptDesk(host, averager)
    name = run.hub.subjects.run
    forged = Receipt(run=name, peer=ada.peer_id, epoch=1, samples=9e9, at=0.0, coordinator=mallory.peer_id)
    await mallory.links.send(ada.peer_id, forged.signed(mallory.identity), timeout_seconds=10.0)
    for epoch in (1, 2):
        desk._committed(commit(epoch, host.peer_id, **{ada.peer_id: 8.0, "gone": 1.0}))
    await poll_until(lambda: keeper.counts["taken"] == 2, 30.0, "receipts")
    await poll_until(lambda: keeper.counts["passed_over"] == 1, 30.0, "a forgery")
    assert keeper.samples == 16.0
    await poll_until(lambda: desk.counts["not_given"] == 2, 30.0, "those who are gone")
    await keeper.close()
    await desk.close()
    [checked], num_bad = check_receipts(read_lines(path))
    assert (checked.peer, checked.name, checked.samples, num_bad) == (ada.peer_id, "Ada", 16.0, 0)
    await watch.cancel()
    await averager.close()
    await run.close()
