"""`potluck fleet demo` as a person runs it."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from commandline import PATIENCE_SECONDS, Terminal

from potluck.testing.polling import poll_until_sync


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_all_promises_are_kept(terminal: Terminal) -> None:
    folder = terminal.folder / "demo"
    found = terminal.ask("fleet", "demo", "--folder", folder, patience_seconds=800)
    assert found["ok"], found["broken"]
    assert [each["kind"] for each in found["incidents"]] == ["laptop killed", "learner killed", "hub killed"]
    assert len(found["returns"]) == 4
    assert Path(found["plot"]).read_bytes().startswith(b"\x89PNG")
    assert "has a demo already" in terminal.refuse("fleet", "demo", "--folder", folder, code=2)


def test_ctrl_c_leaves_nobody_behind(terminal: Terminal) -> None:
    folder = terminal.folder / "demo"
    demo = terminal.start("fleet", "demo", "--folder", folder, name="demo")
    demo.wait_for_line("Four laptops are in the fleet", PATIENCE_SECONDS)
    demo.send_signal(signal.SIGINT)
    assert demo.wait(2 * PATIENCE_SECONDS) == 130

    def left() -> list[int]:
        return [
            p.pid for p in psutil.process_iter(["cmdline"]) if any(str(folder) in w for w in p.info["cmdline"] or ())
        ]

    poll_until_sync(lambda: not left(), PATIENCE_SECONDS, lambda: f"{left()} are left")


def test_init_writes_the_example(terminal: Terminal) -> None:
    terminal.run("fleet", "init", terminal.folder / "mine")
    assert {"README.md", "fleet.toml", "laptop.py"} <= {path.name for path in (terminal.folder / "mine").iterdir()}
    assert "exists already" in terminal.refuse("fleet", "init", terminal.folder / "mine", code=2)
