"""What every hub connection promises: the same suite runs on a real nats-server and on the hub in memory."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Protocol

import pytest

from potluck.errors import (
    ConfigurationError,
    DeadlineExceededError,
    HubUnavailableError,
    PermissionDeniedError,
    RevisionConflictError,
)
from potluck.hub.connection import Delivery, Entry, HubConnection
from potluck.hub.guard.permissions import Permissions
from potluck.hub.nats.connection import ConnectionConfig, NatsConnection
from potluck.hub.nats.linkkeeper import KeeperConfig
from potluck.hub.stores import StoreDefinition, ensure_store
from potluck.hub.subjects import Subjects
from potluck.sim.memoryconnection import MemoryConnection
from potluck.sim.memoryhub import MemoryHub
from potluck.sim.virtualclock import VirtualClock
from potluck.testing.forwarder import Forwarder
from potluck.testing.plainhub import PlainHub, PlainUser
from potluck.testing.polling import poll_until

RUN = "contract"
SUBJECTS = Subjects(RUN)
ADMIN = PlainUser.make()
MEMBER = PlainUser.make()
PATIENCE_SECONDS = 60.0
SMALL_BACKLOG = 8

OPEN = StoreDefinition(name="open", description="read by all", readers="all", expires=True)
PRIVATE = StoreDefinition(name="private", description="read by the guard")

MEMBER_PERMISSIONS = Permissions(
    publish=(
        SUBJECTS.beacon(MEMBER.peer),
        SUBJECTS.store_write("open", f"{MEMBER.peer}.>"),
        f"$JS.API.DIRECT.GET.{SUBJECTS.stream('open')}",
    ),
    subscribe=(f"{Subjects.inbox(MEMBER.peer)}.>", SUBJECTS.beacon("*"), SUBJECTS.store_change("open", ">")),
)


class Connection(HubConnection, Protocol):
    """Both connections have statistics too."""

    def statistics(self) -> Any: ...


class HubUnderTest(Protocol):
    async def connect(self, **options: Any) -> Connection:
        """A connection that may do everything."""

    async def connect_impatient(self) -> Connection:
        """One that does not wait for answers for long."""

    async def connect_member(self) -> Connection:
        """One with the rights of an ordinary member."""

    async def cut(self, connection: Connection) -> None:
        """Keep one connection away from the hub."""

    async def mend(self, connection: Connection) -> None:
        """Let it come back, and wait until it has."""

    async def let_keys_expire(self, seconds: float, gone: Callable[[], Awaitable[bool]]) -> None:
        """Wait until keys with this time to live have gone."""


class MemoryUnderTest:
    def __init__(self) -> None:
        self._clock = VirtualClock()
        self._hub = MemoryHub(RUN, clock=self._clock, stores=())
        self._names = iter(range(1000))
        self._connections: list[MemoryConnection] = []

    async def connect(self, **options: Any) -> Connection:
        return self._add(self._hub.connect(f"ADMIN{next(self._names)}", **options))

    async def connect_impatient(self) -> Connection:
        return await self.connect()

    async def connect_member(self) -> Connection:
        return self._add(self._hub.connect(MEMBER.peer, MEMBER_PERMISSIONS))

    async def cut(self, connection: Connection) -> None:
        assert isinstance(connection, MemoryConnection)
        self._hub.disconnect(connection.peer)

    async def mend(self, connection: Connection) -> None:
        assert isinstance(connection, MemoryConnection)
        self._hub.reconnect(connection.peer)

    async def let_keys_expire(self, seconds: float, gone: Callable[[], Awaitable[bool]]) -> None:
        self._clock.advance(seconds)
        assert await gone()

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()

    def _add(self, connection: MemoryConnection) -> Connection:
        connection.backlog_messages = SMALL_BACKLOG
        self._connections.append(connection)
        return connection


class NatsUnderTest:
    """Each connection goes through a gate of its own."""

    def __init__(self, server: PlainHub) -> None:
        self._server = server
        self._connections: dict[NatsConnection, Forwarder] = {}

    async def connect(self, **options: Any) -> Connection:
        return await self._connect(ADMIN, **options)

    async def connect_impatient(self) -> Connection:
        return await self._connect(ADMIN, reply_timeout_seconds=1.0)

    async def connect_member(self) -> Connection:
        return await self._connect(MEMBER)

    async def cut(self, connection: Connection) -> None:
        assert isinstance(connection, NatsConnection)
        await self._connections[connection].shut()
        await poll_until(lambda: not connection.is_connected, PATIENCE_SECONDS, "the connection to be lost")

    async def mend(self, connection: Connection) -> None:
        assert isinstance(connection, NatsConnection)
        await self._connections[connection].open()
        await poll_until(lambda: connection.is_connected, PATIENCE_SECONDS, "the connection to be back")

    async def let_keys_expire(self, seconds: float, gone: Callable[[], Awaitable[bool]]) -> None:
        await poll_until(gone, PATIENCE_SECONDS, "the keys to expire")

    async def close(self) -> None:
        admin = await self._connect(ADMIN)
        for store in (OPEN, PRIVATE):
            await admin.request(f"$JS.API.STREAM.DELETE.{SUBJECTS.stream(store.name)}", b"", timeout_seconds=30.0)
        for connection, gate in self._connections.items():
            await connection.close()
            await gate.shut()

    async def _connect(self, user: PlainUser, *, reply_timeout_seconds: float = 30.0, **options: Any) -> NatsConnection:
        gate = Forwarder(self._server.port)
        await gate.open()
        keeper = KeeperConfig(backoff_first_seconds=0.01, backoff_limit_seconds=0.05, connect_timeout_seconds=30.0)
        config = ConnectionConfig(
            keeper=keeper, reply_timeout_seconds=reply_timeout_seconds, backlog_messages=SMALL_BACKLOG
        )
        connection = await NatsConnection.connect(
            self._server.address(f"nats://127.0.0.1:{gate.port}"),
            seed=user.seed,
            run=RUN,
            name="main",
            config=config,
            **options,
        )
        self._connections[connection] = gate
        return connection


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainHub]:
    users = [ADMIN, MEMBER.with_permissions(MEMBER_PERMISSIONS)]
    with PlainHub(tmp_path_factory.mktemp("hub"), users) as hub:
        hub.start()
        yield hub


@pytest.fixture(params=["memory", "nats"])
async def hub(request: pytest.FixtureRequest) -> AsyncIterator[HubUnderTest]:
    under_test = MemoryUnderTest() if request.param == "memory" else NatsUnderTest(request.getfixturevalue("server"))
    yield under_test
    await under_test.close()


@pytest.fixture
async def admin(hub: HubUnderTest) -> Connection:
    connection = await hub.connect()
    for definition in (OPEN, PRIVATE):
        await ensure_store(connection, SUBJECTS, definition)
    return connection


async def eventually(condition: Callable[[], Any], what: str) -> None:
    await poll_until(condition, PATIENCE_SECONDS, what, every_seconds=0.001)


class Heard:
    """A handler that keeps what it gets."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []

    def __call__(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)

    @property
    def payloads(self) -> list[bytes]:
        return [delivery.payload for delivery in self.deliveries]

    async def until(self, count: int) -> None:
        await eventually(lambda: len(self.deliveries) >= count, f"{count} messages")


