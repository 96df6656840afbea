"""What one member sends to another: averages first, bounded, in order, again where it was lost, never what is stale."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from potluck.errors import PeerUnreachableError
from potluck.link.carrier import Buffer
from potluck.link.channel.packet import Urgency
from potluck.round.member import lane as lane_module
from potluck.round.member.lane import ENCODED_AHEAD, IN_FLIGHT_BYTES, Lane, Letter, close_lanes
from potluck.round.plan.messages import Average, Contribution, RoundKey
from potluck.sim.virtualloop import in_virtual_time

KEY = RoundKey(epoch=1, token=1, attempt=0)


@dataclass(eq=False)
class FakeReceipt:
    error: Exception | None = None
    watchers: list[Callable[[], None]] = field(default_factory=list)

    is_withdrawn = False

    def withdraw(self, error: Exception) -> bool:
        self.is_withdrawn = True
        self.settle(error)
        return True

    def watch(self, callback: Callable[[], None]) -> None:
        self.watchers.append(callback)

    def settle(self, error: Exception | None = None) -> None:
        self.error = error
        for callback in self.watchers:
            callback()


class FakeLinks:
    """Takes what is sent, and acknowledges it when the test says so, or at once."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, int, bytes]] = []  # kind, chunk, generation, seal
        self.receipts: list[FakeReceipt] = []
        self.failures = 0  # so many sends fail from now on
        self.acknowledges = True
        self.speed: float | None = None
        self.group = "critic"

    def queue_to(self, peer: str) -> FakeLinks:
        assert peer == "other"
        return self

    async def send(
        self, message: Any, frames: Sequence[Buffer], *, group: str, urgency: Urgency, timeout_seconds: float
    ) -> FakeReceipt:
        assert (group, urgency) == (self.group, Urgency.BULK)
        if self.failures:
            self.failures -= 1
            raise PeerUnreachableError("not just now")
        assert isinstance(message, Average | Contribution)
        kind = "average" if isinstance(message, Average) else "contribution"
        self.sent.append((kind, message.chunk, message.generation, message.seal))
        receipt = FakeReceipt()
        self.receipts.append(receipt)
        if self.acknowledges:
            asyncio.get_running_loop().call_soon(receipt.settle)
        return receipt

    def upload_bytes_per_second(self, peer: str) -> float | None:
        return self.speed

    def chunks(self, kind: str) -> list[int]:
        return [chunk for sent, chunk, _, _ in self.sent if sent == kind]


class Way:
    """A lane with everything around it."""

    def __init__(self, *, ahead_chunks: int = 100, frame_bytes: int = 100) -> None:
        self.links = FakeLinks()
        self.generations: dict[int, int] = {}
        self.arrived: list[Letter] = []
        self.encoded: list[int] = []
        self.frame_bytes = frame_bytes
        self.not_finite: set[int] = set()
        self.lane = Lane(
            self.links,  # type: ignore[arg-type]
            "other",
            KEY,
            encode=self._encode,
            is_current=lambda chunk, generation: self.generations.get(chunk, 0) == generation,
            on_sent=self.arrived.append,
            seal_of=lambda letter: b"seal of %d" % letter.chunk,
            ahead_chunks=ahead_chunks,
        )

    def _encode(self, chunk: int, done: Callable[[Buffer | None], None]) -> None:
        self.encoded.append(chunk)
        frame = None if chunk in self.not_finite else bytes(self.frame_bytes)
        asyncio.get_running_loop().call_soon(done, frame)


async def turns(number: int = 50) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@in_virtual_time
async def test_everything_arrives_in_order_with_its_seal() -> None:
    way = Way()
    for chunk in range(10):
        way.lane.contribute(chunk, 0)
    await turns()
    assert way.links.sent == [("contribution", chunk, 0, b"seal of %d" % chunk) for chunk in range(10)]
    assert [letter.chunk for letter in way.arrived] == list(range(10))
    await way.lane.close()


@in_virtual_time
async def test_averages_go_before_contributions() -> None:
    way = Way(frame_bytes=IN_FLIGHT_BYTES)  # one at a time
    way.links.acknowledges = False
    for chunk in range(4):
        way.lane.contribute(chunk, 0)
    await turns()
    assert len(way.links.sent) == 1
    for chunk in (7, 8):
        way.lane.send_average(chunk, 0, bytes(IN_FLIGHT_BYTES))
    for index in range(4):
        way.links.receipts[index].settle()
        await turns()
    assert [(kind, chunk) for kind, chunk, _, _ in way.links.sent] == [
        ("contribution", 0),
        ("average", 7),
        ("average", 8),
        ("contribution", 1),
        ("contribution", 2),
    ]
    await way.lane.close()


