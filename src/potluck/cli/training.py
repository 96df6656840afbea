"""What `potluck join` does once it is in: as a trainer it trains what the manifest says, as an aux peer it helps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck import tasks

if TYPE_CHECKING:
    from potluck.run.peer import Peer
    from potluck.training.helping import AuxiliaryWork
    from potluck.training.manifest import Manifest
    from potluck.training.notice import NoticeBoard
    from potluck.training.trainer import TrainProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What a person says about training on the command line."""

    recipe: Path | None
    batch_size: int | None
    device: str
    max_steps: int | None


async def train(peer: Peer, options: TrainOptions, stop: asyncio.Event, as_json: bool) -> None:
    """Train what the manifest says, in a thread of its own, until `stop`, the end of the run, or of our membership."""
    from potluck.cli import console

    notice = await console.import_slowly("potluck.training.notice")
    board: NoticeBoard = notice.NoticeBoard(peer.session.hub, peer.session.subjects.run)
    try:
        manifest = await _first_manifest(peer, board, stop, as_json)
        if manifest is not None:
            await _train(peer, board, manifest, options, stop, as_json)
    finally:
        await board.close()


async def help_others(peer: Peer, stop: asyncio.Event) -> None:
    """Reduce for the trainers, and coordinate if this peer may, until `stop` or the end of our membership."""
    from potluck.cli import console
    from potluck.cli.joining import until_ended

    module = await console.import_slowly("potluck.training.helping")
    helper: AuxiliaryWork = await module.AuxiliaryWork.start(peer)
    try:
        await console.unless_stopped(until_ended(peer), stop)
    finally:
        await helper.close()


async def _first_manifest(peer: Peer, board: NoticeBoard, stop: asyncio.Event, as_json: bool) -> Manifest | None:
    """What to train; None if told to stop before anybody says it. Raises why our membership ended meanwhile, if so."""
    from potluck.cli import console

    async def read() -> Manifest:
        await board.start()
        if board.manifest is None:
            if as_json:
                console.print_json({"event": "no manifest"})
            else:
                console.out.print("The organiser has not said yet what to train. Waiting for that.")
        return await board.first()

    async def first() -> Manifest | None:
        coming = asyncio.create_task(read())
        try:
            either: set[asyncio.Future[Any]] = {coming, peer.session.ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else peer.session.ended.result()
        finally:
            if not coming.done():  # else its error, if any, is raised above
                await tasks.end(coming)

    return await console.unless_stopped(first(), stop)


async def _train(
    peer: Peer, board: NoticeBoard, first: Manifest, options: TrainOptions, stop: asyncio.Event, as_json: bool
) -> None:
    from potluck.cli import console
    from potluck.cli.folders import receipts_folder
    from potluck.recipes.catalogue import open_recipe
    from potluck.run.joined import Joined
    from potluck.run.loopthread import RunningLoop
    from potluck.training.receipts import receipts_path
    from potluck.training.trainer import TrainConfig, Trainer

    recipe = open_recipe(first.recipe, first.model, options.recipe)
    config = TrainConfig(
        batch_size=options.batch_size,
        device=options.device,
        max_steps=options.max_steps,
        receipts=receipts_path(receipts_folder(), first.run),
    )
    loop = RunningLoop.of_this_thread()
    end = threading.Event()
    tell = _teller(as_json)

    async def started() -> Peer:
        return peer

    def newest() -> Manifest:
        return board.manifest or first

    def work() -> TrainProgress:
        with Joined(started, loop) as run:
            trainer = Trainer(run, newest, recipe, config, tell)
            if as_json:
                console.print_json({"event": "training", "batch_size": trainer.batch_size, "recipe": first.recipe.name})
            else:
                console.out.print(f"Training {first.recipe.name} in batches of {trainer.batch_size}. Ctrl-C leaves.")
            return trainer.train(end)

    stopping = asyncio.create_task(stop.wait())
    stopping.add_done_callback(lambda _task: end.set())
    try:
        last = await asyncio.to_thread(work)
    finally:
        end.set()
        await tasks.end(stopping)
    if as_json:
        console.print_json({"event": "trained", **_figures(last)})
    else:
        console.out.print(f"You gave {console.count(last.samples, 'sample')} up to epoch {last.epoch}. Thank you!")


def _teller(as_json: bool) -> Callable[[TrainProgress], None]:
    from potluck.cli import console

    told_epoch = -1

    def tell(progress: TrainProgress) -> None:
        nonlocal told_epoch
        if as_json:
            console.print_json({"event": "progress", **_figures(progress)})
        elif progress.epoch != told_epoch:
            told_epoch = progress.epoch
            console.out.print(
                f"epoch {progress.epoch}: loss {progress.loss:.4f}, {progress.samples_per_second:.1f} samples/s, "
                f"{progress.samples} given" + (" (paused)" if progress.paused else ""),
                highlight=False,
            )

    return tell


def _figures(progress: TrainProgress) -> dict[str, Any]:
    return {
        "epoch": progress.epoch,
        "steps": progress.steps,
        "samples": progress.samples,
        "loss": progress.loss,
        "samples_per_second": progress.samples_per_second,
        "paused": progress.paused,
    }
