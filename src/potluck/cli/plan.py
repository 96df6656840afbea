"""`potluck plan`: which shape of pipeline so many machines would have, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.cli import options as o

if TYPE_CHECKING:
    from potluck.pipeline.planning import PlanForMachines, Profile, Shape
    from potluck.training.manifest.runfile import RunFile


def plan(
    run_file: Annotated[Path, typer.Argument(help="A run.toml, or the folder that has one.")] = Path("run.toml"),
    machines: Annotated[int, typer.Option(help="How many machines there are, each like this one.")] = 4,
    memory: Annotated[str, typer.Option(help="Memory of each, as 16GB; unlimited unless given.")] = "",
    line: Annotated[str, typer.Option(help="What each line sends, as 100Mbit.")] = "100Mbit",
    latency_ms: Annotated[float, typer.Option(help="From one machine to another.")] = 20.0,
    batch: Annotated[int, typer.Option(help="The global batch; else target_batch_size of the run.")] = 0,
    profile: Annotated[
        Path | None, typer.Option(help="File with this machine's profile: read if it exists, otherwise written.")
    ] = None,
    as_json: o.AsJson = False,
) -> None:
    """Print the shapes that a pipeline could have: stages × replicas, micro-batch, predicted seconds, bubble, memory.

    The recipe's blocks are timed on this machine, and every shape is simulated. Nothing is trained.

    Example: [bold]potluck plan run.toml --machines 7 --memory 16GB --line 200Mbit[/bold]
    """
    from potluck.cli import console
    from potluck.errors import ConfigurationError
    from potluck.training.manifest.method import PipelineSpec
    from potluck.training.manifest.runfile import read_run_file

    console.set_up_logging(verbose=False)
    if machines < 1 or latency_ms < 0 or batch < 0:
        raise ConfigurationError(
            f"--machines {machines}, --latency-ms {latency_ms}, --batch {batch}: at least one machine, nothing negative"
        )
    found = read_run_file(run_file)
    from potluck.pipeline import planning  # after what is cheap to refuse: the profile needs torch

    measured = _profile(found, run_file, profile)
    spec = found.pipeline or PipelineSpec()
    room = o.bytes_of(memory, "--memory")
    speed = o.bytes_of(line, "--line")
    machine = planning.Machine(
        memory_bytes=room if room is not None else float("inf"),
        bytes_per_second=speed if speed is not None else float("inf"),
        latency_seconds=latency_ms / 1000,
    )
    table = planning.plan(
        measured,
        machine,
        batch_size=batch or _batch_size(found),
        max_machines=machines,
        recompute=spec.recompute != "never",
        stages=None if spec.stages == "auto" else spec.stages,
        micro_batch=None if spec.micro_batch == "auto" else spec.micro_batch,
    )
    _show(table, machines, as_json)


def _batch_size(found: RunFile) -> int:
    from potluck.errors import ConfigurationError

    size = getattr(found.training, "target_batch_size", None)
    if size is None:
        raise ConfigurationError("the run's [training] has no target_batch_size: give the global batch with --batch")
    return int(size)


def _profile(found: RunFile, run_file: Path, kept: Path | None) -> Profile:
    import torch

    from potluck.errors import ConfigurationError
    from potluck.pipeline.profiling import measure, read_profile, write_profile
    from potluck.recipes.catalogue import open_recipe, refer_to
    from potluck.recipes.recipe import data_of, require_downloads

    if kept is not None and kept.exists():
        return read_profile(kept)
    folder = run_file if run_file.is_dir() else run_file.parent
    recipe = open_recipe(refer_to(found.recipe, folder), found.model, folder / found.recipe)
    recipe.data = data_of(recipe, found.data)
    require_downloads(recipe)
    torch.manual_seed(found.seed)
    blocks = list(recipe.blocks())
    samples = []
    for sample in recipe.samples(0, torch.Generator().manual_seed(found.seed)):
        samples.append(sample)
        if len(samples) == 8:
            break
    if not samples:
        raise ConfigurationError("the recipe's first shard has no samples: there is nothing to measure with")
    measured = measure(blocks, lambda size: recipe.collate([samples[place % len(samples)] for place in range(size)]))
    if kept is not None:
        write_profile(kept, measured)
    return measured


def _show(table: dict[int, PlanForMachines], machines: int, as_json: bool) -> None:
    from potluck.cli import console

    if as_json:
        for number, planned in table.items():
            shapes = [_figures(shape) for shape in planned.shapes]
            chosen = _figures(planned.chosen)
            console.print_json({"machines": number, "chosen": chosen, "reason": planned.reason, "shapes": shapes})
        return
    rows: list[dict[str, Any]] = []
    for number, planned in table.items():
        for shape in planned.shapes if number == machines else [planned.chosen]:
            mark = "this one" if number == machines and shape is planned.chosen else ""
            rows.append({"machines": number, **_row(shape), "choice": mark})
    console.show_table(rows, empty="Nothing fits.")
    if machines in table:
        console.out.print(f"With {console.count(machines, 'machine')}: {table[machines].reason}.")
    else:
        console.out.print(f"{console.count(machines, 'machine')} cannot hold the model.")


def _figures(shape: Shape) -> dict[str, Any]:
    return {
        "stages": shape.stages,
        "replicas": shape.replicas,
        "micro_batch": shape.micro_batch,
        "micro_batches": shape.num_micro_batches,
        "in_flight": shape.in_flight,
        "seconds": shape.seconds,
        "bubble": shape.bubble,
        "memory_bytes": shape.memory_bytes,
        "first_blocks": list(shape.layout.starts),
    }


def _row(shape: Shape) -> dict[str, Any]:
    return {
        "stages × replicas": f"{shape.stages} × {shape.replicas}",
        "micro-batch": f"{shape.micro_batch} (× {shape.num_micro_batches})",
        "seconds a step": f"{shape.seconds:.3g}",
        "bubble": f"{shape.bubble:.0%}",
        "memory": f"{shape.memory_bytes / 1e6:,.0f} MB",
        "stages begin at block": ", ".join(map(str, shape.layout.starts)),
    }
