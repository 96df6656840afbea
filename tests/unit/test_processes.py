from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import ChildError, Children, ManagedProcess, spawn


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def state_of(process: ManagedProcess) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


SLEEPER = "import time; print('ready', flush=True); time.sleep(600)"


def test_output_of_both_streams_is_collected(children: Children) -> None:
    child = children.spawn(python("import sys; print('out'); sys.stderr.write('err\\n')"))
    assert sorted(child.check().split()) == ["err", "out"]
    assert child.exit_code == 0


def test_a_line_is_waited_for_and_its_groups_come_back(children: Children) -> None:
    child = children.spawn(python("print('hello'); print('listening on port 4222'); import time; time.sleep(600)"))
    assert child.wait_for_line(r"port (\d+)")[1] == "4222"
    assert child.find_line("goodbye") is None


async def test_a_line_is_waited_for_in_the_event_loop(children: Children) -> None:
    child = children.spawn(python(SLEEPER))
    assert (await child.until_line("^ready$"))[0] == "ready"


def test_half_a_line_is_no_line_yet(children: Children) -> None:
    child = children.spawn(python("print('port 42', end='', flush=True); input(); print('22')"), stdin=True)
    poll_until_sync(child.output, 30, "the first half")
    assert child.find_line("port") is None
    child.send_line("go on")
    assert child.wait_for_line(r"port (\d+)")[1] == "4222"


def test_lines_after_a_mark_only(children: Children) -> None:
    child = children.spawn(
        python("import sys\nfor line in sys.stdin: print('got', line, end='', flush=True)"), stdin=True
    )
    child.send_line("first")
    child.wait_for_line("got first")
    mark = child.mark()
    assert child.find_line("got", since=mark) is None
    child.send_line("second")
    assert child.wait_for_line(r"got (\w+)", since=mark)[1] == "second"


def test_a_process_that_ends_without_the_line_fails_at_once_with_its_output(children: Children) -> None:
    child = children.spawn(python("print('cannot open the folder'); raise SystemExit(3)"), name="host")
    with pytest.raises(ChildError, match=r"(?s)host ended without.*exit code 3.*cannot open the folder"):
        child.wait_for_line("ready", deadline_seconds=600)


def test_a_deadline_that_passes_shows_the_output(children: Children) -> None:
    child = children.spawn(python(SLEEPER))
    child.wait_for_line("ready")
    with pytest.raises(ChildError, match=r"(?s)waited 0.05 s for a line with 'never'.*end of its output:\nready"):
        child.wait_for_line("never", deadline_seconds=0.05)
    with pytest.raises(ChildError, match="still runs after 0"):
        child.wait(0)


def test_a_failing_process_fails_the_check(children: Children) -> None:
    child = children.spawn(python("raise SystemExit('no such run')"))
    with pytest.raises(ChildError, match=r"(?s)failed.*exit code 1.*no such run"):
        child.check()


def test_the_message_shows_only_the_end_of_a_long_output(children: Children) -> None:
    child = children.spawn(python("print('x' * 100_000); print('the end'); raise SystemExit(1)"))
    with pytest.raises(ChildError) as caught:
        child.check()
    assert "the end" in str(caught.value)
    assert len(str(caught.value)) < 10_000
    assert len(child.output()) > 100_000


def test_signals_kill_freeze_thaw_interrupt(children: Children) -> None:
    child = children.spawn(python(SLEEPER))
    child.wait_for_line("ready")
    child.freeze()
    poll_until_sync(lambda: state_of(child) == "T", 30, "the child to be frozen")
    child.thaw()
    poll_until_sync(lambda: state_of(child) != "T", 30, "the child to go on")
    child.interrupt()
    assert child.wait() == -signal.SIGINT
    other = children.spawn(python(SLEEPER))
    other.kill()
    assert other.exit_code == -signal.SIGKILL
    with pytest.raises(ChildError, match="cannot get SIGSTOP: it has ended"):
        other.freeze()


def test_the_environment_is_added_to_ours(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "yes")
    child = children.spawn(
        python("import os; print(os.environ['INHERITED'], os.environ['ADDED'])"), env={"ADDED": "too"}
    )
    assert child.check().strip() == "yes too"


def test_a_command_that_does_not_exist_leaves_nothing(children: Children) -> None:
    with pytest.raises(FileNotFoundError):
        children.spawn(["no-such-command-anywhere"])


PARENT = """
import subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
same_group = subprocess.Popen(sleeper)
own_session = subprocess.Popen(sleeper, start_new_session=True)
print("pids", same_group.pid, own_session.pid, flush=True)
if sys.argv[1] == "stay":
    time.sleep(600)
"""


@pytest.mark.parametrize("parent", ["stay", "leave"])
def test_closing_ends_descendants_in_other_sessions_too(parent: str) -> None:
    with spawn(python(PARENT, parent)) as child:
        found = child.wait_for_line(r"pids (\d+) (\d+)")
        pids = [int(found[1]), int(found[2])]
        if parent == "leave":
            assert child.wait() == 0
        assert all(is_running(pid) for pid in pids)
    assert not any(is_running(pid) for pid in pids)


def test_closing_ends_a_frozen_process_and_may_be_repeated() -> None:
    child = spawn(python(SLEEPER))
    child.wait_for_line("ready")
    child.freeze()
    child.close()
    child.close()
    assert child.exit_code == -signal.SIGKILL
    assert child.tail() == "ready\n"


def test_closing_leaves_other_processes_alone(children: Children) -> None:
    bystander = children.spawn(python(SLEEPER))
    with spawn(python(SLEEPER)):
        pass
    assert bystander.exit_code is None


def test_all_children_end_with_the_block_also_after_an_error(tmp_path: Path) -> None:
    started: list[ManagedProcess] = []

    def failing_test() -> None:
        with Children(tmp_path) as running:
            started.extend(running.spawn(python(SLEEPER), name=f"peer{number}") for number in range(3))
            raise RuntimeError("the test failed")

    with pytest.raises(RuntimeError, match="the test failed"):
        failing_test()
    assert len(started) == 3
    assert not any(is_running(child.pid) for child in started)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000-peer0.log", "001-peer1.log", "002-peer2.log"]


def test_each_child_has_a_session_of_its_own(children: Children) -> None:
    child = children.spawn(python(SLEEPER))
    assert os.getsid(child.pid) == child.pid != os.getsid(0)
