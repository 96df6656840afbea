"""Which recipes there are: built in, by name; or in a file of one's own, by its path.

A run pins a file by its digest, in a manifest that its organiser signs. Only a file with that digest is ever executed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import potluck
from potluck.errors import ConfigurationError
from potluck.recipes.approval import approved_copy
from potluck.recipes.recipe import Origin, Recipe, configured
from potluck.recipes.reference import (
    BUILT_IN,
    FileRef,
    RecipeRef,
    check_copy,
    compile_source,
    digest_of,
    read_source,
)
from potluck.recipes.shipped import RunFiles, fetched_files


def refer_to(name: str, folder: Path) -> RecipeRef:
    """The reference to a recipe by its name in run.toml: built in, or a file, from `folder` on."""
    if name in BUILT_IN:
        return RecipeRef(name=name, version=potluck.__version__)
    path = folder / name
    return RecipeRef(name=path.name, digest=digest_of(read_source(path)))


def recipe_class(name: str, folder: Path) -> type[Recipe[Any]]:
    """A recipe by its name in run.toml, not configured yet: built in, or a file, from `folder` on, that is executed."""
    return _load(refer_to(name, folder), folder / name)


def open_recipe(
    ref: RecipeRef, options: Mapping[str, Any], file: Path | None = None, files: RunFiles | Iterable[FileRef] = ()
) -> Recipe[Any]:
    """The recipe that a manifest names, configured; `file` is this machine's copy of it, unless it is built in.

    `files` are the run's, as its manifest names them: a copy of the recipe may be among them, and is taken if the
    person at this machine lets it run (approval.py).
    """
    there = files if isinstance(files, RunFiles) else fetched_files(files)
    if file is None:
        file = approved_copy(ref, there)
    recipe = configured(_load(ref, file), options)
    recipe.files = there
    recipe.origin = Origin(ref=ref, options=dict(options), file=file, files=there)
    return recipe


def reopen(origin: Origin) -> Recipe[Any]:
    """The same recipe again, in another process."""
    return open_recipe(origin.ref, origin.options, origin.file, origin.files)


def _load(ref: RecipeRef, file: Path | None) -> type[Recipe[Any]]:
    source = check_copy(ref, file)
    if file is None or not ref.digest:
        return _only_recipe_in(importlib.import_module(BUILT_IN[ref.name]), ref.name)
    return _only_recipe_in(_execute(source, file, ref.digest), str(file))


def _execute(source: bytes, path: Path, digest: str) -> Any:
    """The file as a module: the very bytes whose digest was checked, not what may stand there a moment later."""
    name = f"potluck_recipe_{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    code = compile_source(source, path)
    spec = importlib.util.spec_from_loader(name, loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module  # where classes look up their annotations
    try:
        exec(code, module.__dict__)  # the user named this file
    except (Exception, SystemExit) as error:  # a script that ends itself is no recipe, and shall not end us
        del sys.modules[name]
        raise ConfigurationError(f"the recipe {path} cannot be used: {type(error).__name__}: {error}") from error
    return module


def _only_recipe_in(module: Any, what: str) -> type[Recipe[Any]]:
    classes = [
        value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__
    ]
    recipes = [value for value in classes if issubclass(value, Recipe)]
    found = [value for value in recipes if not inspect.isabstract(value)]
    if len(found) != 1:
        names = ", ".join(value.__name__ for value in found) or "none"
        missing = [f"{value.__name__} lacks {', '.join(sorted(value.__abstractmethods__))}" for value in recipes]
        lacks = f" ({'; '.join(missing)})" if not found and missing else ""
        raise ConfigurationError(
            f"{what} must define one subclass of potluck.recipes.Recipe, complete; it has {names}{lacks}"
        )
    return found[0]
