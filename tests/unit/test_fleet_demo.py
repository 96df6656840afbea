"""What a fleet's demo promises, and when it says that a promise was broken."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from potluck.cli.fleetdemo.promises import check
from potluck.cli.fleetdemo.record import Incident, Record, read_curve
from potluck.cli.fleetdemo.scenario import FOREVER, prepare
from potluck.cli.fleetdemo.summary import as_json, conclude
from potluck.fleet.jobs.fleetfile import read_fleet_file


def incident(**changes: object) -> Incident:
    made = Incident(
        kind="laptop killed",
        who="moon",
        at_seconds=30.0,
        steps_before={"cartpole": 100.0},
        steps_meanwhile={"cartpole": 3000.0},
        over_at_seconds=45.0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def good_record() -> Record:
    return Record(
        curves={
            "cartpole": [(float(n), 20.0 + 10 * n) for n in range(40)],
            "moon": [(n, 20.0 + n**2) for n in range(20)],
        },
        incidents=[incident(), incident(kind="hub killed", who="hub")],
        restarts={"cartpole": 0, "moon": 1},
        steps_saved=5120,
        steps_resumed=5632,
        exit_codes={"ada": 0, "host": 0},
    )


def broken(record: Record) -> list[str]:
    return [promise.promise for promise in check(record) if not promise.kept]


def test_a_good_play_keeps_all_promises(tmp_path: Path) -> None:
    outcome = conclude(good_record(), tmp_path, 90.0)
    assert outcome.ok
    assert broken(good_record()) == []
    assert outcome.plot.read_bytes().startswith(b"\x89PNG")
    assert json.loads(json.dumps(as_json(outcome)))["returns"] == {"cartpole": 410.0, "moon": 381.0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"problem": "the learner did not come"}, "everything happens"),
        ({"curves": {"cartpole": [(0.0, 20.0)] * 40}}, "cartpole learns"),
        ({"curves": {"cartpole": []}}, "cartpole learns"),
        ({"incidents": [incident(over_at_seconds=None)]}, "moon is killed"),
        ({"incidents": [incident(steps_meanwhile={"cartpole": 100.0})]}, "moon is killed"),
        ({"restarts": {"cartpole": 1, "moon": 1}}, "no other job is started again"),
        ({"restarts": {}}, "no other job is started again"),
        ({"steps_resumed": 512}, "goes on from its checkpoint"),
        ({"exit_codes": {"ada": 1}}, "leaves cleanly"),
        ({"num_left_behind": 1}, "left behind"),
    ],
)
def test_each_promise_can_be_broken(changes: dict[str, object], expected: str) -> None:
    [promise] = broken(replace(good_record(), **changes))  # type: ignore[arg-type]
    assert expected in promise


def test_half_a_line_of_figures_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_curve(path, "return") == []
    path.write_text('{"at": 11.0, "return": 2.0}\n{"at": 12.0, "steps": 5}\n{"at": 13.0, "retu')
    assert read_curve(path, "return", began_at=10.0) == [(1.0, 2.0)]


def test_the_play_uses_the_examples_own_file(tmp_path: Path) -> None:
    prepare(tmp_path)
    file = read_fleet_file(tmp_path / "code")
    assert sorted(plan.machine for plan in file.jobs) == ["", "ada", "bob", "cem", "dot"]
    assert sum(FOREVER in " ".join(plan.command) for plan in file.jobs) == 4
    assert {queue.name: queue.kind for queue in file.queues} == {"experience": "queue", "value": "topic"}
