"""Rounds with a real hub, real links and real threads; several peers in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from roundhouse import ANYTHING, NO_COORDINATOR, RUN, RoundHouse, open_house

from potluck import faultpoints
from potluck.hub.presence import Role
from potluck.peer.identity import Identity
from potluck.round.averager import Averager, AveragerConfig
from potluck.round.codecs import CodecChoice
from potluck.round.outcome import RoundResult
from potluck.run.peer import Peer, PeerConfig
from potluck.testing.polling import poll_until

PATIENCE_SECONDS = 60.0
ELEMENTS = 300_000


class Company:
    """Peers of one run, with averagers."""

    def __init__(self, house: RoundHouse, stack: AsyncExitStack) -> None:
        self.house = house
        self.peers: list[Peer] = []
        self.averagers: list[Averager] = []
        self._stack = stack

    async def join(self, role: Role = "trainer", *, coordinates: bool = True, **config: Any) -> None:
        invite = await self.house.invite(ANYTHING if coordinates else NO_COORDINATOR)
        if not config.get("client_mode"):
            config.setdefault("listen", ("tcp://127.0.0.1:0",))
        peer = Peer(self.house.address, RUN, Identity.temporary(), PeerConfig(role=role, invite=invite, **config))
        self._stack.push_async_callback(peer.close)
        await peer.start()
        averager = Averager(peer, AveragerConfig(codecs=CodecChoice.everything("float16"), num_threads=2))
        self._stack.push_async_callback(averager.close)
        await averager.start()
        self.peers.append(peer)
        self.averagers.append(averager)

    async def settle(self) -> None:
        """Until all see each other, and all that listen are known to be reachable."""
        listening = sum(1 for peer in self.peers if not peer.config.client_mode)
        if len(self.peers) == 1:
            listening = 0  # there is nobody to dial it back

        def all_there() -> bool:
            return all(
                len(peer.session.roster.alive()) == len(self.peers)
                and sum(1 for other in peer.session.roster.alive() if other.card.addresses) == listening
                for peer in self.peers
            )

        await poll_until(all_there, PATIENCE_SECONDS, "the peers to see each other")

    async def average(self, values: list[torch.Tensor | None], **options: Any) -> list[RoundResult]:
        return await asyncio.gather(
            *(
                averager.average(
                    {"w": tensor} if tensor is not None else None,
                    weight=1.0,
                    timeout_seconds=PATIENCE_SECONDS,
                    **options,
                )
                for averager, tensor in zip(self.averagers, values, strict=True)
            )
        )


@asynccontextmanager
async def company(folder: Path) -> AsyncIterator[Company]:
    async with open_house(folder) as house, AsyncExitStack() as stack:
        yield Company(house, stack)


def contributions(count: int) -> list[torch.Tensor]:
    return [torch.arange(ELEMENTS) % 11 + float(number) for number in range(count)]


def assert_mean(values: list[torch.Tensor], count: int) -> None:
    expected = torch.arange(ELEMENTS) % 11 + (count - 1) / 2
    assert torch.equal(values[0], expected)  # small whole numbers and halves are exact in float16
    assert all(torch.equal(tensor, expected) for tensor in values)


async def test_full_peers_clients_and_aux_agree(tmp_path: Path) -> None:
    async with company(tmp_path) as those:
        await those.join("aux")
        await those.join(coordinates=False)
        await those.join(coordinates=False)
        await those.join(coordinates=False, client_mode=True)
        await those.settle()
        for epoch in (1, 2):
            values = contributions(3)
            results = await those.average([None, *values])
            assert_mean(values, 3)
            assert {result.commit.epoch for result in results} == {epoch}
            assert all(result.holds for result in results)
            assert results[3].role == "sender"
            assert results[0].role == "reducer"
        roles = {member.peer: member.weight for member in results[0].commit.members}
        assert roles[those.peers[0].peer_id] == 0.0


async def test_a_lone_peer_commits_its_own_values(tmp_path: Path) -> None:
    async with company(tmp_path) as those:
        await those.join()
        await those.settle()
        [values] = contributions(1)
        [result] = await those.average([values])
        assert_mean([values], 1)
        assert result.commit.holders == (those.peers[0].peer_id,)


@pytest.mark.parametrize("trusted_lan", [False, True])
async def test_ten_rounds_in_a_row(tmp_path: Path, trusted_lan: bool) -> None:
    async with company(tmp_path) as those:
        for _ in range(3):
            await those.join(trusted_lan=trusted_lan)
        await those.settle()
        for epoch in range(1, 11):
            values = contributions(3)
            results = await those.average(list(values))
            assert_mean(values, 3)
            assert {result.commit.epoch for result in results} == {epoch}
        assert sum(averager.statistics().get("coordinator_terms", 0) for averager in those.averagers) == 1


async def test_clients_reach_an_aux_peer_through_the_relay_alone(tmp_path: Path) -> None:
    async with company(tmp_path) as those:
        await those.join("aux")
        await those.join(coordinates=False, client_mode=True)
        await those.join(coordinates=False, client_mode=True)
        await those.settle()
        for peer in those.peers:
            peer.links._table.carriers.pop("direct")
            await peer.direct.close()
        values = contributions(2)
        results = await those.average([None, *values])
        assert_mean(values, 2)
        assert all(result.holds for result in results)
        paths = {other.path for peer in those.peers for other in peer.links.statistics().peers.values()}
        assert "direct" not in paths


async def test_the_hub_restarts_between_and_during_rounds(tmp_path: Path) -> None:
    async with company(tmp_path) as those:
        for _ in range(3):
            await those.join()
        await those.settle()
        values = contributions(3)
        await those.average(list(values))
        await those.house.restart()
        values = contributions(3)
        round_two = asyncio.create_task(those.average(list(values), epoch=2))
        await asyncio.sleep(0)
        await round_two
        assert_mean(values, 3)
        values = contributions(3)
        sending = asyncio.Event()
        before = faultpoints.install(lambda point, _labels: sending.set() if point == "round.first_sent" else None)
        try:
            round_three = asyncio.create_task(those.average(list(values)))
            async with asyncio.timeout(PATIENCE_SECONDS):
                await sending.wait()
        finally:
            faultpoints.install(before)
        await those.house.restart()
        results = await round_three
        assert_mean(values, 3)
        assert {result.commit.epoch for result in results} == {3}
