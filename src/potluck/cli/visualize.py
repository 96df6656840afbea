"""`potluck visualize`: what the model does now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.cli import options as o

if TYPE_CHECKING:
    from potluck.run.peer import Peer
    from potluck.training.trainer.viewing import StateViewer

FETCH_SECONDS = 600.0
RETRY_SECONDS = 5.0

logger = logging.getLogger(__name__)


def visualize(
    link: o.Link = "",
    every: Annotated[int, typer.Option(help="Show it every so many epochs.")] = 10,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
    recipe: o.RecipeFile = None,
    identity_path: Annotated[
        Path | None, typer.Option(help="File with the key you watch by; a new one is made unless given.")
    ] = None,
    as_json: o.AsJson = False,
    verbose: o.Verbose = False,
) -> None:
    """Show what the run's model does now, every so many epochs: generated text, predictions, figures.

    It fetches the newest state as a newcomer would, and has the recipe show it; nothing is trained here.

    Example: [bold]potluck visualize 'potluck://hub.example.org:4222/my-run?ca=…#…' --every 50[/bold]
    """
    from potluck.cli import console
    from potluck.cli.joining import observe, parse_link
    from potluck.errors import ConfigurationError

    if every < 1:
        raise ConfigurationError(f"--every {every}: it is a number of epochs, at least 1")
    console.set_up_logging(verbose)

    async def watch(peer: Peer, stop: asyncio.Event) -> None:
        await console.unless_stopped(unless_ended(peer.session.ended, _watch(peer, recipe, every, once, as_json)), stop)

    observe(parse_link(link, "potluck visualize"), "visualizer", identity_path, as_json, watch)


async def _watch(peer: Peer, recipe_file: Path | None, every: int, once: bool, as_json: bool) -> None:
    from potluck.cli import console
    from potluck.training.manifest.noticeboard import NoticeBoard

    viewing = await console.import_slowly("potluck.training.trainer.viewing")
    board = NoticeBoard.of(peer.session)
    await board.start()
    viewer: StateViewer = await viewing.StateViewer.start(peer)
    try:
        if board.manifest is None and not as_json:
            console.out.print("The organiser has not said yet what to train. Waiting for that.")
        manifest = await board.first()
        from potluck.recipes.catalogue import open_recipe
        from potluck.training.manifest.curriculum import data_at

        recipe = open_recipe(manifest.recipe, manifest.model, recipe_file, manifest.files)
        recipe.data = data_at(recipe, manifest, viewer.lineage.epoch)
        await keep_showing(viewer, recipe, every, once, as_json)
    finally:
        await viewer.close()
        await board.close()


async def unless_ended(ended: asyncio.Future[None], work: Coroutine[Any, Any, None]) -> None:
    """Do the work; if our membership has `ended` first, raise why."""
    from potluck import tasks

    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        (task if task.done() else ended).result()
    finally:
        if not task.done():
            await tasks.end(task)


async def keep_showing(viewer: StateViewer, recipe: Any, every: int, once: bool, as_json: bool) -> None:
    from potluck.errors import RetryableError

    epoch = 1
    while True:
        await viewer.until_epoch(epoch)
        try:
            with await viewer.newest(at_least_epoch=epoch, timeout_seconds=FETCH_SECONDS) as fetched:
                shown, tensors = fetched.epoch, fetched.tensors()
        except RetryableError as error:
            if once:
                raise
            logger.warning("the state of epoch %d or later cannot be shown yet, trying on: %s", epoch, error)
            await asyncio.sleep(RETRY_SECONDS)
            continue
        text, figures = await asyncio.to_thread(_preview, recipe, tensors)
        _tell(shown, text, figures, as_json)
        if once:
            return
        epoch = shown + every


def _preview(recipe: Any, tensors: Any) -> tuple[str, dict[str, float]]:
    from potluck.training.trainer.models import load, preview

    model = recipe.model()
    load(model, tensors)
    return preview(recipe, model)


def _tell(epoch: int, text: str, figures: dict[str, float], as_json: bool) -> None:
    from rich.panel import Panel
    from rich.text import Text

    from potluck.cli import console

    if as_json:
        console.print_json({"event": "preview", "epoch": epoch, "text": text, **figures})
        return
    title = ", ".join([f"epoch {epoch}", *(f"{name} {value:.4g}" for name, value in figures.items())])
    console.out.print(Panel(Text(text or "the recipe has no preview"), title=title))
