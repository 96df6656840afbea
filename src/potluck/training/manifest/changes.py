"""Settings by name, as in `optimizer.learning_rate`: what a command or a page changes, one value at a time (pure)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from potluck.errors import ConfigurationError
from potluck.training.manifest.manifest import Settings

NOT_BY_NAME = ("from_epoch", "paused")  # when a change counts is said beside it, and pausing has words of its own

Value = bool | int | float | str


def values_of(settings: Settings) -> dict[str, Value]:
    """All settings by name."""
    return {name: value for name, value in flattened(msgspec.to_builtins(settings)) if name not in NOT_BY_NAME}


def full_name(name: str, settings: Settings) -> str:
    """A setting by its name or the end of it, where that is clear; ConfigurationError otherwise."""
    known = values_of(settings)
    found = [each for each in known if each == name or each.endswith(f".{name}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigurationError(f"{name!r} may be any of {', '.join(found)}: write it in full")
    near = difflib.get_close_matches(name, [*known, *(each.rpartition(".")[2] for each in known)], 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigurationError(
        f"there is no setting {name!r} that may change while the run trains: {hint}`potluck run show` lists those "
        "that may"
    )


def with_values(settings: Settings, values: Mapping[str, Value]) -> Settings:
    """The settings with these values, by full name; texts are read as what the setting is. ConfigurationError tells."""
    changed: dict[str, Any] = msgspec.to_builtins(settings)
    for name, value in values.items():
        *path, last = name.split(".")
        place = changed
        for part in path:
            place = place[part]
        place[last] = _like(place.get(last), value, name) if path == ["data"] else value
    try:
        return msgspec.convert(changed, Settings, strict=False)
    except msgspec.ValidationError as error:
        told = ", ".join(f"{name}={value}" for name, value in values.items())
        raise ConfigurationError(f"{told} cannot be: {error}") from error


def differences(before: Settings, after: Settings) -> dict[str, Value]:
    """What `after` has that `before` had not, by name."""
    old = values_of(before)
    return {name: value for name, value in values_of(after).items() if name not in old or old[name] != value}


def described(values: Mapping[str, Value]) -> str:
    """Values as a person reads them."""
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Value]]:
    """Values by their full names."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _like(before: Value | None, value: Value, name: str) -> Value:
    """Of the data only the recipe knows what they are, and there is none here: a value stays what it was."""
    if before is None:
        return value
    try:
        return msgspec.convert(value, type(before), strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{name}={value} cannot be, where it is {before} now: {error}") from error
