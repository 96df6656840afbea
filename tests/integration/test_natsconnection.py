"""The connection to a real nats-server through everything that happens to it: crashes, freezes, bans, bad addresses."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from potluck.errors import (
    AccessError,
    CertificateError,
    ConfigurationError,
    HubUnavailableError,
    NotAdmittedError,
    RetryableError,
)
from potluck.hub.address import HubAddress
from potluck.hub.connection import Delivery, Entry
from potluck.hub.guard.permissions import Permissions
from potluck.hub.nats import watch as natswatch
from potluck.hub.nats.connection import ConnectionConfig, NatsConnection
from potluck.hub.nats.linkkeeper import KeeperConfig
from potluck.hub.server.certificate import prepare_certificates
from potluck.hub.stores import STORES, StoreDefinition, ensure_store, ensure_stores
from potluck.hub.subjects import Subjects
from potluck.testing.forwarder import Forwarder
from potluck.testing.plainhub import PlainHub, PlainUser, TlsFiles
from potluck.testing.polling import poll_until
from potluck.testing.ports import unused_tcp_port

RUN = "test"
SUBJECTS = Subjects(RUN)
PATIENCE_SECONDS = 60.0
TABLE = StoreDefinition(name="table", description="for tests", expires=True)
ALICE, BOB, STRANGER = PlainUser.make(), PlainUser.make(), PlainUser.make()


def quick(**changes: Any) -> ConnectionConfig:
    """Patient with a slow machine, but quick to try again."""
    defaults: dict[str, Any] = {
        "connect_timeout_seconds": 30.0,
        "backoff_first_seconds": 0.01,
        "backoff_limit_seconds": 0.1,
        "refusal_patience_seconds": 0.3,
    }
    return ConnectionConfig(keeper=KeeperConfig(**{**defaults, **changes}), reply_timeout_seconds=30.0)


async def connect(
    address: HubAddress, user: PlainUser = ALICE, config: ConnectionConfig | None = None, **options: Any
) -> NatsConnection:
    return await NatsConnection.connect(
        address, seed=user.seed, run=RUN, name="main", config=config or quick(), **options
    )


@asynccontextmanager
async def connected(*arguments: Any, **options: Any) -> AsyncIterator[NatsConnection]:
    connection = await connect(*arguments, **options)
    try:
        yield connection
    finally:
        await connection.close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[PlainHub]:
    with PlainHub(tmp_path / "hub", [ALICE, BOB]) as hub:
        hub.start()
        yield hub


@pytest.fixture
def tls_files(tmp_path: Path) -> TlsFiles:
    made = prepare_certificates(tmp_path / "authority", tmp_path / "tls", ["127.0.0.1"])
    return TlsFiles(certificate=made.chain_file, key=made.chain_file, ca_pem=made.ca_pem)


@pytest.fixture
def tls_hub(tmp_path: Path, tls_files: TlsFiles) -> Iterator[PlainHub]:
    with PlainHub(tmp_path / "hub", [ALICE, BOB], tls=tls_files) as hub:
        hub.start()
        yield hub


async def echo(delivery: Delivery) -> None:
    await delivery.respond(delivery.payload)


async def until(condition: Callable[[], Any], what: str) -> None:
    await poll_until(condition, PATIENCE_SECONDS, what)


async def persist(action: Callable[[], Awaitable[Any]]) -> Any:
    """Do it again until it succeeds, as a component does that meets a hub which is away."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await action()
        except RetryableError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.01)


async def in_thread(action: Callable[[], None]) -> None:
    """Without stopping the event loop meanwhile."""
    await asyncio.get_running_loop().run_in_executor(None, action)


def other_tasks() -> set[asyncio.Task[Any]]:
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}


# Crashes


