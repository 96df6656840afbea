"""What commands say to people."""

from __future__ import annotations

import io
import json

import pytest

from potluck.cli import console
from potluck.hub.guard.member import AccessRequest


def test_whose_alarm_is_over_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(console.out, "print", lambda line: lines.append(str(line)))
    console.tell_alarm("dropped", "", "U" + "A" * 55, as_json=False)
    console.tell_alarm("stalled", "", "", as_json=False)
    assert lines == ["✓ no longer: dropped (UAAAAAAAAAAA)", "✓ no longer: stalled"]


def test_who_asks_to_be_let_in_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = AccessRequest(
        peer="U" + "A" * 55, person="key:U", role="trainer", name="Ann", host="192.0.2.1", message="may I?"
    )
    stream = io.StringIO()
    monkeypatch.setattr(console, "out", console.PlainConsole(file=stream, width=200))
    console.tell_request(request, as_json=False)
    assert stream.getvalue() == (
        "Ann (UAAAAAAAAAAA) asks to be let in as trainer, from 192.0.2.1: “may I?”\n"
        "  potluck members approve UAAAAAAAAAAA    (or deny UAAAAAAAAAAA)\n"
    )
    console.tell_request(request, as_json=True)
    assert json.loads(capsys.readouterr().out)["event"] == "asks to be let in"
