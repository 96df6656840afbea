"""Commands that only look: what they say to whom the run does not let in, and to whom has nothing to show."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from potluck.cli import console, joining
from potluck.cli.main import app
from potluck.errors import NotAdmittedError
from potluck.hub.joinlink import JoinLink


async def nothing(*_: Any) -> None:
    pass


def refusal(monkeypatch: pytest.MonkeyPatch, link: JoinLink, key: Path | None, **options: bool) -> str:
    async def refused(*_: Any) -> None:
        raise NotAdmittedError("only those with an invite")

    monkeypatch.setattr(joining, "seated", refused)
    monkeypatch.setattr(console, "run", asyncio.run)  # the fastest loop leaves a pipe in the process, for good
    with pytest.raises(NotAdmittedError) as caught:
        joining.observe(link, "monitor", key, False, nothing, **options)
    return str(caught.value)


def test_who_was_let_in_without_an_invite_is_told_to_look_by_that_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = JoinLink(host="127.0.0.1", port=4222, run="bakery", ca_hash="")
    assert "--identity-path" in refusal(monkeypatch, asking, None)
    plain = "only those with an invite"
    assert refusal(monkeypatch, asking, tmp_path / "key") == plain  # which was named already
    assert refusal(monkeypatch, asking, None, takes_key=False) == plain  # and which a command may not have


def test_a_file_without_a_receipt_is_named(tmp_path: Path) -> None:
    path = tmp_path / "theirs.jsonl"
    path.write_text("nonsense\n")
    result = CliRunner().invoke(app, ["receipts", str(path)], env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.exit_code == 1
    words = "".join(result.output.split())  # wherever the lines were broken
    assert "".join(f"There is no genuine receipt in {path}.".split()) in words
    assert "theycomewhileyoutrain" not in words


def test_a_recipe_without_data_is_told_in_one_line() -> None:
    result = CliRunner().invoke(app, ["download", "data", "digits"], env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.output == "The recipe digits needs no data: nothing to fetch.\n"
