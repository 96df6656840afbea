"""The bulk wire against a real nats-server, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from potluck.errors import ConfigurationError
from potluck.hub.address import HubAddress
from potluck.hub.bulk.connection import BulkLimits
from potluck.hub.bulk.wire import BulkWire, BulkWireConfig
from potluck.hub.guard.permissions import bulk_permissions
from potluck.hub.server.certificate import prepare_certificates
from potluck.hub.subjects import Subjects
from potluck.testing.plainhub import PlainHub, PlainUser, TlsFiles
from potluck.testing.polling import poll_until
from potluck.testing.ports import unused_tcp_port

uvloop.run(asyncio.sleep(0))  # libuv opens one pipe per process, for good: here, before a test counts

DEADLINE_SECONDS = 30.0
SUBJECTS = Subjects("test")
QUICK = {"backoff_first_seconds": 0.05, "backoff_limit_seconds": 0.2, "refused_first_seconds": 0.05}
SCHEMES = ["nats", "tls", "ws", "wss"]


def member() -> PlainUser:
    user = PlainUser.make()
    return user.with_permissions(bulk_permissions(SUBJECTS, user.peer))


ALICE, BOB, CAROL = member(), member(), member()
TO_BOB = SUBJECTS.relay(BOB.peer, ALICE.peer)
TO_ALICE = SUBJECTS.relay(ALICE.peer, BOB.peer)


class Recorder:
    """Writes down what a wire tells."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.messages: list[tuple[str, memoryview]] = []
        self.skipped: list[tuple[str, int]] = []

    def wire_connected(self) -> None:
        self.log.append("connected")

    def wire_lost(self, reason: str) -> None:
        self.log.append(f"lost: {reason}")

    def wire_writable(self) -> None:
        self.log.append("writable")

    def message_arrived(self, subject: str, payload: memoryview) -> None:
        self.messages.append((subject, payload))

    def message_skipped(self, subject: str, num_bytes: int) -> None:
        self.skipped.append((subject, num_bytes))


class Station:
    """A wire and what it told."""

    def __init__(self, wire: BulkWire) -> None:
        self.wire = wire
        self.events = Recorder()

    def count(self, name: str) -> int:
        return self.wire.statistics()[name]

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        await poll_until(
            condition, DEADLINE_SECONDS, lambda: f"{what}; {self.wire.statistics()}, {self.events.log[-3:]}"
        )

    async def until_connected(self) -> None:
        await self.until(lambda: self.wire.is_connected, "the wire to connect")

    async def until_messages(self, number: int) -> None:
        await self.until(lambda: len(self.events.messages) >= number, f"{number} messages")

    async def publish(self, subject: str, *parts: bytes | memoryview) -> None:
        await self.until(lambda: self.wire.publish(subject, parts), "room to publish")


@asynccontextmanager
async def station(
    address: HubAddress, user: PlainUser, *, limits: BulkLimits | None = None, **times: float
) -> AsyncIterator[Station]:
    config = BulkWireConfig(limits=limits or BulkLimits(), **{**QUICK, **times})  # type: ignore[arg-type]
    opened = Station(BulkWire(address, seed=user.seed, config=config))
    opened.wire.open([SUBJECTS.relay(user.peer, "*")], opened.events)
    try:
        yield opened
    finally:
        await opened.wire.close()


@pytest.fixture(scope="module")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    folder = tmp_path_factory.mktemp("certificates")
    made = prepare_certificates(folder / "authority", folder / "tls", ["127.0.0.1"])
    return TlsFiles(certificate=made.chain_file, key=made.chain_file, ca_pem=made.ca_pem)


@pytest.fixture(scope="module")
def plain_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainHub]:
    with PlainHub(tmp_path_factory.mktemp("plain"), [ALICE, BOB, CAROL]) as hub:
        hub.start()
        yield hub


