"""What a fleet's demo promises, and whether it was kept (pure)."""

from __future__ import annotations

import statistics

from potluck.cli.demo.promises import Promise, all_left_cleanly, the_play_was_played
from potluck.cli.fleetdemo.record import Curve, Incident, Record

LEARNT_FACTOR = 2.0  # the last returns are at least so many times the first
NUM_COMPARED = 5

_STORIES = {
    "laptop killed": "{who} is killed: the other laptops train on, and it comes back",
    "learner killed": "the learner is killed: the laptops train on, and it goes on from its last version",
    "hub killed": "the hub is killed: the laptops train on, and all find it again",
}


def check(record: Record) -> list[Promise]:
    """All promises, in the order in which a person would ask."""
    return [
        the_play_was_played(record.problem),
        *(_learns(job, curve) for job, curve in sorted(record.curves.items())),
        *(_is_borne(incident) for incident in record.incidents),
        _goes_on_from_checkpoint(record),
        _nobody_else_restarts(record),
        all_left_cleanly(record.exit_codes),
        Promise(
            promise="no job is left behind",
            kept=record.num_left_behind == 0,
            found=f"{record.num_left_behind} still run" if record.num_left_behind else "none is",
        ),
    ]


def _learns(job: str, curve: Curve) -> Promise:
    returns = [value for _, value in curve]
    if len(returns) < 2 * NUM_COMPARED:
        return Promise(promise=f"{job} learns", kept=False, found=f"it logged {len(returns)} returns")
    first, last = statistics.mean(returns[:NUM_COMPARED]), statistics.mean(returns[-NUM_COMPARED:])
    return Promise(
        promise=f"{job} learns", kept=last >= LEARNT_FACTOR * first, found=f"return {first:.0f} → {last:.0f}"
    )


def _is_borne(incident: Incident) -> Promise:
    over = incident.over_at_seconds
    found = "never" if over is None else f"over after {over - incident.at_seconds:.1f} s"
    gained = [incident.steps_meanwhile.get(name, steps) - steps for name, steps in incident.steps_before.items()]
    found += f", {sum(gained):,.0f} steps by the others meanwhile" if gained else ""
    return Promise(
        promise=_STORIES[incident.kind].format(who=incident.who),
        kept=over is not None and incident.went_on,
        found=f"{found}{f', {incident.note}' if incident.note else ''}",
    )


def _goes_on_from_checkpoint(record: Record) -> Promise:
    return Promise(
        promise="the killed laptop goes on from its checkpoint",
        kept=0 < record.steps_saved <= record.steps_resumed,
        found=f"step {record.steps_saved:,.0f} was saved, its next figure is of step {record.steps_resumed:,.0f}",
    )


def _nobody_else_restarts(record: Record) -> Promise:
    """Jobs of the killed laptop and the killed learner are started again; nobody else's."""
    killed = {incident.who for incident in record.incidents}
    others = {job: count for job, count in record.restarts.items() if count and job not in killed}
    return Promise(
        promise="no other job is started again",
        kept=bool(record.restarts) and not others,
        found=", ".join(f"{job} {count} times" for job, count in others.items()) or "none was",
    )
