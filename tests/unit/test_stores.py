from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from potluck.errors import ConfigurationError, HubUnavailableError, ProtocolError
from potluck.hub.connection import Delivery
from potluck.hub.stores import (
    STORES,
    StoreDefinition,
    ensure_store,
    ensure_stores,
    readable_stores,
    stream_config,
    writable_stores,
)
from potluck.hub.subjects import Subjects
from potluck.sim.memoryconnection import MemoryConnection
from potluck.sim.memoryhub import MemoryHub

SUBJECTS = Subjects("test")


def names(stores: list[StoreDefinition]) -> set[str]:
    return {store.name for store in stores}


def test_who_reads_and_writes_what() -> None:
    assert names(readable_stores()) == {
        "roster",
        "manifest",
        "lease",
        "lineage",
        "shards",
        "contributions",
        "history",
        "ballot",
    }
    assert writable_stores(coordinates=False) == []
    assert names(writable_stores(coordinates=True)) == {
        "lease",
        "lineage",
        "shards",
        "contributions",
        "history",
        "ballot",
    }


def test_what_outlives_a_restart_is_kept_in_files() -> None:
    # The lease's revisions are fencing tokens; the lineage must never be lost.
    assert all(store.storage == "file" for store in STORES)


def test_members_who_coordinate_cannot_empty_the_lineage() -> None:
    [lineage] = [store for store in STORES if store.name == "lineage"]
    assert "subject_delete_marker_ttl" not in stream_config(lineage, SUBJECTS, 1)
    assert "allow_rollup_hdrs" not in stream_config(lineage, SUBJECTS, 1)


@pytest.mark.parametrize("name", ["", "Upper", "a.b", "a b", "x" * 40])
def test_what_cannot_name_a_store(name: str) -> None:
    with pytest.raises(ConfigurationError):
        StoreDefinition(name=name, description="")


async def test_all_stores_are_made() -> None:
    hub = MemoryHub("test", stores=())
    guard = hub.connect("GUARD")
    await ensure_stores(guard, SUBJECTS)
    for store in STORES:
        assert await guard.store(store.name).entries() == []
    await guard.close()


@asynccontextmanager
async def jetstream_that_says(*answers: object) -> AsyncIterator[tuple[MemoryConnection, list[str]]]:
    """A connection to a hub that gives these answers in turn, and what it was asked."""
    hub = MemoryHub("test", stores=())
    guard, jetstream = hub.connect("GUARD"), hub.connect("JETSTREAM")
    asked: list[str] = []
    left = list(answers)

    async def answer(delivery: Delivery) -> None:
        asked.append(delivery.subject.split(".")[3])
        await delivery.respond(msgspec.json.encode(left.pop(0)))

    await jetstream.subscribe("$JS.API.STREAM.>", answer)
    yield guard, asked
    await guard.close()
    await jetstream.close()


TABLE = StoreDefinition(name="table", description="")
FINE = {"type": "io.nats.jetstream.api.v1.stream_create_response", "config": {}, "did_create": True}
IN_USE = {"error": {"code": 400, "err_code": 10058, "description": "stream name already in use"}}
CANNOT_CHANGE = {"error": {"code": 500, "err_code": 10052, "description": "can not change storage type"}}
NO_PEERS = {"error": {"code": 400, "err_code": 10005, "description": "no suitable peers for placement"}}


async def test_a_store_that_differs_is_changed() -> None:
    async with jetstream_that_says(IN_USE, FINE) as (guard, asked):
        await ensure_store(guard, SUBJECTS, TABLE)
        assert asked == ["CREATE", "UPDATE"]


async def test_a_store_that_cannot_be_changed_is_said_to_be_so() -> None:
    async with jetstream_that_says(IN_USE, CANNOT_CHANGE) as (guard, _):
        with pytest.raises(ConfigurationError, match=r"potluck_test_table.*can not change storage type"):
            await ensure_store(guard, SUBJECTS, TABLE)


async def test_a_cluster_that_is_not_complete_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.hub.stores.RETRY_SECONDS", 0.001)
    async with jetstream_that_says(NO_PEERS, NO_PEERS, FINE) as (guard, asked):
        await ensure_store(guard, SUBJECTS, TABLE, replicas=3)
        assert asked == ["CREATE"] * 3


async def test_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.hub.stores.RETRY_SECONDS", 0.01)
    async with jetstream_that_says(*[NO_PEERS] * 1000) as (guard, _):
        with pytest.raises(HubUnavailableError, match="no suitable peers"):
            await ensure_store(guard, SUBJECTS, TABLE, replicas=3, timeout_seconds=0.05)


async def test_an_answer_that_cannot_be_read_is_no_answer() -> None:
    async with jetstream_that_says(["what"]) as (guard, _):
        with pytest.raises(ProtocolError):
            await ensure_store(guard, SUBJECTS, TABLE)