@pytest.fixture(scope="module")
def tls_hub(tmp_path_factory: pytest.TempPathFactory, tls_files: TlsFiles) -> Iterator[PlainHub]:
    with PlainHub(tmp_path_factory.mktemp("tls"), [ALICE, BOB, CAROL], tls=tls_files) as hub:
        hub.start()
        yield hub


@pytest.fixture
def own_hub(tmp_path: Path, tls_files: TlsFiles) -> Iterator[PlainHub]:
    """A hub that the test may kill."""
    with PlainHub(tmp_path / "hub", [ALICE, BOB, CAROL], tls=tls_files) as hub:
        hub.start()
        yield hub


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def hub(scheme: str, plain_hub: PlainHub, tls_hub: PlainHub) -> PlainHub:
    return tls_hub if scheme in ("tls", "wss") else plain_hub


@pytest.fixture
def address(scheme: str, hub: PlainHub) -> HubAddress:
    return hub.address(hub.websocket_url if scheme.startswith("ws") else hub.url)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_messages_of_every_size_arrive_whole_and_in_order(
    address: HubAddress, run: Callable[[Awaitable[None]], None]
) -> None:
    async def exchange() -> None:
        async with station(address, ALICE) as alice, station(address, BOB) as bob:
            await alice.until_connected()
            await bob.until_connected()
            blob = os.urandom(1024 * 1024)
            sizes = [0, 1, 125, 126, 4095, 4096, 16_000, 32_768, 65_535, 65_536, 70_000, 500_000, len(blob)] * 2
            for size in sizes:
                await alice.publish(TO_BOB, blob[: size // 3], memoryview(blob)[size // 3 : size])
                await bob.publish(TO_ALICE, blob[:size])
            await bob.until_messages(len(sizes))
            await alice.until_messages(len(sizes))
            for received, subject in ((bob, TO_BOB), (alice, TO_ALICE)):
                assert [told for told, _ in received.events.messages] == [subject] * len(sizes)
                # The views are looked at only now: none was overwritten by what came later.
                assert all(
                    payload == blob[:size] for (_, payload), size in zip(received.events.messages, sizes, strict=True)
                )
            assert alice.count("messages_sent") == bob.count("messages_received") == len(sizes)
            assert alice.count("bytes_sent") == bob.count("bytes_received") == sum(sizes)

    run(exchange())


async def test_nothing_happens_before_open_and_after_close(plain_hub: PlainHub) -> None:
    wire = BulkWire(plain_hub.address(), seed=ALICE.seed)
    assert wire.state == "idle"
    assert not wire.publish(TO_BOB, [b"x"])
    wire.open([TO_ALICE], Recorder())
    with pytest.raises(RuntimeError):
        wire.open([TO_ALICE], Recorder())
    await wire.close()
    await wire.close()
    assert wire.state == "closed"
    assert not wire.publish(TO_BOB, [b"x"])


async def test_close_at_any_moment_leaves_nothing(address: HubAddress) -> None:
    for turns in range(0, 40, 3):
        wire = BulkWire(address, seed=ALICE.seed)
        wire.open([TO_ALICE], Recorder())
        for _ in range(turns):
            await asyncio.sleep(0.0005)
        await wire.close()


async def test_what_was_published_before_close_arrives(tls_hub: PlainHub) -> None:
    async with station(tls_hub.address(), BOB) as bob:
        await bob.until_connected()
        async with station(tls_hub.address(), ALICE) as alice:
            await alice.until_connected()
            for _ in range(3):
                assert alice.wire.publish(TO_BOB, [bytes(400_000)])
        await bob.until_messages(3)


async def test_a_wire_that_cannot_write_says_so_and_says_when_it_can(hub: PlainHub, address: HubAddress) -> None:
    limits = BulkLimits(high_water_bytes=300_000, low_water_bytes=100_000)
    async with station(address, ALICE, limits=limits) as alice, station(address, BOB) as bob:
        await alice.until_connected()
        await bob.until_connected()
        payload, accepted = bytes(1_000_000), 0
        hub.process.freeze()
        try:
            while alice.wire.publish(TO_BOB, [payload]):
                accepted += 1
                assert accepted < 100, "the kernel takes everything, or congestion is not seen"
                await asyncio.sleep(0)
        finally:
            hub.process.thaw()
        assert alice.wire.publish(TO_BOB, [b"urgent"], urgent=True)
        assert alice.count("congested") == 1
        await alice.until(lambda: "writable" in alice.events.log, "to be told that there is room")
        assert alice.wire.publish(TO_BOB, [b"again"])
        await bob.until_messages(accepted + 2)
        assert bytes(bob.events.messages[-2][1]) == b"urgent"
        assert alice.events.log.count("writable") == 1


async def test_more_than_the_hub_takes_is_refused_here(plain_hub: PlainHub) -> None:
    async with station(plain_hub.address(), ALICE) as alice:
        await alice.until_connected()
        assert alice.wire.max_payload_bytes == 1024 * 1024
        with pytest.raises(ConfigurationError, match="smaller pieces"):
            alice.wire.publish(TO_BOB, [bytes(1024 * 1024), b"x"])
        assert alice.wire.is_connected


async def test_a_message_that_is_too_large_costs_only_itself(plain_hub: PlainHub) -> None:
    async with (
        station(plain_hub.address(), ALICE) as alice,
        station(plain_hub.address(), BOB, limits=BulkLimits(max_message_bytes=1000)) as bob,
    ):
        await alice.until_connected()
        await bob.until_connected()
        for size in (10, 1001, 900_000, 1000):
            await alice.publish(TO_BOB, bytes(size))
        await bob.until_messages(2)
        assert [len(payload) for _, payload in bob.events.messages] == [10, 1000]
        assert bob.count("oversized") == 2
        assert bob.events.skipped == [(TO_BOB, 1001), (TO_BOB, 900_000)]
        assert bob.events.log == ["connected"]


@pytest.mark.parametrize("scheme", ["tls", "wss"])
async def test_whom_a_wire_listens_to_can_change_and_holds_after_a_reconnect(own_hub: PlainHub, scheme: str) -> None:
    address = own_hub.address(own_hub.websocket_url if scheme == "wss" else own_hub.url)
    async with station(address, ALICE) as alice, station(address, BOB) as bob, station(address, CAROL) as carol:
        stations = (alice, bob, carol)
        for each in stations:
            await each.until_connected()

        async def tell(sender: Station, subject: str, receiver: Station, text: bytes) -> None:
            await sender.publish(subject, text)
            await receiver.until(lambda: text in [bytes(each) for _, each in receiver.events.messages], "the message")

        async def bob_hears(text: bytes) -> bool:
            """Whether Bob hears Alice. Each word that follows proves that the hub is done with the one before."""
            await tell(bob, SUBJECTS.relay(CAROL.peer, BOB.peer), carol, b"Bob listens: " + text)
            await alice.publish(TO_BOB, text)
            await tell(alice, SUBJECTS.relay(CAROL.peer, ALICE.peer), carol, text)
            await tell(carol, carol_to_bob, bob, b"Carol too: " + text)
            return text in [bytes(each) for _, each in bob.events.messages]

        carol_to_bob = SUBJECTS.relay(BOB.peer, CAROL.peer)
        assert await bob_hears(b"at first")
        bob.wire.listen([carol_to_bob])
        assert not await bob_hears(b"then not")
        await asyncio.to_thread(own_hub.restart)
        for each in stations:
            await each.until(lambda each=each: each.count("connects") == 2 and each.wire.is_connected, "it to be back")
        assert not await bob_hears(b"nor after a reconnect")
        bob.wire.listen([carol_to_bob, TO_BOB])
        assert await bob_hears(b"and again")


async def test_nobody_publishes_in_anothers_name(tls_hub: PlainHub) -> None:
    async with station(tls_hub.address(), ALICE) as alice, station(tls_hub.address(), BOB) as bob:
        await alice.until_connected()
        await bob.until_connected()
        await alice.publish(SUBJECTS.relay(BOB.peer, member().peer), b"forged")
        await alice.publish("p.test.plan.X", b"forged")
        await alice.publish(TO_BOB, b"genuine")
        await bob.until_messages(1)
        await alice.until(lambda: alice.count("complaints") == 2, "the hub to complain")
        assert [subject for subject, _ in bob.events.messages] == [TO_BOB]
        assert alice.wire.is_connected


# Loss and return


@pytest.mark.parametrize("scheme", ["tls", "wss"])
async def test_a_hub_that_dies_and_comes_back(own_hub: PlainHub, scheme: str) -> None:
    address = own_hub.address(own_hub.url if scheme == "tls" else own_hub.websocket_url)
    async with station(address, ALICE) as alice, station(address, BOB) as bob:
        await alice.until_connected()
        await bob.until_connected()
        for _ in range(20):
            alice.wire.publish(TO_BOB, [bytes(1_000_000)])
        await bob.until_messages(1)
        own_hub.kill()
        await alice.until(lambda: not alice.wire.is_connected, "the loss to be seen")
        await bob.until(lambda: not bob.wire.is_connected, "the loss to be seen")
        assert not alice.wire.publish(TO_BOB, [b"x"])
        await alice.until(lambda: alice.count("failed_attempts") >= 2, "attempts to reconnect")
        await asyncio.to_thread(own_hub.start)
        await alice.until_connected()
        await bob.until_connected()
        bob.events.messages.clear()
        await alice.publish(TO_BOB, b"after the crash")
        await bob.until_messages(1)
        assert [line.partition(":")[0] for line in bob.events.log] == ["connected", "lost", "connected"]
        assert bob.count("connects") == 2
        assert bob.count("losses") == 1


async def test_a_frozen_hub_is_given_up(own_hub: PlainHub) -> None:
    async with station(own_hub.address(), ALICE, ping_after_seconds=0.2, silent_seconds=0.6) as alice:
        await alice.until_connected()
        own_hub.process.freeze()
        await alice.until(lambda: alice.count("losses") == 1, "the silence to be noticed")
        assert "silent" in alice.events.log[-1]
        own_hub.process.thaw()
        await alice.until_connected()


async def test_an_owner_that_fails_does_not_end_the_wire(plain_hub: PlainHub, caplog: pytest.LogCaptureFixture) -> None:
    async with station(plain_hub.address(), ALICE) as alice:
        told: list[str] = []

        def fail_once() -> None:
            told.append("connected")
            if len(told) == 1:
                raise ValueError("a mistake of the owner")

        alice.events.wire_connected = fail_once  # type: ignore[method-assign]
        await alice.until(lambda: len(told) == 2, "the wire to connect again")
        await alice.until_connected()
        assert alice.count("errors") == 1
        assert "a mistake of the owner" in caplog.text


async def test_an_idle_wire_is_kept(plain_hub: PlainHub) -> None:
    async with station(plain_hub.address(), ALICE, ping_after_seconds=0.05, silent_seconds=DEADLINE_SECONDS) as alice:
        await alice.until_connected()
        await asyncio.sleep(0.5)
        assert alice.events.log == ["connected"]


async def test_who_is_refused_is_seen_to_be_and_gets_in_later(own_hub: PlainHub) -> None:
    carol = member()
    async with station(own_hub.address(), carol, refused_limit_seconds=0.3) as wire:
        await wire.until(lambda: wire.wire.state == "refused", "the refusal")
        await wire.until(lambda: wire.count("refusals") >= 3, "further attempts")
        assert wire.events.log == []
        await own_hub.change_users([ALICE, carol])
        await wire.until_connected()
        assert wire.wire.state == "connected"
        await own_hub.change_users([ALICE])
        await wire.until(lambda: wire.wire.state == "refused", "to be thrown out")
        assert len(wire.events.log) == 2


@pytest.mark.parametrize("scheme", ["tls", "wss"])
async def test_another_authority_is_not_trusted(tls_hub: PlainHub, tmp_path: Path, scheme: str) -> None:
    other = prepare_certificates(tmp_path / "other", tmp_path / "other-tls", ["127.0.0.1"])
    url = tls_hub.url if scheme == "tls" else tls_hub.websocket_url
    async with station(HubAddress(servers=(url,), ca_pem=other.ca_pem), ALICE) as alice:
        await alice.until(lambda: alice.count("failed_attempts") >= 2, "two attempts to fail")
        assert alice.count("connects") == 0


async def test_the_next_server_is_tried(plain_hub: PlainHub) -> None:
    servers = (f"nats://127.0.0.1:{unused_tcp_port()}", f"ws://127.0.0.1:{unused_tcp_port()}", plain_hub.url)
    async with station(plain_hub.address(*servers), ALICE) as alice:
        await alice.until_connected()
        assert alice.count("failed_attempts") == 2


async def test_in_a_cluster_the_other_server_takes_over(tmp_path: Path) -> None:
    routes = [unused_tcp_port(), unused_tcp_port()]
    with (
        PlainHub(tmp_path / "a", [ALICE, BOB, CAROL], name="a", cluster_port=routes[0], routes=routes) as first,
        PlainHub(tmp_path / "b", [ALICE, BOB, CAROL], name="b", cluster_port=routes[1], routes=routes) as second,
    ):
        first.start()
        second.start()
        async with station(first.address(), ALICE) as alice, station(second.address(), BOB) as bob:
            await alice.until_connected()
            await bob.until_connected()

            async def arrives() -> bool:
                before = len(bob.events.messages)
                await alice.publish(TO_BOB, bytes(100_000))
                try:
                    await poll_until(lambda: len(bob.events.messages) > before, 1.0, "a message")
                except AssertionError:
                    return False  # the servers are telling each other still
                return True

            await poll_until(arrives, DEADLINE_SECONDS, "a message to pass from server to server")
            first.kill()
            await alice.until(lambda: alice.count("connects") == 2, "the other server to take over")
            await poll_until(arrives, DEADLINE_SECONDS, "a message by way of the other server")


# Servers that misbehave

INFO = b'INFO {"server_id":"x","max_payload":1048576,"nonce":"abc"}\r\n'
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def fake_server(script: Script) -> AsyncIterator[str]:
    """A server that does what the script says to everyone who connects; gives HOST:PORT."""
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await script(reader, writer)
            await reader.read(-1)  # until the other hangs up
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            running.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running)
        await server.wait_closed()


def says(data: bytes) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return script


def lets_in_and_says(data: bytes) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(INFO)
        await reader.readuntil(b"PING\r\n")
        writer.write(b"PONG\r\n" + data)
        await writer.drain()

    return script


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"PONG\r\n",
        b"INFO nonsense\r\n",
        b"\x00" * 100_000,
        b"I" * 10_000_000,
        INFO + b"MSG a 1 99999999\r\n",
    ],
    ids=["ssh", "http", "pong-first", "bad-info", "zeros", "endless", "oversize"],
)
async def test_what_is_not_a_hub_is_left_alone(said: bytes) -> None:
    async with fake_server(says(said)) as place, station(HubAddress(servers=(f"nats://{place}",)), ALICE) as alice:
        await alice.until(lambda: alice.count("protocol_errors") >= 2, "two attempts to fail")
        assert alice.count("connects") == 0


