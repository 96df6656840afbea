"""What users of links may rely on, whichever carrier is underneath.

A carrier joins the suite by a class like MemoryStack in STACKS: it gives a peer's Links its carriers and says what the
peer's card must contain for others to find it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy
import pytest

from potluck.clock import SystemClock
from potluck.errors import (
    ConfigurationError,
    DeadlineExceededError,
    PeerError,
    PeerUnreachableError,
    PermissionDeniedError,
    ProtocolError,
    RetryableError,
)
from potluck.hub.bulk.wire import BulkWire
from potluck.hub.presence import Card, Presence, State
from potluck.hub.subjects import Subjects
from potluck.link.direct.carrier import DirectCarrier, DirectConfig
from potluck.link.direct.greeting import LinkKeys
from potluck.link.limits import KIB, MIB, STREAM_ITEM_BYTES, LinkConfig
from potluck.link.links import Incoming, Links, SendReceipt, Stream
from potluck.link.relay.carrier import RelayCarrier
from potluck.messages import Message
from potluck.sim.memorycarrier import MemoryCarrier, MemoryNetwork
from potluck.testing.plainhub import PlainHub, PlainUser
from potluck.testing.polling import poll_until

SECONDS = 30.0  # generous: a loaded machine is not an error
CONFIG = LinkConfig(
    window_bytes=2 * MIB,
    max_message_bytes=16 * MIB,
    max_frame_bytes=16 * MIB,
    queue_bytes=16 * MIB,
    receive_bytes=96 * MIB,
    stream_window_bytes=5 * MIB,
)


class Note(Message, frozen=True, kw_only=True, tag="note"):
    number: int = 0
    text: str = ""


class Question(Message, frozen=True, kw_only=True, tag="question"):
    number: int


class Answer(Message, frozen=True, kw_only=True, tag="answer"):
    number: int


class Fetch(Message, frozen=True, kw_only=True, tag="fetch"):
    count: int = 0


class Unheard(Message, frozen=True, kw_only=True, tag="unheard"):
    pass


class Untagged(Message, frozen=True, kw_only=True):
    pass


class Stack(Protocol):
    """Carriers for the peers of one test."""

    kind: str

    async def equip(self, links: Links, name: str, session: str) -> dict[str, Any]: ...


class MemoryStack:
    kind = "direct"

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.network = MemoryNetwork()

    async def equip(self, links: Links, name: str, session: str) -> dict[str, Any]:
        links.add_carrier(MemoryCarrier(self.network, name, kind="direct", events=links))
        return {}


class DirectStack:
    kind = "direct"

    def __init__(self, request: pytest.FixtureRequest) -> None:
        pass

    async def equip(self, links: Links, name: str, session: str) -> dict[str, Any]:
        config = DirectConfig(listen=("tcp://127.0.0.1:0",))
        carrier = DirectCarrier(peer=name, events=links, config=config)
        carrier.start()
        links.add_carrier(carrier)
        return {"link_key": carrier.link_key, "addresses": tuple(str(bound) for bound in carrier.bound)}


class RelayStack:
    kind = "relay"

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.hub: PlainHub = request.getfixturevalue("hub")

    async def equip(self, links: Links, name: str, session: str) -> dict[str, Any]:
        wire, keys = BulkWire(self.hub.address(), seed=USER.seed), LinkKeys.generate()
        carrier = RelayCarrier(links, name, Subjects("test"), wire, keys)
        await carrier.start()
        links.add_carrier(carrier)
        return {"link_key": keys.link_key}


STACKS: dict[str, Callable[[pytest.FixtureRequest], Stack]] = {
    "memory": MemoryStack,
    "direct": DirectStack,
    "relay": RelayStack,
}
USER = PlainUser.make()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainHub]:
    with PlainHub(tmp_path_factory.mktemp("hub"), [USER]) as hub:
        hub.start()
        yield hub


@dataclass
class Peer:
    name: str
    session: str
    links: Links
    card: Card

    def presence(self, state: State = "alive") -> Presence:
        return Presence(peer=self.name, card=self.card, state=state, host="127.0.0.1", person="someone")


class Stage:
    """Peers that know each other."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.peers: dict[str, Peer] = {}
        self._all: list[Peer] = []

    async def join(self, name: str, *, session: str = "1", config: LinkConfig = CONFIG) -> Peer:
        links = Links(name, session, SystemClock(), config)
        card = Card(session=session, role="trainer", **await self.stack.equip(links, name, session))
        peer = self.peers[name] = Peer(name, session, links, card)
        self._all.append(peer)
        for other in self.peers.values():
            links.update_peer(other.presence())
            if other is not peer:
                other.links.update_peer(peer.presence())
        return peer

    async def leave(self, name: str, state: State = "dead") -> None:
        gone = self.peers.pop(name)
        await gone.links.close()
        for other in self.peers.values():
            other.links.update_peer(gone.presence(state))

    async def close(self) -> None:
        for peer in self._all:
            await peer.links.close()


@pytest.fixture(params=list(STACKS))
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    stage = Stage(STACKS[request.param](request))
    yield stage
    await stage.close()