@pytest.mark.parametrize("way", ["tcp", "websocket"])
async def test_all_goes_on_when_the_hub_is_killed_and_started_again(hub: PlainHub, way: str) -> None:
    address = hub.address(hub.url if way == "tcp" else hub.websocket_url)
    async with connected(address) as alice, connected(address, BOB) as bob:
        await ensure_store(alice, SUBJECTS, TABLE)
        await bob.subscribe("p.test.echo", echo)
        seen: dict[str, list[Entry]] = {}
        await bob.store("table").watch(lambda entry: seen.setdefault(entry.key, []).append(entry))
        stopped = False
        answered = 0
        written: dict[str, bytes] = {}

        async def ask() -> None:
            nonlocal answered
            while not stopped:
                assert await persist(lambda: alice.request("p.test.echo", b"hi", timeout_seconds=5.0)) == b"hi"
                answered += 1

        async def write() -> None:
            number = 0
            while not stopped:
                number += 1
                key, value = f"key{number % 20}", b"%d" % number
                await persist(partial(alice.store("table").put, key, value))
                written[key] = value

        traffic = [asyncio.create_task(ask()), asyncio.create_task(write())]

        async def traffic_flows() -> None:
            before, num_seen = answered, sum(map(len, seen.values()))
            await until(lambda: answered > before + 20, "requests to be answered")
            await until(lambda: sum(map(len, seen.values())) > num_seen + 20, "changes to be seen")

        for _ in range(3):
            await traffic_flows()
            await in_thread(hub.restart)
        await traffic_flows()
        stopped = True
        await asyncio.gather(*traffic)
        await until(
            lambda: {key: entries[-1].value for key, entries in seen.items()} == written, "the watch to have seen all"
        )
        for entries in seen.values():
            revisions = [entry.revision for entry in entries]
            assert revisions == sorted(set(revisions))
        assert alice.statistics()["reconnects"] >= 3
        assert bob.statistics()["reconnects"] >= 3
        assert bob.statistics()["handler_errors"] <= 3  # an answer that could not be sent as the hub died


async def test_a_store_that_was_only_in_memory_is_seen_to_be_empty_after_a_crash(hub: PlainHub) -> None:
    definition = StoreDefinition(name="table", description="for tests", storage="memory")
    async with connected(hub.address()) as alice:
        await ensure_store(alice, SUBJECTS, definition)
        store = alice.store("table")
        for number in range(10):
            await store.put("old", b"%d" % number)
        await store.put("gone", b"1")
        seen: list[Entry] = []
        await store.watch(seen.append)
        assert [(entry.key, entry.value) for entry in seen] == [("old", b"9"), ("gone", b"1")]
        await in_thread(hub.restart)
        await persist(lambda: ensure_store(alice, SUBJECTS, definition))
        revision = await persist(lambda: store.put("old", b"new"))
        assert revision < seen[0].revision  # revisions have started again
        await until(lambda: len(seen) >= 4, "the watch to see it")
        assert {(entry.key, entry.value) for entry in seen[2:4]} == {("old", b"new"), ("gone", None)}
        await store.put("old", b"newer")
        await until(lambda: len(seen) == 5, "the watch to go on")
        assert seen[4].value == b"newer"


async def test_a_frozen_hub_is_noticed_and_a_publisher_does_not_hang(hub: PlainHub) -> None:
    config = quick(ping_every_seconds=0.05, pong_within_seconds=0.5, connect_timeout_seconds=0.5)
    async with (
        Forwarder(hub.port) as gate,
        connected(hub.address(f"nats://127.0.0.1:{gate.port}"), config=config) as alice,
    ):
        gate.freeze()

        async def flood() -> None:
            while True:
                await alice.publish("p.test.flood", bytes(1024 * 1024))

        with pytest.raises(HubUnavailableError):
            await asyncio.wait_for(flood(), PATIENCE_SECONDS)
        assert not alice.is_connected
        await until(lambda: alice.statistics()["failed_connects"] >= 2, "attempts that fail")
        gate.thaw()
        await until(lambda: alice.is_connected, "the connection to come back")


async def test_an_answer_that_comes_too_late_does_no_harm(hub: PlainHub) -> None:
    async with Forwarder(hub.port) as gate, connected(hub.address(f"nats://127.0.0.1:{gate.port}")) as alice:
        link = alice._keeper.link
        assert link is not None
        gate.freeze()
        for _ in range(3):
            with pytest.raises(HubUnavailableError, match="did not answer"):
                await link.round_trip(0.05)
        gate.thaw()
        await link.round_trip(PATIENCE_SECONDS)
        assert alice.is_connected
        assert alice.statistics()["reconnects"] == 0