@pytest.mark.parametrize(
    "said",
    [
        b"NONSENSE\r\n",
        b"MSG a 1 2000000\r\n",
        b"MSG a 1 5\r\nhello!!",
        b"MSG a 7 5\r\nhello\r\n",
        b"MSG a 1 600000\r\n" + bytes(700_000),
        os.urandom(100_000).replace(b"\n", b"") + b"\n",
    ],
    ids=["line", "oversize", "overlong", "unasked", "overlong-large", "random"],
)
async def test_a_hub_that_breaks_the_protocol_is_hung_up_on(said: bytes) -> None:
    async with (
        fake_server(lets_in_and_says(said)) as place,
        station(HubAddress(servers=(f"nats://{place}",)), ALICE) as alice,
    ):
        await alice.until(lambda: alice.count("protocol_errors") >= 2, "two connections to be given up")
        assert alice.count("losses") >= 1
        assert alice.events.messages == []


async def test_a_server_that_says_nothing_is_not_waited_for() -> None:
    async with (
        fake_server(says(b"")) as place,
        station(HubAddress(servers=(f"nats://{place}",)), ALICE, connect_timeout_seconds=0.1) as alice,
    ):
        await alice.until(lambda: alice.count("failed_attempts") >= 3, "attempts to time out")


async def test_a_server_that_asks_while_it_decides_gets_an_answer() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(INFO)
        await reader.readuntil(b"PING\r\n")
        writer.write(b"PING\r\n")
        await reader.readuntil(b"PONG\r\n")
        writer.write(b"PONG\r\n")

    async with fake_server(script) as place, station(HubAddress(servers=(f"nats://{place}",)), ALICE) as alice:
        await alice.until_connected()


