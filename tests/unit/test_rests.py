"""A preview computes beside others' work: it rests between forward passes, and ends when it should."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from potluck.monitor.rests import Rests, StoppedError


class Time:
    """Computing and resting, as told."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.rests: list[float] = []

    def now(self) -> float:
        return self.seconds

    def wait(self, stopped: threading.Event, seconds: float) -> bool:
        self.rests.append(seconds)
        self.seconds += seconds
        return stopped.is_set()


def test_small_models_speak_at_once_and_large_ones_rest_in_proportion() -> None:
    time = Time()
    rests = Rests(4.0, now=time.now, wait=time.wait)
    model = nn.Linear(2, 2)
    with rests.of(model):
        for _ in range(5):
            time.seconds += 0.2
            model(torch.zeros(2))
        assert not time.rests, "it has taken a second"
        for _ in range(3):
            time.seconds += 0.5
            model(torch.zeros(2))
    assert time.rests == pytest.approx([2.0, 2.0, 2.0])
    assert rests.rested_seconds == pytest.approx(6.0)
    model(torch.zeros(2))
    assert len(time.rests) == 3, "no longer than that"


def test_a_collection_of_modules_rests_too() -> None:
    time = Time()
    rests = Rests(1.0, now=time.now, wait=time.wait)
    model = nn.ModuleDict({"in": nn.Linear(2, 2), "out": nn.ModuleList([nn.Linear(2, 2)])})
    with rests.of(model):
        time.seconds += 3.0
        model["in"](torch.zeros(2))
        time.seconds += 2.0
        model["out"][0](torch.zeros(2))
    assert time.rests == pytest.approx([3.0, 2.0])


def test_what_is_not_wanted_any_more_ends_at_the_next_pass() -> None:
    rests = Rests(1e6)
    model = nn.Linear(2, 2)
    with rests.of(model):
        model(torch.zeros(2))
        rests.stop()
        with pytest.raises(StoppedError):
            model(torch.zeros(2))


def test_a_rest_ends_when_it_is_stopped() -> None:
    time = Time()
    rests = Rests(1e6, now=time.now)
    model = nn.Linear(2, 2)
    with rests.of(model):
        time.seconds += 2.0
        threading.Timer(0.05, rests.stop).start()
        with pytest.raises(StoppedError):
            model(torch.zeros(2))
