"""What the README shows is run as it stands there, and what it names is there."""

from __future__ import annotations

import os
import re
import shlex
import signal
from pathlib import Path

import pytest
from commandline import PATIENCE_SECONDS, Terminal

from potluck.hub.joinlink import JoinLink
from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import ManagedProcess

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
LINK = "potluck://…"


def shown_commands() -> list[list[str]]:
    """Every `potluck` command in a block of the README, split as a shell would, comments left out."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [words[1:] for words in lines if words and words[0] == "potluck"]


def printed_link(host: ManagedProcess) -> str:
    """The join link as a person finds it on the screen."""
    found = re.search(r"potluck://\S+", host.output())
    return found.group() if found else ""


def test_a_run_is_started_and_joined_as_the_readme_says(
    fresh_terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = fresh_terminal
    init_command, host_command, *others = shown_commands()
    assert (init_command[0], host_command[0]) == ("init", "host")
    monkeypatch.chdir(terminal.folder)  # where commands are typed
    terminal.run(*init_command)
    host = terminal.start(*host_command, "--listen", "127.0.0.1")  # a test opens nothing to the network
    link = poll_until_sync(lambda: printed_link(host), PATIENCE_SECONDS, lambda: f"a join link: {host.output()}")
    joined = []
    for words in others:
        command = [link if word == LINK else word for word in words]
        if command[0] == "join":
            joined.append(terminal.start(*command))
        elif command[0] == "monitor":
            assert "epoch" in terminal.run(*command, "--once")
        elif command[0] == "dashboard":
            dashboard = terminal.start(*command, "--port", "0")
            dashboard.wait_for_line("The dashboard is at", PATIENCE_SECONDS)
            dashboard.interrupt()
            assert dashboard.wait(PATIENCE_SECONDS) == 0, dashboard.output()
        else:
            answer = terminal.run(*command)
            if command[:2] == ["members", "invite"]:
                [invited] = re.findall(r"potluck://\S+", answer)
                assert JoinLink.parse(invited).invite != JoinLink.parse(link).invite
    assert {words[0] for words in others} == {"join", "monitor", "dashboard", "doctor", "members"}
    assert joined
    for process in joined:
        poll_until_sync(lambda p=process: "You are in" in p.output(), PATIENCE_SECONDS, process.output)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 0, process.output()
    os.kill(host.pid, signal.SIGINT)
    assert host.wait(PATIENCE_SECONDS) == 0, host.output()


def test_the_readme_is_one_screen() -> None:
    assert len(README.splitlines()) <= 60


def test_the_tree_names_what_is_there() -> None:
    [tree] = re.findall(r"```\n(src/potluck/.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    packages = set(re.findall(r"^  (\w+)/", tree, re.MULTILINE))
    source = ROOT / "src" / "potluck"
    assert packages == {path.parent.name for path in source.glob("*/__init__.py")}
    for folder in re.findall(r"^(\w+)/", tree, re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder


def test_links_in_the_documents_lead_somewhere() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_two_commands_are_there_and_can_be_run() -> None:
    for script in re.findall(r"^(scripts/\w+)", README, re.MULTILINE):
        assert os.access(ROOT / script, os.X_OK), script