@pytest.fixture
async def ann(stage: Stage) -> Peer:
    return await stage.join("ann")


@pytest.fixture
async def bob(stage: Stage, ann: Peer) -> Peer:
    return await stage.join("bob")


class Inbox:
    """A handler that keeps what it gets."""

    def __init__(self, links: Links, kind: type[Message] = Note) -> None:
        self.queue: asyncio.Queue[Incoming[Any]] = asyncio.Queue()
        links.handle(kind, self.take)

    def take(self, incoming: Incoming[Any]) -> None:
        self.queue.put_nowait(incoming)

    async def next(self) -> Incoming[Any]:
        incoming: Incoming[Any] = await within(self.queue.get())
        return incoming


async def within(awaitable: Awaitable[Any]) -> Any:
    async with asyncio.timeout(SECONDS):
        return await awaitable


async def until_refused(attempt: Callable[[int], Awaitable[object]], error: type[Exception], text: str) -> int:
    """Do it again and again until it fails so; how often it worked."""
    for count in range(1000):
        try:
            await attempt(count)
        except error as refusal:
            if text not in str(refusal):
                raise
            return count
    raise AssertionError("it was never refused")


async def settle() -> None:
    """Let everything run that is ready now."""
    for _ in range(20):
        await asyncio.sleep(0)


# Messages


async def test_a_message_arrives_with_its_frames_and_its_senders_name(ann: Peer, bob: Peer) -> None:
    inbox = Inbox(bob.links)
    numbers = numpy.arange(500_000, dtype=numpy.float32)
    frames: list[Any] = [b"", b"small", bytearray(b"m" * 20_000), numbers, bytes(5 * MIB)]
    receipt = await ann.links.send("bob", Note(number=1, text="hello"), frames, timeout_seconds=SECONDS)
    incoming = await inbox.next()
    assert incoming.sender == "ann"
    assert incoming.message == Note(number=1, text="hello")
    assert [bytes(frame) for frame in incoming.frames] == [memoryview(frame).tobytes() for frame in frames]
    await receipt.wait(timeout_seconds=SECONDS)
    assert receipt.acknowledged


async def test_messages_arrive_in_order_and_once(ann: Peer, bob: Peer) -> None:
    inbox = Inbox(bob.links)
    sizes = [0, 10_000_000, 5, 700_000, 100, 50_000] * 5
    for number, size in enumerate(sizes):
        await ann.links.send("bob", Note(number=number), [bytes(size)], timeout_seconds=SECONDS)
    got = [await inbox.next() for _ in sizes]
    assert [incoming.message.number for incoming in got] == list(range(len(sizes)))
    assert [len(incoming.frames[0]) for incoming in got] == sizes
    await ann.links.flush("bob", timeout_seconds=SECONDS)
    assert inbox.queue.empty()


async def test_both_ways_at_once(ann: Peer, bob: Peer) -> None:
    inboxes = Inbox(ann.links), Inbox(bob.links)

    async def pour(links: Links, to: str) -> None:
        for number in range(60):
            await links.send(to, Note(number=number), [bytes(300 * KIB)], timeout_seconds=SECONDS)

    await within(asyncio.gather(pour(ann.links, "bob"), pour(bob.links, "ann")))
    for inbox in inboxes:
        assert [(await inbox.next()).message.number for _ in range(60)] == list(range(60))


async def test_handlers_start_in_order_even_if_some_are_slow(ann: Peer, bob: Peer) -> None:
    started: list[int] = []
    finished: list[int] = []
    done = asyncio.Event()
    gate = asyncio.Event()

    async def slow(incoming: Incoming[Question]) -> None:
        started.append(incoming.message.number)
        await gate.wait()
        finished.append(incoming.message.number)

    def quick(incoming: Incoming[Note]) -> None:
        started.append(incoming.message.number)
        if incoming.message.number == 19:
            done.set()

    bob.links.handle(Question, slow)
    bob.links.handle(Note, quick)
    for number in range(20):
        message: Message = Question(number=number) if number % 3 == 0 else Note(number=number)
        await ann.links.send("bob", message, timeout_seconds=SECONDS)
    await within(done.wait())
    assert started == list(range(20))
    assert finished == []
    gate.set()
    await poll_until(lambda: len(finished) == 7, SECONDS, "the slow ones to finish")


async def test_only_so_many_handlers_run_at_once(stage: Stage, ann: Peer) -> None:
    bob = await stage.join("bob", config=replace(CONFIG, max_handlers=3))
    running: list[int] = []
    most = 0
    gate = asyncio.Semaphore(0)
    done: list[int] = []

    async def slow(incoming: Incoming[Note]) -> None:
        nonlocal most
        running.append(incoming.message.number)
        most = max(most, len(running))
        await gate.acquire()
        running.remove(incoming.message.number)
        done.append(incoming.message.number)

    bob.links.handle(Note, slow)
    for number in range(10):
        await ann.links.send("bob", Note(number=number), timeout_seconds=SECONDS)
    await poll_until(lambda: len(running) == 3, SECONDS, "three handlers to run")
    await ann.links.flush("bob", timeout_seconds=SECONDS)
    assert running == [0, 1, 2]
    for _ in range(10):
        gate.release()
    await poll_until(lambda: len(done) == 10, SECONDS, "all to finish")
    assert most == 3
    assert sorted(done) == list(range(10))


