"""Which recipes there are: built in, by name; or in a file of one's own, by its path.

A run pins a file by its digest. Whoever joins needs a file with the same digest, and nothing else is ever executed: no
code comes from the hub.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import potluck
from potluck.errors import ConfigurationError
from potluck.recipes.recipe import Recipe, configured
from potluck.recipes.reference import RecipeRef

BUILT_IN = {"digits": "potluck.recipes.digits", "stdlib-lm": "potluck.recipes.stdlib_lm"}
MAX_FILE_BYTES = 1024 * 1024


def refer_to(name: str, folder: Path) -> RecipeRef:
    """The reference to a recipe by its name in run.toml: built in, or a file, from `folder` on."""
    if name in BUILT_IN:
        return RecipeRef(name=name, version=potluck.__version__)
    path = folder / name
    return RecipeRef(name=path.name, digest=_digest(_read(path)))


def recipe_class(name: str, folder: Path) -> type[Recipe[Any]]:
    """A recipe by its name in run.toml, not configured yet: built in, or a file, from `folder` on, that is executed."""
    return _load(refer_to(name, folder), folder / name)


def open_recipe(ref: RecipeRef, options: Mapping[str, Any], file: Path | None = None) -> Recipe[Any]:
    """The recipe that a manifest names, configured; `file` is this machine's copy of it, unless it is built in."""
    return configured(_load(ref, file), options)


def _load(ref: RecipeRef, file: Path | None) -> type[Recipe[Any]]:
    if not ref.digest:
        if ref.name not in BUILT_IN:
            known = ", ".join(sorted(BUILT_IN))
            raise ConfigurationError(
                f"this Potluck ({potluck.__version__}) has no recipe {ref.name!r}, only {known}: the run was made with "
                f"version {ref.version or 'unknown'}, install that one"
            )
        return _only_recipe_in(importlib.import_module(BUILT_IN[ref.name]), ref.name)
    if file is None:
        raise ConfigurationError(
            f"this run trains a recipe of its organiser's own, {ref.name}: get the file from them, look at it, and "
            "name it by --recipe"
        )
    source = _read(file)
    if _digest(source) != ref.digest:
        raise ConfigurationError(
            f"{file} is not the recipe of this run: its digest is {_digest(source)[:12]}…, the run's is "
            f"{ref.digest[:12]}…. Get the file again from the organiser"
        )
    return _only_recipe_in(_execute(source, file, ref.digest), str(file))


def _read(path: Path) -> bytes:
    try:
        source = path.read_bytes()
    except OSError as error:
        known = ", ".join(sorted(BUILT_IN))
        raise ConfigurationError(
            f"there is no recipe {path.name!r}: it is neither built in ({known}) nor a file that can be read ({error})"
        ) from error
    if len(source) > MAX_FILE_BYTES:
        raise ConfigurationError(
            f"{path} has {len(source)} bytes: a recipe is one small file, of {MAX_FILE_BYTES} at most"
        )
    return source


def _digest(source: bytes) -> str:
    return hashlib.sha256(source.replace(b"\r\n", b"\n")).hexdigest()  # the same text on every system


def _execute(source: bytes, path: Path, digest: str) -> Any:
    """The file as a module: the very bytes whose digest was checked, not what may stand there a moment later."""
    name = f"potluck_recipe_{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_loader(name, loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module  # where classes look up their annotations
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)  # the user named this file
    except Exception as error:
        del sys.modules[name]
        raise ConfigurationError(f"the recipe {path} cannot be used: {type(error).__name__}: {error}") from error
    return module


def _only_recipe_in(module: Any, what: str) -> type[Recipe[Any]]:
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, Recipe)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    ]
    if len(found) != 1:
        names = ", ".join(value.__name__ for value in found) or "none"
        raise ConfigurationError(f"{what} must define one subclass of potluck.recipes.Recipe, complete; it has {names}")
    return found[0]
