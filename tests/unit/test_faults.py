from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest

from potluck import faultpoints
from potluck.errors import ConfigurationError, HubUnavailableError
from potluck.testing.faults import FIRED_VARIABLE, PLAN_VARIABLE, Faults, InjectedFaultError, install_from_environment
from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import Children

PROGRAM = """
import sys, time
from potluck.faultpoints import reach
for epoch in range(3):
    reach("round.begun", peer="alice", epoch=epoch)
    print("epoch", epoch, flush=True)
print("arguments", sys.argv[1:], flush=True)
"""


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    return Faults(tmp_path / "fired.jsonl")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_without_a_hook_a_point_does_nothing() -> None:
    assert faultpoints.reach("anywhere", peer="alice") is None


def test_a_fault_fires_where_point_and_labels_match(faults: Faults) -> None:
    faults.add("exchange.sent", action="raise", peer="alice", epoch=3)
    with faults.installed():
        faultpoints.reach("exchange.sent", peer="alice", epoch=2)
        faultpoints.reach("exchange.sent", peer="bob", epoch=3)
        faultpoints.reach("exchange.begun", peer="alice", epoch=3)
        faultpoints.reach("exchange.sent", epoch=3)
        assert faults.fired() == []
        with pytest.raises(InjectedFaultError, match="raise"):
            faultpoints.reach("exchange.sent", peer="alice", epoch=3, part=7)
        faultpoints.reach("exchange.sent", peer="alice", epoch=3)
    (fired,) = faults.fired()
    assert (fired.point, fired.labels) == ("exchange.sent", {"peer": "alice", "epoch": "3", "part": "7"})
    assert fired.monotonic_seconds <= time.monotonic()
    faults.assert_all_fired()


def test_a_record_that_is_half_written_is_not_read_yet(faults: Faults, tmp_path: Path) -> None:
    faults.add("exchange.sent", action="note")
    with faults.installed():
        faultpoints.reach("exchange.sent")
    path = tmp_path / "fired.jsonl"
    line = path.read_bytes()
    path.write_bytes(line + line[:20])
    assert len(faults.fired()) == 1
    path.write_bytes(line + line)
    assert len(faults.fired()) == 2


def test_the_hook_is_gone_after_the_block(faults: Faults) -> None:
    faults.add("point", action="raise", times=0)
    with faults.installed(), pytest.raises(InjectedFaultError):
        faultpoints.reach("point")
    faultpoints.reach("point")
    assert len(faults.fired()) == 1


def test_skip_and_times_choose_among_the_matches(faults: Faults) -> None:
    faults.add("point", action="note", skip=1, times=2)
    faults.add("point", action="note", times=0)
    with faults.installed():
        for number in range(5):
            faultpoints.reach("point", number=number)
    assert [fired.labels["number"] for fired in faults.fired(0)] == ["1", "2"]
    assert len(faults.fired(1)) == 5


def test_a_named_error_is_raised(faults: Faults) -> None:
    faults.add("hub.request", action="raise:HubUnavailableError")
    faults.add("socket.read", action="raise:ConnectionResetError")
    with faults.installed():
        with pytest.raises(HubUnavailableError):
            faultpoints.reach("hub.request")
        with pytest.raises(ConnectionResetError):
            faultpoints.reach("socket.read")