async def test_what_is_published_faster_than_it_goes_out_makes_the_publisher_wait(hub: PlainHub) -> None:
    async with (
        Forwarder(hub.port) as gate,
        connected(hub.address(), BOB) as bob,
        connected(hub.address(f"nats://127.0.0.1:{gate.port}")) as alice,
    ):
        heard: list[int] = []
        await bob.subscribe("p.test.flood", lambda delivery: heard.append(int(delivery.payload[:4])))
        gate.freeze()
        sent = 0

        async def flood() -> None:
            nonlocal sent
            for number in range(48):
                await alice.publish("p.test.flood", b"%4d" % number + bytes(1024 * 1024 - 4))
                sent += 1

        flooding = asyncio.create_task(flood())
        # A little of it fits in buffers: ours, the kernel's, and the gate's.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(flooding), 0.5)
        assert sent < 32
        gate.thaw()
        await flooding
        await until(lambda: len(heard) == 48, "all of it to arrive")
        assert heard == list(range(48))


# Endings


@pytest.mark.parametrize("way", ["tcp", "websocket"])
async def test_closing_leaves_no_task_behind(hub: PlainHub, way: str) -> None:
    before = other_tasks()
    for _ in range(10):
        alice = await connect(hub.address(hub.url if way == "tcp" else hub.websocket_url))
        await ensure_store(alice, SUBJECTS, TABLE)
        await alice.subscribe("p.test.echo", echo)
        await alice.store("table").watch(lambda _: None)
        assert await alice.request("p.test.echo", b"hi", timeout_seconds=30.0) == b"hi"
        await alice.close()
        assert other_tasks() == before


@pytest.mark.parametrize("state", ["refusing", "silent", "reachable"])
async def test_closing_during_a_reconnect_does_not_hang(hub: PlainHub, state: str) -> None:
    chance = random.Random(3)
    before = other_tasks()
    for _ in range(30):
        gate = Forwarder(hub.port)
        await gate.open()
        config = quick(backoff_first_seconds=0.001, backoff_limit_seconds=0.002)
        alice = await connect(hub.address(f"nats://127.0.0.1:{gate.port}"), config=config)
        await alice.subscribe("p.test.echo", echo)
        await gate.shut()
        await until(lambda alice=alice: not alice.is_connected, "the loss")
        if state != "refusing":
            if state == "silent":
                gate.freeze()
            await gate.open()
        await asyncio.sleep(chance.uniform(0, 0.02))
        await asyncio.wait_for(alice.close(), PATIENCE_SECONDS)
        await gate.shut()
        assert other_tasks() == before


@pytest.mark.parametrize("scheme", ["nats", "ws"])
async def test_giving_up_the_first_connect_leaves_nothing_behind(hub: PlainHub, scheme: str) -> None:
    chance = random.Random(5)
    before = other_tasks()
    for _ in range(40):
        connecting = asyncio.create_task(connect(hub.address(hub.url if scheme == "nats" else hub.websocket_url)))
        await asyncio.sleep(chance.uniform(0, 0.01))
        connecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await connecting).close()  # it was quicker
        assert other_tasks() == before


