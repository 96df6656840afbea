"""Every command explains itself, with an example. (test_commands.py asks some of them in processes of their own.)"""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from potluck.cli.main import app

COMMANDS = [
    ["train"],
    ["aux"],
    ["visualize"],
    ["receipts"],
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


@pytest.mark.parametrize("group", ["run", "checkpoint", "download"])
def test_a_group_lists_its_commands(group: str) -> None:
    result = CliRunner().invoke(app, [group, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    for command in (command for command in COMMANDS if command[0] == group):
        assert command[1] in result.output
