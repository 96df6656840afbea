"""The play from top to bottom, with the example's own files (examples/four_laptops).

ada, bob, cem, dot   four laptops, each with an agent and a policy of its own; one of them has the learner too
one laptop           loses its power: agent and job are killed; it comes back and goes on from its checkpoint
the learner          is killed; its agent starts it again
the hub              is killed and stays away for a while; nobody stops training
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from potluck.cli.demo.display import Display
from potluck.cli.demo.processes import PATIENCE_SECONDS
from potluck.cli.fleetdemo.processes import RUN, FleetProcesses
from potluck.cli.fleetdemo.record import Curve, Incident, IncidentKind, Record, read_curve
from potluck.errors import ConfigurationError, DeadlineExceededError

if TYPE_CHECKING:
    from potluck.fleet.jobs.control import FleetControl

LEARNER = "learner"
HUB_AWAY_SECONDS = 10.0
LOOK_EVERY_SECONDS = 0.3
NOTABLE_STEPS = 2500  # a few iterations
LEARNT_RETURN = 150.0  # of 500; at first it is about 20
FOREVER = "--steps 1000000000"

T = TypeVar("T")


def example_folder() -> Path:
    """The four laptops' files: part of the package, or of the clone that it runs from."""
    import potluck

    package = Path(potluck.__file__).parent
    for folder in (package / "examples" / "four_laptops", package.parents[1] / "examples" / "four_laptops"):
        if (folder / "fleet.toml").exists():
            return folder
    raise ConfigurationError("the example four_laptops is not installed: run this in a clone of Potluck")


def prepare(folder: Path) -> None:
    """Copy the example. Its laptops end after some steps; those of the play go on until they are told to end."""
    code = folder / "code"
    shutil.copytree(example_folder(), code, ignore=shutil.ignore_patterns("__pycache__", "checkpoints"))
    file = code / "fleet.toml"
    file.write_text(file.read_text().replace("laptop.py --task", f"laptop.py {FOREVER} --task"))


