"""Members in processes of their own, around a real hub: killed, frozen, cut off, and asked what they hold."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from roundhouse import RUN

from potluck.peer.identity import Identity
from potluck.testing.faults import Faults
from potluck.testing.polling import poll_until
from potluck.testing.processes import Children, ManagedProcess

PROGRAM = Path(__file__).with_name("roundchild.py")
HOST_PROGRAM = Path(__file__).with_name("roundhost.py")
PATIENCE_SECONDS = 60.0  # for whatever should happen soon: the machine may be busy
ROUND_SECONDS = 50.0

Answer = dict[str, Any]


class ChildMember:
    """One member's process, and its next life if it is killed."""

    def __init__(
        self, cluster: Cluster, number: int, *, is_client: bool, is_stranger: bool = False, role: str = "trainer"
    ) -> None:
        self.number = number
        self.is_client = is_client
        self.is_stranger = is_stranger  # nobody vouches for it, and it may not coordinate
        self.role = role
        self.identity_path = cluster.folder / f"member-{number}.nkey"
        identity = Identity.open(self.identity_path)
        self.id = identity.peer_id
        identity.close()
        self._cluster = cluster
        self._ids = itertools.count()
        self._process: ManagedProcess | None = None
        self._orders = Path()

    @property
    def process(self) -> ManagedProcess:
        assert self._process is not None, "it was never started"
        return self._process

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.exit_code is None

    @property
    def has_joined(self) -> bool:
        return self.is_running and bool(self.process.find_line(r'"joined"'))

    def spawn(self) -> None:
        """Give it a process, which joins by itself."""
        cluster = self._cluster
        arguments = {
            "number": self.number,
            "role": self.role,
            "client": self.is_client,
            "identity": str(self.identity_path),
            "fired": str(cluster.fired_path),
            **cluster.place_of(self),
        }
        self._process, self._orders = cluster.take_process(self)
        self._write(arguments)

    async def until_joined(self) -> None:
        await self.process.until_line(r'"joined"', PATIENCE_SECONDS)

    def order(self, do: str, **details: Any) -> str:
        """Send an order; returns the pattern of its answer."""
        number = next(self._ids)
        self._write({"do": do, "id": f"{self.process.pid}-{number}", **details})
        return rf'^{{"answer": "{self.process.pid}-{number}".*'

    def _write(self, line: dict[str, Any]) -> None:
        with self._orders.open("a") as file:
            file.write(json.dumps(line) + "\n")

    async def answer(self, pattern: str, seconds: float = PATIENCE_SECONDS) -> Answer:
        match = await self.process.until_line(pattern, seconds)
        answer: Answer = json.loads(match.group(0))
        return answer

    async def ask(self, do: str, **details: Any) -> Answer:
        return await self.answer(self.order(do, **details))


