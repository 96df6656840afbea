"""What the integrations share: schedules by epochs of the run, links, names, and LAMB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from potluck.errors import ConfigurationError
from potluck.integrations.extras import ExtraMissingError, require
from potluck.integrations.openrun import JoinConfig, run_name
from potluck.integrations.schedules import Mirror, RunSchedule
from potluck.optim.lamb import Lamb
from potluck.optim.modelstate import ModelState

LINK = "potluck://10.0.0.1:4222/bakery?ca=none#ask"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POTLUCK_LINK", "PL_INITIAL_PEERS", "INITIAL_PEERS", "POTLUCK_LISTEN"):
        monkeypatch.delenv(name, raising=False)


def make_optimizer(lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


# Schedules


def sequence(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, 10)]
    return SequentialLR(optimizer, parts, milestones=[4])


MAKERS: list[Any] = [
    sequence,
    lambda optimizer: ExponentialLR(optimizer, 0.9),
    lambda optimizer: LambdaLR(optimizer, lambda epoch: 1.0 / (1 + epoch)),
    lambda optimizer: MultiStepLR(optimizer, [3, 7], 0.1),
    lambda optimizer: OneCycleLR(optimizer, 1.0, total_steps=30),
]


@pytest.mark.parametrize("make", MAKERS)
def test_a_newcomer_goes_on_with_the_schedule_of_the_others(make: Any) -> None:
    """By what travels: the plain numbers in the state, as the run's keepers hold them."""
    one, other = make_optimizer(), make_optimizer()
    schedules = [RunSchedule([(make(optimizer), 1)]) for optimizer in (one, other)]
    states = [
        ModelState(optimizer, scheduler=schedule)  # type: ignore[arg-type]
        for optimizer, schedule in zip((one, other), schedules, strict=True)
    ]
    for _ in range(6):
        one.step()
        schedules[0].step()
    states[1].load_numbers(states[0].metadata())
    rates: list[list[float]] = []
    for _ in range(6):
        rates.append([one.param_groups[0]["lr"], other.param_groups[0]["lr"]])
        for optimizer, schedule in zip((one, other), schedules, strict=True):
            optimizer.step()
            schedule.step()
    assert all(first == second for first, second in rates)
    assert states[0].metadata() == states[1].metadata()
    assert len({first for first, _ in rates}) > 1


def test_schedulers_are_stepped_as_often_as_they_want() -> None:
    optimizer = make_optimizer()
    schedule = RunSchedule([(ExponentialLR(optimizer, 0.5), 2), (ExponentialLR(optimizer, 0.1), 3)])
    rates = []
    for _ in range(6):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1.0, 0.5, 0.05, 0.025, 0.025, 0.00125])


def test_a_mirror_shows_and_saves_and_does_not_step() -> None:
    optimizer = make_optimizer()
    scheduler = ExponentialLR(optimizer, 0.5)
    mirror = Mirror(scheduler)
    mirror.step()
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 1.0)
    optimizer.step()
    scheduler.step()
    assert mirror.last_epoch == 1
    assert mirror.get_last_lr() == [0.5]
    assert mirror.state_dict() == scheduler.state_dict()
    mirror.load_state_dict({**scheduler.state_dict(), "last_epoch": 7})
    assert scheduler.last_epoch == 7


def plateau() -> tuple[torch.optim.Optimizer, RunSchedule, Any]:
    optimizer = make_optimizer()
    schedule = RunSchedule([(ReduceLROnPlateau(optimizer, factor=0.5, patience=0), 1)])
    [mirror] = schedule.mirrors()
    return optimizer, schedule, mirror


def mean(schedules: list[RunSchedule], weights: list[float]) -> dict[str, torch.Tensor]:
    told = [schedule.measures()["0"] for schedule in schedules]
    return {"0": sum(w * each for w, each in zip(weights, told, strict=True)) / sum(weights)}  # type: ignore[dict-item]


def test_a_plateau_is_that_of_all_peers_and_their_rates_stay_the_same() -> None:
    peers = [plateau(), plateau(), plateau()]
    schedules = [schedule for _, schedule, _ in peers]
    mirrors = [mirror for _, _, mirror in peers]
    assert isinstance(mirrors[0], ReduceLROnPlateau)  # by which frameworks know it

    def epoch() -> float:
        heard = mean(schedules, [1.0, 2.0, 5.0])
        for schedule in schedules:
            schedule.hear(heard)
            schedule.step()
        [rate] = {optimizer.param_groups[0]["lr"] for optimizer, _, _ in peers}
        return float(rate)

    mirrors[0].step(1.0)
    mirrors[1].step(torch.tensor(4.0))
    assert epoch() == 1.0
    assert schedules[0].state_dict()["schedulers/0/last_epoch"] == 0  # of 8 samples, those of 3 are not enough
    mirrors[2].step(1.0)
    assert epoch() == 1.0
    assert schedules[2].state_dict()["schedulers/0/best"] == pytest.approx((1 * 1 + 2 * 4 + 5 * 1) / 8)
    assert epoch() == 1.0  # nobody has measured since
    mirrors[0].step(0.0)  # better here,
    mirrors[2].step(9.0)  # worse for all
    assert epoch() == 0.5
    assert all(schedule.state_dict() == schedules[0].state_dict() for schedule in schedules)


