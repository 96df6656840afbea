"""Which machine a job goes to (pure).

It is decided once, by `potluck fleet up`, and stands in the signed document. A job that a machine has stays there as
long as the machine is there and fits: moving it would cost what it has in its working folder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from potluck.errors import ConfigurationError
from potluck.fleet.jobs.fleetfile import JobPlan
from potluck.fleet.jobs.machine import MachineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMachine:
    """A machine of the fleet."""

    peer: str
    name: str
    is_there: bool = False
    facts: MachineFacts | None = None
    """What it has; None while it is away."""


def place(
    jobs: Iterable[JobPlan], machines: Iterable[KnownMachine], before: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The machine's peer id for each job; ConfigurationError where there is none for one. `before`: as it was."""
    known = list(machines)
    placed: dict[str, str] = {}
    load: defaultdict[str, float] = defaultdict(float)
    named = [job for job in jobs if job.machine]
    for job in named:
        placed[job.name] = _by_name(job, known).peer
        load[placed[job.name]] += _weight(job)
    for job in (job for job in jobs if not job.machine):
        fitting = [machine for machine in known if not why_unfit(job, machine)]
        if not fitting:
            raise ConfigurationError(_nowhere(job, known))
        stays = [machine for machine in fitting if machine.peer == (before or {}).get(job.name)]
        best = min(stays or fitting, key=lambda machine: (load[machine.peer] / _size(machine), machine.name))
        placed[job.name] = best.peer
        load[best.peer] += _weight(job)
    return placed


def why_unfit(job: JobPlan, machine: KnownMachine) -> str:
    """Why a machine cannot take a job that says what it needs; empty when it can."""
    facts, needs = machine.facts, job.needs
    if not machine.is_there or facts is None:
        return "it is away"
    if (job.is_container or needs.engine) and not facts.engines:
        return "it has no container engine"
    for what, has, wanted in (
        ("CPUs", facts.cpus, max(needs.cpus, job.limits.cpus)),
        ("bytes of memory", facts.memory_bytes, max(needs.memory_bytes, job.limits.memory_bytes)),
        ("GPUs", len(facts.gpus), max(needs.gpus, job.limits.gpus)),
        ("bytes of free disk", facts.disk_free_bytes, needs.disk_bytes),
    ):
        if has < wanted:
            return f"it has {has:g} {what}, and {wanted:g} are needed"
    return ""


def _by_name(job: JobPlan, machines: list[KnownMachine]) -> KnownMachine:
    found = [machine for machine in machines if job.machine in (machine.name, machine.peer)]
    if not found and len(job.machine) >= 8:
        found = [machine for machine in machines if machine.peer.startswith(job.machine)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigurationError(
            f"{len(found)} machines are called {job.machine}, which {job.name} wants: name it by its id, or start one "
            "agent with another --name"
        )
    names = ", ".join(sorted(machine.name or machine.peer[:12] for machine in machines)) or "none"
    raise ConfigurationError(
        f"there is no machine {job.machine}, which {job.name} wants (there are: {names}). Start one with "
        f"`potluck fleet agent LINK --name {job.machine}`"
    )


def _nowhere(job: JobPlan, machines: list[KnownMachine]) -> str:
    if not machines:
        return f"there is no machine for {job.name}: start one with `potluck fleet agent LINK`"
    reasons = "; ".join(f"{machine.name or machine.peer[:12]}: {why_unfit(job, machine)}" for machine in machines)
    return f"no machine fits {job.name} ({reasons})"


def _weight(job: JobPlan) -> float:
    return max(job.needs.cpus, job.limits.cpus, 1.0)


def _size(machine: KnownMachine) -> float:
    return max(machine.facts.cpus, 1) if machine.facts is not None else 1