@pytest.mark.parametrize(
    "action",
    ["explode", "delay", "delay:soon", "delay:-1", "stop:4000", "kill:9", "raise:Nonsense", "raise:print", "exit:"],
)
def test_a_wrong_action_is_refused_when_the_plan_is_made(faults: Faults, action: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        faults.add("point", action=action)


def test_a_fault_that_never_fired_fails_the_test(faults: Faults) -> None:
    faults.add("point.misspelt", action="kill")
    with faults.installed():
        faultpoints.reach("point.misspelled")
    with pytest.raises(AssertionError, match=r"never fired.*point\.misspelt"):
        faults.assert_all_fired()


def test_an_environment_without_a_plan_installs_nothing() -> None:
    assert install_from_environment({}) is False
    with pytest.raises(ConfigurationError, match=FIRED_VARIABLE):
        install_from_environment({PLAN_VARIABLE: "[]"})


def test_a_plan_written_by_hand_is_understood(tmp_path: Path) -> None:
    plan = '[{"point": "exchange.sent", "peer": "alice", "epoch": 3, "action": "note"}]'
    try:
        assert install_from_environment({PLAN_VARIABLE: plan, FIRED_VARIABLE: str(tmp_path / "fired.jsonl")})
        faultpoints.reach("exchange.sent", peer="alice", epoch=3)
    finally:
        faultpoints.install(None)
    assert len(Faults(tmp_path / "fired.jsonl").fired()) == 1


def test_a_plan_with_a_mistake_is_refused(tmp_path: Path) -> None:
    for plan in ('[{"point": "a"}]', '[{"point": "a", "action": "explode"}]', "{}"):
        with pytest.raises(msgspec.ValidationError):
            install_from_environment({PLAN_VARIABLE: plan, FIRED_VARIABLE: str(tmp_path / "fired.jsonl")})


# From here on with real child processes.


def test_a_child_is_killed_at_the_point_and_has_recorded_it(faults: Faults, children: Children, program: Path) -> None:
    faults.add("round.begun", action="kill", peer="alice", epoch=1)
    child = children.spawn(faults.argv(str(program), "--flag"), env=faults.environment())
    assert child.wait() == -signal.SIGKILL
    assert "epoch 0" in child.output()
    assert "epoch 1" not in child.output()
    (fired,) = faults.fired()
    assert (fired.pid, fired.labels["epoch"]) == (child.pid, "1")


@pytest.mark.parametrize(
    ("action", "exit_code"), [("exit", 1), ("exit:7", 7), ("raise", 1), ("interrupt", -signal.SIGINT)]
)
def test_a_child_ends_as_the_action_says(
    faults: Faults, children: Children, program: Path, action: str, exit_code: int
) -> None:
    faults.add("round.begun", action=action, epoch=2)
    child = children.spawn(faults.argv(str(program)), env=faults.environment())
    assert child.wait() == exit_code
    assert "epoch 1" in child.output()
    assert "epoch 2" not in child.output()
    faults.assert_all_fired()


def test_a_stopped_child_goes_on_by_itself_after_its_time(faults: Faults, children: Children, program: Path) -> None:
    faults.add("round.begun", action="stop:0.5", epoch=1)
    child = children.spawn(faults.argv(str(program)), env=faults.environment())
    fired = faults.wait_until_fired()
    assert child.wait() == 0
    assert time.monotonic() - fired.monotonic_seconds >= 0.5
    assert "epoch 2" in child.output()


def test_a_child_stopped_without_a_time_waits_for_the_test(faults: Faults, children: Children, program: Path) -> None:
    faults.add("round.begun", action="stop", epoch=1)
    child = children.spawn(faults.argv(str(program)), env=faults.environment())
    faults.wait_until_fired()

    def is_stopped() -> bool:
        return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    poll_until_sync(is_stopped, 30, "the child to be stopped")
    assert "epoch 1" not in child.output()
    child.thaw()
    assert child.wait() == 0


def test_a_delayed_child_goes_on(faults: Faults, children: Children, program: Path) -> None:
    faults.add("round.begun", action="delay:0.3", epoch=2)
    child = children.spawn(faults.argv(str(program), "one", "two"), env=faults.environment())
    child.wait_for_line(r"arguments \['one', 'two'\]")
    assert time.monotonic() - faults.wait_until_fired().monotonic_seconds >= 0.3
    assert child.wait() == 0


def test_a_module_runs_with_its_arguments(faults: Faults, children: Children) -> None:
    child = children.spawn(faults.argv("-m", "json.tool", "--help"), env=faults.environment())
    assert "usage" in child.check()


def test_a_child_that_is_started_plainly_ignores_the_plan(faults: Faults, children: Children, program: Path) -> None:
    faults.add("round.begun", action="kill")
    child = children.spawn([sys.executable, str(program)], env=faults.environment())
    assert child.wait() == 0
    assert faults.fired() == []


async def test_waiting_for_a_fault_leaves_the_event_loop_free(
    faults: Faults, children: Children, program: Path
) -> None:
    faults.add("round.begun", action="kill", epoch=0)
    child = children.spawn(faults.argv(str(program)), env=faults.environment())
    assert (await faults.until_fired()).pid == child.pid
    assert await child.until_exit() == -signal.SIGKILL
