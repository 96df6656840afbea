"""`potluck tokenize`: make a run's texts into tokens once, so that volunteers only read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli import options as o


def tokenize(
    run_file: Annotated[Path, typer.Argument(help="A run.toml, or the folder that has one.")] = Path("run.toml"),
    as_json: o.AsJson = False,
) -> None:
    r"""Make the texts of a language model's run into tokens, with a bar; `tokenized = true` under \[data] uses them.

    The tokenizer is trained first where the run has one to train. What the host serves then is the tokens.

    Example: [bold]potluck tokenize my-albert[/bold]
    """
    from rich.progress import Progress

    from potluck.cli import console
    from potluck.errors import ConfigurationError
    from potluck.recipes.catalogue import open_recipe, refer_to
    from potluck.recipes.recipe import data_of
    from potluck.recipes.shipped import folder_files
    from potluck.training.manifest.runfile import read_run_file

    console.set_up_logging(False)
    file = run_file / "run.toml" if run_file.is_dir() else run_file
    found = read_run_file(file)
    folder = file.parent
    recipe = open_recipe(refer_to(found.recipe, folder), found.model, folder / found.recipe, folder_files(folder))
    make = getattr(recipe, "tokenize", None)
    if make is None:
        raise ConfigurationError(f"recipe={found.recipe!r} has no texts to make into tokens; the recipes hf-… have")
    recipe.data = data_of(recipe, found.data)
    with Progress(console=console.err, disable=as_json) as bar:
        task = bar.add_task("tokens", total=None)

        def tell(done: int, total: int, tokens: int) -> None:
            bar.update(task, completed=done, total=total, description=f"{tokens / 1e6:.2f} M tokens")

        num_tokens = make(folder, tell)
    if as_json:
        console.print_json({"run": found.name, "tokens": num_tokens, "folder": str(folder / "tokens")})
    else:
        console.out.print(
            f"{num_tokens / 1e6:.2f} M tokens in {folder / 'tokens'}. Set tokenized = true under [data].",
            markup=False,
            highlight=False,
        )
