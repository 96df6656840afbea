"""The states that a peer holds."""

from __future__ import annotations

from statelab import model

from potluck.state.chunkpool import ChunkPool
from potluck.state.shelf import Shelf
from potluck.state.snapshot import Snapshot, stage


def state(pool: ChunkPool, number: int) -> Snapshot:
    return stage(model(number, 1), {}, pool).hashed()


def test_the_newest_few_are_held_and_a_backup_besides() -> None:
    pool, shelf = ChunkPool(), Shelf(2)
    for epoch in range(1, 5):
        shelf.put(epoch, state(pool, epoch), made_at=epoch)
    shelf.put(1, state(pool, 1), made_at=1, is_backup=True)
    assert [(held.epoch, held.is_backup) for held in shelf] == [(1, True), (3, False), (4, False)]
    shelf.drop_backup()
    assert [held.epoch for held in shelf] == [3, 4]


def test_the_same_state_put_there_again_is_still_there() -> None:
    pool, shelf = ChunkPool(), Shelf(2)
    snapshot = state(pool, 1)
    for epoch in (1, 9, 9):
        shelf.put(epoch, snapshot, made_at=epoch)
    assert [held.epoch for held in shelf] == [1, 9]
    snapshot.release()
    assert bytes(shelf.newest().snapshot.view(0)), "it is held, and so are its chunks"  # type: ignore[union-attr]
    shelf.clear()
    assert pool.statistics()["chunk_bytes_used"] == 0
