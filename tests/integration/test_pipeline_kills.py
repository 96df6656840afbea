"""A pipeline of real processes: servers die by SIGKILL at every phase of a step, one freezes, a feeder dies.

One run for all: three stages, of which the middle one has a server for each phase to lose. In each step one process
meets its fault; the step commits all the same, and at the end the weights are those of one process with the large
batches. Dropout and tied parameters are on.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
import torch
from roundhouse import ANYTHING, RUN, RoundHouse, open_house

from pipelinelab import RUN_SEED, LabCourse, assert_close, build, reference
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
CHILD = Path(__file__).with_name("pipelinechild.py")


class Company:
    """The processes of one run, and its conductor in this one."""

    def __init__(self, house: RoundHouse, folder: Path, children: Children, invite: str) -> None:
        self._house, self._folder, self._children, self._invite = house, folder, children, invite
        self.processes: dict[str, ManagedProcess] = {}
        self.outcomes: list[StepOutcome] = []
        self.names: dict[str, str] = {}  # by peer id
        self.stages: dict[str, tuple[int, ...]] = {}

    async def open(self, config: ConductorConfig) -> None:
        identity = Identity.open(self._folder / "conductor.key")
        own = PeerConfig(name="conductor", invite=self._invite, listen=("tcp://127.0.0.1:0",))
        self.peer = Peer(self._house.address, RUN, identity, own)
        await self.peer.start()
        blueprint = Blueprint.of(lambda: build(tied=True), RUN_SEED)
        self.layout = Layout.even(blueprint.num_blocks, NUM_STAGES)
        staff = Staff([1.0] * blueprint.num_blocks, [1] * blueprint.num_blocks, lambda _num_servers: self.layout)
        self.course = LabCourse()
        self.conductor = Conductor(
            self.peer.links,
            self.peer.session.roster,
            self.peer.clock,
            blueprint=blueprint,
            staff=staff,
            course=self.course,
            book=HubBook(self.peer.session.hub.store("groups")),
            config=config,
        )
        self.members: tuple[str, ...] = ()

    async def close(self) -> None:
        await self.conductor.close()
        await self.peer.close()

    def spawn(self, name: str, *stages: int) -> None:
        address = self._house.address
        arguments = {
            "servers": list(address.servers),
            "ca_pem": address.ca_pem,
            "run": RUN,
            "identity": str(self._folder / f"{name}.key"),
            "invite": self._invite,
            "conductor": self.peer.peer_id,
            "num_stages": NUM_STAGES,
            "stages": stages,
        }
        self.stages[name] = stages
        self.processes[name] = self._children.spawn(
            [sys.executable, str(CHILD), json.dumps(arguments)], name=name, stdin=True
        )

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
        self.course.steps.append(SAMPLES)
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
            self.processes[name].send_line(f"weights {path} {len(self.outcomes)}")
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

    expected = build(tied=True, dropout=0.1)
    losses = reference(expected, [SAMPLES] * len(company.outcomes))
    assert [outcome.loss for outcome in company.outcomes] == pytest.approx(losses, rel=1e-5)
    found = await company.weights()
    wanted = {
        f"{number}.{name}": parameter.detach()
        for number, block in enumerate(expected)
        for name, parameter in block.named_parameters()
    }
    assert found.keys() == wanted.keys()
    assert_close([found[key] for key in wanted], list(wanted.values()))
