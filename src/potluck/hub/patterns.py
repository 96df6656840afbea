"""Subjects and patterns of subjects: what is valid, and what matches what."""

from __future__ import annotations

import re

from potluck.errors import ConfigurationError

TOKEN = re.compile(r"[^\s.*>\x00]+")


def check_subject(subject: str) -> str:
    """The subject itself, if one can publish on it, or ConfigurationError."""
    if not all(TOKEN.fullmatch(token) for token in subject.split(".")):
        raise ConfigurationError(f"{subject[:80]!r} is not a subject that can be published on")
    return subject


def check_pattern(pattern: str) -> str:
    """The pattern itself, if one can subscribe to it, or ConfigurationError."""
    *first, last = pattern.split(".")
    if not all(token == "*" or TOKEN.fullmatch(token) for token in (*first, "*" if last == ">" else last)):
        raise ConfigurationError(f"{pattern[:80]!r} is not a subject that can be subscribed to")
    return pattern


def covers(pattern: str, subject: str) -> bool:
    """Whether a pattern matches a subject, or everything that another pattern matches."""
    tokens, wanted = pattern.split("."), subject.split(".")
    for index, token in enumerate(tokens):
        if token == ">":
            return len(wanted) > index
        if index >= len(wanted) or wanted[index] == ">" or token not in ("*", wanted[index]):
            return False
    return len(wanted) == len(tokens)
