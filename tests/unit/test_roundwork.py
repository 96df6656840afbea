"""One member's work in a round: what it keeps of what others send, whom it waits for, and how often it encodes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from roundlab import assert_same_average, lab
from roundworld import KEY, make_plan

from potluck.link.carrier import Buffer
from potluck.link.channel.sendreceipt import SendReceipt
from potluck.link.dispatch import Incoming
from potluck.round.codecs import CodecSpec
from potluck.round.codecs.floats import Float32
from potluck.round.member import roundwork as module
from potluck.round.member.incoming import EARLY_SECONDS, IncomingFrames
from potluck.round.member.roundwork import LEAST_AHEAD_CHUNKS, RoundWork
from potluck.round.member.tensorwork import TensorWork
from potluck.round.plan.chunks import CodecSpan
from potluck.round.plan.messages import Average, Contribution, Part, Plan
from potluck.sim.inlineworkers import InlineWorkers
from potluck.sim.virtualclock import VirtualClock
from potluck.sim.virtualloop import LoopClock, in_virtual_time

CHUNK_BYTES = 32 * 1024
CHUNK_ELEMENTS = CHUNK_BYTES // 4


def plan_for(num_senders: int, num_chunks: int) -> Plan:
    """Member 0 only reduces, and all of it."""
    plan = make_plan(1 + num_senders, 1, num_chunks, aux=1)
    runs = (CodecSpan(codec=CodecSpec(name="float32"), elements=num_chunks * CHUNK_ELEMENTS),)
    return msgspec.structs.replace(plan, runs=runs, chunk_bytes=CHUNK_BYTES)


def values(value: float) -> bytes:
    return torch.full((CHUNK_ELEMENTS,), value).numpy().tobytes()


class FakeLinks:
    """Takes what is sent, which arrives at once, and knows who handles what."""

    group = ""

    def __init__(self, handlers: dict[type, Callable[[Any], Any]], sent: list[tuple[str, int]]) -> None:
        self.handle = handlers.__setitem__
        self._sent = sent

    def queue_to(self, peer: str) -> FakeQueue:
        return FakeQueue(peer, self._sent)

    def upload_bytes_per_second(self, _peer: str) -> float | None:
        return None


class FakeQueue:
    def __init__(self, peer: str, sent: list[tuple[str, int]]) -> None:
        self._peer, self._sent = peer, sent

    async def send(self, message: Average, _frames: list[Buffer], **_options: Any) -> SendReceipt:
        self._sent.append((self._peer, message.chunk))
        receipt = SendReceipt()
        receipt.settle()
        return receipt


class Desk:
    """The reducer of a round, and what its members send it."""

    def __init__(self, plan: Plan) -> None:
        self.sent: list[tuple[str, int]] = []  # averages: to whom, and of which chunk
        self._handlers: dict[type, Callable[[Any], Any]] = {}
        links: Any = FakeLinks(self._handlers, self.sent)
        self.incoming_frames = IncomingFrames(links, lambda: self.round_work, lambda _key: True)
        self.round_work = RoundWork(
            links,
            InlineWorkers(),
            plan,
            0,
            None,
            LoopClock(),
            on_news=lambda: None,
            on_broken=self._broke,
            on_room=self.incoming_frames.look_again,
        )
        self.round_work.start()
        self.most_held: Counter[int] = Counter()  # by sender, contributions kept at the same time
        self._waiting: list[asyncio.Future[Any]] = []

    def _broke(self, error: Exception) -> None:
        raise AssertionError("its work failed") from error

    def contribute(self, sender: int, chunk: int, value: float = 1.0, generation: int = 0) -> None:
        message = Contribution(key=KEY, chunk=chunk, generation=generation)
        mail = Incoming(sender=f"peer{sender}", message=message, frames=[memoryview(values(value))])
        waiting = self._handlers[Contribution](mail)
        if waiting is not None:
            self._waiting.append(asyncio.ensure_future(waiting))
        for member in range(len(self.round_work.plan.members)):
            held = sum(member in frames for frames in self.round_work._contributions.values())
            self.most_held[member] = max(self.most_held[member], held)

    async def settle(self) -> None:
        await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.round_work.stop()
        await asyncio.gather(*self._waiting)


# How many contributions a reducer keeps


def test_how_far_contributions_may_be_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them together take half of the model's size in float32, and each member may always send a little."""

    def ahead(num_senders: int, num_chunks: int) -> int:
        round_work = RoundWork(
            None,  # type: ignore[arg-type]
            InlineWorkers(),
            plan_for(num_senders, num_chunks),
            0,
            None,
            VirtualClock(),
            on_news=lambda: None,
            on_broken=lambda _error: None,
        )
        return round_work.ahead_chunks()

    assert ahead(3, 40) == 40 // 2 // 2
    assert ahead(9, 160) == 160 // 2 // 8
    assert ahead(9, 16) == LEAST_AHEAD_CHUNKS
    assert ahead(1, 40) == 40 // 2


