"""A real member in a real process does its worst: our memory stays as it is, and others are served all the while."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import psutil
import pytest
from directpeers import DEADLINE_SECONDS, Peer, direct_config, entry, introduce, open_peer, send_all

from potluck.link.direct.greeting import LinkKeys
from potluck.testing.polling import poll_until
from potluck.testing.processes import Children

HOSTILE = Path(__file__).with_name("hostilechild.py")
MAY_COST_BYTES = 64 * 2**20
EXCHANGES = 20  # with somebody honest, meanwhile
SIZE = 100_000


class Counting:
    """Carrier events that keep nothing."""

    def __init__(self) -> None:
        self.num_packets: dict[str, int] = {}
        self.num_bytes: dict[str, int] = {}
        self.open: set[str] = set()
        self.closed: list[tuple[str, str]] = []
        self.writable: list[str] = []

    def packet_arrived(self, carrier: object, peer: str, header: memoryview, payload: memoryview | None) -> None:
        self.num_packets[peer] = self.num_packets.get(peer, 0) + 1
        self.num_bytes[peer] = self.num_bytes.get(peer, 0) + len(payload or b"")

    def path_opened(self, carrier: object, peer: str) -> None:
        self.open.add(peer)

    def path_closed(self, carrier: object, peer: str, reason: str) -> None:
        self.open.discard(peer)
        self.closed.append((peer, reason))

    def path_writable(self, carrier: object, peer: str) -> None:
        self.writable.append(peer)

    def is_open(self, peer: str) -> bool:
        return peer in self.open


class Watch:
    """How much memory this process uses, at most."""

    def __init__(self) -> None:
        gc.collect()
        self._process = psutil.Process()
        self._resting = self.highest = self._process.memory_info().rss

    def growth_bytes(self) -> int:
        self.highest = max(self.highest, self._process.memory_info().rss)
        return self.highest - self._resting


async def exchange(m: Peer, bystander: Peer, watch: Watch) -> None:
    """An honest peer is served, both ways, again and again."""
    for number in range(1, EXCHANGES + 1):
        for sender, receiver in ((m, bystander), (bystander, m)):
            before = receiver.events.num_packets.get(sender.name, 0)
            await send_all(sender, receiver.name, [(b"", bytes(SIZE))])
            await poll_until(
                lambda sender=sender, receiver=receiver, before=before: (  # type: ignore[misc]
                    receiver.events.num_packets.get(sender.name, 0) > before
                ),
                DEADLINE_SECONDS,
                f"exchange {number}",
                every_seconds=0.001,
            )
        assert watch.growth_bytes() < MAY_COST_BYTES


@pytest.mark.parametrize(
    ("role", "attack"),
    [
        *(("dialler", attack) for attack in ("stranger", "tiny", "asks", "large", "unfinished", "deaf")),
        *(("listener", attack) for attack in ("tiny", "asks", "large")),
    ],
)
async def test_who_does_its_worst_costs_little_memory_and_keeps_nobody_from_being_served(
    role, attack, children: Children
):
    keys = LinkKeys.generate()
    name = "z" if role == "listener" else "a"
    quick = direct_config(sockets={"heartbeat_seconds": 0.5, "silence_seconds": 2.0})
    async with open_peer("m", quick, events=Counting()) as m, open_peer("n", events=Counting()) as bystander:
        introduce(m, bystander)
        await m.until_open("n")
        await bystander.until_open("m")
        watch = Watch()
        await exchange(m, bystander, watch)
        watch = Watch()
        address = "tcp://127.0.0.1:0" if role == "listener" else str(m.carrier.bound[0])
        m.carrier.update_peer(entry(name, "s1", keys.link_key))
        argv = [role, attack, keys.link_key, keys.secret, m.carrier.link_key, address]
        hostile = children.spawn([sys.executable, HOSTILE, *argv], name="hostile")
        if role == "listener":
            found = await hostile.until_line(r"listening (\S+)", DEADLINE_SECONDS)
            m.carrier.update_peer(m.presence())
            m.carrier.update_peer(entry(name, "s1", keys.link_key, found[1]))
        await hostile.until_line("greeted", DEADLINE_SECONDS)
        if attack == "stranger":
            await hostile.until_line("cut", DEADLINE_SECONDS)
            assert m.stat("handshake_failed") == 1
        else:
            await m.until_open(name)
        if attack == "deaf":
            while m.carrier.send(name, b"", bytes(500_000)):
                assert watch.growth_bytes() < MAY_COST_BYTES
        await exchange(m, bystander, watch)
        if attack in ("tiny", "large"):
            enough = 100_000 if attack == "tiny" else 500
            await poll_until(
                lambda: m.events.num_packets.get(name, 0) > enough and watch.growth_bytes() < MAY_COST_BYTES,
                DEADLINE_SECONDS,
                lambda: f"a lot of it ({m.events.num_packets}, {m.events.closed}, {hostile.tail()})",
            )
        if attack in ("unfinished", "deaf"):  # its silence shows
            await poll_until(lambda: not m.events.is_open(name), DEADLINE_SECONDS, "it to be given up")
        await exchange(m, bystander, watch)
        assert not [peer for peer, _ in m.events.closed if peer == "n"]
        assert watch.growth_bytes() < MAY_COST_BYTES