@in_virtual_time
async def test_only_so_many_bytes_are_under_way() -> None:
    way = Way(frame_bytes=IN_FLIGHT_BYTES // 4)
    way.links.acknowledges = False
    for chunk in range(10):
        way.lane.contribute(chunk, 0)
    await turns()
    assert way.links.chunks("contribution") == [0, 1, 2, 3]
    assert len(way.encoded) <= 4 + ENCODED_AHEAD, "contributions are encoded shortly before they leave"
    way.links.receipts[0].settle()
    await turns()
    assert way.links.chunks("contribution") == [0, 1, 2, 3, 4]
    await way.lane.close()


@in_virtual_time
async def test_contributions_stay_only_so_far_ahead_of_the_averages_that_come_back() -> None:
    way = Way(ahead_chunks=3)
    for chunk in range(10):
        way.lane.contribute(chunk, 0)
    await turns()
    assert way.links.chunks("contribution") == [0, 1, 2]
    way.lane.answered(9)  # one that was not sent
    await turns()
    assert way.links.chunks("contribution") == [0, 1, 2]
    way.lane.answered(1)
    await turns()
    assert way.links.chunks("contribution") == [0, 1, 2, 3]
    way.generations[8] = 1
    way.lane.contribute(8, 1)
    await turns()
    assert way.links.sent[-1][:3] == ("contribution", 8, 1), "what is done again is not held back"
    await way.lane.close()


@in_virtual_time
async def test_what_was_lost_is_sent_again() -> None:
    way = Way()
    way.links.acknowledges = False
    way.lane.contribute(0, 0)
    way.lane.send_average(5, 0, b"average")
    await turns()
    assert len(way.links.receipts) == 2
    way.links.acknowledges = True
    for receipt in way.links.receipts[:2]:
        receipt.settle(PeerUnreachableError("the channel broke"))
    await turns()
    assert sorted(way.links.chunks("contribution")) == [0, 0]
    assert way.links.chunks("average") == [5, 5]
    assert {letter.chunk for letter in way.arrived} == {0, 5}
    await way.lane.close()


@in_virtual_time
async def test_while_the_peer_cannot_be_reached_it_is_tried_again_after_a_while() -> None:
    way = Way()
    way.links.failures = 2
    started = asyncio.get_running_loop().time()
    way.lane.contribute(0, 0)
    await asyncio.sleep(10.0)
    assert way.links.chunks("contribution") == [0]
    assert way.links.failures == 0
    assert asyncio.get_running_loop().time() - started >= 2 * lane_module.RETRY_SECONDS
    await way.lane.close()


@in_virtual_time
async def test_what_counts_no_more_is_neither_encoded_nor_sent() -> None:
    way = Way(frame_bytes=IN_FLIGHT_BYTES)
    way.links.acknowledges = False
    for chunk in range(6):
        way.lane.contribute(chunk, 0)
    way.lane.send_average(9, 0, bytes(10))
    await turns()
    sent = len(way.links.sent)
    encoded = list(way.encoded)
    way.generations.update(dict.fromkeys(range(10), 1))
    for receipt in way.links.receipts:
        receipt.settle()
    await turns()
    assert len(way.links.sent) == sent
    assert way.encoded == encoded
    await way.lane.close()


@in_virtual_time
async def test_values_that_cannot_be_encoded_hold_nothing_up() -> None:
    way = Way(ahead_chunks=2)
    way.not_finite = {0, 1, 2}
    for chunk in range(5):
        way.lane.contribute(chunk, 0)
    await turns()
    assert way.links.chunks("contribution") == [3, 4]
    await way.lane.close()


@in_virtual_time
async def test_a_closed_lane_sends_nothing_more_and_lets_go_of_its_frames() -> None:
    way = Way(frame_bytes=IN_FLIGHT_BYTES)
    way.links.acknowledges = False
    for chunk in range(3):
        way.lane.contribute(chunk, 0)
    await turns()
    assert way.lane._letters, "one is on its way, others wait"
    await way.lane.close()
    assert not way.lane._letters
    way.lane.contribute(1, 0)
    way.lane.send_average(2, 0, b"average")
    way.links.receipts[0].settle(PeerUnreachableError("gone"))
    await turns()
    assert len(way.links.sent) == 1
    assert not way.lane._letters
    await way.lane.close()


@in_virtual_time
async def test_whoever_is_cancelled_while_closing_lanes_leaves_none_open() -> None:
    ways = [Way() for _ in range(3)]
    for way in ways:
        way.links.acknowledges = False
        way.lane.send_average(0, 0, b"average")
    await turns()
    closing = asyncio.create_task(close_lanes([way.lane for way in ways]))
    await asyncio.sleep(0)
    closing.cancel()
    await turns()
    assert closing.cancelled()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("round lane")]


@in_virtual_time
async def test_on_a_slow_line_little_is_on_its_way_so_that_averages_soon_pass() -> None:
    way = Way(frame_bytes=100_000)
    way.links.acknowledges = False
    way.links.speed = 250_000.0
    for chunk in range(50):
        way.lane.contribute(chunk, 0)
    await turns(200)
    assert len(way.links.sent) == 5, "two seconds of the line"
    way.links.speed = 10.0
    for receipt in way.links.receipts[:4]:
        receipt.settle()
    await turns(200)
    assert len(way.links.sent) == 6, "two frames, however slow it is"
    await way.lane.close()


@in_virtual_time
async def test_what_waits_to_leave_is_withdrawn_when_the_round_is_over() -> None:
    way = Way()
    way.links.acknowledges = False
    for chunk in range(3):
        way.lane.contribute(chunk, 0)
    await turns()
    way.links.receipts[0].settle()
    await way.lane.close()
    await turns()
    assert [receipt.is_withdrawn for receipt in way.links.receipts] == [False, True, True]
    assert len(way.links.sent) == 3, "nothing is sent again"
