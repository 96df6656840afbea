"""Memory over hundreds of rounds of which a third fail: three peers with real links around a real hub.

    scripts/bench soak [--json] [--rounds 300] [--elements 2000000]

All peers live in this process, so that its resident memory is all of theirs. In every third round nothing gets through
between any two of them from some point on: contributions, averages and queues are left half-way, and every peer's call
ends with an error at its deadline. What counts is the resident memory after the rounds are over, again and again: the
largest after the first tenth, when everything has been used once, against the median.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from harness import parser, report, say
from potluck import faultpoints
from potluck.errors import RoundFailedError
from potluck.hub.access.member import Scopes
from potluck.hub.access.organise import Organiser
from potluck.hub.guard.guard import GuardConfig
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.server.configuration import HubConfig
from potluck.hub.subjects import Subjects
from potluck.peer.identity import Identity
from potluck.round.averager import Averager
from potluck.run.host import Host, HostConfig
from potluck.run.peer import Peer, PeerConfig
from potluck.testing.polling import poll_until

RUN = "soak"
NUM_PEERS = 3
TIMEOUT_SECONDS = 60.0
FAIL_SECONDS = 1.5
POINTS = ["planned", "first_sent", "half_sent", "first_reduced", "half_averages_sent"]
MIB = 1024 * 1024


class Cuttable:
    """A peer between which and all others nothing gets through while it is cut; nobody is told."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.averager = Averager(peer)  # the peer has joined
        self.is_cut = False
        for carrier in (peer.direct, peer.relay):
            self._wrap(carrier)

    def _wrap(self, carrier: Any) -> None:
        send: Callable[..., bool] = carrier.send
        carrier.send = lambda peer, header, payload: True if self.is_cut else send(peer, header, payload)


class Soak:
    """Rounds, good and bad, and the memory after each."""

    def __init__(self, members: list[Cuttable], elements: int) -> None:
        self.members = members
        self.tensors = [{"w": torch.ones(elements)} for _ in members]
        self.rss_bytes: list[int] = []
        self.num_failed = 0
        self._process = psutil.Process()

    async def round(self, number: int) -> None:
        """One round; every third one fails."""
        fails = number % 3 == 2
        if fails:
            self._cut_at(f"round.{POINTS[number // 3 % len(POINTS)]}")
        timeout_seconds = FAIL_SECONDS if fails else TIMEOUT_SECONDS
        calls = [
            member.averager.average(tensors, weight=1.0, timeout_seconds=timeout_seconds)
            for member, tensors in zip(self.members, self.tensors, strict=True)
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        faultpoints.install(None)
        for member in self.members:
            member.is_cut = False
        failed = [isinstance(outcome, RoundFailedError) for outcome in outcomes]
        if any(
            isinstance(outcome, BaseException) and not isinstance(outcome, RoundFailedError) for outcome in outcomes
        ):
            raise SystemExit(f"round {number}: {outcomes}")
        if any(failed) and not fails:
            raise SystemExit(f"round {number} should not have failed: {outcomes}")
        self.num_failed += any(failed)
        gc.collect()
        self.rss_bytes.append(self._process.memory_info().rss)

    def _cut_at(self, wanted: str) -> None:
        def reached(point: str, _labels: object) -> None:
            if point == wanted:
                for member in self.members:
                    member.is_cut = True

        faultpoints.install(reached)


@asynccontextmanager
async def members_of_a_run(folder: Path) -> AsyncIterator[list[Cuttable]]:
    """A hub, and peers that have joined it and see each other."""
    hub = HubConfig(folder=folder / "hub", run=RUN, host="127.0.0.1", websocket_port=None, sync_always=False)
    host = Host(HostConfig(hub=hub, guard=GuardConfig(run=RUN), peer=None))
    async with AsyncExitStack() as stack:
        await host.start()
        stack.push_async_callback(host.stop)
        members = []
        invite = await _invite(host)
        for number in range(NUM_PEERS):
            config = PeerConfig(invite=invite, name=f"peer {number}", listen=("tcp://127.0.0.1:0",))
            peer = Peer(host.address, RUN, Identity.temporary(), config)
            await peer.start()
            stack.push_async_callback(peer.close)
            member = Cuttable(peer)
            await member.averager.start()
            stack.push_async_callback(member.averager.close)
            members.append(member)
        await poll_until(
            lambda: all(len(member.peer.session.roster.alive()) == NUM_PEERS for member in members), 30.0, "everybody"
        )
        yield members


async def _invite(host: Host) -> str:
    assert host._hub is not None
    keys = host._hub.keys
    connection = await NatsConnection.connect(host.address, seed=keys.organiser_seed, run=RUN, name="main")
    try:
        organiser = Organiser(connection, Subjects(RUN), keys.organiser_public)
        _, secret = await organiser.create_invite(
            scopes=Scopes(roles=("trainer",), coordinates=True, trusted=True), uses=None
        )
        return secret
    finally:
        await connection.close()


async def measure(num_rounds: int, elements: int) -> dict[str, Any]:
    """All rounds; the figures."""
    with tempfile.TemporaryDirectory() as folder:
        async with members_of_a_run(Path(folder)) as members:
            soak = Soak(members, elements)
            number = 0
            while number < num_rounds or soak.num_failed < num_rounds // 3:  # a cut may come too late to do harm
                await soak.round(number)
                number += 1
                if number % 30 == 0:
                    say(f"{number} rounds, {soak.num_failed} failed, {soak.rss_bytes[-1] / MIB:.0f} MiB")
                if number > 2 * num_rounds:
                    raise SystemExit(f"only {soak.num_failed} of {number} rounds failed: this says nothing of them")
            epochs = members[0].averager.epoch
    settled = soak.rss_bytes[num_rounds // 10 :]
    third = len(settled) // 3
    typical = statistics.median(settled)
    return {
        "rounds": number,
        "failed": soak.num_failed,
        "epochs": epochs,
        "rss_median_mib": typical / MIB,
        "rss_largest_over_median": max(settled) / typical,
        "rss_smallest_over_median": min(settled) / typical,
        "rss_last_third_over_first": statistics.median(settled[-third:]) / statistics.median(settled[:third]),
    }


def main() -> None:
    """Run it."""
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=300)
    arguments.add_argument("--elements", type=int, default=2_000_000)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    figures = asyncio.run(measure(options.rounds, options.elements))
    report(figures, as_json=options.json, title="memory over rounds of which a third fail")


if __name__ == "__main__":
    main()
