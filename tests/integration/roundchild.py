"""A member in a process of its own, told by lines of JSON on standard input what to do; answers in lines of JSON.

python -m potluck.testing.faulty roundchild.py

{"servers": …, "identity": …, …} the first line: who to be, and where. Until then it only has its imports done
{"do": "arm", "faults": [...]}   from now on these faults, as in potluck.testing.faults; with "cut": also lose all
                                 packets from and to these peers, from that moment on
{"do": "poison"}                 from now on, as a reducer, give out something else than the average
{"do": "mend"}                   lose packets no more
{"do": "lie", "epoch": 3}        report another digest than that of the averages in that epoch
{"do": "slow", "seconds": 0.1}   let each piece of tensor work take so much longer
{"do": "round", "epoch": 3}      take part, and tell what came of it
{"do": "status"}                 tell what is known
{"do": "leave"}                  good-bye
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from potluck import faultpoints
from potluck.errors import PotluckError
from potluck.hub.address import HubAddress
from potluck.messages import encode
from potluck.peer.identity import Identity
from potluck.round.audit.seals import Notary, Sealer, sealed_hash
from potluck.round.averager import Averager, AveragerConfig
from potluck.round.codecs import CodecChoice
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.round.coordinator.director import DirectorTimeouts
from potluck.round.coordinator.trigger import Quorum
from potluck.round.member.reduction import Reduced
from potluck.round.member.roundwork import RoundWork
from potluck.round.member.tensorwork import SealedWork, TensorWork
from potluck.round.member.workers import Workers
from potluck.round.plan.chunks import Chunk
from potluck.round.plan.messages import Commit, Plan, Report
from potluck.run import peer as peer_module
from potluck.run.peer import Peer, PeerConfig
from potluck.testing.faults import Fault, FaultHook

T = TypeVar("T")

ELEMENTS = 600_000
POLL_SECONDS = 0.01
SAMPLES = 40
PATIENCE = DirectorTimeouts(silent_seconds=1.5, stalled_seconds=2.5, straggler_seconds=2.0)


def values_of(number: int) -> torch.Tensor:
    """Values that tell who contributed: the average of a set of members is unlike that of any other."""
    return torch.arange(ELEMENTS) % 7 + 2.0**number


def contributors_of(value: float) -> list[int]:
    """Whose values are in an average of 2ⁱ over some members i."""
    for count in range(1, 12):
        total = round(value * count, 3)
        if total == int(total) and int(total).bit_count() == count:
            return [bit for bit in range(12) if int(total) >> bit & 1]
    raise AssertionError(f"{value} is nobody's average")


class PoisoningWork(SealedWork):
    """A reducer's work that gives out the negative of the average, sealed as it should be."""

    def __init__(self, sealer: Sealer, notary: Notary, poisoned: list[int]) -> None:
        super().__init__(sealer, notary)
        self.poisoned = poisoned

    def reduce(self, chunk: Chunk, generation: int, *arguments: Any) -> Reduced:
        reduced = super().reduce(chunk, generation, *arguments)
        if reduced.frame is None:
            return reduced
        frame = (-torch.frombuffer(bytearray(reduced.frame), dtype=torch.float32)).numpy().tobytes()
        frame_hash = sealed_hash(frame)
        self.average_seals[chunk.index, generation] = self._sealer.seal_average(chunk.index, generation, frame_hash)
        self.poisoned.append(chunk.index)
        return replace(reduced, frame=frame, frame_hash=frame_hash)


class Cutter:
    """Loses packets from and to some peers, whichever carrier they take; nobody is told."""

    def __init__(self, peer: Peer) -> None:
        self.peers: set[str] = set()
        self.num_lost = 0
        arrived = peer.links.packet_arrived
        peer.links.packet_arrived = lambda carrier, sender, header, payload: (  # type: ignore[method-assign]
            None if self._loses(sender) else arrived(carrier, sender, header, payload)
        )
        for carrier in (peer.direct, peer.relay):
            self._wrap(carrier)

    def _wrap(self, carrier: Any) -> None:
        send: Callable[..., bool] = carrier.send
        carrier.send = lambda peer, header, payload: self._loses(peer) or send(peer, header, payload)

    def mend(self) -> None:
        self.peers.clear()
        self.num_lost = 0

    def _loses(self, peer: str) -> bool:
        self.num_lost += peer in self.peers
        return peer in self.peers


