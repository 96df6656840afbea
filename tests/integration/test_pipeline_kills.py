"""A pipeline of real processes: servers die by SIGKILL at every phase of a step, one freezes, one is slow; a feeder,
the hub and a coordinator die.

One run for all: three stages, of which the middle one has a server for each phase to lose. In each step one process
meets its fault; the step commits all the same, and at the end the weights are those of one process with the large
batches. Dropout and tied parameters are on.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import torch
from roundhouse import ANYTHING, RUN, RoundHouse, open_house

from pipelinelab import RUN_SEED, LabCourse, assert_close, build, reference
from potluck import faultpoints
from potluck.peer.identity import Identity
from potluck.pipeline.blueprint import Blueprint
from potluck.pipeline.book import HubBook
from potluck.pipeline.conducting import Conductor, ConductorConfig
from potluck.pipeline.layout import Layout
from potluck.pipeline.staffing import Staff
from potluck.pipeline.stepping import StepConfig, StepOutcome
from potluck.run.peer import Peer, PeerConfig
from potluck.testing.faults import Faults
from potluck.testing.processes import Children, ManagedProcess

pytestmark = pytest.mark.timeout(400)

NUM_STAGES = 3
POINTS = ["queued", "forwarded", "between", "backward", "added", "averaging", "averaged"]
FEW_POINTS = ["forwarded", "added", "averaging"]  # the others are killed within one process: test_pipeline_run.py
SAMPLES = [2, 1, 2, 3, 2, 2, 1, 2, 2, 2, 1, 2, 3, 2, 2, 2, 1, 2, 2, 1]
MAX_STEPS = 30
SLOW_SECONDS = 0.05  # for each micro-batch; others take a tenth of that
CHILD = Path(__file__).with_name("pipelinechild.py")


class Company:
    """The processes of one run, and its conductor in this one."""

    def __init__(
        self, house: RoundHouse, folder: Path, children: Children, invite: str, num_stages: int = NUM_STAGES
    ) -> None:
        self._house, self._folder, self._children, self._invite = house, folder, children, invite
        self.num_stages = num_stages
        self.processes: dict[str, ManagedProcess] = {}
        self.outcomes: list[StepOutcome] = []
        self.names: dict[str, str] = {}  # by peer id

    async def open(self, config: ConductorConfig) -> None:
        identity = Identity.open(self._folder / "conductor.key")
        own = PeerConfig(name="conductor", invite=self._invite, listen=("tcp://127.0.0.1:0",))
        self.peer = Peer(self._house.address, RUN, identity, own)
        await self.peer.start()
        self._config = config
        self.course = LabCourse()
        self.conduct(term=0)
        self.members: tuple[str, ...] = ()

    def conduct(self, term: int) -> None:
        blueprint = Blueprint.of(lambda: build(tied=True), RUN_SEED)
        self.layout = Layout.even(blueprint.num_blocks, self.num_stages)
        staff = Staff([1.0] * blueprint.num_blocks, [1] * blueprint.num_blocks, lambda _num_servers: self.layout)
        self.book = HubBook(self.peer.session.hub.store("groups"))
        self.conductor = Conductor(
            self.peer.links,
            self.peer.session.roster,
            self.peer.clock,
            blueprint=blueprint,
            staff=staff,
            course=self.course,
            book=self.book,
            term=term,
            config=self._config,
        )

    async def close(self) -> None:
        await self.conductor.close()
        await self.peer.close()

    def spawn(self, name: str, *stages: int, slow_seconds: float = 0.0) -> None:
        about = {"conductor": self.peer.peer_id, "stages": stages, "slow_seconds": slow_seconds}
        self.processes[name] = self._child(name, **about)

    def _child(self, name: str, **about: object) -> ManagedProcess:
        address = self._house.address
        arguments = {
            "servers": list(address.servers),
            "ca_pem": address.ca_pem,
            "run": RUN,
            "identity": str(self._folder / f"{name}.key"),
            "invite": self._invite,
            "num_stages": self.num_stages,
            **about,
        }
        return self._children.spawn([sys.executable, str(CHILD), json.dumps(arguments)], name=name, stdin=True)

    def follow(self, conductor: str) -> None:
        for process in self.processes.values():
            if process.exit_code is None:
                process.send_line(f"follow {conductor}")

    async def lose_the_hub(self) -> StepOutcome:
        """SIGKILL of the hub while a step is averaged: its host starts it again, and the step commits."""
        averaging = asyncio.Event()

        def hook(name: str, labels: Mapping[str, object]) -> None:
            if name == "pipeline.conductor.averaging":
                averaging.set()

        before = faultpoints.install(hook)
        try:
            stepping = asyncio.create_task(self.step())
            await asyncio.wait_for(averaging.wait(), 60)
            os.kill(int((self._folder / "hub" / "server.pid").read_text()), signal.SIGKILL)
            return await stepping
        finally:
            faultpoints.install(before)

    async def lose_a_coordinator(self) -> None:
        """Another process conducts, and dies by SIGKILL between a step's averages and its commit; we go on."""
        await self.conductor.close()
        child = self._child("coordinator", samples=SAMPLES, term=1)
        peer = (await child.until_line(r"conducting (\w+)", 120))[1]
        fired = self._folder / "coordinator.fired"
        child.send_line(f"arm {fired} pipeline.conductor.committing kill")
        await child.until_line("armed", 60)
        self.follow(peer)
        child.send_line("go")
        assert await child.until_exit(120) == -9
        assert Faults(fired).fired()
        self.conduct(term=2)
        record = await self.book.read()
        assert record is not None
        self.conductor.record = record
        self.course.steps += [SAMPLES] * (record.step - len(self.course.steps))
        self.follow(self.peer.peer_id)

    async def until_met(self, name: str, point: str, action: str = "kill") -> StepOutcome:
        """Take steps until this process has met its fault; in a step it may happen to get nothing."""
        faults = Faults(self._folder / f"{name}.fired")
        self.processes[name].send_line(f"arm {self._folder / f'{name}.fired'} {point} {action}")
        await self.processes[name].until_line("armed", 60)
        for _ in range(MAX_STEPS):
            outcome = await self.step()
            if faults.fired():
                return outcome
        raise AssertionError(f"{name} never came to {point}")

    async def step(self) -> StepOutcome:
        self.course.steps[self.conductor.record.step :] = [SAMPLES]
        async with asyncio.timeout(120):
            await self.conductor.until_ready()
            outcome = await self.conductor.take_step()
        self.outcomes.append(outcome)
        self.members = outcome.members
        return outcome

    async def all_enlisted(self) -> None:
        for name, process in self.processes.items():
            found = await process.until_line(r"enlisted (\w+)", 120)
            self.names[found[1]] = name

    async def weights(self) -> dict[str, torch.Tensor]:
        """Of all that live; replicas must agree to the bit."""
        found: dict[str, torch.Tensor] = {}
        alive = {self.names[peer] for peer in self.members}
        for name in sorted(alive):
            path = self._folder / f"{name}.weights"
            self.processes[name].send_line(f"weights {path} {self.conductor.record.step}")
            await self.processes[name].until_line("saved", 60)
            for key, values in torch.load(path).items():
                assert torch.equal(found.setdefault(key, values), values), f"{name} has another {key}"
        return found