async def echo(delivery: Delivery) -> None:
    await delivery.respond(delivery.payload)


# Publishing and listening


async def test_a_message_reaches_every_subscriber_with_its_subject(hub: HubUnderTest) -> None:
    alice, bob = await hub.connect(), await hub.connect()
    exact, star, rest, other = Heard(), Heard(), Heard(), Heard()
    await bob.subscribe("p.contract.news.A.weather", exact)
    await bob.subscribe("p.contract.news.*.weather", star)
    await alice.subscribe("p.contract.>", rest)
    await bob.subscribe("p.contract.news.B.weather", other)
    await alice.publish("p.contract.news.A.weather", b"rain")
    for heard in (exact, star, rest):
        await heard.until(1)
        assert [(each.subject, each.payload) for each in heard.deliveries] == [("p.contract.news.A.weather", b"rain")]
    assert other.deliveries == []


@pytest.mark.parametrize("waits", [False, True])
async def test_messages_are_handled_in_order_and_one_at_a_time(hub: HubUnderTest, waits: bool) -> None:
    alice, bob = await hub.connect(), await hub.connect()
    seen: list[bytes] = []
    running = 0

    async def slowly(delivery: Delivery) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0)
        seen.append(delivery.payload)
        running -= 1

    await bob.subscribe("p.contract.orders", slowly if waits else lambda delivery: seen.append(delivery.payload))
    for number in range(500):
        await alice.publish("p.contract.orders", b"%d" % number)
        # Not more at once than the backlog holds: overflowing is another test.
        await eventually(lambda number=number: len(seen) > number - SMALL_BACKLOG, "the handler to keep up")
    await eventually(lambda: len(seen) == 500, "all messages")
    assert seen == [b"%d" % number for number in range(500)]


async def test_of_a_queue_one_subscriber_gets_each_message(hub: HubUnderTest) -> None:
    alice, bob, carol = await hub.connect(), await hub.connect(), await hub.connect()
    shared, everything = Heard(), Heard()
    await bob.subscribe("p.contract.jobs", shared, queue="workers")
    await carol.subscribe("p.contract.jobs", shared, queue="workers")
    await carol.subscribe("p.contract.jobs", everything)
    jobs = [b"%d" % number for number in range(100)]
    for job in jobs:
        await alice.publish("p.contract.jobs", job)
    await shared.until(100)
    await everything.until(100)
    assert sorted(shared.payloads) == sorted(jobs)
    assert everything.payloads == jobs