@in_virtual_time
async def test_who_sends_more_than_there_is_room_for_has_to_wait_and_all_of_it_is_used() -> None:
    desk = Desk(plan_for(3, 40))
    room = desk.round_work.ahead_chunks()
    assert room == 10
    for chunk in range(40):
        desk.contribute(1, chunk, 1.0)  # whatever the limit
    await desk.settle()
    assert desk.most_held == {0: 0, 1: room, 2: 0, 3: 0}
    for chunk in range(40):
        desk.contribute(2, chunk, 2.0)
        desk.contribute(3, chunk, 3.0)
        await desk.settle()
    assert desk.most_held[1] == room
    assert desk.round_work.exchange.is_complete
    assert desk.round_work._ahead == {1: set(), 2: set(), 3: set()}
    assert torch.frombuffer(desk.round_work.averages.frame(39), dtype=torch.float32)[0] == pytest.approx(20 / 9)
    assert desk.incoming_frames.counts == {"early_messages": 30}
    await desk.close()


@in_virtual_time
async def test_what_finds_no_room_for_long_is_dropped() -> None:
    desk = Desk(plan_for(2, 8))
    for chunk in range(8):
        desk.contribute(1, chunk)
    await asyncio.sleep(EARLY_SECONDS + 1)
    assert desk.incoming_frames.counts == {"early_messages": 4, "late_messages": 4}
    assert sum(map(len, desk.round_work._contributions.values())) == 4
    await desk.close()


@in_virtual_time
async def test_what_is_done_again_is_not_held_up() -> None:
    plan = plan_for(2, 8)
    desk = Desk(plan)
    for chunk in range(4):
        desk.contribute(1, chunk)
    parts = (Part(reducer=0, start=0, stop=8, generation=1),)
    await desk.round_work.revise(msgspec.structs.replace(plan, revision=1, parts=parts))
    assert desk.round_work._contributions == {}
    for chunk in range(8):
        desk.contribute(1, chunk, generation=1)
    assert desk.most_held[1] == 8
    await desk.close()


# Values that cannot be used


@in_virtual_time
async def test_a_chunk_to_which_nobody_contributed_anything_usable_is_left_to_the_coordinator() -> None:
    desk = Desk(plan_for(3, 2))
    for member in (1, 2, 3):
        desk.contribute(member, 0, float("nan"))
    await desk.settle()
    report = desk.round_work.report()
    assert [offence.member for offence in report.offences] == [1, 2, 3]
    assert report.waiting_for == ()  # nobody is to blame for chunk 1 before this one is dealt with
    assert not desk.round_work.exchange._chunks[0].reducing
    for member in (1, 2, 3):
        desk.contribute(member, 1, 5.0)
    await desk.settle()
    assert desk.round_work.exchange.held == {1}, "the other chunk has nothing to do with it"
    await desk.close()


# What is encoded, and when a member has all of it


@in_virtual_time
async def test_contributions_and_averages_are_encoded_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    contributed: Counter[tuple[int, int]] = Counter()
    num_encoded = 0
    work, encode = TensorWork.encode, Float32.encode

    def encode_contribution(self: TensorWork, chunk: Any, tensors: Any) -> Buffer:
        contributed[id(tensors), chunk.index] += 1
        return work(self, chunk, tensors)

    def encode_any(self: Float32, *args: Any) -> Buffer:
        nonlocal num_encoded
        num_encoded += 1
        return encode(self, *args)

    monkeypatch.setattr(TensorWork, "encode", encode_contribution)
    monkeypatch.setattr(Float32, "encode", encode_any)
    made: list[RoundWork] = []
    start = RoundWork.start
    monkeypatch.setattr(module.RoundWork, "start", lambda self: (made.append(self), start(self)))
    async with lab(4) as there:
        await there.average()
        assert_same_average(there.members)
    num_chunks = len(made[0].grid)
    assert num_chunks > 4
    assert set(contributed.values()) == {1}
    assert len(contributed) == 3 * num_chunks, "each member encodes what others reduce"
    assert num_encoded - len(contributed) == num_chunks, "each average is encoded once, for everybody"


@in_virtual_time
async def test_a_caller_that_gives_up_while_its_tensors_are_written_goes_on_only_when_all_of_them_are() -> None:
    async with lab(2) as there:
        first = there.members[0]
        workers = first.averager._workers
        run = workers.run

        async def run_slowly(job: Any) -> Any:
            await asyncio.sleep(1.0)
            return await run(job)

        workers.run = run_slowly  # type: ignore[method-assign]
        committed = asyncio.Event()
        first.averager.listen(lambda _commit: committed.set())
        started = there.start()
        await committed.wait()
        await asyncio.sleep(0.1)
        assert not started[0].done()
        started[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await started[0]
        assert (await started[1]).holds
        assert_same_average(there.members)
