"""What `potluck join` does before it asks to be let in: shows what would run, asks, checks, fetches."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from potluck.hub.joinlink import JoinLink
    from potluck.recipes.downloads import Download, Progress
    from potluck.training.manifest.manifest import Manifest


def make_ready(link: JoinLink, *, yes: bool, as_json: bool, own_copy: bool = False) -> Manifest | None:
    """See to all that a trainer needs; None where only the hub can say what the run trains.

    `own_copy`: the person has named a file as the recipe, which is consent enough.
    """
    from potluck.cli import console
    from potluck.training.manifest.requirements import fetch_manifest

    with console.err.status(f"asking {link.host} what the run trains"):
        manifest = fetch_manifest(link)
    if manifest is not None:
        see_to(manifest, link, yes=yes, as_json=as_json, own_copy=own_copy, may_ask=True)
    return manifest


def see_to(
    manifest: Manifest, link: JoinLink, *, yes: bool, as_json: bool, own_copy: bool = False, may_ask: bool = False
) -> None:
    """Check packages, ask whether the organiser's code may run, and fetch the run's files; ConfigurationError tells."""
    from potluck.training.manifest.requirements import check_requirements, fetches_of

    check_requirements(manifest)
    fetches = fetches_of(manifest, link)
    if not own_copy:
        _ask(manifest, link, fetches, yes=yes, as_json=as_json, may_ask=may_ask)
        fetches = fetches_of(manifest, link)
    fetch_with_bars(fetches, as_json)


def _ask(
    manifest: Manifest, link: JoinLink, fetches: Sequence[Download], *, yes: bool, as_json: bool, may_ask: bool
) -> None:
    from potluck.cli import console
    from potluck.errors import ConfigurationError
    from potluck.recipes.approval import approve, is_approved
    from potluck.training.manifest.requirements import fetch_recipe, recipe_ref

    ref = recipe_ref(manifest)
    if not manifest.recipe.digest or is_approved(manifest.recipe):
        return
    path = fetch_recipe(manifest, link)
    if ref is None or path is None:
        return  # the host does not serve it: readiness.py says how to get it
    if as_json:
        console.print_json({"event": "recipe", **_facts(manifest, fetches), "path": str(path), "yes": yes})
    else:
        console.out.print(
            f"This run trains with code of its organiser's own: {ref.name} ({ref.num_bytes / 1e3:.1f} kB, sha256 "
            f"{ref.sha256[:12]}…), signed by the organiser that your link names. It would run on this machine with "
            f"your rights. It lies here, to be read:\n\n  {path}\n",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        if manifest.requirements:
            console.out.print(f"It uses {', '.join(manifest.requirements)}.", markup=False, highlight=False)
        for each in fetches:
            if each.sha256 != ref.sha256:
                size = f"{each.num_bytes / 1e6:.1f} MB" if each.num_bytes is not None else "size unknown"
                console.out.print(f"It has {each.name} fetched ({size}) from {each.url}", markup=False, highlight=False)
    if not yes:
        if as_json or not may_ask or not sys.stdin.isatty():
            raise ConfigurationError(
                f"the run's own code ({path}) runs only with your consent: read it, then add --yes"
            )
        if not typer.confirm("Run it?", default=False):
            raise ConfigurationError("without its code there is nothing to train: nothing was started")
    approve(manifest.recipe)


def _facts(manifest: Manifest, fetches: Sequence[Download]) -> dict[str, Any]:
    return {
        "name": manifest.recipe.name,
        "digest": manifest.recipe.digest,
        "requirements": list(manifest.requirements),
        "fetches": [{"name": each.name, "url": each.url, "bytes": each.num_bytes} for each in fetches],
    }


def fetch_with_bars(downloads: Sequence[Download], as_json: bool, folder: Path | None = None) -> None:
    """Fetch these, with a bar for each."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    from potluck.cli import console
    from potluck.training.manifest.requirements import fetch_all

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=console.err, disable=as_json or not downloads) as bars:

        def bar(download: Download) -> Progress:
            task = bars.add_task(download.name, total=download.num_bytes)
            return lambda there, total: bars.update(task, completed=there, total=total)

        fetch_all(downloads, bar, folder)