@pytest.mark.parametrize("complaint", ["'Authorization Violation'", "'maximum connections exceeded'"])
async def test_a_complaint_ends_the_handshake(complaint: str) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(INFO)
        await reader.readuntil(b"PING\r\n")
        writer.write(f"-ERR {complaint}\r\n".encode())

    is_refusal = "Authorization" in complaint
    async with fake_server(script) as place, station(HubAddress(servers=(f"nats://{place}",)), ALICE) as alice:
        await alice.until(lambda: alice.count("refusals" if is_refusal else "failed_attempts") >= 2, "two refusals")
        assert alice.count("failed_attempts" if is_refusal else "refusals") == 0
        await alice.until(lambda: alice.wire.state == ("refused" if is_refusal else "connecting"), "the state to tell")


@pytest.mark.parametrize(
    "info",
    [INFO, INFO[:-3] + b',"tls_required":true}\r\nPONG\r\n', INFO[:-3] + b',"tls_required":true}\r\nMSG a'],
    ids=["no-tls", "pong-in-plain", "half-a-line-in-plain"],
)
async def test_nothing_is_told_to_or_believed_from_a_server_in_plain(tls_files: TlsFiles, info: bytes) -> None:
    heard: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(info)
        heard.append(await reader.read(1000))

    async with (
        fake_server(script) as place,
        station(HubAddress(servers=(f"tls://{place}",), ca_pem=tls_files.ca_pem), ALICE) as alice,
    ):
        await alice.until(lambda: alice.count("failed_attempts") >= 2, "two attempts to fail")
        await alice.until(lambda: bool(heard), "the server to see the end")
        assert not any(b"CONNECT" in words for words in heard)
        assert alice.count("connects") == 0


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 404 Not Found\r\n\r\n", b"nonsense\r\n\r\n", b"x" * 100_000],
    ids=["404", "nonsense", "endless"],
)
async def test_a_web_server_that_is_no_hub_is_left_alone(answer: bytes) -> None:
    async with fake_server(says(answer)) as place, station(HubAddress(servers=(f"ws://{place}",)), ALICE) as alice:
        await alice.until(lambda: alice.count("protocol_errors") >= 2, "two attempts to fail")


@pytest.mark.parametrize(
    "wrong",
    [
        {"connect_timeout_seconds": 0.0},
        {"silent_seconds": 1.0},
        {"backoff_limit_seconds": 0.01},
        {"refused_limit_seconds": 0.1},
    ],
)
def test_a_config_that_cannot_work_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        BulkWireConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        BulkLimits(high_water_bytes=1, low_water_bytes=1)
