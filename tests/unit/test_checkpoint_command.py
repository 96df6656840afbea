"""`potluck checkpoint list` and `verify`, on folders that have nothing, or nothing that can be used."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from potluck.cli.main import app
from potluck.state.backupfile import record_path


def checkpoint(command: str, folder: Path, *options: str) -> Result:
    arguments = ["checkpoint", command, "--path", str(folder), *options]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.mark.parametrize("command", ["list", "verify"])
def test_no_backups_are_no_trouble(command: str, tmp_path: Path) -> None:
    result = checkpoint(command, tmp_path)
    assert result.exit_code == 0
    assert "no backups yet" in result.output


def test_backups_that_are_all_broken_are_trouble(tmp_path: Path) -> None:
    record_path(tmp_path, 3).write_text('{"epoch": 3, ')
    listed = checkpoint("list", tmp_path)
    assert listed.exit_code == 1
    assert "None of the backups here can be read" in listed.output
    verified = checkpoint("verify", tmp_path)
    assert verified.exit_code == 1
    assert "3" in verified.output
    assert "no backups yet" not in verified.output
