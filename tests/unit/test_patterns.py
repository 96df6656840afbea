from __future__ import annotations

import pytest

from potluck.errors import ConfigurationError
from potluck.hub.patterns import check_pattern, check_subject, covers


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.b", "a", False),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.>", "a.b", True),
        ("a.>", "a.b.c.d", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("a.*.c", "a.b.c", True),
        # Patterns within patterns
        ("a.*", "a.*", True),
        ("a.b", "a.*", False),
        ("a.*", "a.>", False),
        ("a.>", "a.>", True),
        ("a.>", "a.*.>", True),
        ("a.*.>", "a.>", False),
        (">", "a.>", True),
        ("a.>", ">", False),
    ],
)
def test_what_covers_what(pattern: str, subject: str, expected: bool) -> None:
    assert covers(pattern, subject) is expected


@pytest.mark.parametrize("subject", ["a", "a.b", "$JS.API.X", "_INBOX.U1.2", "p.run.kv.store.a-b_c"])
def test_subjects(subject: str) -> None:
    assert check_subject(subject) == subject
    assert check_pattern(subject) == subject


@pytest.mark.parametrize("subject", ["", ".", "a.", ".a", "a..b", "a b", "a\tb", "a\r\nPUB x", "a\0"])
def test_what_is_neither_subject_nor_pattern(subject: str) -> None:
    with pytest.raises(ConfigurationError):
        check_subject(subject)
    with pytest.raises(ConfigurationError):
        check_pattern(subject)


@pytest.mark.parametrize("pattern", ["*", ">", "a.*", "a.>", "*.*.b", "a.*.>"])
def test_patterns_cannot_be_published_on(pattern: str) -> None:
    assert check_pattern(pattern) == pattern
    with pytest.raises(ConfigurationError):
        check_subject(pattern)


@pytest.mark.parametrize("pattern", ["a.>.b", ">.", "a*", "a.b>", "**"])
def test_wildcards_stand_alone(pattern: str) -> None:
    with pytest.raises(ConfigurationError):
        check_pattern(pattern)