@pytest.mark.parametrize(
    "points",
    [pytest.param(FEW_POINTS, id="some phases"), pytest.param(POINTS, id="all phases", marks=pytest.mark.soak)],
)
async def test_a_process_dies_at_each_phase_and_the_weights_are_those_of_one(
    tmp_path: Path, children: Children, points: list[str]
) -> None:
    async with open_house(tmp_path / "hub") as house:
        company = Company(house, tmp_path, children, await house.invite(ANYTHING))
        await company.open(ConductorConfig(step=StepConfig(stall_seconds=6.0, fence_seconds=6.0)))
        try:
            await run(company, points)
        finally:
            await company.close()


async def run(company: Company, points: list[str]) -> None:
    servers = [(f"victim-{point}", 1) for point in points] + [("frozen", 0), ("s0", 0), ("s1", 1), ("s2", 2)]
    for name, stage in servers:
        company.spawn(name, stage)
    company.spawn("slow", 2, slow_seconds=SLOW_SECONDS)
    for name in ("lost-feeder", "feeder"):
        company.spawn(name)
    await company.all_enlisted()

    for point in points:
        name = f"victim-{point}"
        outcome = await company.until_met(name, f"pipeline.{point}")
        assert [company.names[peer] for peer in outcome.excluded] == [name]
        assert outcome.attempts > 1
        assert await company.processes[name].until_exit() == -9
    outcome = await company.until_met("frozen", "pipeline.backward", "stop")
    assert [company.names[peer] for peer in outcome.excluded] == ["frozen"]
    await company.until_met("lost-feeder", "pipeline.fed")
    assert await company.processes["lost-feeder"].until_exit() == -9
    outcome = await company.step()
    assert (outcome.attempts, outcome.replayed) == (1, 0)
    assert "slow" in {company.names[peer] for peer in company.members}
    await company.lose_the_hub()
    await company.step()
    await company.lose_a_coordinator()
    await company.step()
    await assert_as_one_process(company)


