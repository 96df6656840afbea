"""`potluck tune`: which options let this machine train a run fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from potluck.cli import options as o


def tune(
    what: Annotated[str, typer.Argument(help="A run.toml, its folder, or the join link of a run.")] = "run.toml",
    device: o.Device = "",
    recipe: o.RecipeFile = None,
    yes: o.Yes = False,
    max_memory: o.MaxMemory = "",
    as_json: o.AsJson = False,
) -> None:
    """Find the batch size, threads and reading processes that suit this machine, and print them as options.

    The model is trained on some batches of its own data, and thrown away: nothing is sent to the run.

    Examples: [bold]potluck tune my-run[/bold], [bold]potluck tune 'potluck://…'[/bold]
    """
    from potluck.cli import console

    console.set_up_logging(False)
    memory = o.bytes_of(max_memory, "--max-memory")
    opened, manifest = _from_link(what, recipe, yes, as_json) if "://" in what else _from_file(Path(what))
    from potluck.training.trainer.tuning import tune as find

    def tell(text: str) -> None:
        if not as_json:
            console.err.print(text, highlight=False)

    found = find(opened, manifest, device=device, max_memory_bytes=int(memory) if memory else None, tell=tell)
    if as_json:
        console.print_json({**found.as_dict(), "options": found.options})
        return
    console.show_table([found.as_dict()], empty="")
    console.out.print(f"potluck join LINK {found.options}", markup=False, highlight=False)


def _from_file(path: Path) -> tuple[Any, Any]:
    from potluck.recipes.catalogue import open_recipe
    from potluck.recipes.shipped import folder_files
    from potluck.training.manifest.runfile import manifest_of, read_run_file

    file = path / "run.toml" if path.is_dir() else path
    found = read_run_file(file)
    manifest = manifest_of(found, file.parent)
    own = file.parent / found.recipe
    return open_recipe(manifest.recipe, manifest.model, own, folder_files(file.parent)), manifest


def _from_link(link: str, recipe: Path | None, yes: bool, as_json: bool) -> tuple[Any, Any]:
    from potluck.cli.joining import parse_link
    from potluck.cli.requirements import make_ready
    from potluck.errors import ConfigurationError
    from potluck.recipes.catalogue import open_recipe

    parsed = parse_link(link, "potluck tune")
    manifest = make_ready(parsed, yes=yes, as_json=as_json, own_copy=recipe is not None)
    if manifest is None:
        raise ConfigurationError(
            "the run's host cannot be reached by HTTP from here: get its run.toml from the organiser, and tune that"
        )
    return open_recipe(manifest.recipe, manifest.model, recipe, manifest.files), manifest