async def test_a_cancelled_subscription_is_silent(hub: HubUnderTest) -> None:
    alice, bob = await hub.connect(), await hub.connect()
    cancelled, other = Heard(), Heard()
    subscription = await bob.subscribe("p.contract.talk", cancelled)
    await bob.subscribe("p.contract.talk", other)
    await alice.publish("p.contract.talk", b"first")
    await cancelled.until(1)
    await subscription.cancel()
    await subscription.cancel()
    await alice.publish("p.contract.talk", b"second")
    await other.until(2)
    assert cancelled.payloads == [b"first"]


async def test_cancelling_ends_a_handler_that_waits(hub: HubUnderTest) -> None:
    alice, bob = await hub.connect(), await hub.connect()
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait_for_ever(delivery: Delivery) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    subscription = await bob.subscribe("p.contract.talk", wait_for_ever)
    await alice.publish("p.contract.talk", b"hello")
    await begun.wait()
    await subscription.cancel()
    assert ended.is_set()


async def test_a_handler_may_cancel_its_own_subscription(hub: HubUnderTest) -> None:
    alice, bob = await hub.connect(), await hub.connect()
    heard: list[bytes] = []

    async def once(delivery: Delivery) -> None:
        await subscription.cancel()
        heard.append(delivery.payload)

    subscription = await bob.subscribe("p.contract.talk", once)
    other = Heard()
    await bob.subscribe("p.contract.talk", other)
    await alice.publish("p.contract.talk", b"first")
    await alice.publish("p.contract.talk", b"second")
    await other.until(2)
    await eventually(lambda: heard, "the handler to return from its cancelling")  # it waits for the hub's client
    assert heard == [b"first"]


