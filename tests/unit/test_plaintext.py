"""Names and messages that would command a terminal."""

from __future__ import annotations

import io
import json
import logging

import pytest
from rich.table import Table
from rich.text import Text

from potluck.cli import console
from potluck.errors import ConfigurationError, ProtocolError
from potluck.hub.access.application import Application
from potluck.hub.presence import Card, Presence
from potluck.plaintext import check_plain, clean, clean_all, clean_lines
from potluck.run.peer import PeerConfig

BAD = "a\x1b[31mred\x07\nb"
BAD_CHARACTERS = ["\x00", "\n", "\x1b", "\x7f", "\x9b", "\u061c", "\u200f", "\u2028", "\u202e", "\u2066", "\ufeff"]
FINE = ["", "Ada", "Zoë Ångström", "李小龍", "علی", "👩‍👩‍👧 & co", "<script>", "[bold]x[/bold]", "a b"]


@pytest.mark.parametrize("character", BAD_CHARACTERS)
def test_such_characters_are_refused_by_name_and_written_out(character: str) -> None:
    application = Application(role="trainer", name="Ada", message=f"let {character} in")
    with pytest.raises(ProtocolError, match="message has a control or bidirectional character"):
        check_plain(application)
    shown = clean(f"let {character} in")
    assert shown.isprintable()
    assert clean(shown) == shown


@pytest.mark.parametrize("text", FINE)
def test_other_peoples_letters_are_fine(text: str) -> None:
    check_plain(Application(role="trainer", name=text))
    assert clean(text) == text


def test_a_message_is_cleaned_to_the_last_text() -> None:
    card = Card(session="s", role="trainer", name=BAD, addresses=("tcp://\u202e",))
    presence = Presence(peer="U", card=card, state="dead", host="h", person="p", reason=BAD)
    cleaned = clean_all(presence)
    assert cleaned.card.name == cleaned.reason == r"a\x1b[31mred\x07\x0ab"
    assert cleaned.card.addresses == (r"tcp://\u202e",)
    assert clean_all(cleaned) is cleaned
    assert clean_lines("two\nlines\x1b") == "two\nlines" + r"\x1b"


@pytest.mark.parametrize(("field", "option"), [("name", BAD), ("message", "x\u202ey")])
def test_a_peer_is_told_before_it_asks_any_hub(field: str, option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{field} has a control or bidirectional character .*: leave it out"):
        PeerConfig(**{field: option})


def test_nothing_that_is_printed_commands_the_terminal() -> None:
    stream = io.StringIO()
    shown = console.PlainConsole(file=stream, force_terminal=True, width=200)
    table = Table("name")
    table.add_row(Text(BAD))
    shown.print(Text.assemble("it is ", (BAD, "bold")))
    shown.print(BAD, "\u202e", markup=False)
    shown.print(table)
    printed = stream.getvalue()
    assert "\x1b[1m" in printed  # our own bold
    assert "\x1b[31m" not in printed
    assert not any(character in printed for character in "\x07\u202e")
    assert printed.count(r"a\x1b") == 3


def test_a_log_line_is_one_line() -> None:
    record = logging.LogRecord("potluck", logging.WARNING, "", 0, "%s asks for access", (BAD,), None)
    assert console.PlainFormatter("%(message)s").format(record) == r"a\x1b[31mred\x07\x0ab asks for access"


def test_json_says_the_same_and_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    told = {"name": BAD, "more": "\x7f\x85\u202e 李"}
    console.print_json(told)
    printed = capsys.readouterr().out
    assert printed.rstrip("\n").isprintable()
    assert json.loads(printed) == told