async def test_a_callback_that_fails_does_not_stop_the_connection(
    hub: PlainHub, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ValueError("a bug in a callback")

    async with connected(hub.address(), on_connected=fail, on_disconnected=fail) as alice:
        await in_thread(hub.restart)
        await until(lambda: alice.statistics()["callback_errors"] == 2, "both callbacks")
        await persist(lambda: alice.publish("p.test.talk", b""))
        assert "a bug in a callback" in caplog.text


# Refusals


async def test_who_is_thrown_out_and_kept_out_learns_it(hub: PlainHub) -> None:
    refused: list[AccessError] = []
    async with connected(hub.address(), on_refused=refused.append) as alice:
        await alice.subscribe("p.test.echo", echo)
        await hub.change_users([BOB])
        await until(lambda: refused, "the refusal")
        assert isinstance(refused[0], NotAdmittedError)
        assert alice.closed_error is refused[0]
        assert not alice.is_connected
        uses = (
            alice.publish("p.test.talk", b""),
            alice.request("p.test.talk", b"", timeout_seconds=600.0),
            alice.subscribe("p.test.talk", echo),
            alice.store("table").get("k"),
        )
        for use in uses:
            with pytest.raises(NotAdmittedError):
                await use
        attempts = alice.statistics()["refusals"]
        assert attempts >= 2
        await hub.change_users([ALICE, BOB])  # too late: it has given up
        assert alice.statistics()["refusals"] == attempts
        assert len(refused) == 1


async def test_a_passing_refusal_is_put_up_with(hub: PlainHub) -> None:
    refused: list[AccessError] = []
    config = quick(refusal_patience_seconds=600.0)
    async with connected(hub.address(), config=config, on_refused=refused.append) as alice:
        await hub.change_users([BOB])
        await until(lambda: alice.statistics()["refusals"] >= 3, "some refusals")
        await hub.change_users([ALICE, BOB])
        await until(lambda: alice.is_connected, "the return")
        assert refused == []
        assert alice.closed_error is None


async def test_a_stranger_is_not_admitted(hub: PlainHub) -> None:
    with pytest.raises(NotAdmittedError, match="does not let this identity in"):
        await connect(hub.address(), STRANGER)
    with pytest.raises(NotAdmittedError):
        await connect(hub.address(hub.websocket_url), STRANGER)


async def test_a_seed_that_is_none_is_refused(hub: PlainHub) -> None:
    with pytest.raises(ConfigurationError, match="not a valid nkey seed"):
        await NatsConnection.connect(hub.address(), seed=b"SUNOTASEED", run=RUN, name="main")


# Addresses


async def test_plain_words_for_what_cannot_be_reached(hub: PlainHub) -> None:
    nobody = unused_tcp_port()
    for scheme in ("nats", "ws"):
        with pytest.raises(HubUnavailableError, match="connection refused"):
            await connect(hub.address(f"{scheme}://127.0.0.1:{nobody}"))
        with pytest.raises(HubUnavailableError, match="is not known"):
            await connect(hub.address(f"{scheme}://hub.invalid:4222"))
    with pytest.raises(HubUnavailableError, match=r"no server.*127\.0\.0\.1.*refused.*hub\.invalid.*not known"):
        await connect(hub.address(f"nats://127.0.0.1:{nobody}", "nats://hub.invalid:4222"))


@pytest.mark.parametrize("server", ["nats://", "tls://:4222", "nats://host:port", "wss://host:70000", "nats://[::1"])
async def test_what_is_no_address_is_refused(server: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a hub address"):
        await connect(HubAddress(servers=(server,)))


@pytest.mark.parametrize("scheme", ["nats", "tls", "ws", "wss"])
async def test_what_accepts_and_says_nothing_is_given_up_in_time(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = HubAddress(servers=(f"{scheme}://127.0.0.1:{silent.getsockname()[1]}",))
        with pytest.raises(HubUnavailableError, match=r"did not answer within 0\.2 s"):
            await connect(address, connect_timeout_seconds=0.2)


@asynccontextmanager
async def a_server(talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """Something that answers in its own way; its address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    "words",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"",
        b"INFO not json\r\n",
        b'INFO {"max_payload": 1024}\r\n',
        b"INFO {\"max_payload\": 1024}\r\n-ERR 'maximum connections exceeded'\r\n",
        b'INFO {"max_payload": 1024}\r\nnonsense\r\n',
        b"x" * 3_000_000,
    ],
)
async def test_what_is_no_hub_is_refused(words: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        await writer.drain()
        writer.write_eof()
        await reader.read()

    async with a_server(talk) as place:
        with pytest.raises(HubUnavailableError):
            await connect(HubAddress(servers=(f"nats://{place}",)))


async def test_a_hub_that_takes_its_time_to_decide_is_waited_for() -> None:
    """It pings while it waits for the guard, before it answers our ping."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"max_payload": 1048576, "headers": true}\r\n')
        assert (await reader.readline()).startswith(b"CONNECT ")
        assert await reader.readline() == b"PING\r\n"
        writer.write(b"PING\r\n")
        assert await reader.readline() == b"PONG\r\n"
        writer.write(b"PONG\r\n")
        while line := await reader.readline():
            if line == b"PING\r\n":
                writer.write(b"PONG\r\n")

    async with a_server(talk) as place, connected(HubAddress(servers=(f"nats://{place}",))) as alice:
        assert alice.is_connected
        await alice.subscribe("p.test.talk", lambda _: None)  # which takes a round trip


async def test_servers_are_tried_in_order_and_websocket_is_a_way_out(hub: PlainHub) -> None:
    nobody = f"nats://127.0.0.1:{unused_tcp_port()}"
    async with connected(hub.address(nobody, hub.url, hub.websocket_url)) as alice:
        assert alice.server == hub.url
    async with connected(hub.address(nobody, hub.websocket_url)) as alice:
        assert alice.server == hub.websocket_url
        await alice.subscribe("p.test.echo", echo)
        large = bytes(1024 * 1024)
        assert await alice.request("p.test.echo", large, timeout_seconds=30.0) == large


async def test_a_lost_connection_comes_back_the_same_way_if_it_can(hub: PlainHub) -> None:
    async with Forwarder(hub.port) as gate:
        through_gate = f"nats://127.0.0.1:{gate.port}"
        async with connected(hub.address(through_gate, hub.websocket_url)) as alice:
            for _ in range(3):
                await in_thread(hub.restart)
                await until(lambda: alice.is_connected and alice.statistics()["reconnects"] > 0, "the return")
                if alice.server == through_gate:
                    break  # while the hub was starting, either way may have opened first
            await gate.shut()
            await until(lambda: alice.is_connected and alice.server == hub.websocket_url, "the other way")


# Encryption


@pytest.mark.parametrize("way", ["tls", "wss"])
async def test_an_encrypted_hub(tls_hub: PlainHub, way: str) -> None:
    address = tls_hub.address(tls_hub.url if way == "tls" else tls_hub.websocket_url)
    async with connected(address) as alice, connected(address, BOB) as bob:
        await bob.subscribe("p.test.echo", echo)
        large = random.Random(1).randbytes(1024 * 1024)
        assert await alice.request("p.test.echo", large, timeout_seconds=30.0) == large
        await in_thread(tls_hub.restart)
        assert await persist(lambda: alice.request("p.test.echo", b"again", timeout_seconds=5.0)) == b"again"


@pytest.mark.parametrize("way", ["tls", "wss"])
async def test_another_authority_is_not_trusted(tls_hub: PlainHub, tmp_path: Path, way: str) -> None:
    other = prepare_certificates(tmp_path / "other", tmp_path / "other-tls", ["127.0.0.1"])
    url = tls_hub.url if way == "tls" else tls_hub.websocket_url
    for ca_pem in (other.ca_pem, ""):  # "": only what this machine trusts
        with pytest.raises(CertificateError, match="is not the one that the join link names"):
            await connect(HubAddress(servers=(url,), ca_pem=ca_pem))


async def test_the_wrong_certificate_is_what_is_told_of_several_failures(tls_hub: PlainHub, tmp_path: Path) -> None:
    other = prepare_certificates(tmp_path / "other", tmp_path / "other-tls", ["127.0.0.1"])
    servers = (f"tls://127.0.0.1:{unused_tcp_port()}", tls_hub.url)
    with pytest.raises(CertificateError):
        await connect(HubAddress(servers=servers, ca_pem=other.ca_pem))


async def test_a_tls_address_is_never_spoken_to_in_plain() -> None:
    heard = b""
    told = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        writer.write(b'INFO {"max_payload": 1024, "nonce": "abc"}\r\n')
        heard += await reader.read()
        told.set()

    async with a_server(talk) as place:
        with pytest.raises(CertificateError, match="offers no encryption"):
            await connect(HubAddress(servers=(f"tls://{place}",)))
        await told.wait()
    assert heard == b""


async def test_words_before_the_encryption_are_not_believed(tls_files: TlsFiles) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"max_payload": 1024, "tls_required": true}\r\nPONG\r\n')
        await reader.read()

    async with a_server(talk) as place:
        with pytest.raises(CertificateError, match="before encryption began"):
            await connect(HubAddress(servers=(f"tls://{place}",), ca_pem=tls_files.ca_pem))


async def test_a_plain_address_of_an_encrypted_hub_says_what_to_change(tls_hub: PlainHub) -> None:
    with pytest.raises(CertificateError, match="tls://"):
        await connect(HubAddress(servers=(f"nats://127.0.0.1:{tls_hub.port}",)))
    with pytest.raises((CertificateError, HubUnavailableError)):
        await connect(HubAddress(servers=(f"ws://127.0.0.1:{tls_hub.websocket_port}",)))


# Clusters


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[PlainHub]]:
    routes = [unused_tcp_port() for _ in range(3)]
    hubs = [
        PlainHub(tmp_path / f"hub{index}", [ALICE, BOB], name=f"hub{index}", cluster_port=port, routes=routes)
        for index, port in enumerate(routes)
    ]
    try:
        for hub in hubs:
            hub.start()
        yield hubs
    finally:
        for hub in hubs:
            hub.close()


@pytest.mark.timeout(300)
async def test_in_a_cluster_the_next_server_takes_over(cluster: list[PlainHub]) -> None:
    by_url = {hub.url: hub for hub in cluster}
    # Only one server is named: the others are learnt from it.
    async with connected(cluster[0].address()) as alice, connected(cluster[0].address(), BOB) as bob:
        await ensure_store(alice, SUBJECTS, TABLE, replicas=3, timeout_seconds=PATIENCE_SECONDS)
        await bob.subscribe("p.test.echo", echo)
        seen: dict[str, bytes | None] = {}
        await persist(lambda: bob.store("table").watch(lambda entry: seen.update({entry.key: entry.value})))
        written: dict[str, bytes | None] = {}
        for turn in range(3):
            for number in range(20):
                key, value = f"key{number % 7}", b"%d.%d" % (turn, number)
                await persist(partial(alice.store("table").put, key, value))
                written[key] = value
                entry = await persist(partial(alice.store("table").get, key))
                assert entry is not None
                assert entry.value == value
            await until(lambda: seen == written, "the watch to see it all")
            victim = by_url[alice.server]
            await in_thread(victim.kill)
            assert await persist(lambda: alice.request("p.test.echo", b"hi", timeout_seconds=2.0)) == b"hi"
            assert alice.server != victim.url
            await persist(partial(alice.store("table").put, "after", b"%d" % turn))
            written["after"] = b"%d" % turn
            await until(lambda: seen == written, "the watch to go on")
            await in_thread(victim.start)


# Stores


async def test_all_stores_of_a_run_can_be_made_and_made_again(hub: PlainHub) -> None:
    async with connected(hub.address()) as alice:
        await ensure_stores(alice, SUBJECTS)
        revisions = {store.name: await alice.store(store.name).put("k", b"1", expected=0) for store in STORES}
        await ensure_stores(alice, SUBJECTS)
        for name, revision in revisions.items():
            entry = await alice.store(name).get("k")
            assert entry is not None
            assert entry.revision == revision


async def test_a_store_is_changed_where_it_can_be_and_else_it_is_said(hub: PlainHub) -> None:
    async with connected(hub.address()) as alice:
        await ensure_store(alice, SUBJECTS, StoreDefinition(name="table", description="first"))
        await alice.store("table").put("k", b"1")
        await ensure_store(alice, SUBJECTS, StoreDefinition(name="table", description="second", expires=True))
        await alice.store("table").put("short", b"1", ttl_seconds=60)
        assert [entry.key for entry in await alice.store("table").entries()] == ["k", "short"]
        with pytest.raises(ConfigurationError, match="does not keep the store potluck_test_table"):
            await ensure_store(alice, SUBJECTS, StoreDefinition(name="table", description="third", storage="memory"))


async def test_what_only_coordinators_write_cannot_be_emptied_by_a_header(hub: PlainHub) -> None:
    async with connected(hub.address()) as alice:
        await ensure_stores(alice, SUBJECTS)
        await alice.store("lineage").put("epoch.1", b"")
        subject = SUBJECTS.store_write("lineage", "epoch.2")
        await alice.request_messages(subject, b"", timeout_seconds=30.0, headers={"Nats-Rollup": "all"})
        assert [entry.key for entry in await alice.store("lineage").entries()] == ["epoch.1"]


async def test_the_mark_of_a_deletion_goes_by_itself_and_nobody_is_told_twice(
    hub: PlainHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("potluck.hub.nats.store.DELETED_FOR_SECONDS", 1)
    async with connected(hub.address()) as alice:
        await ensure_store(alice, SUBJECTS, TABLE)
        store = alice.store("table")
        seen: list[Entry] = []
        await store.watch(seen.append)
        await store.put("k", b"1")
        await store.delete("k")
        await until(lambda: len(seen) == 2, "the deletion")

        async def num_versions() -> int:
            return len(await store.versions())

        assert await num_versions() == 1

        async def no_mark() -> bool:
            return await num_versions() == 0

        await poll_until(no_mark, PATIENCE_SECONDS, "the mark to go")
        assert await store.get("k") is None
        await store.put("k", b"2", expected=0)
        await until(lambda: len(seen) == 3, "the new version")
        assert [entry.value for entry in seen] == [b"1", None, b"2"]


async def test_changes_that_were_swallowed_are_found(hub: PlainHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(natswatch, "IN_FLIGHT_SECONDS", 0.01)
    monkeypatch.setattr(natswatch, "CHECK_EVERY_SECONDS", 0.1)
    monkeypatch.setattr(natswatch, "FIRST_CHECK_SECONDS", 0.1)
    async with connected(hub.address()) as alice:
        await ensure_store(alice, SUBJECTS, TABLE)
        store = alice.store("table")
        seen: list[tuple[str, bytes | None]] = []
        watch = await store.watch(lambda entry: seen.append((entry.key, entry.value)))
        # As when a route between two servers of a cluster breaks: the connection is fine, and nothing comes.
        assert watch._subscription is not None
        await watch._subscription.cancel()
        await store.put("a", b"1")
        await store.put("b", b"1")
        await until(lambda: seen == [("a", b"1"), ("b", b"1")], "the regular check to find them")


async def test_a_change_that_follows_one_we_never_saw_makes_the_watch_look(
    hub: PlainHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(natswatch, "FIRST_CHECK_SECONDS", 3600.0)
    async with connected(hub.address()) as alice:
        await ensure_store(alice, SUBJECTS, TABLE)
        store = alice.store("table")
        seen: list[tuple[str, bytes | None]] = []
        watch = await store.watch(lambda entry: seen.append((entry.key, entry.value)))
        assert watch._subscription is not None
        await watch._subscription.cancel()
        await store.put("a", b"1")
        await store.put("b", b"1")
        watch._subscription = await alice.subscribe(store.change_subject(""), watch._changed)
        await store.put("a", b"2")
        await until(lambda: sorted(seen) == [("a", b"2"), ("b", b"1")], "both to be told")


async def test_a_member_reads_through_the_guard(tmp_path: Path) -> None:
    subject = SUBJECTS.read(BOB.peer, "table")
    permissions = Permissions(
        publish=(subject,), subscribe=(f"{Subjects.inbox(BOB.peer)}.>", SUBJECTS.store_change("table", ">"))
    )
    with PlainHub(tmp_path / "hub", [ALICE, BOB.with_permissions(permissions)]) as hub:
        hub.start()
        through_guard = ConnectionConfig(keeper=quick().keeper, reply_timeout_seconds=30.0, stores="guard")
        async with connected(hub.address()) as guard, connected(hub.address(), BOB, through_guard) as bob:
            await ensure_store(guard, SUBJECTS, TABLE)
            with pytest.raises(HubUnavailableError, match="nobody answers"):
                await bob.store("table").get("k")

            async def forward(delivery: Delivery) -> None:
                await guard.forward(guard.read_subject("table"), delivery.payload, reply=delivery.reply)

            await guard.subscribe(subject, forward)
            keys = [f"key{number:04}" for number in range(1100)]
            await asyncio.gather(*(guard.store("table").put(key, b"1") for key in keys))
            seen: list[str] = []
            await bob.store("table").watch(lambda entry: seen.append(entry.key))
            assert sorted(seen) == keys
            assert [entry.key for entry in await bob.store("table").entries()] == keys
            assert await bob.store("table").get("key0007") is not None
            assert await bob.store("table").get("missing") is None


# The other event loop


async def come_and_go(hub: PlainHub, url: str) -> None:
    async with connected(hub.address(url)) as alice, connected(hub.address(url), BOB) as bob:
        await ensure_store(alice, SUBJECTS, TABLE)
        await bob.subscribe("p.test.echo", echo)
        seen: list[bytes | None] = []
        await bob.store("table").watch(lambda entry: seen.append(entry.value))
        large = bytes(1024 * 1024)
        assert await alice.request("p.test.echo", large, timeout_seconds=30.0) == large
        await in_thread(hub.restart)
        assert await persist(lambda: alice.request("p.test.echo", b"hi", timeout_seconds=5.0)) == b"hi"
        await persist(lambda: alice.store("table").put("k", url.encode()))
        await until(lambda: seen[-1:] == [url.encode()], "the watch to go on")
        with pytest.raises(NotAdmittedError):
            await connect(hub.address(url), STRANGER)
    assert other_tasks() == set()


@pytest.fixture(scope="module")
def _used_before() -> None:
    """The first loop makes a pipe for signals that stays for the life of the process."""
    uvloop.new_event_loop().close()


@pytest.mark.usefixtures("_used_before")
@pytest.mark.parametrize("way", ["tls", "wss"])
def test_the_same_on_uvloop(tls_hub: PlainHub, way: str) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(come_and_go(tls_hub, tls_hub.url if way == "tls" else tls_hub.websocket_url))