@pytest.mark.parametrize("waits", [False, True])
async def test_a_handler_that_fails_is_counted_and_delivery_goes_on(
    hub: HubUnderTest, waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    alice, bob = await hub.connect(), await hub.connect()
    heard = Heard()

    def fail(delivery: Delivery) -> None:
        heard(delivery)
        raise ValueError("a bug in a handler")

    async def fail_later(delivery: Delivery) -> None:
        await asyncio.sleep(0)
        fail(delivery)

    await bob.subscribe("p.contract.talk", fail_later if waits else fail)
    for payload in (b"1", b"2", b"3"):
        await alice.publish("p.contract.talk", payload)
    await heard.until(3)
    await eventually(lambda: bob.statistics()["handler_errors"] == 3, "the errors to be counted")
    assert heard.payloads == [b"1", b"2", b"3"]
    assert "a bug in a handler" in caplog.text


async def test_a_slow_handler_loses_messages_past_its_backlog_and_nothing_grows(hub: HubUnderTest) -> None:
    alice, bob = await hub.connect(), await hub.connect()
    seen: list[bytes] = []
    go_on = asyncio.Event()

    async def slow(delivery: Delivery) -> None:
        await go_on.wait()
        seen.append(delivery.payload)

    last = Heard()
    await bob.subscribe("p.contract.flood", slow)
    await bob.subscribe("p.contract.flood.end", last)
    for number in range(100):
        await alice.publish("p.contract.flood", b"%d" % number)
    await alice.publish("p.contract.flood.end", b"")
    await last.until(1)
    await eventually(lambda: bob.statistics()["dropped"] == 100 - 1 - SMALL_BACKLOG, "the overflow to be counted")
    go_on.set()
    await eventually(lambda: len(seen) == 1 + SMALL_BACKLOG, "the backlog to be handled")
    assert seen == [b"%d" % number for number in range(1 + SMALL_BACKLOG)]
    await alice.publish("p.contract.flood", b"after")
    await eventually(lambda: seen[-1] == b"after", "the handler to go on")


@pytest.mark.parametrize("subject", ["", "a b", "a..b", "a.\r\n.b"])
async def test_what_is_no_subject_is_refused(hub: HubUnderTest, subject: str) -> None:
    alice = await hub.connect()
    with pytest.raises(ConfigurationError):
        await alice.publish(subject, b"")
    with pytest.raises(ConfigurationError):
        await alice.request(subject, b"", timeout_seconds=1.0)
    with pytest.raises(ConfigurationError):
        await alice.subscribe(subject, Heard())
    if subject:
        with pytest.raises(ConfigurationError):
            await alice.subscribe("p.contract.jobs", Heard(), queue=subject)
    assert alice.statistics()["subscriptions"] == 0


async def test_a_message_that_is_too_large_is_refused(hub: HubUnderTest) -> None:
    alice = await hub.connect()
    heard = Heard()
    await alice.subscribe("p.contract.big", heard)
    with pytest.raises(ConfigurationError, match="exceeds the hub's limit"):
        await alice.publish("p.contract.big", bytes(1024 * 1024 + 1))
    await alice.publish("p.contract.big", bytes(1024 * 1024))
    await heard.until(1)


# Requests


async def test_a_request_gets_the_answer_to_it(hub: HubUnderTest) -> None:
    alice, bob = await hub.connect(), await hub.connect()
    await bob.subscribe("p.contract.echo", echo)
    answers = await asyncio.gather(
        *(alice.request("p.contract.echo", b"%d" % number, timeout_seconds=60.0) for number in range(SMALL_BACKLOG))
    )
    assert answers == [b"%d" % number for number in range(SMALL_BACKLOG)]
    assert alice.statistics()["pending_requests"] == 0


async def test_only_the_first_answer_counts(hub: HubUnderTest) -> None:
    alice, bob, carol = await hub.connect(), await hub.connect(), await hub.connect()

    async def answer_twice(delivery: Delivery) -> None:
        await delivery.respond(b"first")
        await delivery.respond(b"second")

    heard = Heard()
    await bob.subscribe("p.contract.ask", answer_twice)
    await carol.subscribe("p.contract.ask", heard)
    assert await alice.request("p.contract.ask", b"", timeout_seconds=60.0) == b"first"
    await heard.until(1)
    assert await alice.request("p.contract.ask", b"", timeout_seconds=60.0) == b"first"


async def test_the_reply_subject_is_in_the_senders_own_inbox(hub: HubUnderTest) -> None:
    admin, member = await hub.connect(), await hub.connect_member()
    asked, told = Heard(), Heard()

    async def answer(delivery: Delivery) -> None:
        asked(delivery)
        await delivery.respond(b"")

    await admin.subscribe(SUBJECTS.beacon("*"), answer)
    await member.request(SUBJECTS.beacon(MEMBER.peer), b"", timeout_seconds=60.0)
    assert asked.deliveries[0].reply.startswith(f"{Subjects.inbox(MEMBER.peer)}.")
    await admin.subscribe("p.contract.plain", told)
    await admin.publish("p.contract.plain", b"")
    await told.until(1)
    assert told.deliveries[0].reply == ""


async def test_answering_what_is_no_request_does_nothing(hub: HubUnderTest) -> None:
    alice, bob = await hub.connect(), await hub.connect()
    heard = Heard()

    async def answer(delivery: Delivery) -> None:
        await delivery.respond(b"unasked")
        heard(delivery)

    await bob.subscribe("p.contract.talk", answer)
    await alice.publish("p.contract.talk", b"hello")
    await heard.until(1)
    assert bob.statistics()["handler_errors"] == 0


async def test_a_request_that_nobody_hears_fails_at_once(hub: HubUnderTest) -> None:
    alice = await hub.connect()
    with pytest.raises(HubUnavailableError, match=r"nobody answers on p\.contract\.void"):
        await alice.request("p.contract.void", b"", timeout_seconds=600.0)


async def test_a_request_without_an_answer_ends_at_its_deadline(hub: HubUnderTest) -> None:
    alice, bob = await hub.connect(), await hub.connect()
    heard = Heard()
    await bob.subscribe("p.contract.ask", heard)
    with pytest.raises(DeadlineExceededError, match=r"no answer on p\.contract\.ask within 0\.05 s"):
        await alice.request("p.contract.ask", b"", timeout_seconds=0.05)
    assert alice.statistics()["pending_requests"] == 0
    await heard.until(1)
    await heard.deliveries[0].respond(b"too late")
    await bob.subscribe("p.contract.echo", echo)
    assert await alice.request("p.contract.echo", b"on time", timeout_seconds=60.0) == b"on time"


async def test_a_cancelled_request_leaves_nothing_behind(hub: HubUnderTest) -> None:
    alice, bob = await hub.connect(), await hub.connect()
    heard = Heard()
    await bob.subscribe("p.contract.ask", heard)
    request = asyncio.create_task(alice.request("p.contract.ask", b"", timeout_seconds=600.0))
    await heard.until(1)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert alice.statistics()["pending_requests"] == 0


# Permissions


async def test_a_forbidden_request_is_refused_at_once(hub: HubUnderTest) -> None:
    admin, member = await hub.connect(), await hub.connect_member()
    heard = Heard()
    await admin.subscribe(SUBJECTS.beacon("*"), heard)
    subject = SUBJECTS.beacon(ADMIN.peer)
    with pytest.raises(PermissionDeniedError, match=subject):
        await member.request(subject, b"in another's name", timeout_seconds=600.0)
    await member.publish(SUBJECTS.beacon(MEMBER.peer), b"in its own")
    await heard.until(1)
    assert heard.payloads == [b"in its own"]
    assert member.statistics()["permission_violations"] == 1


async def test_a_forbidden_publish_is_not_delivered_and_counted(hub: HubUnderTest) -> None:
    admin, member = await hub.connect(), await hub.connect_member()
    heard = Heard()
    await admin.subscribe("p.contract.>", heard)
    await member.publish(SUBJECTS.plan(MEMBER.peer), b"a plan")
    await member.publish(SUBJECTS.beacon(MEMBER.peer), b"a beacon")
    await heard.until(1)
    assert heard.payloads == [b"a beacon"]
    await eventually(lambda: member.statistics()["permission_violations"] == 1, "the violation to be counted")


@pytest.mark.parametrize("subject", ["p.contract.plan.*", ">", "p.contract.>", SUBJECTS.store_change("private", ">")])
async def test_a_forbidden_subscription_is_refused(hub: HubUnderTest, subject: str) -> None:
    member = await hub.connect_member()
    with pytest.raises(PermissionDeniedError):
        await member.subscribe(subject, Heard())
    assert member.statistics()["subscriptions"] == 0
    heard = Heard()
    await member.subscribe(SUBJECTS.beacon("*"), heard)
    await member.publish(SUBJECTS.beacon(MEMBER.peer), b"still here")
    await heard.until(1)


# Being away


async def test_while_the_hub_is_away_everything_says_so(hub: HubUnderTest, admin: Connection) -> None:
    alice = await hub.connect()
    heard = Heard()
    await alice.subscribe("p.contract.ask", heard)
    asking = asyncio.create_task(admin.request("p.contract.ask", b"", timeout_seconds=600.0))
    await heard.until(1)
    await hub.cut(alice)
    assert not alice.is_connected
    with pytest.raises(HubUnavailableError):
        await alice.publish("p.contract.talk", b"")
    with pytest.raises(HubUnavailableError):
        await alice.request("p.contract.talk", b"", timeout_seconds=600.0)
    with pytest.raises(HubUnavailableError):
        await heard.deliveries[0].respond(b"")
    with pytest.raises(ConfigurationError):
        await alice.subscribe("not..a.subject", heard)
    store = alice.store("open")
    uses = (store.get("k"), store.entries(), store.put("k", b""), store.delete("k"), store.watch(lambda _: None))
    found = await asyncio.gather(*uses, return_exceptions=True)  # together, since each waits for an answer in vain
    assert all(isinstance(error, HubUnavailableError) for error in found), found
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_request_under_way_fails_as_soon_as_the_hub_goes(hub: HubUnderTest) -> None:
    alice, bob = await hub.connect(), await hub.connect()
    heard = Heard()
    await bob.subscribe("p.contract.ask", heard)
    request = asyncio.create_task(alice.request("p.contract.ask", b"", timeout_seconds=600.0))
    await heard.until(1)
    await hub.cut(alice)
    with pytest.raises(HubUnavailableError):
        await request


async def test_subscriptions_and_handlers_survive_an_outage(hub: HubUnderTest) -> None:
    alice, bob = await hub.connect(), await hub.connect()
    before, meanwhile, cancelled = Heard(), Heard(), Heard()
    go_on = asyncio.Event()

    async def keep_at_it(delivery: Delivery) -> None:
        await go_on.wait()
        before(delivery)

    begun = Heard()
    await bob.subscribe("p.contract.talk", begun)
    await bob.subscribe("p.contract.talk", keep_at_it)
    subscription = await bob.subscribe("p.contract.talk", cancelled)
    await alice.publish("p.contract.talk", b"before")
    await begun.until(1)
    await cancelled.until(1)
    await hub.cut(bob)
    await bob.subscribe("p.contract.talk", meanwhile)
    await subscription.cancel()
    await alice.publish("p.contract.talk", b"unheard")
    await hub.mend(bob)
    await alice.publish("p.contract.talk", b"after")
    go_on.set()
    await before.until(2)
    await meanwhile.until(1)
    assert before.payloads == [b"before", b"after"]
    assert meanwhile.payloads == [b"after"]
    assert cancelled.payloads == [b"before"]
    assert bob.statistics()["reconnects"] == 1


async def test_the_owner_is_told_of_every_loss_and_return(hub: HubUnderTest) -> None:
    events: list[str] = []
    alice = await hub.connect(on_connected=lambda: events.append("back"), on_disconnected=lambda: events.append("lost"))
    bob = await hub.connect()
    await alice.subscribe("p.contract.echo", echo)
    assert events == []
    for round_number in range(3):
        await hub.cut(alice)
        await eventually(lambda n=round_number: events == ["lost", "back"] * n + ["lost"], "the loss to be told")
        await hub.mend(alice)
        await eventually(lambda n=round_number: events == ["lost", "back"] * (n + 1), "the return to be told")
        assert await bob.request("p.contract.echo", b"hi", timeout_seconds=60.0) == b"hi"


async def test_closing_is_final_and_may_be_repeated(hub: HubUnderTest) -> None:
    alice, bob = await hub.connect(), await hub.connect()
    heard = Heard()
    await bob.subscribe("p.contract.>", heard)
    request = asyncio.create_task(alice.request("p.contract.ask", b"", timeout_seconds=600.0))
    await heard.until(1)
    await alice.publish("p.contract.last", b"words")
    await alice.close()
    await alice.close()
    assert not alice.is_connected
    with pytest.raises(HubUnavailableError):
        await request
    with pytest.raises(HubUnavailableError):
        await alice.publish("p.contract.talk", b"")
    with pytest.raises(HubUnavailableError):
        await alice.subscribe("p.contract.talk", heard)
    await heard.until(2)  # what was published before the close has arrived
    assert heard.payloads == [b"", b"words"]


async def test_closing_while_away_does_not_hang(hub: HubUnderTest, admin: Connection) -> None:
    alice = await hub.connect()
    await alice.store("open").watch(lambda _: None)
    await hub.cut(alice)
    await alice.close()


# Stores


async def test_a_key_can_be_written_and_read(admin: Connection) -> None:
    store = admin.store("open")
    assert await store.get("a.b-c_D9") is None
    first = await store.put("a.b-c_D9", b"one")
    second = await store.put("other", b"")
    third = await store.put("a.b-c_D9", b"two")
    assert 0 < first < second < third
    entry = await store.get("a.b-c_D9")
    assert entry is not None
    assert (entry.key, entry.value, entry.revision) == ("a.b-c_D9", b"two", third)
    empty = await store.get("other")
    assert empty is not None
    assert empty.value == b""
    assert entry.written_at >= empty.written_at > 1.6e9


async def test_compare_and_set(admin: Connection) -> None:
    store = admin.store("open")
    first = await store.put("k", b"1", expected=0)
    with pytest.raises(RevisionConflictError, match="k in the store open no longer has revision 0"):
        await store.put("k", b"2", expected=0)
    second = await store.put("k", b"2", expected=first)
    with pytest.raises(RevisionConflictError):
        await store.put("k", b"3", expected=first)
    with pytest.raises(RevisionConflictError):
        await store.put("missing", b"3", expected=second)
    entry = await store.get("k")
    assert entry is not None
    assert (entry.value, entry.revision) == (b"2", second)


async def test_of_many_that_compare_and_set_one_wins(hub: HubUnderTest, admin: Connection) -> None:
    others = [await hub.connect() for _ in range(4)]
    revision = await admin.store("open").put("k", b"start")
    for turn in range(10):
        attempts = [other.store("open").put("k", b"%d" % turn, expected=revision) for other in others]
        results = await asyncio.gather(*attempts, return_exceptions=True)
        won = [result for result in results if isinstance(result, int)]
        assert len(won) == 1
        assert sum(isinstance(result, RevisionConflictError) for result in results) == 3
        revision = won[0]


async def test_a_deleted_key_is_gone_and_can_be_made_again(admin: Connection) -> None:
    store = admin.store("open")
    await store.delete("never-there")
    assert await store.get("never-there") is None
    revision = await store.put("k", b"1")
    await store.delete("k")
    assert await store.get("k") is None
    assert await store.entries() == []
    with pytest.raises(RevisionConflictError):
        await store.put("k", b"2", expected=revision)
    assert await store.put("k", b"2", expected=0) > revision
    with pytest.raises(RevisionConflictError):
        await store.put("k", b"3", expected=0)


async def test_deleting_by_compare_and_set(admin: Connection) -> None:
    store = admin.store("open")
    first = await store.put("k", b"1")
    second = await store.put("k", b"2")
    with pytest.raises(RevisionConflictError):
        await store.delete("k", expected=first)
    with pytest.raises(RevisionConflictError):
        await store.delete("k", expected=0)
    with pytest.raises(RevisionConflictError):
        await store.delete("missing", expected=first)
    await store.delete("k", expected=second)
    await store.delete("k", expected=0)
    assert await store.get("k") is None


async def test_a_deletion_has_a_revision_to_compare_with(admin: Connection) -> None:
    store = admin.store("open")
    seen: list[Entry] = []
    await store.watch(seen.append)
    await store.put("k", b"1")
    await store.delete("k")
    await eventually(lambda: len(seen) == 2, "the deletion")
    assert seen[1].value is None
    revision = await store.put("k", b"2", expected=seen[1].revision)
    assert revision > seen[1].revision
    with pytest.raises(RevisionConflictError):
        await store.put("k", b"3", expected=seen[1].revision)


async def test_entries_by_prefix(admin: Connection) -> None:
    store = admin.store("open")
    for key in ("a.1", "a.2", "a.b.3", "ab.4", "c"):
        await store.put(key, key.encode())
    await store.delete("a.2")
    assert [entry.key for entry in await store.entries()] == ["a.1", "a.b.3", "ab.4", "c"]
    assert [(entry.key, entry.value) for entry in await store.entries("a.")] == [("a.1", b"a.1"), ("a.b.3", b"a.b.3")]
    assert [entry.key for entry in await store.entries("a.b.")] == ["a.b.3"]
    assert await store.entries("z.") == []


@pytest.mark.parametrize("key", ["", ".", "a.", ".a", "a..b", "a b", "a*", ">", "ä", "a/b", "x" * 257, "a\r\nb"])
async def test_what_cannot_be_a_key_is_refused(admin: Connection, key: str) -> None:
    store = admin.store("open")
    for use in (store.get(key), store.put(key, b""), store.delete(key)):
        with pytest.raises(ConfigurationError):
            await use


@pytest.mark.parametrize("prefix", ["a", ".", "a..", "*.", "a.>"])
async def test_what_cannot_be_a_prefix_is_refused(admin: Connection, prefix: str) -> None:
    store = admin.store("open")
    with pytest.raises(ConfigurationError):
        await store.entries(prefix)
    with pytest.raises(ConfigurationError):
        await store.watch(lambda _: None, prefix)


@pytest.mark.parametrize("ttl_seconds", [0, -1, 0.5, 1.5])
async def test_what_cannot_be_a_time_to_live_is_refused(admin: Connection, ttl_seconds: float) -> None:
    with pytest.raises(ConfigurationError):
        await admin.store("open").put("k", b"", ttl_seconds=ttl_seconds)


async def test_a_key_with_a_time_to_live_goes_by_itself_and_watchers_see_it(
    hub: HubUnderTest, admin: Connection
) -> None:
    store = admin.store("open")
    seen: list[Entry] = []
    await store.watch(seen.append)
    first = await store.put("lease", b"mine", ttl_seconds=1)
    await store.put("kept", b"for good")

    async def gone() -> bool:
        return await store.get("lease") is None

    await hub.let_keys_expire(1, gone)
    await eventually(lambda: len(seen) == 3, "the expiry to be told")
    assert [(entry.key, entry.value) for entry in seen] == [("lease", b"mine"), ("kept", b"for good"), ("lease", None)]
    assert seen[2].revision > first
    with pytest.raises(RevisionConflictError):
        await store.put("lease", b"mine", expected=first)
    assert await store.put("lease", b"yours", expected=0, ttl_seconds=60) > seen[2].revision
    assert [entry.key for entry in await store.entries()] == ["kept", "lease"]


async def test_a_store_that_is_not_there(hub: HubUnderTest) -> None:
    alice = await hub.connect_impatient()
    store = alice.store("nowhere")
    uses = (store.get("k"), store.entries(), store.put("k", b""), store.delete("k"), store.watch(lambda _: None))
    found = await asyncio.gather(*uses, return_exceptions=True)  # together, since each waits for an answer in vain
    assert all(isinstance(error, HubUnavailableError) for error in found), found
    assert alice.statistics()["watches"] == 0
    assert alice.statistics()["subscriptions"] == 0


async def test_a_member_reads_and_writes_what_it_may_and_nothing_else(hub: HubUnderTest, admin: Connection) -> None:
    member = await hub.connect_member()
    key = f"{MEMBER.peer}.note"
    await admin.store("open").put("theirs", b"0")
    await admin.store("private").put("secret", b"0")
    seen: list[Entry] = []
    await member.store("open").watch(seen.append)
    revision = await member.store("open").put(key, b"1", expected=0)
    await member.store("open").put(key, b"2", expected=revision, ttl_seconds=60)
    await member.store("open").delete(key)
    await eventually(lambda: len(seen) == 4, "all changes")
    assert [entry.value for entry in seen] == [b"0", b"1", b"2", None]
    assert [entry.key for entry in await member.store("open").entries()] == ["theirs"]
    assert await member.store("open").get("theirs") is not None
    private = member.store("private")
    uses = (
        member.store("open").put("theirs", b"changed"),
        member.store("open").delete("theirs"),
        private.get("secret"),
        private.entries(),
        private.watch(lambda _: None),
        private.put("secret", b"changed"),
    )
    for use in uses:
        with pytest.raises(PermissionDeniedError):
            await use
    unchanged = await admin.store("open").get("theirs")
    assert unchanged is not None
    assert unchanged.value == b"0"


# Watching


async def test_a_watch_tells_what_is_there_then_what_changes(hub: HubUnderTest, admin: Connection) -> None:
    store = (await hub.connect()).store("open")
    await admin.store("open").put("a", b"1")
    await admin.store("open").put("b", b"1")
    await admin.store("open").put("gone", b"1")
    await admin.store("open").delete("gone")
    seen: list[Entry] = []
    watch = await store.watch(seen.append)
    assert [(entry.key, entry.value) for entry in seen] == [("a", b"1"), ("b", b"1")]
    await admin.store("open").put("a", b"2")
    await admin.store("open").delete("b")
    await admin.store("open").delete("never-there")
    await admin.store("open").put("c", b"1")
    await eventually(lambda: len(seen) == 5, "the changes")
    assert [(entry.key, entry.value) for entry in seen[2:]] == [("a", b"2"), ("b", None), ("c", b"1")]
    assert [entry.revision for entry in seen] == sorted(entry.revision for entry in seen)
    await watch.cancel()
    await watch.cancel()
    other: list[Entry] = []
    await store.watch(other.append)
    await admin.store("open").put("d", b"1")
    await eventually(lambda: [entry.key for entry in other] == ["a", "c", "d"], "the other watch to see it")
    assert len(seen) == 5


async def test_a_watch_by_prefix(admin: Connection) -> None:
    store = admin.store("open")
    await store.put("a.1", b"")
    await store.put("b.1", b"")
    seen: list[str] = []
    everything: list[str] = []
    await store.watch(lambda entry: seen.append(entry.key), "a.")
    await store.watch(lambda entry: everything.append(entry.key))
    for key in ("a.2", "b.2", "a.c.3", "ab.4"):
        await store.put(key, b"")
    await eventually(lambda: len(everything) == 6, "all changes")
    assert seen == ["a.1", "a.2", "a.c.3"]


async def test_a_watcher_that_fails_is_counted_and_told_the_rest(
    admin: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    store = admin.store("open")
    await store.put("a", b"")
    seen: list[str] = []

    def fail(entry: Entry) -> None:
        seen.append(entry.key)
        raise ValueError("a bug in a watcher")

    await store.watch(fail)
    await store.put("b", b"")
    await eventually(lambda: seen == ["a", "b"], "both")
    assert admin.statistics()["handler_errors"] == 2
    assert "a bug in a watcher" in caplog.text


async def test_a_watch_that_starts_amid_changes_misses_none(hub: HubUnderTest, admin: Connection) -> None:
    store = admin.store("open")
    keys = [f"key{number}" for number in range(10)]
    num_versions = 30

    async def write() -> None:
        for version in range(num_versions):
            for key in keys:
                await store.put(key, b"%d" % version)

    logs: list[list[Entry]] = []
    writing = asyncio.create_task(write())
    watcher = await hub.connect()
    while not writing.done():
        if len(logs) < 10:
            logs.append([])
            await watcher.store("open").watch(logs[-1].append)
        await asyncio.sleep(0)
    await writing
    assert logs
    last = b"%d" % (num_versions - 1)
    for log in logs:
        await eventually(
            lambda log=log: {entry.key for entry in log if entry.value == last} == set(keys), "the last versions"
        )
        for key in keys:
            versions = [int(entry.value or b"-1") for entry in log if entry.key == key]
            assert versions == list(range(versions[0], num_versions))


async def test_a_watch_catches_up_after_an_outage(hub: HubUnderTest, admin: Connection) -> None:
    watcher = await hub.connect()
    store = admin.store("open")
    for key in ("same", "changed", "deleted", "remade"):
        await store.put(key, b"before")
    seen: list[Entry] = []
    await watcher.store("open").watch(seen.append)
    assert len(seen) == 4
    await hub.cut(watcher)
    await store.put("changed", b"1")
    await store.put("changed", b"2")
    await store.delete("deleted")
    await store.delete("remade")
    await store.put("remade", b"after")
    await store.put("new", b"after")
    await store.put("passing", b"after")
    await store.delete("passing")
    await hub.mend(watcher)
    await eventually(lambda: len(seen) == 8, "the watch to catch up")
    await store.put("same", b"at last")
    await eventually(lambda: len(seen) == 9, "the watch to go on")
    assert sorted((entry.key, entry.value) for entry in seen[4:8] if entry.value is not None) == [
        ("changed", b"2"),
        ("new", b"after"),
        ("remade", b"after"),
    ]
    assert [entry.key for entry in seen[4:8] if entry.value is None] == ["deleted"]
    assert (seen[8].key, seen[8].value) == ("same", b"at last")


async def test_a_watch_with_outages_amid_changes_ends_up_right(hub: HubUnderTest, admin: Connection) -> None:
    watcher = await hub.connect()
    store = admin.store("open")
    chance = random.Random(7)
    seen: dict[str, list[Entry]] = {}
    await watcher.store("open").watch(lambda entry: seen.setdefault(entry.key, []).append(entry))
    number = 0
    for _ in range(4):
        for away in (False, True):
            if away:
                await hub.cut(watcher)
            for _ in range(30):
                key = f"key{chance.randrange(12)}"
                number += 1
                if chance.random() < 0.3:
                    await store.delete(key)
                else:
                    await store.put(key, b"%d" % number)
        await hub.mend(watcher)
    wanted = {entry.key: entry.value for entry in await store.entries()}

    def shown() -> dict[str, bytes | None]:
        return {key: entries[-1].value for key, entries in seen.items() if entries[-1].value is not None}

    await eventually(lambda: shown() == wanted, "the watch to show what the store holds")
    for entries in seen.values():
        revisions = [entry.revision for entry in entries]
        assert revisions == sorted(set(revisions))
        kinds = [entry.value is None for entry in entries]
        assert not any(this and following for this, following in itertools.pairwise(kinds))


async def test_three_thousand_keys(hub: HubUnderTest, admin: Connection) -> None:
    store = admin.store("open")
    keys = [f"peer.{number:04}" for number in range(3000)]
    for start in range(0, len(keys), 100):
        await asyncio.gather(*(store.put(key, key.encode()) for key in keys[start : start + 100]))
    await store.delete(keys[7])
    await store.put("elsewhere", b"")
    wanted = [key for key in keys if key != keys[7]]
    entries = await store.entries("peer.")
    assert [entry.key for entry in entries] == wanted
    assert all(entry.value == entry.key.encode() for entry in entries)
    seen: list[str] = []
    watcher = await hub.connect()
    await watcher.store("open").watch(lambda entry: seen.append(entry.key))
    assert sorted(seen) == sorted([*wanted, "elsewhere"])
