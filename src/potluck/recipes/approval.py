"""Whose code may run here: a recipe that came from a run's host runs only after a person has said so, for that digest.

What is built in needs nobody's leave, nor does a file that the person named.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from potluck.recipes.downloads import data_folder
from potluck.recipes.reference import FileRef, RecipeRef
from potluck.recipes.shipped import RunFiles, fetched_files


def is_approved(recipe: RecipeRef) -> bool:
    """Whether this code may run on this machine."""
    return not recipe.digest or _note(recipe).exists()


def approve(recipe: RecipeRef) -> None:
    """Note that the person at this machine lets this very code run."""
    if recipe.digest:
        path = _note(recipe)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def approved_copy(recipe: RecipeRef, files: RunFiles | Iterable[FileRef]) -> Path | None:
    """The copy of an organiser's own recipe that came from the host; None where it is not here, or may not run."""
    if not recipe.digest or not is_approved(recipe):
        return None
    return (files if isinstance(files, RunFiles) else fetched_files(files)).named(recipe.name)


def _note(recipe: RecipeRef) -> Path:
    return data_folder() / "approved" / recipe.digest
