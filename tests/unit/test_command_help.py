"""Every command explains itself, with an example. (test_commands.py asks some of them in processes of their own.)"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from potluck.cli.main import app
from potluck.errors import ConfigurationError
from potluck.training.books.shards import MAX_READERS
from potluck.training.manifest.runfile import read_run_file

COMMANDS = [
    ["train"],
    ["aux"],
    ["visualize"],
    ["receipts"],
    ["plan"],
    ["tokenize"],
    ["tune"],
    *(["run", name] for name in ("pause", "resume", "set", "rollback", "show", "log")),
    *(["checkpoint", name] for name in ("list", "verify", "save", "export", "upload")),
    ["download", "data"],
    *(["members", name] for name in ("invite", "invites", "revoke", "requests", "approve", "deny", "list")),
    *(["members", name] for name in ("ban", "unban", "bans", "pardon", "excluded")),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_explains_itself(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"potluck {' '.join(command)}" in result.output


def test_help_keeps_the_names_of_tables_of_run_toml() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300", "TERM": "dumb"})
    assert "under [data] uses them" in result.output


def test_a_folder_that_is_there_is_written_over_only_if_asked(tmp_path: Path) -> None:
    def init(*options: str) -> Result:
        return CliRunner().invoke(app, ["init", str(tmp_path / "my-run"), "--recipe", "digits", *options])

    assert init().exit_code == 0
    file = tmp_path / "my-run" / "run.toml"
    first = file.read_text()
    file.write_text("mine")
    assert isinstance(init().exception, ConfigurationError)
    assert file.read_text() == "mine"
    assert init("--force").exit_code == 0
    assert file.read_text() == first


def test_a_run_can_be_made_from_another(tmp_path: Path) -> None:
    experiment = Path(__file__).parents[2] / "experiments" / "trecover"
    result = CliRunner().invoke(app, ["init", str(tmp_path / "mine"), "--recipe", str(experiment)])
    assert result.exit_code == 0, result.exception
    assert read_run_file(tmp_path / "mine").name == "mine"
    assert (tmp_path / "mine" / "recipe.py").read_text() == (experiment / "recipe.py").read_text()
    assert (tmp_path / "mine" / "tiny.toml").exists()


@pytest.mark.parametrize("group", ["run", "checkpoint", "download"])
def test_a_group_lists_its_commands(group: str) -> None:
    result = CliRunner().invoke(app, [group, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    for command in (command for command in COMMANDS if command[0] == group):
        assert command[1] in result.output


@pytest.mark.parametrize(
    "option",
    [
        ["--batch-size", "0"],
        ["--n-workers", "0"],
        ["--n-workers", str(MAX_READERS + 1)],
        ["--threads", "0"],
        ["--max-steps", "0"],
        ["--hand-in-seconds", "-1"],
        ["--recipe", "nowhere.py"],
    ],
    ids=" ".join,
)
def test_a_wrong_option_is_told_before_anybody_is_looked_for(option: list[str]) -> None:
    link = "potluck://127.0.0.1:4/bakery?ca=abcdefghijklmnopqrstuvwxyz234567#ask"
    result = CliRunner().invoke(app, ["train", link, *option], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    assert option[0] in result.output


def test_an_address_to_listen_on_is_read_before_anybody_is_looked_for() -> None:
    link = "potluck://127.0.0.1:4/bakery?ca=abcdefghijklmnopqrstuvwxyz234567#ask"
    result = CliRunner().invoke(app, ["train", link, "--listen", "0.0.0.0"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert isinstance(result.exception, ConfigurationError)
    assert "'0.0.0.0' is not an address: write tcp://HOST:PORT" in str(result.exception)


def test_ctrl_c_right_after_the_start_shows_no_traceback() -> None:
    code = """
import runpy, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
runpy.run_module("potluck.cli", run_name="__main__")
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (out.returncode, out.stdout, out.stderr) == (130, "", "")
