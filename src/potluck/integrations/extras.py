"""Frameworks are extras: where one is not installed, the message says how to get it."""

from __future__ import annotations

from importlib import import_module

from potluck.errors import ConfigurationError


class ExtraMissingError(ConfigurationError, ImportError):
    """A framework is not installed. Both our error and Python's, so that `try: import …` works as usual."""


def require(module: str, extra: str) -> None:
    """Import a framework, or say which extra has it. An error inside of the framework is left as it is."""
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise ExtraMissingError(
            f"{module} is not installed, which potluck.integrations.{extra} is for: "
            f"pip install 'potluck-train[{extra}]'"
        ) from error
