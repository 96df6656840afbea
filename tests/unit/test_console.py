"""What commands say to people."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from potluck.cli import console
from potluck.hub.access.member import AccessRequest
from potluck.hub.presence import Card, Presence
from potluck.peer.roster import Roster


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


def test_those_who_only_watch_come_and_go_unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(console.out, "print", lambda line: lines.append(str(line)))
    roster = Roster()
    roster.listen(lambda event: console.tell_roster_event(event, roster.num_working, as_json=False))
    for name, role in (("Ada", "trainer"), ("monitor", "observer"), ("host", "aux")):
        card = Card(session=name, role=role, name=name)  # type: ignore[arg-type]
        roster.apply(Presence(peer=f"U{name}", card=card, state="alive", host="", person=name))
    assert lines == ["Ada (UAda) joined; now 1 peer", "host (Uhost) joined; now 2 peers"]
