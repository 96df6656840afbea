"""What comes with a run: its organiser's files, what its recipe has downloaded, and which packages that needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from potluck.recipes.recipe import Recipe
from potluck.recipes.reference import DownloadRef, FileRef
from potluck.recipes.shipped import refs_of


def files_of(folder: Path, patterns: Iterable[str]) -> tuple[FileRef, ...]:
    """Of an organiser's folder, by names and patterns, each with its digest."""
    return refs_of(folder, patterns)


def downloads_of(recipe: Recipe[Any]) -> tuple[DownloadRef, ...]:
    """What the recipe declares: signed with the manifest, a volunteer knows it before it runs the recipe."""
    return tuple(
        DownloadRef(name=each.name, url=each.url, sha256=each.sha256, num_bytes=each.num_bytes)
        for each in recipe.downloads
    )


def requirements_of(recipe: Recipe[Any], besides: Sequence[str]) -> tuple[str, ...]:
    """What the recipe declares, and what run.toml adds."""
    return tuple(dict.fromkeys((*recipe.requirements, *besides)))
