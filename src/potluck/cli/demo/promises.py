"""What a demo promises, and whether it was kept (pure)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from potluck.cli.demo.record import DemoRecord, Incident

LEARNT_SHARE = 0.9  # the loss must fall at least to this share of what it was

_STORIES = {
    "trainer killed": "{who}, a trainer, is killed: the others go on without it",
    "coordinator killed": "{who}, who coordinates, is killed: another takes over",
    "newcomer": "{who} joins late: it gets the run's state and contributes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """One thing that was promised."""

    promise: str
    kept: bool
    found: str


def check(record: DemoRecord) -> list[Promise]:
    """All promises, in the order in which a person would ask."""
    return [
        the_play_was_played(record.problem),
        _loss_falls(record),
        _lineage_is_one_chain(record),
        *(_run_goes_on(record, incident) for incident in record.incidents),
        _everybody_contributed(record),
        _checkpoint_is_there(record),
        all_left_cleanly(record.exit_codes),
    ]


def the_play_was_played(problem: str) -> Promise:
    """Nothing kept the play from going on."""
    return Promise(promise="everything happens that was to happen", kept=not problem, found=problem or "it did")


def _loss_falls(record: DemoRecord) -> Promise:
    before, after = record.loss_before, record.loss_after
    known = before is not None and after is not None and math.isfinite(before) and math.isfinite(after)
    found = f"{before:.3f} → {after:.3f}" if known else f"{before} → {after}"
    kept = bool(known and after is not None and before is not None and after <= LEARNT_SHARE * before)
    return Promise(promise="the loss falls, on text that nobody trains on", kept=kept, found=found)


def _lineage_is_one_chain(record: DemoRecord) -> Promise:
    epochs = [commit.epoch for commit in record.commits]
    grows = all(earlier < later for earlier, later in itertools.pairwise(epochs))
    found = f"{len(epochs)} commits up to epoch {record.epoch}"
    if record.bad_heads:
        found += f", {record.bad_heads} that did not follow"
    return Promise(
        promise="no committed epoch is lost or committed twice",
        kept=bool(epochs) and grows and not record.bad_heads,
        found=found,
    )


def _run_goes_on(record: DemoRecord, incident: Incident) -> Promise:
    seconds = incident.recovery_seconds(record.commits)
    return Promise(
        promise=_STORIES[incident.kind].format(who=incident.who),
        kept=seconds is not None,
        found="never" if seconds is None else f"after {seconds:.1f} s",
    )


def _everybody_contributed(record: DemoRecord) -> Promise:
    given = {name: sum(c.weights.get(name, 0.0) for c in record.commits) for name in record.trainers}
    return Promise(
        promise="every trainer's samples count, by whatever way they come",
        kept=bool(given) and all(samples > 0 for samples in given.values()),
        found=", ".join(f"{name} {samples:,.0f}" for name, samples in given.items()),
    )


def _checkpoint_is_there(record: DemoRecord) -> Promise:
    epoch = record.checkpoint_epoch
    return Promise(
        promise="the run's state is on disk, whole",
        kept=bool(epoch),  # which may be after the last that was seen: those who leave hand in their work
        found="none" if epoch is None else f"epoch {epoch}",
    )


def all_left_cleanly(exit_codes: Mapping[str, int]) -> Promise:
    """Of everybody who was asked to leave."""
    rude = {name: code for name, code in exit_codes.items() if code != 0}
    return Promise(
        promise="everybody who is asked to leave leaves cleanly",
        kept=bool(exit_codes) and not rude,
        found=f"exit codes {rude}" if rude else f"{len(exit_codes)} processes did",
    )
