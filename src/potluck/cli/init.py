"""`potluck init`: a folder with all that a run needs, which runs as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def init(
    folder: Annotated[Path, typer.Argument(help="The folder to make; its name becomes the run's.")] = Path(
        "my-first-run"
    ),
    recipe: Annotated[
        str,
        typer.Option(help="What to train: stdlib-lm, digits, own for a recipe to change, or a run's folder to copy."),
    ] = "own",
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Write a run.toml that explains itself, and a recipe to start from. Both work as they are.

    Examples: [bold]potluck init my-run && potluck host my-run[/bold]

    [bold]potluck init my-albert --recipe experiments/albert[/bold]
    """
    from potluck.errors import ConfigurationError
    from potluck.hub.subjects import check_run_name
    from potluck.training.manifest.skeleton import RECIPE_FILE, copied, files_of_a_run

    name = check_run_name(folder.resolve().name)
    files = copied(name, Path(recipe)) if (Path(recipe) / "run.toml").is_file() else files_of_a_run(name, recipe)
    there = [file for file in files if (folder / file).exists()]
    if there and not force:
        raise ConfigurationError(f"{folder} has {' and '.join(there)} already: choose another folder, or --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be written ({error.strerror}): choose another folder") from error
    if as_json:
        from potluck.cli import console

        console.print_json({"run": name, "folder": str(folder), "files": [str(folder / file) for file in files]})
        return
    typer.echo(f"Wrote {', '.join(str(folder / file) for file in files)}.")
    if RECIPE_FILE in files:
        typer.echo(f"Change {folder / RECIPE_FILE} as you like; whoever joins needs the same file, by --recipe.")
    typer.echo(f"Start the run:  potluck host {folder}")