async def test_a_slow_handler_stops_its_sender_and_memory_stays_bounded(ann: Peer, bob: Peer) -> None:
    gate = asyncio.Event()
    seen: list[int] = []

    async def slow(incoming: Incoming[Note]) -> None:
        await gate.wait()
        seen.append(incoming.message.number)

    bob.links.handle(Note, slow)
    frame = bytes(400 * KIB)
    sent = await until_refused(
        lambda number: ann.links.send("bob", Note(number=number), [frame], timeout_seconds=0.2),
        DeadlineExceededError,
        "no room",
    )
    held = CONFIG.window_bytes + CONFIG.queue_bytes
    assert held // 2 <= sent * len(frame) <= held + 2 * MIB
    assert ann.links.statistics().peers["bob"].queue_bytes <= CONFIG.queue_bytes
    with pytest.raises(DeadlineExceededError):
        await ann.links.flush("bob", timeout_seconds=0.05)
    gate.set()
    await ann.links.flush("bob", timeout_seconds=SECONDS)
    await poll_until(lambda: len(seen) == sent, SECONDS, "everything to be handled")
    assert seen == list(range(sent))


async def test_nobody_overtakes_a_message_that_waits_for_room(ann: Peer, bob: Peer) -> None:
    gate = asyncio.Event()
    numbers: list[int] = []

    async def slow(incoming: Incoming[Note]) -> None:
        numbers.append(incoming.message.number)
        await gate.wait()

    bob.links.handle(Note, slow)
    send = ann.links.send
    first = await until_refused(
        lambda number: send("bob", Note(number=number), [bytes(4 * MIB)], timeout_seconds=0.2),
        DeadlineExceededError,
        "no room",
    )
    large = asyncio.ensure_future(send("bob", Note(number=first), [bytes(4 * MIB)], timeout_seconds=SECONDS))
    await settle()
    small = asyncio.ensure_future(send("bob", Note(number=first + 1), timeout_seconds=SECONDS))
    await settle()
    assert large.done() or not small.done(), "there is room for it, but it is not its turn"
    gate.set()
    await within(asyncio.gather(large, small))
    await poll_until(lambda: len(numbers) == first + 2, SECONDS, "all to arrive")
    assert numbers == list(range(first + 2))


async def test_a_handler_may_give_the_credit_back_early(ann: Peer, bob: Peer) -> None:
    """Each message is larger than half the window, and no handler finishes: without `release` two would fill it."""
    gate = asyncio.Event()
    started: list[int] = []

    async def slow(incoming: Incoming[Note]) -> None:
        started.append(incoming.message.number)
        incoming.release()
        await gate.wait()

    bob.links.handle(Note, slow)
    for number in range(10):
        await ann.links.send("bob", Note(number=number), [bytes(500 * KIB)], timeout_seconds=SECONDS)
    await poll_until(lambda: len(started) == 10, SECONDS, "all to start")
    gate.set()


async def test_bulk_lets_other_messages_pass(ann: Peer, bob: Peer) -> None:
    got: list[int] = []
    done = asyncio.Event()

    def take(incoming: Incoming[Note]) -> None:
        got.append(incoming.message.number)
        if incoming.message.number == 3:
            done.set()

    bob.links.handle(Note, take)
    for number in range(4):
        await ann.links.send("bob", Note(number=number), [bytes(3 * MIB)], timeout_seconds=SECONDS, bulk=True)
    await ann.links.send("bob", Note(number=100), timeout_seconds=SECONDS)
    await within(done.wait())
    assert [number for number in got if number < 100] == [0, 1, 2, 3]
    assert got.index(100) < 3


async def test_messages_that_nobody_handles_are_counted_and_do_no_harm(ann: Peer, bob: Peer) -> None:
    inbox = Inbox(bob.links)
    await ann.links.send("bob", Unheard(), [bytes(1 * MIB)], timeout_seconds=SECONDS)
    await ann.links.send("bob", Note(number=1), timeout_seconds=SECONDS)
    assert (await inbox.next()).message.number == 1
    assert bob.links.statistics().total.unknown_kinds == 1


