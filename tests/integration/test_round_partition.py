"""A cluster of three hubs falls apart in the middle of a commit, with a coordinator on either side.

    ┌── site 0 ──────────────┐        ┌── site 1 ──────┐   ┌── site 2 ──────┐
    │ hub, guard             │   ✂    │ hub, guard     ├───┤ hub, guard     │
    │ ann (coordinates), abe │        │ bob            │   │ cat            │
    └────────────────────────┘        └────────────────┘   └────────────────┘

Each site is a network namespace with real processes in it. Ann's site is cut off just when she is about to commit, and
her word comes late: because packets vanish and the kernel sends them again when the line is back, or because she was
frozen until then. The majority agrees on that epoch and on another one meanwhile; the minority on nothing.

Both delays: `scripts/test tests/integration/test_round_partition.py`, without a mark.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest
from clusterhost import RUN
from roundcluster import PATIENCE_SECONDS, PROGRAM, Answer, ChildMember, Cluster, check_agreement

from potluck.testing.cuts import How
from potluck.testing.faults import Faults
from potluck.testing.natlab import Host, NatLab, lab_available
from potluck.testing.polling import poll_until
from potluck.testing.processes import Children, ManagedProcess

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]

HOST_PROGRAM = Path(__file__).with_name("clusterhost.py")
ROUTE_PORT = 6222
HEALING_SECONDS = (
    150.0  # routes are retried, missed changes looked for every half minute, links dialled; all one by one
)
MEMBERS_AT = (0, 0, 1, 2)  # the site of each

Delay = Literal["in the network", "in the process"]


class SplitCluster(Cluster):
    """Three sites with a hub each, and four members that may all coordinate."""

    def __init__(self, folder: Path, children: Children, sites: list[Host]) -> None:
        super().__init__(folder, children)
        self.sites = sites
        self._machines: list[ManagedProcess] = []
        self._told: list[Answer] = []  # by each machine
        self._prepared: list[tuple[ManagedProcess, Path]] = []  # for each member

    async def open(self) -> None:
        self.members = [ChildMember(self, number, is_client=False) for number in range(len(MEMBERS_AT))]
        self._prepared = [self._prepare_for(member) for member in self.members]
        routes = [f"{site.address}:{ROUTE_PORT}" for site in self.sites]
        for number, site in enumerate(self.sites):
            folder = self.folder / f"hub-{number}"
            if number:
                shutil.copytree(self.folder / "hub-0" / "identity", folder / "identity")
            machine = site.popen([sys.executable, HOST_PROGRAM, folder, str(number), *routes], name="hub", stdin=True)
            self._machines.append(machine)
            self._told.append(json.loads((await machine.until_line('"servers"', PATIENCE_SECONDS)).string))
        for machine in self._machines:
            machine.send_line("start the guard")
        for machine in self._machines:
            await machine.until_line("^guard$", PATIENCE_SECONDS)
        self._machines[0].send_line("an invite, please")
        self.host = json.loads((await self._machines[0].until_line('"invite"', PATIENCE_SECONDS)).string)
        for member in self.members:  # one after the other, so that the first coordinates
            member.spawn()
            await member.until_joined()
        await self.repair()

    def site_of(self, member: ChildMember) -> Host:
        return self.sites[MEMBERS_AT[member.number]]

    def place_of(self, member: ChildMember) -> Answer:
        told = self._told[MEMBERS_AT[member.number]]
        servers = [server for server in told["servers"] if server.startswith("tls")]
        place = {"servers": servers, "ca_pem": told["ca_pem"], "host": self.site_of(member).address}
        return {**place, "invite": self.host["invite"], "run": RUN}

    def take_process(self, member: ChildMember) -> tuple[ManagedProcess, Path]:
        return self._prepared[member.number]

    def _prepare_for(self, member: ChildMember) -> tuple[ManagedProcess, Path]:
        """A process that has its imports done, or nearly."""
        orders = self.folder / f"orders-{member.number}.jsonl"
        orders.touch()
        argv = Faults(self.fired_path).argv(str(PROGRAM), str(orders))
        return self.site_of(member).popen(argv, name=f"member-{member.number}"), orders

    def cut_off(self, how: How) -> None:
        """Nothing moves between the first site and the others."""
        for site in self.sites[1:]:
            self.sites[0].block(to=site, how=how)

    def heal(self) -> None:
        self.sites[0].unblock()

    async def status(self, member: ChildMember) -> Answer:
        return await member.ask("status")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[NatLab]:
    if (reason := lab_available()) is not None:
        pytest.skip(reason)
    with NatLab(log_folder=tmp_path) as network:
        yield network


@asynccontextmanager
async def split_cluster(lab: NatLab, folder: Path, children: Children) -> AsyncIterator[SplitCluster]:
    cluster = SplitCluster(folder, children, [lab.public(f"site-{number}") for number in range(3)])
    await cluster.open()
    yield cluster
    for member in cluster.members:
        member.order("leave")
    for member in cluster.members:
        assert await member.process.until_exit(PATIENCE_SECONDS) == 0


@pytest.mark.parametrize("delay", ["in the network", pytest.param("in the process", marks=pytest.mark.soak)])
async def test_of_two_sides_one_commits(lab: NatLab, tmp_path: Path, children: Children, delay: Delay) -> None:
    async with split_cluster(lab, tmp_path, children) as cluster:
        ann, abe, bob, cat = cluster.members
        [before, *_] = await cluster.round()
        assert await cluster.coordinator() is ann

        await ann.ask("arm", faults=[{"point": "round.committing", "action": "stop", "epoch": cluster.epoch + 1}])
        patterns = cluster.begin()
        await poll_until(Faults(cluster.fired_path).fired, PATIENCE_SECONDS, "ann to be about to commit")
        cluster.cut_off("drop" if delay == "in the network" else "reject")
        if delay == "in the network":
            ann.process.thaw()  # what she says now is on its way until the cut is healed

        there = await cluster.answers(patterns, [bob, cat])
        check_agreement(there, must_contribute=range(4), may_contribute=[])  # as ann had left it, complete
        assert there[0]["term"] > before["term"]  # under another coordinator
        lone = cluster.begin([bob, cat])
        check_agreement(await cluster.answers(lone, [bob, cat]), must_contribute=[2, 3], may_contribute=[])
        if delay == "in the network":
            status = await cluster.status(ann)
            assert status["epoch"] == cluster.epoch - 2  # she waits for an answer, and will get none
            assert status["coordinator"] == ann.id  # nor has she heard of another
        assert (await cluster.status(abe))["epoch"] == cluster.epoch - 2

        cluster.heal()
        ann.process.thaw()
        here = await cluster.answers(patterns, [ann, abe])
        assert not [answer for answer in here if "failed" in answer], here
        for answer in here:  # ann's side had the same averages; the epoch counts as the others committed it
            if answer["head"] == cluster.epoch - 1:
                assert (answer["commit"], answer["term"]) == (there[0]["commit"], there[0]["term"])
        await cluster.repair(HEALING_SECONDS)
        assert cluster.epoch == 3
        await cluster.round()
        statuses = [await cluster.status(member) for member in cluster.members]
        assert {status["epoch"] for status in statuses} == {4}
        assert all(status["statistics"]["bad_heads"] == 0 for status in statuses), statuses
        lineage = statuses[2]["commits"]
        assert sorted(lineage) == ["1", "2", "3", "4"]
        for status in statuses:  # whoever was cut off may not have seen what was committed meanwhile, but nothing else
            assert status["commits"].items() <= lineage.items()
