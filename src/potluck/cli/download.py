"""`potluck download`: what a recipe needs, before it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Fetch what a recipe needs.", no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def _group() -> None:
    """Fetch what a recipe needs."""


@app.command("data")
def data(
    recipe: Annotated[
        str,
        typer.Argument(help="A recipe's name or file, or a run's folder; unless given, the run.toml in this folder."),
    ] = "",
    folder: Annotated[
        Path | None, typer.Option(help="Where files go; else POTLUCK_DATA, else your data folder.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only check that all files are present and complete.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Fetch the data that a recipe needs, check its hashes, and continue interrupted downloads.

    Examples: [bold]potluck download data my-recipe.py[/bold], [bold]potluck download data my-run[/bold]
    """
    from potluck.cli import console
    from potluck.cli.folders import recipe_of
    from potluck.cli.requirements import fetch_with_bars
    from potluck.recipes.catalogue import recipe_class
    from potluck.recipes.downloads import is_whole, path_of

    named, where = recipe_of(recipe)
    downloads = recipe_class(named, where).downloads
    if check:
        rows = [{"name": d.name, "whole": is_whole(d, folder), "path": str(path_of(d, folder))} for d in downloads]
    else:
        fetch_with_bars(downloads, as_json, folder)
        rows = [{"name": d.name, "whole": True, "path": str(path_of(d, folder))} for d in downloads]
    if as_json:
        console.print_json(rows)
    else:
        console.show_table(rows, empty=f"The recipe {named} needs no data: nothing to fetch.")
    raise typer.Exit(0 if all(row["whole"] for row in rows) else 1)