class Play:
    """One performance."""

    def __init__(self, folder: Path, stage: Display, record: Record) -> None:
        self._folder = folder
        self._stage = stage
        self._record = record
        self._processes = FleetProcesses(folder)
        self._began_at = time.time()
        self._where: dict[str, str] = {}  # the laptop of each job

    async def perform(self) -> None:
        """All of it. What goes wrong is raised; nobody is left behind in any case."""
        try:
            link = await self._open()
            await self._train_together()
            await self._lose_laptop(link)
            await self._lose_learner()
            await self._lose_hub()
            await self._learn()
            self._stage.say("All jobs are told to end, and all leave.")
            await self._control(lambda control: control.down())
            await self._until("the end of all jobs", lambda: not self._processes.left_behind())
        finally:
            self._collect()
            leaving = asyncio.create_task(self._leave())
            try:
                await asyncio.shield(leaving)
            except asyncio.CancelledError:
                await leaving
                raise

    async def _open(self) -> str:
        from potluck.fleet.jobs.fleetfile import read_fleet_file

        processes = self._processes
        link = str((await (await processes.host()).until("ready"))["link"])
        file = read_fleet_file(self._folder / "code")
        laptops = sorted({plan.machine for plan in file.jobs if plan.machine})
        agents = await asyncio.gather(*(processes.agent(laptop, link) for laptop in laptops))
        await asyncio.gather(*(agent.until("connected") for agent in agents))
        self._stage.say(f"Four laptops are in the fleet after {self._now:.0f} s.")
        await self._control(lambda control: control.up(file))
        for status in await self._control(lambda control: control.jobs()):
            self._where[status.job.name] = status.machine
        return link

    async def _train_together(self) -> None:
        await self._until("figures of all", lambda: all(self._curve(job, "steps") for job in self._policies))
        self._stage.say(f"All four policies train after {self._now:.0f} s.")
        await self._until(
            "the pooled network",
            lambda: all(any(version for _, version in self._curve(job, "version")) for job in self._policies),
        )
        self._stage.say(f"All have the pooled value network after {self._now:.0f} s.")

    async def _lose_laptop(self, link: str) -> None:
        victim = next(job for job in self._policies if self._where[job] != self._where[LEARNER])
        laptop, record = self._where[victim], self._record
        checkpoint = self._processes.metrics_of(laptop, victim).parents[1] / "work" / "checkpoints" / "laptop.pt"
        await self._until("a checkpoint", checkpoint.exists)
        incident = self._note("laptop killed", victim, [job for job in self._policies if job != victim])
        await self._processes.kill_laptop(laptop)
        record.steps_saved = await asyncio.to_thread(_steps_in, checkpoint)
        num_figures = len(self._curve(victim, "steps"))
        await self._until("steps of the others", lambda: self._all_went_on(incident))
        incident.note = f"{laptop} was away for {self._now - incident.at_seconds:.0f} s"
        await self._processes.agent(laptop, link)
        await self._until(f"{laptop}'s return", lambda: len(self._curve(victim, "steps")) > num_figures)
        record.steps_resumed = self._curve(victim, "steps")[num_figures][1]
        self._over(incident, f"[bold]{laptop}[/bold] was killed; it came back and goes on from its checkpoint")

    async def _lose_learner(self) -> None:
        version = self._version()
        incident = self._note("learner killed", LEARNER, self._policies)
        self._processes.kill_job(self._where[LEARNER], LEARNER)
        await self._until("steps of all", lambda: self._all_went_on(incident))
        await self._until("a newer version", lambda: self._version() > version and self._is_later(incident))
        incident.note = f"it went on from version {version:.0f}"
        self._over(incident, "The [bold]learner[/bold] was killed; its agent started it again")

    async def _lose_hub(self) -> None:
        incident = self._note("hub killed", "hub", self._policies)
        await self._processes.kill_hub()
        await asyncio.sleep(HUB_AWAY_SECONDS)
        await self._until("steps without a hub", lambda: self._all_went_on(incident))
        away_until = self._now
        incident.note = f"away for {away_until - incident.at_seconds:.0f} s"
        version = self._version()
        await (await self._processes.host()).until("ready")
        await self._until("the learner", lambda: self._version() > version)
        await self._until_all_report()
        self._over(incident, "The [bold]hub[/bold] was killed and started again; all laptops found it")

    async def _learn(self) -> None:
        """Until every policy has learnt something, which most have by now."""

        def has_learnt(job: str) -> bool:
            returns = [value for _, value in self._curve(job, "return")[-5:]]
            return bool(returns) and min(returns) >= LEARNT_RETURN

        await self._until("four policies that have learnt", lambda: all(map(has_learnt, self._policies)))
        for status in await self._control(lambda control: control.jobs()):
            if status.report is not None:
                self._record.restarts[status.job.name] = status.report.restarts

    async def _leave(self) -> None:
        self._record.exit_codes = await self._processes.leave()
        self._record.num_left_behind = len(self._processes.left_behind())
        self._processes.end_what_is_left()

    # Looking

    @property
    def _now(self) -> float:
        return time.time() - self._began_at

    @property
    def _policies(self) -> list[str]:
        return sorted(set(self._where) - {LEARNER})

    def _curve(self, job: str, figure: str) -> Curve:
        return read_curve(self._processes.metrics_of(self._where[job], job), figure, self._began_at)

    def _steps(self, jobs: list[str]) -> dict[str, float]:
        return {job: max((steps for _, steps in self._curve(job, "steps")), default=0.0) for job in jobs}

    def _version(self) -> float:
        return max((version for _, version in self._curve(LEARNER, "version")), default=0.0)

    def _is_later(self, incident: Incident) -> bool:
        return self._curve(LEARNER, "version")[-1][0] > incident.at_seconds

    def _note(self, kind: IncidentKind, who: str, others: list[str]) -> Incident:
        incident = Incident(kind=kind, who=who, at_seconds=self._now, steps_before=self._steps(others))
        self._record.incidents.append(incident)
        return incident

    def _all_went_on(self, incident: Incident) -> bool:
        incident.steps_meanwhile = self._steps([*incident.steps_before])
        return all(
            incident.steps_meanwhile[job] >= steps + NOTABLE_STEPS for job, steps in incident.steps_before.items()
        )

    def _over(self, incident: Incident, text: str) -> None:
        incident.over_at_seconds = self._now
        self._stage.say(f"{text} ({self._now - incident.at_seconds:.0f} s). The others trained on.")

    def _collect(self) -> None:
        self._record.curves = {job: self._curve(job, "return") for job in self._policies}

    async def _until(self, what: str, is_so: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    if await asyncio.to_thread(is_so):
                        return
                    await asyncio.sleep(LOOK_EVERY_SECONDS)
        except TimeoutError:
            raise DeadlineExceededError(f"{what} did not come within {PATIENCE_SECONDS:g} s") from None

    async def _until_all_report(self) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            machines = await self._control(lambda control: control.machines())
            if all(machine.report is not None for machine in machines):
                return
        raise DeadlineExceededError(f"not all machines reported within {PATIENCE_SECONDS:g} s")

    async def _control(self, work: Callable[[FleetControl], Awaitable[T]]) -> T:
        """Do something in the organiser's name, as `potluck fleet` does."""
        from potluck.cli.folders import hosted_run
        from potluck.fleet.jobs.control import fleet_control

        where, record = hosted_run(RUN, self._processes.hub_folder)
        async with fleet_control(where, record) as control:
            return await work(control)


def _steps_in(checkpoint: Path) -> float:
    import torch

    return float(torch.load(checkpoint, weights_only=True)["steps"])
