"""What commands say to people."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from potluck.cli import console


def test_whose_alarm_is_over_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(console.out, "print", lambda line: lines.append(str(line)))
    console.tell_alarm("dropped", "", "U" + "A" * 55, as_json=False)
    console.tell_alarm("stalled", "", "", as_json=False)
    assert lines == ["✓ no longer: dropped (UAAAAAAAAAAA)", "✓ no longer: stalled"]


def test_a_table_that_does_not_fit_is_shown_in_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"peer": "U" + "A" * 55, "name": "[b]Ada[/b]", "state": "alive"},
        {"peer": "UB", "name": "", "state": "away"},
    ]

    def shown(width: int) -> str:
        console_ = Console(width=width, file=io.StringIO())
        monkeypatch.setattr(console, "out", console_)
        console.show_table(rows, empty="")
        return console_.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    assert "│ UAAAAAAAAAAA │ [b]Ada[/b] │ alive │" in shown(80)
    narrow = shown(30)
    assert narrow == "peer: UAAAAAAAAAAA\nname: [b]Ada[/b]\nstate: alive\n\npeer: UB\nname: \nstate: away\n"