class Cluster:
    """A hub and its members: full trainers who may coordinate, client trainers who may not, and full strangers."""

    def __init__(self, folder: Path, children: Children) -> None:
        self.folder = folder
        self.children = children
        self.fired_path = folder / "fired.jsonl"
        self.members: list[ChildMember] = []
        self.host: Answer = {}  # where the hub is, and invites
        self.epoch = 0
        self._host_process: ManagedProcess | None = None
        self._warm: list[tuple[ManagedProcess, Path]] = []
        self._num_processes = 0

    def place_of(self, member: ChildMember) -> Answer:
        """Where a member finds its hub, and what lets it in."""
        return {
            "invite": self.host["plain_invite" if member.is_client or member.is_stranger else "invite"],
            "servers": self.host["servers"],
            "ca_pem": self.host["ca_pem"],
            "run": RUN,
        }

    def take_process(self, member: ChildMember) -> tuple[ManagedProcess, Path]:
        """A process that has its imports done, or nearly, and its file of orders; another gets ready meanwhile."""
        self._prepare()
        return self._warm.pop(0)

    def _prepare(self) -> None:
        self._num_processes += 1
        orders = self.folder / f"orders-{self._num_processes}.jsonl"
        orders.touch()
        argv = Faults(self.fired_path).argv(str(PROGRAM), str(orders))
        self._warm.append((self.children.spawn(argv, name=f"member-process-{self._num_processes}"), orders))

    async def start_hub(self) -> None:
        """Start the hub and its guard, on the same ports every time."""
        argv = [sys.executable, str(HOST_PROGRAM), str(self.folder / "hub")]
        self._host_process = self.children.spawn(argv, name="host")
        line = await self._host_process.until_line(r"^\{.*\}$", PATIENCE_SECONDS)
        self.host = json.loads(line.group(0))

    async def restart_hub(self) -> None:
        """The hub and its guard crash, and come back with what was on disk."""
        assert self._host_process is not None
        self._host_process.kill(group=True)
        await self.start_hub()

    async def start(self, num_full: int, num_clients: int, num_strangers: int) -> None:
        await self.start_hub()
        self._prepare()
        for number in range(num_full + num_clients + num_strangers):
            is_client = num_full <= number < num_full + num_clients
            is_stranger = number >= num_full + num_clients
            self.members.append(ChildMember(self, number, is_client=is_client, is_stranger=is_stranger))
        await self.repair()

    async def repair(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Everybody runs again, sees everybody, and is linked to everybody."""
        for member in self.members:
            if not member.is_running:
                member.spawn()
        for member in self.members:
            await member.until_joined()
            await member.ask("mend")
        lacking: list[str] = []
        await poll_until(
            lambda: self._is_whole(lacking), patience_seconds, lambda: f"the cluster to be whole: {lacking[-1]}"
        )

    async def _is_whole(self, lacking: list[str]) -> bool:
        everybody = sorted(member.id for member in self.members)
        full = sorted(member.id for member in self.members if not member.is_client)
        for member in self.members:
            status = await member.ask("status")
            if (status["alive"], status["full"]) != (everybody, full) or status["linked"] != everybody:
                lacking.append(f"member {member.number} says {status}; {everybody=}, {full=}")
                return False
            self.epoch = max(self.epoch, status["epoch"])
        return True

    async def coordinator(self) -> ChildMember:
        """Who holds the lease."""

        async def found() -> ChildMember | None:
            holder = (await self.members[-1].ask("status"))["coordinator"]
            return next((member for member in self.members if member.id == holder), None)

        return await poll_until(found, PATIENCE_SECONDS, "somebody to hold the lease")

    def begin(self, members: Iterable[ChildMember] | None = None) -> dict[ChildMember, str]:
        """These members, or all, start to take part in the next epoch; returns where their answers will be."""
        self.epoch += 1
        chosen = self.members if members is None else members
        return {
            member: member.order("round", epoch=self.epoch, timeout_seconds=ROUND_SECONDS)
            for member in chosen
            if member.is_running
        }

    async def answers(self, patterns: dict[ChildMember, str], members: Sequence[ChildMember]) -> list[Answer]:
        return [await member.answer(patterns[member], ROUND_SECONDS + PATIENCE_SECONDS) for member in members]

    async def round(self) -> list[Answer]:
        """Everybody takes part, without trouble; all must hold the mean of all."""
        answers = await self.answers(self.begin(), self.members)
        check_agreement(answers, must_contribute=[m.number for m in self.members], may_contribute=[])
        assert all(answer["holds"] for answer in answers), answers
        return answers


def check_agreement(
    answers: Sequence[Answer], *, must_contribute: Iterable[int], may_contribute: Iterable[int], must_hold: bool = True
) -> None:
    """Whoever holds averages holds the same bits, and they are averages over the right members."""
    assert not [answer for answer in answers if "failed" in answer], answers
    holders = [answer for answer in answers if answer["holds"]]
    if must_hold:
        assert len(holders) == len(answers), answers
    assert len({answer["values"] for answer in holders}) <= 1, answers
    assert len({answer["commit"] for answer in answers}) == 1, answers
    required, allowed = set(must_contribute), {*must_contribute, *may_contribute}
    for answer in holders:
        for contributors in answer["contributors"]:
            assert required <= set(contributors) <= allowed, answer


@asynccontextmanager
async def open_cluster(
    folder: Path, *, num_full: int, num_clients: int, num_strangers: int = 0
) -> AsyncIterator[Cluster]:
    with Children(log_folder=folder) as children:
        cluster = Cluster(folder, children)
        await cluster.start(num_full, num_clients, num_strangers)
        yield cluster
        running = [member for member in cluster.members if member.is_running]
        for member in running:
            member.order("leave")
        for member in running:
            assert await member.process.until_exit(PATIENCE_SECONDS) == 0
