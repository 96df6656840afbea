"""`potluck pipeline`: who serves which stage; what the whole model says; the whole model as a file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.cli import options as o

if TYPE_CHECKING:
    from potluck.run.peer import Peer
    from potluck.training.staged.whole import WholeModel

LOOK_SECONDS = 15.0


def pipeline(
    what: Annotated[str, typer.Argument(metavar="LINK|generate|export", help="A join link, or what to do.")],
    folder: Annotated[Path, typer.Argument(help="With generate and export: the folder that has run.toml.")] = Path(),
    hub: Annotated[
        Path | None, typer.Option("--folder", help="The run's folder, if it is not the default one.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="The cut's step. Default: the newest cut.")] = None,
    to: Annotated[Path, typer.Option(help="With export: the safetensors file to write.")] = Path("model.safetensors"),
    identity_path: o.IdentityPath = None,
    as_json: o.AsJson = False,
) -> None:
    """Show a pipeline: stages × servers, what they hold and load, moves and morphs with their reasons.

    Examples: [bold]potluck pipeline 'potluck://…'[/bold]

    [bold]potluck pipeline generate my-run[/bold] on the host: what the model of the newest cut says, and its figures.

    [bold]potluck pipeline export my-run --to model.safetensors[/bold] the same as a file; no machine needs to hold all.
    """
    from potluck.cli import console

    console.set_up_logging(verbose=False)
    if what in ("generate", "export"):
        whole = _whole(folder, hub, step)
        if what == "export":
            num_bytes = whole.export(to)
            _say(f"Step {whole.step} is in {to} ({num_bytes / 1e6:,.1f} MB).", as_json, step=whole.step, file=str(to))
            return
        _generate(whole, as_json)
        return
    from potluck.cli.joining import observe, parse_link

    async def look(peer: Peer, stop: asyncio.Event) -> None:
        found = await console.unless_stopped(_overview(peer), stop)
        if found is not None:
            _show(found, {presence.peer: presence.card.name for presence in peer.session.roster}, as_json)

    observe(parse_link(what, "potluck pipeline"), "pipeline", identity_path, as_json, look)


def _say(text: str, as_json: bool, **about: Any) -> None:
    from potluck.cli import console

    if as_json:
        console.print_json(about)
    else:
        console.out.print(text, markup=False, highlight=False)


async def _overview(peer: Peer) -> dict[str, Any]:
    from potluck.errors import DeadlineExceededError
    from potluck.monitor.pipelinenews import PipelineNews

    coming = asyncio.Event()
    news = PipelineNews(peer.session, coming.set)
    await news.start()
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            await coming.wait()
        assert news.newest is not None
        return news.newest.as_json()
    except TimeoutError:
        raise DeadlineExceededError(
            f"no conductor has said anything for {LOOK_SECONDS:.0f} s: the run has no [pipeline], or its host is away"
        ) from None
    finally:
        await news.close()


def _show(found: dict[str, Any], names: dict[str, str], as_json: bool) -> None:
    from potluck.cli import console

    if as_json:
        console.print_json(found)
        return
    loss = f"loss {found['loss']:.4f}" if found["step"] else "no loss yet"
    waits = f" It waits: {found['waits']}." if found["waits"] else ""
    console.out.print(
        f"Step {found['step']}, {loss}, {found['stages']} stages, {found['phase']}.{waits}",
        markup=False,
        highlight=False,
    )
    rows = []
    for peer, about in found["peers"].items():
        roles = [f"serves stage {', '.join(map(str, about['serves']))}"] if about["serves"] else []
        roles += [f"holds stage {', '.join(map(str, about['listens']))}"] if about["listens"] else []
        roles += ["feeds"] if about["feeds"] else []
        roles += ["saves"] if about["saves"] else []
        rows.append(
            {
                "peer": names.get(peer, "") or peer[:8],
                "does": ", ".join(roles) or "waits",
                "blocks": len(about["standing"]),
                "loading": len(about["loading"]),
                "waiting": about["waiting"] or "",
                "samples/s": f"{about['rate']:.1f}" if about["rate"] else "",
                "why": about["why"],
            }
        )
    console.show_table(rows, empty="Nobody is there.")
    for stage, row in enumerate(found["rows"]):
        if row["is_bottleneck"]:
            text = f"The bottleneck is stage {stage}: {row['samples_per_second']:.1f} samples per second."
            console.out.print(text, markup=False, highlight=False)
    checks = found["checks"]
    if checks["made"] or checks["not_possible"]:
        text = (
            f"Spot checks: {checks['made']}, of which {checks['failed']} failed; {checks['not_possible']} not possible."
        )
        console.out.print(text, markup=False, highlight=False)
    for peer, reason in checks["excluded"].items():
        console.out.print(f"{names.get(peer, '') or peer[:8]} is excluded: {reason}", markup=False, highlight=False)
    for line in found["morphs"]:
        console.out.print(line, markup=False, highlight=False)
    for move in found["moves"]:
        who = names.get(move["peer"], "") or move["peer"][:8]
        text = f"{who}: stage {move['from']} to {move['to']}, {move['reason']}"
        console.out.print(text, markup=False, highlight=False)


def _whole(folder: Path, hub: Path | None, step: int | None) -> WholeModel:
    from potluck.cli.folders import run_folder
    from potluck.pipeline.cuts import CutShelf
    from potluck.recipes.catalogue import open_recipe
    from potluck.recipes.recipe import data_of
    from potluck.recipes.shipped import folder_files
    from potluck.training.manifest.runfile import manifest_of, read_run_file
    from potluck.training.staged.hosting import CUTS_FOLDER
    from potluck.training.staged.whole import WholeModel

    found = read_run_file(folder)
    where = folder if folder.is_dir() else folder.parent
    manifest = manifest_of(found, where)
    recipe = open_recipe(manifest.recipe, manifest.model, where / found.recipe, folder_files(where))
    recipe.data = data_of(recipe, manifest.newest.data)
    shelf = CutShelf(run_folder(found.name, hub) / CUTS_FOLDER)
    return WholeModel(recipe, manifest.seed, shelf, step)


def _generate(whole: WholeModel, as_json: bool) -> None:
    from potluck.cli import console
    from potluck.training.trainer.models import preview

    text, figures = preview(whole.recipe, whole.model())
    if as_json:
        console.print_json({"step": whole.step, "text": text, **figures})
        return
    for name, value in figures.items():
        console.out.print(f"step {whole.step}: {name} {value:.4f}", markup=False, highlight=False)
    console.out.print(text, markup=False, highlight=False)
