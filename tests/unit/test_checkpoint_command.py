"""`potluck checkpoint list` and `verify`: on folders that have nothing, nothing that can be used, or a peer's."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from potluck.cli.folders import states_folder
from potluck.cli.main import app
from potluck.errors import ConfigurationError
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


def test_a_peers_own_backups_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own"
    (own / "backups").mkdir(parents=True)
    record_path(own / "backups", 3).write_text("{")
    assert "None of the backups here" in checkpoint("list", own).output  # by its --state-path
    listing = ["checkpoint", "list", "--run", "bakery"]
    refused = CliRunner().invoke(app, listing).exception
    assert isinstance(refused, ConfigurationError)
    assert "--state-path by --path" in str(refused)
    for peer, found in (("Ada", "None of the backups here"), ("Grace", "several peers")):
        folder = states_folder("bakery", peer) / "backups"
        folder.mkdir(parents=True)
        record_path(folder, 3).write_text("{")
        result = CliRunner().invoke(app, listing, env={"COLUMNS": "200", "TERM": "dumb"})
        assert found in result.output + str(result.exception)


def test_an_epoch_without_a_backup_is_a_mistake_and_no_broken_backup(tmp_path: Path) -> None:
    record_path(tmp_path, 3).write_text("{")
    refused = checkpoint("verify", tmp_path, "--epoch", "5").exception
    assert isinstance(refused, ConfigurationError)
    assert str(refused) == f"{tmp_path} has no backup of epoch 5: there are 3"
    assert checkpoint("verify", tmp_path, "--epoch", "3").exit_code == 1


def test_a_folder_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", forbidden)
    refused = checkpoint("list", tmp_path / "theirs").exception
    assert isinstance(refused, ConfigurationError)
    assert "theirs cannot be looked at: Permission denied" in str(refused)


def test_the_first_epoch_is_named_too(tmp_path: Path) -> None:
    result = checkpoint("export", tmp_path, str(tmp_path / "model.safetensors"), "--epoch", "0")
    assert "no backup of epoch 0" in str(result.exception)
