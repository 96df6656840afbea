"""What a demo makes of what it saw: figures and promises."""

from __future__ import annotations

import dataclasses

import pytest

from potluck.cli.demo.promises import check
from potluck.cli.demo.record import DemoRecord, Incident, SeenCommit, samples_per_second


def commit(epoch: int, at_seconds: float, term: int = 1, **weights: float) -> SeenCommit:
    return SeenCommit(at_seconds=at_seconds, epoch=epoch, term=term, weights=weights, sent_bytes=1000)


@pytest.fixture
def record() -> DemoRecord:
    """A play in which everything went well."""
    return DemoRecord(
        trainers=["Ada", "Grace", "Barbara"],
        commits=[
            commit(1, 1.0, Ada=100),
            commit(2, 2.0, Ada=100),
            commit(3, 3.0, Ada=100),
            commit(4, 5.0, Ada=100, Grace=100),
            commit(5, 6.0, Ada=120, Grace=80),
            commit(6, 7.0, Ada=100, Grace=100),
            commit(7, 7.6, Ada=100, Grace=100),  # under way when Ada was killed
            commit(8, 9.5, Grace=200),
            commit(9, 14.0, term=2, Grace=200),
            commit(10, 20.0, term=2, Grace=100, Barbara=100),
        ],
        incidents=[
            Incident(kind="trainer killed", who="Ada", at_seconds=7.5, epoch=6, term=1),
            Incident(kind="coordinator killed", who="host", at_seconds=10.0, epoch=8, term=1),
            Incident(kind="newcomer", who="Barbara", at_seconds=15.0, epoch=9, term=2),
        ],
        exit_codes={"Grace": 0, "Barbara": 0, "host": 0},
        alone_until_seconds=3.2,
        together_from_seconds=4.5,
        checkpoint_epoch=10,
        loss_before=5.5,
        loss_after=2.5,
    )


def broken(record: DemoRecord) -> list[str]:
    return [promise.promise for promise in check(record) if not promise.kept]


def test_a_play_that_went_well(record: DemoRecord) -> None:
    assert broken(record) == []
    assert len(check(record)) == 6 + len(record.incidents)
    assert record.sent_bytes == 10_000
    assert (record.epoch, record.term) == (10, 2)


def test_one_alone_and_all_together(record: DemoRecord) -> None:
    assert [each.epoch for each in record.alone()] == [1, 2, 3]
    assert [each.epoch for each in record.together()] == [4, 5, 6]
    assert samples_per_second(record.alone()) == 100
    assert samples_per_second(record.together()) == 200
    assert samples_per_second(record.commits[:1]) is None
    assert samples_per_second([]) is None
    assert record.has_epoch_of(["Grace", "Barbara"])
    assert not record.has_epoch_of(["Ada"])
    assert not DemoRecord().has_epoch_of(["Ada"])


def test_how_long_a_recovery_took(record: DemoRecord) -> None:
    seconds = [incident.recovery_seconds(record.commits) for incident in record.incidents]
    assert seconds == [2.0, 4.0, 5.0]
    assert record.incidents[0].recovery_seconds(record.commits[:7]) is None


def test_a_commit_from_before_shows_nothing(record: DemoRecord) -> None:
    early = dataclasses.replace(record.incidents[1], epoch=9)
    assert early.recovery_seconds(record.commits) == 10.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss_after": 5.4}, "the loss falls"),
        ({"loss_after": float("nan")}, "the loss falls"),
        ({"loss_before": None}, "the loss falls"),
        ({"bad_heads": 1}, "no committed epoch"),
        ({"checkpoint_epoch": None}, "on disk"),
        ({"checkpoint_epoch": 0}, "on disk"),
        ({"exit_codes": {"Grace": 0, "host": -9}}, "leaves cleanly"),
        ({"problem": "the host did not start"}, "everything happens"),
        ({"trainers": ["Ada", "Grace", "Barbara", "Edsger"]}, "samples count"),
    ],
)
def test_each_promise_can_be_broken(record: DemoRecord, change: dict[str, object], words: str) -> None:
    for name, value in change.items():
        setattr(record, name, value)
    [promise] = broken(record)
    assert words in promise


def test_an_epoch_that_comes_twice_is_a_broken_promise(record: DemoRecord) -> None:
    record.commits.append(commit(10, 21.0, term=2, Grace=100))
    [promise] = broken(record)
    assert "no committed epoch" in promise


def test_a_run_that_stands_still_is_a_broken_promise(record: DemoRecord) -> None:
    record.incidents.append(Incident(kind="trainer killed", who="Grace", at_seconds=21.0, epoch=10, term=2))
    [promise] = broken(record)
    assert "Grace" in promise


def test_nothing_at_all_keeps_no_promise() -> None:
    assert len(broken(DemoRecord(problem="nobody came"))) == 6