def test_what_is_measured_during_a_round_counts_for_the_next() -> None:
    _, schedule, mirror = plateau()
    mirror.step(1.0)
    heard = schedule.measures()
    mirror.step(2.0)
    schedule.hear(heard)
    assert schedule.measures()["0"].tolist() == [2.0, 1.0]


def test_a_metric_that_is_none_is_left_out_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    _, schedule, mirror = plateau()
    mirror.step(float("nan"))
    assert schedule.measures()["0"].tolist() == [0.0, 0.0]
    assert "left out" in caplog.text
    with pytest.raises(ConfigurationError, match="without one"):
        mirror.step()


def test_a_frequency_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="frequency is 0"):
        RunSchedule([(ExponentialLR(make_optimizer(), 0.5), 0)])


# Which run


@pytest.mark.parametrize("name", ["POTLUCK_LINK", "PL_INITIAL_PEERS", "INITIAL_PEERS"])
def test_the_link_comes_from_the_environment_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert JoinConfig().link() == ""
    monkeypatch.setenv(name, LINK)
    assert JoinConfig().link() == LINK
    assert JoinConfig(initial_peers=[LINK.replace("bakery", "other")]).link() != LINK


def test_a_run_id_must_be_that_of_the_link() -> None:
    assert JoinConfig(initial_peers=LINK, run_id="Bakery").link() == LINK
    with pytest.raises(ConfigurationError, match="leave run_id out"):
        JoinConfig(initial_peers=LINK, run_id="kitchen")
    assert run_name("lightning_run") == "lightning-run"


def test_where_links_are_accepted_can_be_said_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTLUCK_LISTEN", "127.0.0.1")
    assert JoinConfig().peer_options()["listen"] == ("tcp://127.0.0.1:0",)
    assert JoinConfig(client_mode=True).peer_options()["listen"] == ()
    assert JoinConfig(listen=("tcp://10.0.0.1:4000",)).peer_options()["listen"] == ("tcp://10.0.0.1:4000",)


# Without the frameworks


def test_who_has_not_installed_a_framework_is_told_how_to() -> None:
    with pytest.raises(ExtraMissingError, match=r"pip install 'potluck-train\[lightning\]'"):
        require("no_such_framework", "lightning")


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_the_integrations_say_so_and_the_rest_does_not_need_them(framework: str) -> None:
    code = f"""
import sys
sys.modules[{framework!r}] = None
import potluck, potluck.integrations, potluck.integrations.openrun
potluck.Optimizer, potluck.DiLoCo
try:
    import potluck.integrations.{framework}
except ImportError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert f"ExtraMissingError {framework}" in done.stdout
    assert f"pip install 'potluck-train[{framework}]'" in done.stdout


def test_nothing_else_imports_the_integrations() -> None:
    source = Path(__file__).resolve().parents[2] / "src" / "potluck"
    users = [
        path.relative_to(source).parts[0]
        for path in source.rglob("*.py")
        if "potluck.integrations" in path.read_text() and path != source / "__init__.py"
    ]
    assert set(users) <= {"integrations", "peer", "testing"}  # the last names it, among what it does not import


# LAMB


def test_lamb_is_adam_scaled_to_the_length_of_each_tensor() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(5, 3))
    start = parameter.detach().clone()
    optimizer = Lamb([parameter], lr=0.1, weight_decay=0.01)
    gradients = [torch.randn(5, 3) for _ in range(3)]
    expected, mean, square = start.clone(), torch.zeros(5, 3), torch.zeros(5, 3)
    for number, gradient in enumerate(gradients, 1):
        parameter.grad = gradient.clone()
        optimizer.step()
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        update = (mean / (1 - 0.9**number)) / ((square / (1 - 0.999**number)).sqrt() + 1e-6) + 0.01 * expected
        expected = expected - 0.1 * (expected.norm() / update.norm()) * update
    torch.testing.assert_close(parameter.detach(), expected)


def test_lamb_moves_what_is_zero_and_refuses_nonsense() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    Lamb([parameter], lr=0.5).step()
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -0.5))
    with pytest.raises(ConfigurationError, match="none may be below 0"):
        Lamb([parameter], lr=-1.0)
