from __future__ import annotations

import itertools

import pytest

from potluck.link.paths import FORGIVEN_SECONDS, LARGEST_WAIT_SECONDS, Paths


@pytest.fixture
def paths() -> Paths:
    return Paths(("direct", "relay"), settle_seconds=0.5)


def prove(paths: Paths, kind: str, now: float) -> None:
    """Answer the probe of that path."""
    numbers = dict(paths.due_probes(now))
    assert kind in numbers
    paths.echoed(kind, numbers[kind])


def test_without_a_path_there_is_none(paths: Paths) -> None:
    assert paths.choose(0.0) is None
    assert paths.next_at() is None


def test_the_first_path_is_used_at_once(paths: Paths) -> None:
    paths.opened("relay", 0.0)
    assert paths.choose(0.0) == "relay"
    assert paths.due_probes(0.0) == []


def test_the_better_of_two_is_used_when_nothing_is_in_use(paths: Paths) -> None:
    paths.opened("relay", 0.0)
    paths.opened("direct", 0.0)
    assert paths.choose(0.0) == "direct"
    assert paths.due_probes(0.0) == [], "a worse path needs no proof"


def test_a_better_path_is_used_once_its_probe_was_echoed(paths: Paths) -> None:
    paths.opened("relay", 0.0)
    paths.choose(0.0)
    paths.opened("direct", 1.0)
    assert paths.choose(1.0) == "relay"
    assert paths.next_at() == 1.0
    prove(paths, "direct", 1.0)
    assert paths.choose(1.1) == "direct"


def test_an_echo_proves_only_the_path_and_the_probe_it_belongs_to(paths: Paths) -> None:
    paths.opened("relay", 0.0)
    paths.choose(0.0)
    paths.opened("direct", 1.0)
    [(_, first)] = paths.due_probes(1.0)
    [(_, second)] = paths.due_probes(2.0)
    paths.echoed("relay", second)
    paths.echoed("direct", first)
    paths.echoed("direct", 0)
    paths.echoed("unheard of", second)
    assert paths.choose(3.0) == "relay"
    paths.echoed("direct", second)
    assert paths.choose(3.0) == "direct"


def test_probes_that_are_not_answered_become_rarer(paths: Paths) -> None:
    paths.opened("relay", 0.0)
    paths.choose(0.0)
    paths.opened("direct", 0.0)
    times = [step / 10 for step in range(1000) if paths.due_probes(step / 10)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps[0] == pytest.approx(1.0)
    assert gaps == sorted(gaps)
    assert gaps[-1] == pytest.approx(30.0, abs=0.2)


def test_a_closed_path_is_left_at_once_and_a_closed_one_is_never_chosen(paths: Paths) -> None:
    paths.opened("direct", 0.0)
    paths.opened("relay", 0.0)
    assert paths.choose(0.0) == "direct"
    paths.closed("direct", 1.0)
    assert paths.choose(1.0) == "relay"
    paths.closed("relay", 2.0)
    assert paths.choose(2.0) is None


def test_a_path_that_flaps_is_left_alone_longer_each_time(paths: Paths) -> None:
    paths.opened("relay", 0.0)
    paths.opened("direct", 0.0)
    assert paths.choose(0.0) == "direct"
    now, waits = 0.0, []
    for _ in range(9):
        paths.closed("direct", now)
        assert paths.choose(now) == "relay"
        paths.opened("direct", now)
        prove(paths, "direct", now)
        opened_at = now
        while paths.choose(now) != "direct":
            now += 0.1
        waits.append(round(now - opened_at, 1))
    assert waits[0] == pytest.approx(0.5, abs=0.2)
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(LARGEST_WAIT_SECONDS, abs=0.2)
    paths.closed("direct", now + FORGIVEN_SECONDS + 1)
    paths.choose(now + FORGIVEN_SECONDS + 1)
    paths.opened("direct", now + FORGIVEN_SECONDS + 1)
    prove(paths, "direct", now + FORGIVEN_SECONDS + 1)
    assert paths.choose(now + FORGIVEN_SECONDS + 1.6) == "direct", "a minute without failure, and it is forgiven"


def test_a_flapping_path_is_better_than_none(paths: Paths) -> None:
    for now in range(10):
        paths.opened("direct", float(now))
        assert paths.choose(float(now)) == "direct"
        paths.closed("direct", now + 0.5)
        assert paths.choose(now + 0.5) is None


def test_a_silent_path_is_left_and_used_again_when_it_answers(paths: Paths) -> None:
    paths.opened("relay", 0.0)
    paths.opened("direct", 0.0)
    assert paths.choose(0.0) == "direct"
    paths.silent("direct", 5.0)
    assert paths.choose(5.0) == "relay"
    assert paths.due_probes(5.5) == []
    prove(paths, "direct", 6.0)
    assert paths.choose(6.1) == "direct"


def test_when_all_are_silent_they_take_turns(paths: Paths) -> None:
    paths.opened("relay", 0.0)
    paths.opened("direct", 0.0)
    used = []
    for now in range(6):
        used.append(paths.choose(float(now)))
        paths.silent(used[-1] or "", float(now))
    assert used == ["direct", "relay", "direct", "relay", "direct", "relay"]
    paths.answered("relay")
    assert paths.choose(7.0) == "relay"


def test_the_only_path_is_used_even_if_it_is_silent(paths: Paths) -> None:
    paths.opened("relay", 0.0)
    paths.choose(0.0)
    paths.silent("relay", 5.0)
    assert paths.choose(5.0) == "relay"


def test_silence_of_a_closed_path_means_nothing(paths: Paths) -> None:
    paths.silent("direct", 1.0)
    paths.opened("direct", 2.0)
    assert paths.choose(2.0) == "direct"


def test_kinds_that_nobody_named_come_last(paths: Paths) -> None:
    paths.opened("pigeon", 0.0)
    assert paths.choose(0.0) == "pigeon"
    paths.opened("relay", 0.0)
    prove(paths, "relay", 0.0)
    assert paths.choose(0.0) == "relay"
