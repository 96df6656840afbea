"""What each flow control between a tensor and the wire is worth: with it, and without it, in virtual time.

The real channels, links and rounds, over simulated lines: so each figure comes out the same on any machine, and takes
seconds. See docs/design/flow-control.md for what each is for.

    scripts/bench flow --json
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from unittest import mock

import torch

from harness import parser, report, say
from potluck import tasks
from potluck.link.channel.congestion import CongestionWindow
from potluck.link.channel.packet import Urgency
from potluck.link.limits import KIB, MIB, LinkConfig
from potluck.link.line import SharedLine
from potluck.link.relay.credit import InboundBudget, SendCredit
from potluck.messages import Message
from potluck.round.averager import Averager, AveragerConfig
from potluck.round.codecs import CodecChoice
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.round.coordinator.trigger import Quorum
from potluck.round.member import lane
from potluck.run.group import Group
from potluck.sim.inlineworkers import InlineWorkers
from potluck.sim.linknode import LinkNode
from potluck.sim.memorycarrier import Conditions, MemoryNetwork
from potluck.sim.memoryrun import CARRIERS, MemoryRun
from potluck.sim.virtualclock import VirtualClock
from potluck.sim.virtualloop import LoopClock, in_virtual_time

HOME_LINE = Conditions(delay_seconds=0.02, bytes_per_second=250_000.0)  # 2 Mbit/s
LINE = Conditions(delay_seconds=0.02, bytes_per_second=2_500_000.0)  # 20 Mbit/s
FAST_LINE = Conditions(delay_seconds=0.001, bytes_per_second=100e6)
FRAME = bytes(64 * KIB)
MANY_BYTES = 1 << 40


# Links


def nodes(conditions: Conditions, *names: str, **config: Any) -> tuple[VirtualClock, list[LinkNode]]:
    """Peers that know each other."""
    clock = VirtualClock()
    network = MemoryNetwork(schedule=clock.schedule)
    for kind in CARRIERS:
        network.set_conditions(conditions, kind=kind)
    made = [LinkNode(name, network, clock, config=LinkConfig(**config)) for name in names]
    for one, other in itertools.permutations(made, 2):
        one.table.update_peer(other.presence())
    clock.advance(1.0)
    return clock, made


def send(sender: LinkNode, to: str, num_bytes: int, urgency: Urgency) -> list[Any]:
    link = sender.table.links[to]
    return [link.send(b"", [memoryview(FRAME)], urgency=urgency) for _ in range(num_bytes // len(FRAME))]


def seconds_until_acknowledged(clock: VirtualClock, receipts: Sequence[Any], step: float = 0.01) -> float:
    began = clock.monotonic()
    while not all(receipt.acknowledged for receipt in receipts):
        clock.advance(step)
    return clock.monotonic() - began


def channel_window(is_on: bool) -> float:
    """Seconds until a small message has arrived that was sent beside bulk, on 2 Mbit/s."""

    def wide_open(self: CongestionWindow) -> None:
        self.window_bytes = 32 * MIB

    with mock.patch.object(CongestionWindow, "_size", CongestionWindow._size if is_on else wide_open):
        clock, (ada, _) = nodes(HOME_LINE, "ada", "bob")
        send(ada, "bob", 4 * MIB, Urgency.BULK)
        clock.advance(3.0)
        return seconds_until_acknowledged(clock, [ada.table.links["bob"].send(b"a beacon", urgency=Urgency.FIRST)])


def shared_line(is_on: bool) -> float:
    """Seconds that a round's 4 MiB take beside a newcomer that loads a state, on a line that is capped to 2 Mbit/s."""

    def admits_all(_self: SharedLine, _now: float, *, has_bulk: bool) -> bool:
        return True

    with mock.patch.object(SharedLine, "admits_streams", SharedLine.admits_streams if is_on else admits_all):
        clock, (ada, _, _) = nodes(FAST_LINE, "ada", "bob", "newcomer", send_bytes_per_second=250_000.0)
        send(ada, "newcomer", 16 * MIB, Urgency.STREAM)
        return seconds_until_acknowledged(clock, send(ada, "bob", 4 * MIB, Urgency.BULK), 0.1)


def channel_credit(is_on: bool) -> float:
    """MiB in the memory of a receiver whose application takes nothing, after 256 MiB were sent to it."""
    config = {} if is_on else {"window_bytes": 1024 * MIB, "receive_bytes": 4096 * MIB}
    clock, (ada, bob) = nodes(FAST_LINE, "ada", "bob", **config)
    bob.keeps = True
    send(ada, "bob", 256 * MIB, Urgency.BULK)
    clock.advance(30.0)
    return sum(len(frame) for delivery in bob.kept for frame in delivery.frames) / MIB