async def test_a_handler_that_fails_is_counted_and_does_no_harm(
    ann: Peer, bob: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox(bob.links, Answer)

    def plain(incoming: Incoming[Note]) -> None:
        raise ValueError("plain")

    async def later(incoming: Incoming[Question]) -> None:
        raise ValueError("later")

    bob.links.handle(Note, plain)
    bob.links.handle(Question, later)
    for number in range(3):
        await ann.links.send("bob", Note(), [bytes(1 * MIB)], timeout_seconds=SECONDS)
        await ann.links.send("bob", Question(number=number), [bytes(1 * MIB)], timeout_seconds=SECONDS)
    await ann.links.send("bob", Answer(number=7), timeout_seconds=SECONDS)
    assert (await inbox.next()).message.number == 7
    await poll_until(lambda: bob.links.statistics().total.handler_errors == 6, SECONDS, "six errors")
    assert "failed" in caplog.text


async def test_a_handler_that_takes_longer_than_its_asker_waits_is_one_plain_line(
    ann: Peer, bob: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    async def wait(incoming: Incoming[Question]) -> None:
        await asyncio.Event().wait()

    bob.links.handle(Question, wait)
    with pytest.raises(DeadlineExceededError):
        await ann.links.request("bob", Question(number=1), reply=Answer, timeout_seconds=0.5)
    await poll_until(lambda: bob.links.statistics().total.handler_errors == 1, SECONDS, "the handler to give up")
    assert "it took longer than the asker waits" in caplog.text
    assert not any(record.exc_info for record in caplog.records)


async def test_what_cannot_be_sent_is_refused_at_once(ann: Peer, bob: Peer) -> None:
    send = ann.links.send
    with pytest.raises(ConfigurationError, match="tag"):
        await send("bob", Untagged(), timeout_seconds=1)
    with pytest.raises(ConfigurationError, match="as frames"):
        await send("bob", Note(text="x" * 300_000), timeout_seconds=1)
    with pytest.raises(ConfigurationError, match="frames in a message"):
        await send("bob", Note(), [b""] * 2000, timeout_seconds=1)
    with pytest.raises(ConfigurationError, match="use a stream"):
        await send("bob", Note(), [bytes(17 * MIB)], timeout_seconds=1)
    with pytest.raises(ConfigurationError, match="contiguous"):
        await send("bob", Note(), [memoryview(bytes(10))[::2]], timeout_seconds=1)
    with pytest.raises(ConfigurationError, match="must be bytes"):
        await send("bob", Note(), ["text"], timeout_seconds=1)  # type: ignore[list-item]
    ann.links.handle(Note, lambda incoming: None)
    with pytest.raises(ConfigurationError, match="already"):
        ann.links.handle(Note, lambda incoming: None)


async def test_unknown_and_departed_peers_are_unreachable(stage: Stage, ann: Peer, bob: Peer) -> None:
    with pytest.raises(PeerUnreachableError, match="nobody"):
        await ann.links.send("nobody", Note(), timeout_seconds=1)
    with pytest.raises(PeerUnreachableError):
        await ann.links.flush("nobody", timeout_seconds=1)
    await stage.leave("bob", "left")
    with pytest.raises(PeerUnreachableError, match="bob"):
        await ann.links.send("bob", Note(), timeout_seconds=1)
    with pytest.raises(PeerUnreachableError, match="bob"):
        await ann.links.request("bob", Question(number=1), reply=Answer, timeout_seconds=1)
    with pytest.raises(PeerUnreachableError, match="bob"):
        await ann.links.open_stream("bob", Fetch(), timeout_seconds=1)


async def test_the_death_of_a_peer_fails_everything_that_waits_for_it_at_once(
    stage: Stage, ann: Peer, bob: Peer
) -> None:
    gate = asyncio.Event()

    async def never(incoming: Incoming[Any]) -> None:
        await gate.wait()

    bob.links.handle(Note, never)
    bob.links.handle(Question, never)
    asking = asyncio.ensure_future(ann.links.request("bob", Question(number=1), reply=Answer, timeout_seconds=SECONDS))
    sends = [
        asyncio.ensure_future(ann.links.send("bob", Note(), [bytes(4 * MIB)], timeout_seconds=SECONDS))
        for _ in range(12)
    ]
    await poll_until(lambda: sum(send.done() for send in sends) >= 4, SECONDS, "the queue to be full")
    flushing = asyncio.ensure_future(ann.links.flush("bob", timeout_seconds=SECONDS))
    await settle()
    await stage.leave("bob")
    with pytest.raises(PeerUnreachableError):
        await within(asking)
    with pytest.raises(PeerUnreachableError):
        await within(flushing)
    results = await within(asyncio.gather(*sends, return_exceptions=True))
    assert any(isinstance(result, PeerUnreachableError) for result in results)
    receipts = [result for result in results if not isinstance(result, BaseException)]
    assert all(receipt.settled for receipt in receipts)


async def test_a_peer_that_restarts_is_met_anew(stage: Stage, ann: Peer, bob: Peer) -> None:
    inbox = Inbox(bob.links)
    await ann.links.send("bob", Note(number=1), timeout_seconds=SECONDS)
    assert (await inbox.next()).message.number == 1
    await bob.links.close()
    again = await stage.join("bob", session="2")
    inbox = Inbox(again.links)
    await ann.links.send("bob", Note(number=2), [bytes(1 * MIB)], timeout_seconds=SECONDS)
    assert (await inbox.next()).message.number == 2
    ann_inbox = Inbox(ann.links)
    await again.links.send("ann", Note(number=3), timeout_seconds=SECONDS)
    assert (await ann_inbox.next()).message.number == 3


async def test_a_flush_says_that_something_was_lost(stage: Stage, ann: Peer, bob: Peer) -> None:
    await ann.links.send("bob", Note(), [bytes(8 * MIB)], timeout_seconds=SECONDS)
    ann.links.update_peer(bob.presence("dead"))
    with pytest.raises(PeerUnreachableError, match="may or may not"):
        await ann.links.flush("bob", timeout_seconds=SECONDS)
    ann.links.update_peer(bob.presence())
    await ann.links.flush("bob", timeout_seconds=SECONDS)


# Requests


async def test_a_request_is_answered(ann: Peer, bob: Peer) -> None:
    async def answer(incoming: Incoming[Question]) -> tuple[Answer, list[bytes]]:
        return Answer(number=incoming.message.number * 2), [bytes(incoming.frames[0])[::-1]]

    bob.links.handle(Question, answer)

    async def ask(number: int) -> None:
        incoming = await ann.links.request(
            "bob", Question(number=number), [b"abc" * number], reply=Answer, timeout_seconds=SECONDS
        )
        assert incoming.message.number == 2 * number
        assert bytes(incoming.frames[0]) == b"cba" * number
        assert incoming.sender == "bob"

    await within(asyncio.gather(*(ask(number) for number in range(100))))


async def test_a_plain_function_can_answer_too(ann: Peer, bob: Peer) -> None:
    bob.links.handle(Question, lambda incoming: Answer(number=incoming.message.number + 1))
    incoming = await ann.links.request("bob", Question(number=1), reply=Answer, timeout_seconds=SECONDS)
    assert incoming.message.number == 2


@pytest.mark.parametrize(
    ("raised", "expected", "text"),
    [
        (PermissionDeniedError("you may not ask this"), PermissionDeniedError, "you may not ask this"),
        (RetryableError("busy, ask later"), RetryableError, "busy, ask later"),
        (ConfigurationError("there is no such part"), ConfigurationError, "no such part"),
        (PeerUnreachableError("my friend is gone"), PeerError, "my friend is gone"),
        (ValueError("/home/bob/secret"), PeerError, "its handler failed"),
    ],
)
async def test_errors_reach_the_asker_without_internals(
    ann: Peer, bob: Peer, raised: Exception, expected: type[Exception], text: str
) -> None:
    async def fail(incoming: Incoming[Question]) -> None:
        raise raised

    bob.links.handle(Question, fail)
    with pytest.raises(expected, match=text) as caught:
        await ann.links.request("bob", Question(number=1), reply=Answer, timeout_seconds=SECONDS)
    assert type(caught.value) is expected
    assert "secret" not in str(caught.value)


async def test_answers_that_are_none_are_told(ann: Peer, bob: Peer, caplog: pytest.LogCaptureFixture) -> None:
    async def nothing(incoming: Incoming[Question]) -> None:
        pass

    bob.links.handle(Question, nothing)
    bob.links.handle(Fetch, lambda incoming: Note())
    bob.links.handle(Note, lambda incoming: "a string")  # type: ignore[arg-type,return-value]
    bob.links.handle(Answer, lambda incoming: (Answer(number=1), [bytes(17 * MIB)]))
    request = ann.links.request
    with pytest.raises(PeerError, match="no answer"):
        await request("bob", Question(number=1), reply=Answer, timeout_seconds=SECONDS)
    with pytest.raises(ProtocolError, match="'note', not 'answer'"):
        await request("bob", Fetch(), reply=Answer, timeout_seconds=SECONDS)
    for message in (Note(), Answer(number=1)):
        with pytest.raises(PeerError, match="cannot be sent"):
            await request("bob", message, reply=Answer, timeout_seconds=SECONDS)
    with pytest.raises(ProtocolError, match="nobody handles 'unheard'"):
        await request("bob", Unheard(), reply=Answer, timeout_seconds=SECONDS)
    assert "cannot be sent" in caplog.text


async def test_a_request_has_a_deadline_on_both_sides(ann: Peer, bob: Peer) -> None:
    seen: list[float | None] = []
    ended = asyncio.Event()

    async def slow(incoming: Incoming[Question]) -> Answer:
        seen.append(incoming.timeout_seconds)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return Answer(number=1)

    bob.links.handle(Question, slow)
    with pytest.raises(DeadlineExceededError, match="did not answer question"):
        await ann.links.request("bob", Question(number=1), reply=Answer, timeout_seconds=0.3)
    await within(ended.wait())
    assert seen == [0.3]


async def test_a_late_answer_is_dropped(ann: Peer, bob: Peer) -> None:
    gate = asyncio.Event()
    inbox = Inbox(ann.links)

    async def slow(incoming: Incoming[Question]) -> Answer:
        asyncio.get_running_loop().call_soon(gate.set)
        return Answer(number=1)

    bob.links.handle(Question, slow)
    with pytest.raises(DeadlineExceededError):
        await ann.links.request("bob", Question(number=1), reply=Answer, timeout_seconds=0.0)
    await bob.links.send("ann", Note(number=1), timeout_seconds=SECONDS)
    await inbox.next()


async def test_a_handler_may_ask_back(ann: Peer, bob: Peer) -> None:
    ann.links.handle(Fetch, lambda incoming: Answer(number=20))

    async def answer(incoming: Incoming[Question]) -> Answer:
        back = await bob.links.request(
            incoming.sender, Fetch(), reply=Answer, timeout_seconds=incoming.timeout_seconds or 0.0
        )
        return Answer(number=incoming.message.number + back.message.number)

    bob.links.handle(Question, answer)
    incoming = await ann.links.request("bob", Question(number=3), reply=Answer, timeout_seconds=SECONDS)
    assert incoming.message.number == 23


# Streams


async def test_a_stream_carries_items_both_ways(ann: Peer, bob: Peer) -> None:
    async def double(stream: Stream) -> None:
        assert isinstance(stream.message, Fetch)
        assert [bytes(frame) for frame in stream.frames] == [b"opening"]
        async for frames in stream:
            await stream.send([frame for frame in frames for _ in range(2)], timeout_seconds=SECONDS)

    bob.links.handle_stream(Fetch, double)
    async with await ann.links.open_stream("bob", Fetch(count=3), [b"opening"], timeout_seconds=SECONDS) as stream:
        for size in (0, 10, 100_000, 3 * MIB // 2):
            await stream.send([bytes([size % 256]) * size], timeout_seconds=SECONDS)
        await stream.close()
        sizes = [[len(frame) for frame in frames] async for frames in stream]
    assert sizes == [[0, 0], [10, 10], [100_000, 100_000], [3 * MIB // 2, 3 * MIB // 2]]
    assert stream.is_over
    await poll_until(lambda: not reserved(ann, bob), SECONDS, "the streams' memory to be free")


def reserved(*peers: Peer) -> int:
    return sum(peer.links.statistics().reserved_bytes for peer in peers)


async def test_a_stream_larger_than_its_window_flows(ann: Peer, bob: Peer) -> None:
    async def serve(stream: Stream) -> None:
        for index in range(40):
            await stream.send([bytes([index]) * (1 * MIB)], timeout_seconds=SECONDS)

    bob.links.handle_stream(Fetch, serve)
    async with await ann.links.open_stream("bob", Fetch(), timeout_seconds=SECONDS) as stream:
        got = [frames[0][0] async for frames in stream]
    assert got == list(range(40))


async def test_a_reader_who_stops_stops_its_stream_and_nobody_else(ann: Peer, bob: Peer) -> None:
    gate = asyncio.Event()
    got: list[int] = []

    async def read(stream: Stream) -> None:
        await gate.wait()
        got.extend([len(frames[0]) async for frames in stream])

    bob.links.handle_stream(Fetch, read)
    bob.links.handle(Question, lambda incoming: Answer(number=1))
    stream = await ann.links.open_stream("bob", Fetch(), timeout_seconds=SECONDS)
    sent = await until_refused(
        lambda _: stream.send([bytes(1 * MIB)], timeout_seconds=0.3), DeadlineExceededError, "took nothing"
    )
    assert CONFIG.stream_window_bytes // MIB - 2 <= sent <= CONFIG.stream_window_bytes // MIB
    answer = await ann.links.request("bob", Question(number=1), [bytes(1 * MIB)], reply=Answer, timeout_seconds=SECONDS)
    assert answer.message.number == 1
    gate.set()
    await stream.send([bytes(1 * MIB)], timeout_seconds=SECONDS)
    await stream.close()
    await poll_until(lambda: len(got) == sent + 1, SECONDS, "the reader to catch up")


async def test_one_way_may_close_before_the_other(ann: Peer, bob: Peer) -> None:
    async def count(stream: Stream) -> None:
        total = sum([len(frames[0]) async for frames in stream])
        await stream.send([total.to_bytes(8, "little")], timeout_seconds=SECONDS)

    bob.links.handle_stream(Fetch, count)
    stream = await ann.links.open_stream("bob", Fetch(), timeout_seconds=SECONDS)
    for size in (1, 2, 3):
        await stream.send([bytes(size)], timeout_seconds=SECONDS)
    await stream.close()
    await stream.close()
    with pytest.raises(ConfigurationError, match="closed this way"):
        await stream.send([b"more"], timeout_seconds=SECONDS)
    frames = await stream.receive(timeout_seconds=SECONDS)
    assert frames is not None
    assert int.from_bytes(frames[0], "little") == 6
    assert await stream.receive(timeout_seconds=SECONDS) is None


async def test_cancelling_tells_the_other_side_why(ann: Peer, bob: Peer) -> None:
    told: asyncio.Queue[Exception] = asyncio.Queue()

    async def read(stream: Stream) -> None:
        try:
            async for _ in stream:
                pass
        except PeerError as error:
            told.put_nowait(error)
            raise PeerUnreachableError("enough") from error

    bob.links.handle_stream(Fetch, read)
    stream = await ann.links.open_stream("bob", Fetch(), timeout_seconds=SECONDS)
    await stream.send([b"x"], timeout_seconds=SECONDS)
    await stream.cancel("changed my mind")
    assert "changed my mind" in str(await within(told.get()))
    with pytest.raises(PeerError, match="cancelled here"):
        await stream.send([b"y"], timeout_seconds=SECONDS)
    with pytest.raises(PeerError, match="cancelled here"):
        await stream.receive(timeout_seconds=SECONDS)
    await poll_until(lambda: not reserved(ann, bob), SECONDS, "the streams' memory to be free")


async def test_an_exception_inside_async_with_cancels_the_stream(ann: Peer, bob: Peer) -> None:
    told: asyncio.Queue[Exception] = asyncio.Queue()

    async def read(stream: Stream) -> None:
        try:
            await stream.receive(timeout_seconds=SECONDS)
        except PeerError as error:
            told.put_nowait(error)

    bob.links.handle_stream(Fetch, read)
    with pytest.raises(KeyError):
        async with await ann.links.open_stream("bob", Fetch(), timeout_seconds=SECONDS):
            raise KeyError
    assert "gave up" in str(await within(told.get()))


async def test_a_stream_handler_that_fails_cancels_its_stream(
    ann: Peer, bob: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(stream: Stream) -> None:
        raise ValueError("/home/bob/secret")

    bob.links.handle_stream(Fetch, fail)
    stream = await ann.links.open_stream("bob", Fetch(), timeout_seconds=SECONDS)
    with pytest.raises(PeerError, match="its handler failed") as caught:
        await stream.receive(timeout_seconds=SECONDS)
    assert "secret" not in str(caught.value)
    assert bob.links.statistics().total.handler_errors == 1


async def test_a_handler_that_reads_no_more_stops_the_sender(ann: Peer, bob: Peer) -> None:
    async def read_one(stream: Stream) -> None:
        await stream.receive(timeout_seconds=SECONDS)
        await stream.send([b"enough"], timeout_seconds=SECONDS)

    bob.links.handle_stream(Fetch, read_one)
    stream = await ann.links.open_stream("bob", Fetch(), timeout_seconds=SECONDS)
    await until_refused(
        lambda _: stream.send([bytes(1 * MIB)], timeout_seconds=SECONDS), ConfigurationError, "closed this way"
    )
    assert [[bytes(frame) for frame in frames] async for frames in stream] == [[b"enough"]]
    await poll_until(lambda: not reserved(ann, bob), SECONDS, "the streams' memory to be free")


async def test_streams_that_nobody_handles_or_that_are_too_many_are_refused(stage: Stage, ann: Peer) -> None:
    gate = asyncio.Event()

    async def wait(stream: Stream) -> None:
        await gate.wait()

    bob = await stage.join("bob", config=replace(CONFIG, max_streams=2))
    bob.links.handle_stream(Fetch, wait)
    stream = await ann.links.open_stream("bob", Unheard(), timeout_seconds=SECONDS)
    with pytest.raises(PeerError, match="nobody handles"):
        await stream.receive(timeout_seconds=SECONDS)
    streams = [await ann.links.open_stream("bob", Fetch(), timeout_seconds=SECONDS) for _ in range(2)]
    third = await ann.links.open_stream("bob", Fetch(), timeout_seconds=SECONDS)
    with pytest.raises(PeerError, match="too many"):
        await third.receive(timeout_seconds=SECONDS)
    counters = bob.links.statistics().total
    assert (counters.unknown_kinds, counters.refused) == (1, 1)
    gate.set()
    for stream in streams:
        assert await stream.receive(timeout_seconds=SECONDS) is None


async def test_streams_have_limits_and_deadlines(ann: Peer, bob: Peer) -> None:
    gate = asyncio.Event()

    async def wait(stream: Stream) -> None:
        await gate.wait()

    bob.links.handle_stream(Fetch, wait)
    with pytest.raises(ConfigurationError, match="already"):
        bob.links.handle_stream(Fetch, wait)
    stream = await ann.links.open_stream("bob", Fetch(), timeout_seconds=SECONDS)
    with pytest.raises(ConfigurationError, match="smaller ones"):
        await stream.send([bytes(STREAM_ITEM_BYTES)], timeout_seconds=1)
    with pytest.raises(DeadlineExceededError, match="brought nothing"):
        await stream.receive(timeout_seconds=0.05)
    gate.set()
    assert await stream.receive(timeout_seconds=SECONDS) is None


async def test_opening_more_streams_than_memory_allows_is_refused_here(ann: Peer, bob: Peer) -> None:
    bob.links.handle_stream(Fetch, lambda stream: stream.close())
    opened: list[Stream] = []

    async def open_one(_: int) -> None:
        opened.append(await ann.links.open_stream("bob", Fetch(), timeout_seconds=SECONDS))

    assert await until_refused(open_one, RetryableError, "too many streams") > 0
    for stream in opened:
        await stream.finish()
    await poll_until(lambda: not reserved(ann, bob), SECONDS, "the streams' memory to be free")


async def test_the_death_of_a_peer_ends_its_streams(stage: Stage, ann: Peer, bob: Peer) -> None:
    ended = asyncio.Event()

    async def read(stream: Stream) -> None:
        try:
            async for _ in stream:
                pass
        finally:
            ended.set()

    ann.links.handle_stream(Fetch, read)
    stream = await bob.links.open_stream("ann", Fetch(), timeout_seconds=SECONDS)
    await stream.send([b"x"], timeout_seconds=SECONDS)
    await bob.links.flush("ann", timeout_seconds=SECONDS)
    await stage.leave("bob")
    await within(ended.wait())
    await poll_until(lambda: not reserved(ann), SECONDS, "the stream's memory to be free")
    with pytest.raises(PeerError):
        await stream.receive(timeout_seconds=SECONDS)


# Oneself, statistics, the end


async def test_a_peer_can_talk_to_itself(ann: Peer) -> None:
    inbox = Inbox(ann.links)
    frame = bytearray(b"abc")
    receipt = await ann.links.send("ann", Note(number=1), [frame], timeout_seconds=SECONDS)
    incoming = await inbox.next()
    assert (incoming.sender, incoming.message.number, bytes(incoming.frames[0])) == ("ann", 1, b"abc")
    await ann.links.flush("ann", timeout_seconds=SECONDS)
    assert receipt.acknowledged
    ann.links.handle(Question, lambda asked: Answer(number=asked.message.number + 1))
    answer = await ann.links.request("ann", Question(number=1), reply=Answer, timeout_seconds=SECONDS)
    assert answer.message.number == 2

    async def echo(stream: Stream) -> None:
        async for frames in stream:
            await stream.send(frames, timeout_seconds=SECONDS)

    ann.links.handle_stream(Fetch, echo)
    async with await ann.links.open_stream("ann", Fetch(), timeout_seconds=SECONDS) as stream:
        for _ in range(10):
            await stream.send([bytes(2 * MIB)], timeout_seconds=SECONDS)
            assert len((await stream.receive(timeout_seconds=SECONDS) or [memoryview(b"")])[0]) == 2 * MIB
    with pytest.raises(PeerError, match="nobody handles"):
        await ann.links.request("ann", Unheard(), reply=Answer, timeout_seconds=SECONDS)
    await poll_until(lambda: not reserved(ann), SECONDS, "the streams' memory to be free")


async def test_messages_to_oneself_are_bounded_and_belong_to_the_handler_until_it_has_finished(ann: Peer) -> None:
    gate = asyncio.Event()

    async def slow(incoming: Incoming[Note]) -> None:
        await gate.wait()

    ann.links.handle(Note, slow)
    receipts: list[SendReceipt] = []

    async def send_one(_: int) -> None:
        receipts.append(await ann.links.send("ann", Note(), [bytes(4 * MIB)], timeout_seconds=0.05))

    assert await until_refused(send_one, DeadlineExceededError, "no room") == 3
    assert not any(receipt.settled for receipt in receipts)
    gate.set()
    await ann.links.flush("ann", timeout_seconds=SECONDS)
    assert all(receipt.acknowledged for receipt in receipts)


async def test_statistics_count_what_happened(stage: Stage, ann: Peer, bob: Peer) -> None:
    inbox = Inbox(bob.links)
    for number in range(10):
        await ann.links.send("bob", Note(number=number), [bytes(1 * MIB)], timeout_seconds=SECONDS)
    for _ in range(10):
        await inbox.next()
    await ann.links.flush("bob", timeout_seconds=SECONDS)
    mine, theirs = ann.links.statistics(), bob.links.statistics()
    assert mine.peers["bob"].path == stage.stack.kind
    assert mine.peers["bob"].queue_bytes == mine.peers["bob"].in_flight_bytes == 0
    assert mine.peers["bob"].counters.messages_sent == mine.total.messages_sent == 10
    assert theirs.peers["ann"].counters.messages_received == 10
    assert mine.total.bytes_sent > 10 * MIB
    assert theirs.total.bytes_received > 10 * MIB
    assert mine.peers["bob"].rtt_seconds
    assert mine.upload_bytes_per_second
    assert theirs.download_bytes_per_second
    assert (theirs.total.malformed, theirs.total.refused, theirs.total.stale) == (0, 0, 0)


async def test_closing_ends_everything_and_may_be_repeated(stage: Stage, ann: Peer, bob: Peer) -> None:
    cancelled = asyncio.Event()

    async def forever(incoming: Incoming[Question]) -> Answer:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return Answer(number=1)

    bob.links.handle(Question, forever)
    ann.links.handle(Question, forever)
    started = [
        asyncio.ensure_future(ann.links.request(peer, Question(number=1), reply=Answer, timeout_seconds=SECONDS))
        for peer in ("bob", "ann")
    ]
    stream = await ann.links.open_stream("bob", Fetch(), timeout_seconds=SECONDS)
    await settle()
    await ann.links.close()
    await ann.links.close()
    for asking in started:
        with pytest.raises(PeerUnreachableError, match="closed"):
            await within(asking)
    with pytest.raises(PeerUnreachableError, match="closed"):
        await ann.links.send("bob", Note(), timeout_seconds=1)
    with pytest.raises(PeerError):
        await stream.receive(timeout_seconds=SECONDS)
    await bob.links.close()
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
