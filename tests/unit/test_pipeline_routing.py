"""The router on virtual time: shares by rate, slow servers, newcomers, busy and gone."""

from __future__ import annotations

import heapq
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.pipeline.routing import LinkCost, RouterConfig, StageRouter


class Stage:
    """Servers of known speeds on virtual time: each does one task after the other."""

    def __init__(self, speeds: dict[str, float], links: dict[str, LinkCost] | None = None, window: int = 8) -> None:
        self.router = StageRouter(RouterConfig(max_window=window))
        self.speeds = dict(speeds)
        self.links = links or {}
        for server in speeds:
            self.router.add(server, link=self.links.get(server, LinkCost()))
        self.now = 0.0
        self.free_at: dict[str, float] = {}
        self.receipts: list[tuple[float, int, str]] = []
        self.done: Counter[str] = Counter()
        self.most_at_once: Counter[str] = Counter()
        self.under_way: Counter[str] = Counter()
        self.next_task = 0
        self.ended: dict[str, list[float]] = {}

    def give(self) -> bool:
        server = self.router.choose(samples=1, now=self.now)
        if server is None:
            return False
        task, self.next_task = self.next_task, self.next_task + 1
        self.router.accepted(server, task, samples=1, now=self.now)
        link = self.links.get(server, LinkCost())
        arrives = self.now + link.latency_seconds
        self.free_at[server] = max(self.free_at.get(server, 0.0), arrives) + 1 / self.speeds[server]
        heapq.heappush(self.receipts, (self.free_at[server] + link.latency_seconds, task, server))
        self.under_way[server] += 1
        self.most_at_once[server] = max(self.most_at_once[server], self.under_way[server])
        return True

    def take_receipt(self) -> None:
        self.now, task, server = heapq.heappop(self.receipts)
        self.under_way[server] -= 1
        self.done[server] += 1
        self.ended.setdefault(server, []).append(self.now)
        self.router.finished(server, task, self.now)

    def run(self, num_tasks: int) -> None:
        until = sum(self.done.values()) + num_tasks
        while sum(self.done.values()) < until:
            while self.give():
                pass
            self.take_receipt()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 10).map(float), min_size=2, max_size=6))
def test_shares_tend_to_the_rates(speeds: list[float]) -> None:
    stage = Stage({f"s{index}": speed for index, speed in enumerate(speeds)})
    stage.run(200)  # to learn
    before = Counter(stage.done)
    stage.run(400)
    for server, speed in stage.speeds.items():
        share = (stage.done[server] - before[server]) / 400
        assert abs(share - speed / sum(speeds)) < 0.05, (server, share, speeds)


def test_sixteen_unequal_servers_reach_95_percent_of_their_rate() -> None:
    speeds = {f"s{index:02}": 1.0 + index % 8 for index in range(16)}
    stage = Stage(speeds)
    stage.run(500)
    began = stage.now
    stage.run(3000)
    assert 3000 / (stage.now - began) >= 0.95 * sum(speeds.values())


def test_a_server_that_slows_down_loses_its_share_at_once() -> None:
    stage = Stage({"steady": 10.0, "fading": 10.0})
    stage.run(200)
    stage.speeds["fading"] = 1.0
    changed_at = stage.now
    while stage.now < changed_at + 4.0:
        stage.run(1)
    later = [t for t in stage.ended["fading"] if t > changed_at + 2.0]
    assert len(later) <= 6  # it does one a second; at half of the tasks it would have had twenty
    assert len([t for t in stage.ended["steady"] if t > changed_at + 2.0]) >= 18


def test_latency_is_hidden_by_the_window() -> None:
    far = {"far": LinkCost(latency_seconds=0.05)}
    stage = Stage({"far": 20.0, "near": 20.0}, far)
    stage.run(100)
    before, began = Counter(stage.done), stage.now
    stage.run(400)
    assert stage.done["far"] - before["far"] >= 160
    assert 400 / (stage.now - began) >= 0.9 * 40


def test_a_thin_line_counts_like_a_slow_machine() -> None:
    router = StageRouter()
    router.add("thin", link=LinkCost(transfer_seconds_per_sample=3.0))
    router.add("wide")
    given_to: Counter[str] = Counter()
    for task in range(40):
        server = router.choose(samples=1, now=float(task))
        assert server is not None
        router.accepted(server, task, samples=1, now=float(task))
        router.finished(server, task, float(task) + 1)
        given_to[server] += 1
    assert given_to["wide"] == pytest.approx(30, abs=2)


def test_a_newcomer_has_one_unproven_task_at_a_time() -> None:
    stage = Stage({"old": 10.0})
    stage.run(50)
    stage.speeds["new"] = 0.5
    stage.router.add("new")
    stage.run(15)
    assert stage.most_at_once["new"] == 1
    assert stage.under_way["new"] + stage.done["new"] >= 1, "it is tried soon"
    stage.run(200)
    assert stage.done["new"] >= 2


def test_a_newcomer_does_not_take_all_tasks_at_first() -> None:
    stage = Stage({"old": 10.0})
    stage.run(500)
    stage.speeds["new"] = 10.0
    stage.router.add("new")
    before = stage.done["old"]
    stage.run(40)
    assert stage.done["old"] - before >= 15


def test_busy_servers_are_passed_over_and_asked_again() -> None:
    router = StageRouter()
    router.add("a")
    router.add("b")
    first = router.choose(samples=1, now=0.0)
    assert first == "a"
    router.busy("a", 0.0)
    assert router.choose(samples=1, now=0.0) == "b"
    router.busy("b", 0.0)
    assert router.choose(samples=1, now=0.0) is None
    again = router.next_free_at(0.0)
    assert again is not None
    assert router.choose(samples=1, now=again) == "a"


def test_a_server_that_is_gone_returns_its_tasks_and_keeps_its_measured_rate() -> None:
    stage = Stage({"a": 1.0, "b": 5.0})
    stage.run(100)
    while stage.give():
        pass
    held = stage.router.gone("a")
    assert len(held) == stage.under_way["a"] > 0
    assert stage.router.servers == ("b",)
    stage.router.add("a")
    assert stage.router.seconds_per_sample("a", stage.now) == pytest.approx(1.0, rel=0.05)
    stage.router.finished("a", held[0], stage.now)  # a receipt from before says nothing


def test_tasks_without_a_receipt_are_found() -> None:
    router = StageRouter()
    router.add("a")
    router.accepted("a", "task", samples=1, now=0.0)
    assert router.overdue(5.0, longer_than_seconds=10.0) == ()
    assert router.overdue(11.0, longer_than_seconds=10.0) == (("a", "task"),)
    router.dropped("a", "task")
    assert router.overdue(11.0, longer_than_seconds=10.0) == ()
