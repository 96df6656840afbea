"""Which line of a TOML file a message is about (pure): a person who wrote the file looks there first."""

from __future__ import annotations

import re

_PATH = re.compile(r"`\$((?:\.[\w-]+|\[[\d.]+\])+)`")  # as msgspec names a value
_SECTION = re.compile(r"\[(\w+)\]")  # as our own messages name a part of the file
_UNKNOWN = re.compile(r"unknown field `([\w-]+)`")
_ASSIGNED = re.compile(r"\b([a-z_]\w*) ?= ?")  # as in batch=3, or local_updates = true
_WORD = re.compile(r"\b[a-z]\w+\b")
_HEADER = re.compile(r"^\s*\[{1,2}\s*([\w.-]+)\s*\]{1,2}")
_KEY = re.compile(r"^\s*([\w.-]+)\s*=\s*\"?([\w.-]*)")


def line_of_error(text: str, message: str) -> int | None:
    """The line, counted from 1; None where it cannot be told."""
    path = _PATH.search(message)
    parts = re.findall(r"[\w-]+", re.sub(r"\[[\d.]+\]", "", path.group(1))) if path else []
    if section := _SECTION.search(message):
        parts = [section.group(1), *parts]
    if unknown := _UNKNOWN.search(message):
        parts = [*parts, unknown.group(1)]
    keys = _ASSIGNED.findall(message)
    words = _WORD.findall(message)
    settings = [word for word in words if "_" in word]  # elsewhere in the file, other words may just be English
    of_table = [name for name, value in keys_of(text, parts) if name in words or value in words]
    candidates = [
        *([*parts, key] for key in keys),
        *([*parts, name] for name in of_table),
        parts,
        *([key] for key in (*keys, *settings)),
        parts[:1],
    ]
    return next((line for names in candidates if names and (line := line_of(text, names)) is not None), None)


def keys_of(text: str, names: list[str]) -> list[tuple[str, str]]:
    """What stands in a table, as (name, value): values that are words, without their quotes."""
    table: list[str] = []
    found = []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            table = header.group(1).split(".")
        elif names and table == names and (key := _KEY.match(line)):
            found.append((key.group(1), key.group(2)))
    return found


def line_of(text: str, names: list[str]) -> int | None:
    """The line of a value by the names of its tables and its own; of a table, its header."""
    table: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = header.group(1).split(".")
            if table == names:
                return number
        elif key := _KEY.match(line):
            full = [*table, *key.group(1).split(".")]
            if names in (full, full[-1:]):
                return number
    return None
