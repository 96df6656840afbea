"""A run for bench_dashboard.py: a host, and a crowd of simulated trainers that only say how they are doing.

    python dashboard_crowd.py FOLDER PEERS      says {"event": "ready"} when all are in; goes on until its input ends

Each trainer has a connection of its own and sends a beacon each second, with figures that change, and its links every
ten seconds. The host's peer stands in for a coordinator: it commits an epoch every two seconds, with everybody as
members, and writes history, contributions and rounds as a coordinator does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import sys
from pathlib import Path

import potluck
from potluck.cli.console import run
from potluck.errors import RetryableError
from potluck.hub.access.application import Application
from potluck.hub.address import HubAddress
from potluck.hub.connection import HubConnection
from potluck.hub.guard.guard import GuardConfig
from potluck.hub.nats.connection import ConnectionConfig, NatsConnection
from potluck.hub.presence import Beacon, Card
from potluck.hub.server.configuration import HubConfig
from potluck.hub.subjects import Subjects
from potluck.messages import encode
from potluck.peer.admission import be_admitted
from potluck.peer.identity import Identity
from potluck.peer.session import REQUEST_TIMEOUT_SECONDS, new_session_id
from potluck.round.lineage import Lineage
from potluck.round.plan.messages import Commit, CommittedMember, RoundKey
from potluck.run.host import Host, HostConfig
from potluck.run.linknews import TOPIC, LinkFigures, LinkNews
from potluck.training.books.contributions import KEY, ContributionBook, added
from potluck.training.books.history import TAIL_KEY, HistoryLog, record_of, round_key

RUN = "crowd"
EPOCH_SECONDS = 2.0
JOINING_AT_ONCE = 8
NUM_LINKS = 6
SUBJECTS = Subjects(RUN)


class Simulated:
    """One trainer, as the hub and a dashboard see it."""

    def __init__(self, number: int) -> None:
        self.identity = Identity.temporary()
        self.peer = self.identity.peer_id
        self.session = new_session_id()
        self.name = f"peer {number}"
        self.service = ("local", "cloud", "colab", "kaggle")[number % 4]
        self.rate = random.uniform(20, 200)
        self.samples = 0.0
        self.epoch = 0
        self.hub: HubConnection | None = None

    async def join(self, address: HubAddress, invite: str) -> None:
        async def connect(lane: str, **_: object) -> HubConnection:
            return await NatsConnection.connect(
                address, seed=self.identity.seed, run=RUN, name=f"{lane}.{self.session}",
                config=ConnectionConfig(stores="guard"),
            )  # fmt: skip

        application = Application(role="trainer", invite=invite, name=self.name, version=potluck.__version__)
        await be_admitted(connect, SUBJECTS, self.peer, application)
        self.hub = await connect("main")
        card = Card(
            session=self.session, role="trainer", name=self.name, service=self.service, version=potluck.__version__,
            upload_bytes_per_second=1e6 * self.rate, download_bytes_per_second=2e6 * self.rate,
        )  # fmt: skip
        await self.hub.request(SUBJECTS.card(self.peer), encode(card), timeout_seconds=REQUEST_TIMEOUT_SECONDS)

    async def live(self, others: list[Simulated]) -> None:
        assert self.hub is not None
        await asyncio.sleep(random.random())
        linked = random.sample([other.peer for other in others if other is not self], min(NUM_LINKS, len(others) - 1))
        for second in range(10**9):
            rate = self.rate * random.uniform(0.9, 1.1)
            self.samples += rate
            loss = loss_at(self.epoch) + random.uniform(-0.1, 0.1)
            beacon = Beacon(
                session=self.session, epoch=self.epoch, samples=int(self.samples), samples_per_second=rate,
                target=40_000, loss=loss,
            )  # fmt: skip
            links = tuple(
                LinkFigures(peer=peer, path="relay" if index == 0 else "direct", upload_bytes_per_second=1e6 * rate)
                for index, peer in enumerate(linked)
            )
            with contextlib.suppress(RetryableError):
                await self.hub.publish(SUBJECTS.beacon(self.peer), encode(beacon))
                if second % 10 == 0:
                    await self.hub.publish(SUBJECTS.news(self.peer, TOPIC), encode(LinkNews(links=links)))
            await asyncio.sleep(1.0)


async def commit_epochs(host: Host, crowd: list[Simulated]) -> None:
    """What a coordinator writes."""
    assert host.peer is not None
    session = host.peer.session
    lineage = Lineage(session.hub.store("lineage"), RUN)
    await lineage.start()
    await lineage.open_term(1)
    history, book_store = session.hub.store("history"), session.hub.store("contributions")
    log, book, before = HistoryLog(), ContributionBook(), None
    names = {each.peer: each.name for each in crowd}
    while True:
        await asyncio.sleep(EPOCH_SECONDS)
        commit = next_commit(crowd, lineage, session.peer_id, session.now())
        try:
            await lineage.commit(commit, session.identity)
            log.append(at=session.now(), epoch=commit.epoch, loss=loss_at(commit.epoch), peers=len(crowd) + 1,
                       rate=sum(each.rate for each in crowd), alone=200.0, trainers=len(crowd), round_seconds=0.9,
                       sent_bytes=len(crowd) * 1e6)  # fmt: skip
            if (page := log.complete_page()) is not None:
                await history.put(*page)
                log.turn_page()
            await history.put(TAIL_KEY, encode(log.tail()))
            await history.put(round_key(commit.epoch), encode(record_of(commit, names, before)))
            book = added(book, commit, names)
            await book_store.put(KEY, encode(book))
        except RetryableError as error:  # a machine that is too busy; a coordinator would try again too
            print(f"not written: {error}", file=sys.stderr, flush=True)
        before = commit
        for each in crowd:
            each.epoch, each.samples = lineage.epoch, 0.0


def next_commit(crowd: list[Simulated], lineage: Lineage, coordinator: str, now: float) -> Commit:
    """An epoch with everybody in it; now and then somebody is too slow."""
    epoch = lineage.epoch + 1
    members = tuple(
        CommittedMember(peer=each.peer, weight=max(each.samples, 1.0), holds=True, seconds=random.uniform(0.2, 0.9),
                        sent_bytes=10**6, received_bytes=10**6)
        for each in crowd
    )  # fmt: skip
    return Commit(
        epoch=epoch, key=RoundKey(epoch=epoch, token=1, attempt=0), term=1, coordinator=coordinator, members=members,
        digest="d", parent=lineage.parent_digest(), layout="l", committed_at=now, seconds=0.9,
        left_out={crowd[epoch % len(crowd)].peer: "it was too slow"} if epoch % 7 == 0 else {},
    )  # fmt: skip


def loss_at(epoch: int) -> float:
    """As losses go."""
    return 1 + 3 * math.exp(-epoch / 100)


async def main(folder: Path, num_peers: int) -> None:
    hub = HubConfig(folder=folder, run=RUN, host="127.0.0.1", advertised_hosts=("127.0.0.1",))
    host = Host(HostConfig(hub=hub, guard=GuardConfig(run=RUN)))
    await host.start()
    crowd = [Simulated(number) for number in range(num_peers)]
    turns = asyncio.Semaphore(JOINING_AT_ONCE)

    async def join(each: Simulated) -> None:
        async with turns:
            await each.join(host.address, host.link.invite)

    async with asyncio.TaskGroup() as joining:
        for each in crowd:
            joining.create_task(join(each))
    living = [asyncio.create_task(each.live(crowd)) for each in crowd]
    living.append(asyncio.create_task(commit_epochs(host, crowd)))
    print(json.dumps({"event": "ready"}), flush=True)
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    done, _ = await asyncio.wait({ended, *living}, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


if __name__ == "__main__":
    run(main(Path(sys.argv[1]), int(sys.argv[2])))