async def assert_as_one_process(company: Company) -> None:
    expected = build(tied=True, dropout=0.1)
    losses = reference(expected, [SAMPLES] * company.conductor.record.step)
    for outcome in company.outcomes:
        assert outcome.loss == pytest.approx(losses[outcome.step], rel=1e-5)
    found = await company.weights()
    wanted = {
        f"{number}.{name}": parameter.detach()
        for number, block in enumerate(expected)
        for name, parameter in block.named_parameters()
    }
    assert found.keys() == wanted.keys()
    assert_close([found[key] for key in wanted], list(wanted.values()))


@pytest.mark.soak
async def test_four_stages_of_two_servers_and_two_feeders_lose_one_of_each(tmp_path: Path, children: Children) -> None:
    async with open_house(tmp_path / "hub") as house:
        company = Company(house, tmp_path, children, await house.invite(ANYTHING), num_stages=4)
        await company.open(ConductorConfig(step=StepConfig(stall_seconds=6.0, fence_seconds=6.0)))
        try:
            for stage in range(4):
                for replica in range(2):
                    company.spawn(f"s{stage}.{replica}", stage)
            for name in ("f0", "f1"):
                company.spawn(name)
            await company.all_enlisted()
            for _ in range(3):
                assert (await company.step()).attempts == 1
            for stage, point in enumerate(["queued", "between", "backward", "averaged"]):
                outcome = await company.until_met(f"s{stage}.0", f"pipeline.{point}")
                assert [company.names[peer] for peer in outcome.excluded] == [f"s{stage}.0"]
            await company.until_met("f0", "pipeline.fed")
            await company.lose_the_hub()
            await company.lose_a_coordinator()
            await company.step()
            await assert_as_one_process(company)
        finally:
            await company.close()


@pytest.mark.soak
async def test_memory_stays_the_same_for_300_steps(tmp_path: Path, children: Children) -> None:
    async with open_house(tmp_path / "hub") as house:
        company = Company(house, tmp_path, children, await house.invite(ANYTHING), num_stages=2)
        await company.open(ConductorConfig())
        try:
            for stage in range(2):
                company.spawn(f"s{stage}", stage)
            company.spawn("f")
            await company.all_enlisted()
            sizes: dict[int, dict[str, int]] = {}
            for step in range(301):
                await company.step()
                if step in (50, 100, 200, 300):
                    sizes[step] = {
                        n: psutil.Process(p.pid).memory_info().rss >> 10 for n, p in company.processes.items()
                    }
                    sizes[step]["conductor"] = psutil.Process().memory_info().rss >> 10
            print("KiB after so many steps:", sizes)
            for name, before in sizes[50].items():
                assert sizes[300][name] - before < 0.02 * before, f"{name} grows: {sizes}"
        finally:
            await company.close()
