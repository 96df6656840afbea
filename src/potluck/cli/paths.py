"""`potluck paths`: prepare, watch, evaluate, export and re-route a run with paths."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from potluck.cli import options as o

if TYPE_CHECKING:
    from potluck.run.peer import Peer
    from potluck.training.trainer.pathuse import HostedPaths


class ShowsByDefault(TyperGroup):
    """`potluck paths LINK` is `potluck paths show LINK`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Whatever is no command is a link."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["show", *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=ShowsByDefault,
    help="Sparse models of many paths (DiPaCo): prepare, watch, evaluate, export. `potluck paths LINK` shows who "
    "trains what.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Run = Annotated[str, typer.Option("--run", help="The run's name. Default: the name in the run.toml of this folder.")]
Folder = Annotated[Path | None, typer.Option(help="The run's folder, if it is not the default one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]


@app.command("prepare")
def prepare(
    run_file: Annotated[
        Path, typer.Argument(metavar="RUN.TOML", help="A run.toml with [paths], or its folder.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Route the run's documents to its paths, before it is hosted; prints documents and tokens per path.

    Example: [bold]potluck paths prepare my-run && potluck host my-run[/bold]
    """
    from potluck.cli import console
    from potluck.paths.grid import path_name
    from potluck.training.manifest.runfile import FILE_NAME, read_run_file

    console.set_up_logging(verbose=False)
    folder = run_file if run_file.is_dir() else run_file.parent
    found = read_run_file(folder / FILE_NAME if run_file.is_dir() else run_file)
    from potluck.training.trainer.pathuse import prepare as work  # needs torch

    made = work(found, folder)
    shards = made.shards
    rows: list[dict[str, Any]] = [
        {
            "path": path_name(path),
            "documents": len(shards.training[number]),
            "tokens": shards.tokens(number),
            "validation": len(shards.validation[number]),
        }
        for number, path in enumerate(shards.grid.paths)
    ]
    if as_json:
        figures = {
            "file": str(made.file),
            "sha256": made.sha256,
            "tokens": shards.all_tokens,
            "warnings": made.warnings,
        }
        console.print_json({"paths": rows, **figures})
        return
    console.show_table([{**row, "tokens": f"{row['tokens']:,}"} for row in rows], empty="There are no paths.")
    for warning in made.warnings:
        console.err.print(f"[yellow]Warning:[/yellow] {warning}", highlight=False)
    console.out.print(f"Wrote {made.file}. Start the run:  potluck host {folder}", highlight=False, soft_wrap=True)


@app.command("show")
def show(
    link: o.Link = "",
    identity_path: Annotated[
        Path | None, typer.Option(help="File with the key you watch by; a new one is made unless given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show paths × modules: who trains what, tokens, losses, and the last outer step of each module.

    Example: [bold]potluck paths 'potluck://hub.example.org:4222/my-run?ca=…#…'[/bold]
    """
    from potluck.cli import console
    from potluck.cli.joining import observe, parse_link

    console.set_up_logging(verbose=False)

    async def look(peer: Peer, stop: asyncio.Event) -> None:
        await console.unless_stopped(_look(peer, as_json), stop)

    observe(parse_link(link, "potluck paths"), "paths", identity_path, as_json, look)


async def _look(peer: Peer, as_json: bool) -> None:
    from potluck.cli import console
    from potluck.errors import ConfigurationError
    from potluck.monitor.pathview import view_paths
    from potluck.monitor.watcher import Watcher
    from potluck.paths.phasedesk import read_book
    from potluck.training.manifest.noticeboard import NoticeBoard

    board = NoticeBoard.of(peer.session)
    watcher = await Watcher.started(peer.session)
    try:
        await board.start()
        if board.manifest is None or board.manifest.paths is None:
            raise ConfigurationError("this run has no paths: it trains one model. `potluck monitor` shows it")
        names = {presence.peer: presence.card.name or presence.peer[:12] for presence in peer.session.roster}
        found = view_paths(
            board.manifest.paths.grid(),
            await read_book(peer.session.hub),
            watcher.view.groups(),
            lambda one: names.get(one, one[:12]),
            peer.session.now(),
        )
    finally:
        await board.close()
        await watcher.close()
    if as_json:
        console.print_json(found.as_json())
        return
    console.show_table([row.as_table() for row in found.paths], empty="There are no paths.")
    console.show_table([row.as_table() for row in found.modules], empty="There are no modules.")


def _hosted(run: str, folder: Path | None, *, best: bool = False) -> HostedPaths:
    from potluck.cli.folders import hosted_run
    from potluck.training.trainer.exporting import kept_manifest
    from potluck.training.trainer.pathuse import HostedPaths

    where, _record = hosted_run(run, folder)
    return HostedPaths(kept_manifest(where), where / "states", best=best)


@app.command("evaluate")
def evaluate(
    run: Run = "",
    folder: Folder = None,
    reroute_every: Annotated[
        int | None, typer.Option(min=0, help="Choose the path anew every so many tokens; unless given, as in run.toml.")
    ] = None,
    dense: Annotated[
        Path | None, typer.Option(help="Weights (safetensors) of a dense model of the same recipe, to compare with.")
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="Validation documents of each path, at most.")] = 64,
    as_json: AsJson = False,
) -> None:
    """Score the newest backups on documents that nobody trains on: per path, by the router, re-routed on the way.

    Example: [bold]potluck paths evaluate --reroute-every 64 --dense dense.safetensors[/bold]
    """
    from potluck.cli import console
    from potluck.paths.grid import path_name

    console.set_up_logging(verbose=False)
    hosted = _hosted(run, folder)
    baseline = None
    if dense is not None:
        baseline = _dense(hosted, dense)
    every = (
        hosted.manifest.paths.reroute_every if reroute_every is None and hosted.manifest.paths else reroute_every or 0
    )
    found = hosted.evaluate(reroute_every=every, dense=baseline, most=documents)
    rows: list[dict[str, Any]] = [
        {"path": path_name(path), "documents": found.documents[path], "loss": round(loss, 4)}
        for path, loss in found.by_path.items()
    ]
    total = {"mixture": found.mixture, "rerouted": found.rerouted, "dense": found.dense, "tokens": found.tokens}
    if as_json:
        console.print_json({"paths": rows, **total, "epochs": hosted.epochs})
        return
    console.show_table(rows, empty="There is nothing to evaluate.")
    console.out.print(f"By the router: {found.mixture:.4f} per token, over {found.tokens:,} tokens.", highlight=False)
    if found.rerouted is not None:
        console.out.print(f"Re-routed every {every} tokens: {found.rerouted:.4f}.", highlight=False)
    if found.dense is not None:
        console.out.print(f"The dense model of the same inference cost: {found.dense:.4f}.", highlight=False)


def _dense(hosted: HostedPaths, file: Path) -> Any:
    from safetensors.torch import load_file

    from potluck.errors import ConfigurationError

    model = hosted.make()
    try:
        weights = load_file(file)
        model.load_state_dict({name.removeprefix("parameter/"): value for name, value in weights.items()}, strict=False)
    except Exception as error:  # the file may be anything
        raise ConfigurationError(f"{file} holds no weights of this recipe's model: {error}") from error
    return model


@app.command("export")
def export(
    path: Annotated[str, typer.Option("--path", help="One path, as one plain module: 1,0.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="All modules and the router, for PathModel.")] = False,
    to: Annotated[Path, typer.Option("--to", help="The file, or with --all the folder, to write.")] = Path(
        "paths-export"
    ),
    best: Annotated[bool, typer.Option("--best", help="The path at its lowest validation loss.")] = False,
    run: Run = "",
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Take paths away: one as a plain model's weights, or all of them for `potluck.paths.pathmodel.PathModel`.

    Examples: [bold]potluck paths export --path 1,0 --to path.safetensors[/bold]

    [bold]potluck paths export --all --to my-model[/bold]
    """
    from potluck.cli import console
    from potluck.errors import ConfigurationError
    from potluck.paths.grid import read_path

    if bool(path) == everything:
        raise ConfigurationError("export what? Name one path, as in --path 1,0, or say --all")
    console.set_up_logging(verbose=False)
    hosted = _hosted(run, folder, best=best)
    if everything:
        names = hosted.model().save(to, hosted.routing)
        told: dict[str, Any] = {"folder": str(to), "files": names}
    else:
        from safetensors.torch import save_file

        model = hosted.plain(read_path(path))
        file = to if to.suffix else to.with_suffix(".safetensors")
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, file)
        told = {"file": str(file), "parameters": sum(p.numel() for p in model.parameters())}
    told["epochs"] = hosted.epochs
    if as_json:
        console.print_json(told)
    else:
        console.out.print(f"Wrote {told.get('file') or told['folder']}.", highlight=False)


@app.command("reroute")
def reroute(
    run: Run = "",
    folder: Folder = None,
    in_phases: Annotated[int, typer.Option(min=1, help="After how many more phases all paths use it.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Route all documents anew, by which path has the least loss on their like; counts at one phase for all.

    Example: [bold]potluck paths reroute[/bold]
    """
    from potluck.cli import console
    from potluck.cli.pathrerouting import put_up_route

    console.set_up_logging(verbose=False)
    hosted = _hosted(run, folder)
    routing = hosted.reroute()
    moved = sum(a != b for a, b in zip(routing.paths, hosted.routing.paths, strict=True))
    phase = put_up_route(run, folder, routing, in_phases)
    if as_json:
        console.print_json({"moved": moved, "documents": len(routing.paths), "from_phase": phase})
    else:
        console.out.print(
            f"{moved:,} of {len(routing.paths):,} documents change paths, from phase {phase} on.", highlight=False
        )
