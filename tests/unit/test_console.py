"""What commands say to people."""

from __future__ import annotations

import pytest

from potluck.cli import console


def test_whose_alarm_is_over_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(console.out, "print", lambda line: lines.append(str(line)))
    console.tell_alarm("dropped", "", "U" + "A" * 55, as_json=False)
    console.tell_alarm("stalled", "", "", as_json=False)
    assert lines == ["✓ no longer: dropped (UAAAAAAAAAAA)", "✓ no longer: stalled"]
