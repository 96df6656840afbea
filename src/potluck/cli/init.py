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
        typer.Option(
            help="What to train: stdlib-lm, digits, hf-causal-lm, hf-masked-lm, image-classifier, own for a recipe to "
            "change as you like, or a run's folder to copy."
        ),
    ] = "own",
    data: Annotated[
        Path | None,
        typer.Option(help="Your texts (.txt, .jsonl, .parquet) or your folder of pictures: copied beside run.toml."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Write a run.toml that explains itself, and a recipe to start from. Both work as they are.

    Example: [bold]potluck init my-run && potluck host my-run[/bold]

    [bold]potluck init bread --recipe hf-causal-lm --data texts.jsonl[/bold]

    [bold]potluck init my-albert --recipe experiments/albert[/bold]
    """
    from potluck.errors import ConfigurationError
    from potluck.hub.subjects import check_run_name
    from potluck.training.manifest.skeleton import RECIPE_FILE, copied, data_of_recipe, files_of_a_run

    name = check_run_name(folder.resolve().name)
    if data is not None and not data.exists():
        raise ConfigurationError(f"--data {data}: there is no such file or folder")
    is_copy = (Path(recipe) / "run.toml").is_file()
    if is_copy and data is not None:
        raise ConfigurationError(f"the run.toml of {recipe} names its own data: leave out --data")
    files = copied(name, Path(recipe)) if is_copy else files_of_a_run(name, recipe, data)
    there = [file for file in files if (folder / file).exists()]
    if there and not force:
        raise ConfigurationError(f"{folder} has {' and '.join(there)} already: choose another folder, or --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
        if data is not None:
            _copy(data, folder / data.name)
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be written ({error.strerror}): choose another folder") from error
    if as_json:
        from potluck.cli import console

        console.print_json({"run": name, "folder": str(folder), "files": [str(folder / file) for file in files]})
        return
    written = [*files, *([data.name] if data is not None else [])]
    typer.echo(f"Wrote {', '.join(str(folder / file) for file in written)}.")
    if RECIPE_FILE in files:
        typer.echo(f"Change {folder / RECIPE_FILE} as you like; the host serves it to all members.")
    if data is None and not is_copy and (needed := data_of_recipe(recipe)):
        typer.echo(f"Put your own data into {folder / needed}, or name them in {folder / 'run.toml'}.")
    typer.echo(f"Start the run:  potluck host {folder}")


def _copy(source: Path, target: Path) -> None:
    import shutil

    if target.exists() and source.samefile(target):
        return
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copyfile(source, target)
