"""Text that other people wrote: without characters that command a terminal or change how a line reads.

Names, messages and reasons end up in terminals, logs and pages. A control character there can move the cursor, colour
or hide what stands around it, or begin a line that looks like one of ours; a bidirectional one shows text in another
order than it is stored. Guards refuse such text (`check_plain`). Whatever shows text from elsewhere cleans it
(`clean`), since what came by another way, or was stored earlier, has not passed a guard.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from potluck.errors import ProtocolError

# C0, DEL and C1; marks, embeddings, overrides and isolates of direction; separators of lines and paragraphs.
_UNPLAIN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")

T = TypeVar("T")


def clean(text: str) -> str:
    r"""The text with such characters written out, as `\x1b` or `\u202e`."""
    return _UNPLAIN.sub(lambda found: _written_out(found.group()), text)


def clean_lines(text: str) -> str:
    """The same, but for the ends of lines, which stay."""
    return "\n".join(clean(line) for line in text.split("\n"))


def clean_all(value: T) -> T:
    """A message, or what such a one is made of, with all of its texts cleaned; the same object where they are."""
    if next(_unplain_texts(value, ""), None) is None:
        return value
    cleaned: T = _cleaned(value)
    return cleaned


def check_plain(message: Any) -> None:
    """ProtocolError where a text in a message has such a character; it names the field and the character."""
    found = next(_unplain_texts(message, ""), None)
    if found is not None:
        field, character = found
        raise ProtocolError(
            f"{field or 'the text'} has a control or bidirectional character ({_written_out(character)}): leave it out"
        )


def _written_out(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x20 else f"\\u{number:04x}"  # as JSON writes it, where JSON does not already


def _unplain_texts(value: Any, field: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        if (found := _UNPLAIN.search(value)) is not None:
            yield field, found.group()
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _unplain_texts(getattr(value, name), name)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _unplain_texts(key, field)
            yield from _unplain_texts(each, field)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _unplain_texts(each, field)


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **{n: _cleaned(getattr(value, n)) for n in value.__struct_fields__})
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(_cleaned(each) for each in value)
    return value
