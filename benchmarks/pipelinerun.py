"""The conductor and feeder of bench_pipeline.py and bench_morph.py, and their steps."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import torch

from pipelinetoy import SEED, Toy
from potluck.hub.joinlink import JoinLink, fetch_address
from potluck.peer.identity import Identity
from potluck.pipeline.blocks import State
from potluck.pipeline.blueprint import Blueprint
from potluck.pipeline.book import HubBook
from potluck.pipeline.conducting import Conductor
from potluck.pipeline.feeding import FeederConfig
from potluck.pipeline.following import Following
from potluck.pipeline.holding import Holding
from potluck.pipeline.layout import Layout
from potluck.pipeline.member import MemberConfig, Part, PipelineMember
from potluck.pipeline.messages import Place
from potluck.pipeline.staffing import Staff
from potluck.pipeline.unitstate import Optimizing
from potluck.run.peer import Peer, PeerConfig
from potluck.testing.polling import poll_until

IN_FLIGHT = 16
LOOPBACK = "tcp://127.0.0.1:0"


class ToySource:
    """The same micro-batch again and again."""

    def __init__(self, toy: Toy) -> None:
        self._toy = toy

    def batch(self, step: int, place: Place, first: int, samples: int) -> State:
        return self._toy.batch(samples)

    def after(self, step: int, place: Place, samples: int) -> Place:
        return place


class ToyCourse:
    """Steps without end."""

    def __init__(self, toy: Toy) -> None:
        self._toy = toy

    def sizes(self, step: int, num_stages: int) -> tuple[int, ...]:
        return (self._toy.micro_batch,) * self._toy.num_micro_batches

    def max_norm(self, step: int) -> float:
        return 0.0

    def stands_still(self, step: int) -> str:
        return ""


@asynccontextmanager
async def conducting(
    link: JoinLink,
    toy: Toy,
    layout_for: Callable[[int], Layout],
    *,
    listen: str = LOOPBACK,
    listens: bool = False,
    in_flight: int = IN_FLIGHT,
) -> AsyncIterator[tuple[Conductor, PipelineMember]]:
    """A conductor, and a feeder on the same peer."""
    config = PeerConfig(name="conductor", link=link, listen=(listen,), trusted_lan=True)
    peer = Peer(await fetch_address(link), link.run, Identity.temporary(), config)
    await peer.start()
    blueprint = Blueprint.of(toy.blocks, SEED)
    conductor = Conductor(
        peer.links,
        peer.session.roster,
        peer.clock,
        blueprint=blueprint,
        staff=Staff([1.0] * blueprint.num_blocks, [1] * blueprint.num_blocks, layout_for),
        course=ToyCourse(toy),
        book=HubBook(peer.session.hub.store("groups")),
    )
    feeder = PipelineMember(
        peer.links,
        peer.clock,
        peer.peer_id,
        Following(peer.peer_id),
        Holding(blueprint, Optimizing(lambda named: torch.optim.SGD(named.values(), lr=1e-3))),
        Part(feeds=True, listens=listens),
        source=ToySource(toy),
        config=MemberConfig(feeder=FeederConfig(in_flight=in_flight)),
    )
    await feeder.start()
    try:
        yield conductor, feeder
    finally:
        await feeder.close()
        await conductor.close()
        await peer.close()


async def timed_steps(conductor: Conductor, num_servers: int, *, warm_up: int, steps: int) -> float:
    """Seconds of a step, once all servers serve."""

    def have_come() -> bool:
        peers = conductor.overview()["peers"]
        ready = [peer for peer in peers.values() if peer["serves"] and peer["standing"] and not peer["loading"]]
        return len(ready) == num_servers

    await poll_until(have_come, 180, f"{num_servers} servers")
    began = 0.0
    for step in range(warm_up + steps):
        if step == warm_up:
            began = time.perf_counter()
        await conductor.until_ready()
        await conductor.take_step()
    return (time.perf_counter() - began) / steps