def relay_credit(is_on: bool) -> float:
    """MiB that the hub keeps at most for a receiver on 8 Mbit/s, while 16 peers send 8 MiB each to it."""
    budget, now, line_bytes, most_bytes = InboundBudget(), 0.0, 0.0, 0
    packet, rate, step = 512 * KIB, 1e6, 0.05
    grants: list[deque[tuple[int, int]]] = [deque() for _ in range(16)]
    accounts = [budget.open(lambda *told, heard=heard: heard.append(told), now) for heard in grants]  # type: ignore[misc]
    senders = [SendCredit(limit_bytes=a.limit_bytes, base_bytes=a.limit_bytes) for a in accounts]
    left = [8 * MIB // packet] * 16
    queue: deque[tuple[int, int, int]] = deque()  # sender, bytes of a packet or 0 of a question, bytes sent before
    while any(left) or queue:
        for number, sender in enumerate(senders):
            while grants[number]:
                sender.granted(*grants[number].popleft())
            while left[number] and (not is_on or sender.allows(packet)):
                queue.append((number, packet, sender.sent_bytes))
                sender.sent_bytes += packet
                left[number] -= 1
            if left[number] and not sender.wanted_bytes:
                sender.want(packet)
                queue.append((number, 0, sender.sent_bytes))
        most_bytes = max(most_bytes, sum(size for _, size, _ in queue))
        now, line_bytes = now + step, line_bytes + rate * step
        while queue and line_bytes >= queue[0][1]:
            number, size, sent_bytes = queue.popleft()
            line_bytes -= size
            if size:
                budget.arrived(accounts[number], size, now)
            else:
                budget.wants(accounts[number], sent_bytes, packet, now)
    return most_bytes / MIB


# Senders and rounds, on a virtual loop


class Bytes(Message, frozen=True, kw_only=True, tag="bench.bytes"):
    """Something large."""


async def queued_for_peer(queue_bytes: int) -> float:
    """MiB that wait for one peer on 20 Mbit/s, after 256 MiB were sent to it by as many senders as like."""
    run = MemoryRun(clock=LoopClock(), link_config=LinkConfig(queue_bytes=queue_bytes))
    await run.open()
    ada, bob = await run.join("ada"), await run.join("bob")
    for kind in CARRIERS:
        run.network.set_conditions(LINE, kind=kind, sender=ada.peer_id, receiver=bob.peer_id)
    frame = bytes(MIB)
    senders = [
        asyncio.create_task(ada.links.send(bob.peer_id, Bytes(), [frame], timeout_seconds=600.0, bulk=True))
        for _ in range(256)
    ]
    await asyncio.sleep(1.0)
    found = ada.links.statistics().peers[bob.peer_id].queue_bytes / MIB
    await tasks.end(*senders)
    await run.close()
    return found


def send_queue(is_on: bool) -> float:
    """MiB that wait for one peer."""
    return in_memory(lambda: queued_for_peer(LinkConfig().queue_bytes if is_on else MANY_BYTES))


def in_memory(work: Callable[[], Awaitable[float]]) -> float:
    """What comes of it on a virtual loop."""
    found: list[float] = []

    @in_virtual_time
    async def run() -> None:
        found.append(await work())

    run()
    return found[0]


async def queued_in_round(num_values: int, num_members: int) -> float:
    """MiB of encoded chunks that wait in one member's queues at most, in a round on 20 Mbit/s."""
    run = MemoryRun(clock=LoopClock())
    await run.open()
    coordinator = CoordinatorConfig(trigger=Quorum(grace_seconds=0.5))
    config = AveragerConfig(codecs=CodecChoice.everything("float32"), coordinator=coordinator)
    averagers = []
    for number in range(num_members):
        averagers.append(Averager(Group(await run.join(f"peer-{number}")), config, workers=InlineWorkers()))
        await averagers[-1].start()
    for one, other in itertools.permutations(run.peers.values(), 2):
        for kind in CARRIERS:
            run.network.set_conditions(LINE, kind=kind, sender=one.peer_id, receiver=other.peer_id)
    await asyncio.sleep(5.0)
    most_bytes = 0

    async def watch() -> None:
        nonlocal most_bytes
        while True:
            for peer in run.peers.values():
                most_bytes = max(most_bytes, sum(each.queue_bytes for each in peer.links.statistics().peers.values()))
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    tensors = [{"w": torch.full((num_values,), float(number))} for number in range(num_members)]
    await asyncio.gather(
        *(each.average(own, weight=1.0, timeout_seconds=3600.0) for each, own in zip(averagers, tensors, strict=True))
    )
    await tasks.end(watching)
    for averager in averagers:
        await averager.close()
    await run.close()
    return most_bytes / MIB


def lane_limit(is_on: bool) -> float:
    """MiB of encoded chunks in the queues of one of three members, 114 MiB of float32 values, 20 Mbit/s."""
    with (
        mock.patch.object(lane, "IN_FLIGHT_BYTES", lane.IN_FLIGHT_BYTES if is_on else MANY_BYTES),
        mock.patch.object(lane, "IN_FLIGHT_SECONDS", lane.IN_FLIGHT_SECONDS if is_on else 1e9),
    ):
        return in_memory(lambda: queued_in_round(30_000_000, 3))


FIGURES: dict[str, tuple[str, Callable[[bool], float]]] = {
    "lane": ("MiB of chunks in queues, a round of 114 MiB, 20 Mbit/s", lane_limit),
    "send queue": ("MiB that wait for one peer, of 256 sent", send_queue),
    "channel window": ("seconds of a small message beside bulk, 2 Mbit/s", channel_window),
    "channel credit": ("MiB at a receiver that takes nothing", channel_credit),
    "shared line": ("seconds of a round's 4 MiB beside a load, 2 Mbit/s", shared_line),
    "relay credit": ("MiB at the hub for one receiver on 8 Mbit/s", relay_credit),
}


def main() -> None:
    arguments = parser(__doc__, repeats=None).parse_args()
    figures = {}
    for name, (what, measure) in FIGURES.items():
        on, off = measure(True), measure(False)
        say(f"{name:16} {what:52} {on:8.2f} with, {off:8.2f} without")
        figures[f"{name}: with"], figures[f"{name}: without"] = on, off
    report(figures, as_json=arguments.json, title="flow controls, with and without")


if __name__ == "__main__":
    main()