class Liar:
    """Changes what this member reports."""

    def __init__(self) -> None:
        self.epoch = 0
        self.num_lies = 0
        report = RoundWork.report

        def lie(round_work: RoundWork) -> Report:
            told = report(round_work)
            if told.key.epoch != self.epoch or not told.digest:
                return told
            self.num_lies += 1
            return msgspec.structs.replace(told, digest="f" * 32)

        RoundWork.report = lie  # type: ignore[method-assign]


class SlowWorkers(Workers):
    """Takes its time."""

    extra_seconds = 0.0
    num_slowed = 0

    def submit(self, work: Callable[[], T], done: Callable[[T], None], failed: Callable[[Exception], None]) -> None:
        def slowly() -> T:
            if self.extra_seconds:
                self.num_slowed += 1
                time.sleep(self.extra_seconds)
            return work()

        super().submit(slowly, done, failed)


class Member:
    """The process's peer."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments
        self.number: int = arguments["number"]
        config = PeerConfig(
            role=arguments["role"],
            name=f"member {self.number}",
            invite=arguments["invite"],
            client_mode=arguments["client"],
            listen=() if arguments["client"] else (f"tcp://{arguments.get('host', '127.0.0.1')}:0",),
        )
        address = HubAddress(servers=tuple(arguments["servers"]), ca_pem=arguments["ca_pem"])
        self.peer = Peer(address, arguments["run"], Identity.open(Path(arguments["identity"])), config)
        self.cutter = Cutter(self.peer)
        self.liar = Liar()
        self.workers = SlowWorkers(1)
        self.averager: Averager | None = None
        self.poisoned: list[int] = []  # chunks
        self.commits: dict[int, str] = {}  # every epoch that we saw committed, by the hash of its record

    async def start(self) -> None:
        await self.peer.start()
        coordinator = CoordinatorConfig(trigger=Quorum(grace_seconds=3.0), patience=PATIENCE)
        config = AveragerConfig(codecs=CodecChoice.everything("float32"), coordinator=coordinator, num_threads=1)
        self.averager = Averager(self.peer, config, workers=self.workers)
        self.averager.listen(self._committed)
        await self.averager.start()

    async def close(self) -> None:
        if self.averager is not None:
            await self.averager.close()
        await self.peer.close()

    def _committed(self, commit: Commit) -> None:
        self.commits[commit.epoch] = hashlib.sha256(encode(commit)).hexdigest()

    def arm(self, faults: list[dict[str, Any]]) -> None:
        """Install these faults in place of those before."""
        cuts = [fault.pop("cut", []) for fault in faults]
        plan = [
            Fault(point=fault.pop("point"), action=fault.pop("action"), labels=fault) for fault in map(dict, faults)
        ]
        hook = FaultHook(plan, Path(self.arguments["fired"]))

        def reached(point: str, labels: Mapping[str, object]) -> None:
            for fault, peers in zip(plan, cuts, strict=True):
                if fault.matches(point, labels):
                    self.cutter.peers |= set(peers)
            hook(point, labels)

        faultpoints.install(reached)

    def turn_poisoner(self) -> None:
        """Replace our work in rounds that are audited."""
        assert self.averager is not None
        participation, run = self.averager._participation, self.peer.session.subjects.run

        def poisoning_work(plan: Plan) -> TensorWork:
            assert plan.audit, "nobody would find out"
            return PoisoningWork(
                Sealer(self.peer.session.identity, run, plan.key), Notary(run, plan.key), self.poisoned
            )

        participation._work = poisoning_work  # type: ignore[method-assign]

    async def round(self, epoch: int, timeout_seconds: float) -> dict[str, Any]:
        """Take part once."""
        assert self.averager is not None
        values = values_of(self.number)
        started = time.monotonic()
        tensors = {"w": values} if self.arguments["role"] == "trainer" else None
        try:
            result = await self.averager.average(tensors, weight=1.0, epoch=epoch, timeout_seconds=timeout_seconds)
        except PotluckError as error:
            return {"failed": str(error), "epoch": epoch}
        answer = {
            "epoch": epoch,
            "head": result.commit.epoch,
            "holds": result.holds,
            "seconds": time.monotonic() - started,
            "role": result.role,
            "left_out": dict(result.commit.left_out),
            "commit": result.commit.digest,
            "term": result.commit.term,
            "audited": result.commit.audited,
            "excluded": {peer: exclusion.reason for peer, exclusion in result.commit.excluded.items()},
            "holders": list(result.commit.holders),
            "reason": result.left_behind.reason if result.left_behind is not None else "",
            "fetch_from": list(result.left_behind.holders) if result.left_behind is not None else [],
        }
        if result.holds and tensors is not None:
            answer["values"] = hashlib.sha256(values.numpy().tobytes()).hexdigest()
            indices = range(0, ELEMENTS, ELEMENTS // SAMPLES)
            answer["contributors"] = sorted(
                {tuple(contributors_of(float(values[index]) - index % 7)) for index in indices}
            )
        return answer

    def status(self) -> dict[str, Any]:
        assert self.averager is not None
        alive = [presence for presence in self.peer.session.roster if presence.state == "alive"]
        return {
            "alive": sorted(presence.peer for presence in alive),
            "full": sorted(presence.peer for presence in alive if presence.card.addresses),
            "linked": sorted(peer for peer, link in self.peer.links.statistics().peers.items() if link.path),
            "epoch": self.averager.epoch,
            "poisoned": len(self.poisoned),
            "coordinator": self.averager.lease.view.holder,
            "coordinates": self.averager.lease.is_held,
            "commits": self.commits,
            "statistics": self.averager.statistics(),
            "lies": self.liar.num_lies,
            "slowed": self.workers.num_slowed,
            "lost_packets": self.cutter.num_lost,
        }


def say(answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


async def orders(path: Path) -> AsyncIterator[dict[str, Any]]:
    """Each line of the file, as it is written; ends when our parent does."""
    parent, position = os.getppid(), 0
    while os.getppid() == parent:
        text = path.read_text()  # noqa: ASYNC240 - a few bytes
        complete = text.rfind("\n") + 1
        for line in text[position:complete].splitlines():
            yield json.loads(line)
        position = complete
        await asyncio.sleep(POLL_SECONDS)


async def main() -> None:
    member: Member | None = None
    rounds: set[asyncio.Task[None]] = set()

    async def take_part(member: Member, order: dict[str, Any]) -> None:
        answer = await member.round(order["epoch"], order["timeout_seconds"])
        say({"answer": order["id"], **answer})

    async for order in orders(Path(sys.argv[1])):
        if member is None:
            member = Member(order)
            await member.start()
            say({"joined": member.peer.peer_id})
            continue
        if order["do"] == "round":
            task = asyncio.create_task(take_part(member, order))
            rounds.add(task)
            task.add_done_callback(rounds.discard)
            continue
        if order["do"] == "leave":
            break
        if order["do"] == "arm":
            member.arm(order["faults"])
        elif order["do"] == "poison":
            member.turn_poisoner()
        elif order["do"] == "mend":
            member.cutter.mend()
        elif order["do"] == "lie":
            member.liar.epoch = order["epoch"]
        elif order["do"] == "slow":
            member.workers.extra_seconds = order["seconds"]
        say({"answer": order["id"], **member.status()})
    if member is not None:
        await member.close()


if __name__ == "__main__":
    peer_module.TELL_SPEED_EVERY_SECONDS = 3600.0  # whoever was frozen seems slow for a while, and would reduce nothing
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    logging.getLogger("potluck").setLevel(logging.DEBUG)
    torch.set_num_threads(1)
    asyncio.run(main())
