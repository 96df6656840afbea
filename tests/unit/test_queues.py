"""Queues: names, limits, rights, and what a member's connection may do by them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ConfigurationError
from potluck.hub.access.member import Scopes
from potluck.hub.patterns import covers
from potluck.hub.queues import (
    EVERY,
    ITEM_ID,
    QueueDefinition,
    QueueSubjects,
    check_item_id,
    check_queue_name,
    merged_rights,
    parse_rights,
    queue_permissions,
    rights_on,
    stream_configs,
)

ME, OTHER = "U" + "A" * 55, "U" + "B" * 55
SUBJECTS = QueueSubjects("bakery")
DEFINITIONS = {
    "experience": QueueDefinition(name="experience"),
    "secret": QueueDefinition(name="secret"),
    "weights": QueueDefinition(name="weights", kind="topic"),
}


def test_rights_as_people_write_them() -> None:
    assert parse_rights(["a=put", "a=take", "b", "*=take"]) == {
        "a": ("put", "take"), "b": ("put", "take"), "*": ("take",)
    }  # fmt: skip
    for wrong in ("a=read", "A b=put", "=put", "a=put,put,"):
        with pytest.raises(ConfigurationError):
            parse_rights([wrong])


@pytest.mark.parametrize("name", ["", "Upper", "a.b", "a b", "-a", "a" * 41, "a*", "ä"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigurationError):
        check_queue_name(name)


@pytest.mark.parametrize(
    "wrong", [{"max_items": 0}, {"max_bytes": 10}, {"tries": 0}, {"lease_seconds": 0.5}, {"id_window_seconds": 1e9}]
)
def test_limits_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="choose"):
        QueueDefinition(name="a", **wrong)


@given(st.text(min_size=1, max_size=200))
def test_every_id_fits_into_a_subject(text: str) -> None:
    token = check_item_id(text)
    assert ITEM_ID.fullmatch(token)
    assert check_item_id(text) == token


def test_two_invites_allow_what_both_do() -> None:
    assert merged_rights({"a": ("put",)}, {"a": ("take",), "b": ("put",)}) == {"a": ("put", "take"), "b": ("put",)}
    assert rights_on({EVERY: ("take",), "a": ("put",)}, "a") == ("put", "take")
    with pytest.raises(ConfigurationError):
        Scopes(queues={"a": ()})


@pytest.mark.parametrize("rights", [{}, {"experience": ("put",)}, {"experience": ("take",)}, {"weights": ("take",)}])
def test_nothing_is_allowed_beyond_the_rights(rights: dict[str, tuple[str, ...]]) -> None:
    publish, subscribe = queue_permissions(SUBJECTS, ME, rights, DEFINITIONS)  # type: ignore[arg-type]

    def may(subject: str) -> bool:
        return any(covers(pattern, subject) for pattern in publish)

    for name, definition in DEFINITIONS.items():
        granted = rights_on(rights, name)  # type: ignore[arg-type]
        assert may(SUBJECTS.put(name, ME)) == ("put" in granted)
        assert may(SUBJECTS.read(name)) == ("take" in granted)
        assert may(SUBJECTS.next(name)) == ("take" in granted and definition.kind == "queue")
        assert any(covers(each, SUBJECTS.news(name, OTHER)) for each in subscribe) == (
            "take" in granted and definition.kind == "topic"
        )
        assert not may(SUBJECTS.put(name, OTHER))
    for subject in ("$JS.API.STREAM.DELETE.x", "$JS.API.INFO", SUBJECTS.ask(OTHER, "list"), f"_INBOX.{OTHER}.x"):
        assert not may(subject)
    assert not any(covers(each, f"_INBOX.{OTHER}.x") for each in subscribe)


def test_a_dead_taker_fills_no_disk() -> None:
    for definition in DEFINITIONS.values():
        for config in stream_configs(definition, SUBJECTS, 1, 2**20):
            assert config.get("max_bytes", 0) > 0 or config.get("max_msgs", 0) > 0
