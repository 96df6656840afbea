"""What `potluck join` does once it is in: as a trainer it trains what the manifest says, as an aux peer it helps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from potluck import tasks

if TYPE_CHECKING:
    from potluck.cli.optiongroups import BackupOptions, TrainOptions
    from potluck.run.peer import Peer
    from potluck.state.config import StateConfig
    from potluck.training.manifest.manifest import Manifest
    from potluck.training.manifest.notice import NoticeBoard
    from potluck.training.trainer.helping import AuxiliaryWork
    from potluck.training.trainer.trainer import Trainer, TrainProgress


async def train(
    peer: Peer, options: TrainOptions, backups: BackupOptions | None, stop: asyncio.Event, as_json: bool
) -> None:
    """Train what the manifest says, in a thread of its own, until `stop`, the end of the run, or of our membership."""
    from potluck.cli import console
    from potluck.cli.baggage import see_to
    from potluck.training.manifest.notice import NoticeBoard
    from potluck.training.manifest.readiness import check_ready, last_epoch

    importing = asyncio.create_task(
        console.import_slowly("potluck.training.trainer.leaving"), name="import"
    )  # takes longest
    board = NoticeBoard.of(peer.session)
    try:
        manifest = await _first_manifest(peer, board, stop, as_json)
        if manifest is None:
            return
        if peer.config.link is not None:  # mostly seen to before we got in
            arranged = {"yes": options.yes, "as_json": as_json, "own_copy": options.recipe is not None}
            await asyncio.to_thread(see_to, manifest, peer.config.link, **arranged)
        check_ready(manifest, options.recipe)
        if (epoch := await last_epoch(peer.session, manifest)) is not None:
            _tell_over(epoch, as_json)
            return
        await importing
        _tell_prepared("torch", as_json)
        state = _state_config(backups, manifest.run, peer.peer_id)
        await _train(peer, board, manifest, options, state, stop, as_json)
    finally:
        await tasks.end(importing)
        await board.close()


async def help_others(peer: Peer, backups: BackupOptions | None, stop: asyncio.Event) -> None:
    """Reduce for the trainers, and coordinate if this peer may, until `stop` or the end of our membership."""
    from potluck.cli import console
    from potluck.cli.joining import until_ended

    module = await console.import_slowly("potluck.training.trainer.helping")
    state = _state_config(backups, peer.session.subjects.run, peer.peer_id)
    helper: AuxiliaryWork = await module.AuxiliaryWork.start(peer, state)
    try:
        await console.unless_stopped(until_ended(peer), stop)
    finally:
        await helper.close()


def _state_config(backups: BackupOptions | None, run: str, peer_id: str) -> StateConfig:
    """Where and how often this peer writes backups, and whether it keeps states for others."""
    from potluck.cli.folders import states_folder
    from potluck.state.backups import BackupConfig
    from potluck.state.config import StateConfig

    if backups is None:
        return StateConfig(keep="never")
    folder = backups.state_path or states_folder(run, peer_id)
    every_epochs = backups.backup_every_step
    kept = (
        BackupConfig(every_epochs=every_epochs) if every_epochs else BackupConfig(every_epochs=0, keep_last=1, spread=0)
    )
    return StateConfig(folder=folder, backups=kept)


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
    peer: Peer,
    board: NoticeBoard,
    first: Manifest,
    options: TrainOptions,
    state: StateConfig,
    stop: asyncio.Event,
    as_json: bool,
) -> None:
    from potluck.cli import console
    from potluck.cli.loading import Loading
    from potluck.errors import StoppedError
    from potluck.recipes.catalogue import open_recipe
    from potluck.run.joined import Joined
    from potluck.run.loopthread import RunningLoop
    from potluck.training.books.receipts import receipts_folder, receipts_path
    from potluck.training.trainer.leaving import train_and_hand_in
    from potluck.training.trainer.lineadvice import line_advice, round_bytes
    from potluck.training.trainer.trainer import TrainConfig, Trainer

    recipe = open_recipe(first.recipe, first.model, options.recipe, first.files)
    loading = Loading(as_json)
    config = TrainConfig(
        batch_size=options.batch_size,
        device=options.device,
        precision=options.precision,
        compile=options.compile,
        shard=options.shard,
        max_steps=options.max_steps,
        receipts=receipts_path(receipts_folder(), first.run),
        num_readers=options.n_workers,
        num_threads=options.threads,
        max_memory_bytes=options.max_memory_bytes,
        state=replace(state, on_progress=loading.tell),
    )
    loop = RunningLoop.of_this_thread()
    end = threading.Event()

    async def started() -> Peer:
        return peer

    def newest() -> Manifest:
        return board.manifest or first

    tell = _teller(as_json, lambda: len(peer.session.roster), newest)

    def advise(trainer: Trainer) -> str:
        card = peer.session.card
        num_bytes = round_bytes(trainer.model, newest())
        return line_advice(num_bytes, card.upload_bytes_per_second, card.download_bytes_per_second, newest())

    def work() -> TrainProgress:
        with Joined(started, loop) as run:
            run.is_leaving = end.is_set
            with loading:
                trainer = Trainer(
                    run,
                    newest,
                    recipe,
                    config,
                    tell,
                    on_model=lambda: _tell_prepared("model", as_json),
                    on_batch_size=lambda size: _tell_batch_size(size, as_json),
                )
            _tell_training(trainer, first.recipe.name, as_json)
            if advice := advise(trainer):
                _tell_line(advice, as_json)
            return train_and_hand_in(
                trainer,
                end,
                options.hand_in_seconds,
                on_handing_in=lambda samples: _tell_handing_in(samples, as_json),
                on_failure=lambda why: console.err.print(why, markup=False),
            )

    stopping = asyncio.create_task(stop.wait())
    stopping.add_done_callback(lambda _task: end.set())
    try:
        last = await asyncio.to_thread(work)
    except StoppedError:
        console.err.print("You left before training began.")
        return
    finally:
        end.set()
        await tasks.end(stopping)
    if as_json:
        console.print_json({"event": "trained", **_figures(last, len(peer.session.roster))})
    else:
        console.out.print(last.describe_given(), highlight=False)


def _tell_over(epoch: int, as_json: bool) -> None:
    from potluck.cli import console

    if as_json:
        console.print_json({"event": "over", "epoch": epoch})
    else:
        console.out.print(f"This run is over: it ended with epoch {epoch}, and nothing is left to train.")


def _tell_prepared(what: str, as_json: bool) -> None:
    """For programs that want to know where the time goes; people see what comes of it."""
    from potluck.cli import console

    if as_json:
        console.print_json({"event": "prepared", "what": what})


def _tell_training(trainer: Trainer, recipe: str, as_json: bool) -> None:
    from potluck.cli import console

    size = None if trainer.is_searching else trainer.batch_size
    if as_json:
        figures = {
            "batch_size": size,
            "device": ",".join(map(str, trainer.devices)),
            "precision": trainer.precision.precision,
            "threads": trainer.num_threads,
        }
        console.print_json({"event": "training", "recipe": recipe, **figures})
    else:
        batches = "in batches whose size is found on the way" if size is None else f"in batches of {size}"
        devices = ", ".join(map(str, trainer.devices))
        console.out.print(
            f"Training {recipe} on {devices} in {trainer.precision.precision} {batches}, with "
            f"{console.count(trainer.num_threads, 'thread')}. "
            "Ctrl-C hands in what you have done, and leaves."
        )


def _tell_line(advice: str, as_json: bool) -> None:
    from potluck.cli import console

    if as_json:
        console.print_json({"event": "slow line", "advice": advice})
    else:
        console.out.print(advice, markup=False, highlight=False)


def _tell_batch_size(size: int, as_json: bool) -> None:
    from potluck.cli import console

    if as_json:
        console.print_json({"event": "batch size", "batch_size": size})
    else:
        console.out.print(f"Batches of {size} from here on.", highlight=False)


def _tell_handing_in(samples: int, as_json: bool) -> None:
    from potluck.cli import console

    if as_json:
        console.print_json({"event": "handing in", "samples": samples})
    else:
        console.out.print(f"Handing in your last {console.count(samples, 'sample')} with the next epoch …")


def _teller(
    as_json: bool, num_peers: Callable[[], int], manifest: Callable[[], Manifest]
) -> Callable[[TrainProgress], None]:
    from potluck.cli import console

    told_epoch, is_paused = -1, False

    def tell(progress: TrainProgress) -> None:
        nonlocal told_epoch, is_paused
        if progress.paused != is_paused:
            is_paused = progress.paused
            _tell_pause(is_paused, manifest(), as_json)
        if as_json:
            console.print_json({"event": "progress", **_figures(progress, num_peers())})
        elif progress.epoch != told_epoch:
            told_epoch = progress.epoch
            console.out.print(
                f"epoch {progress.epoch}: loss {progress.loss:.4f}, {progress.samples_per_second:.1f} samples/s, "
                f"{progress.given} given, {console.count(num_peers(), 'peer')}",
                highlight=False,
            )

    return tell


def _tell_pause(is_paused: bool, manifest: Manifest, as_json: bool) -> None:
    """That the run waits, or goes on, by whom and why."""
    from potluck.cli import console

    what = "paused" if is_paused else "resumed"
    order = manifest.newest_change(what)
    by, reason = (order.by, order.reason) if order is not None else ("", "")
    if as_json:
        console.print_json({"event": what, "by": by, "reason": reason})
        return
    why = f" ({reason})" if reason else ""
    text = (
        f"{by or 'The organiser'} has paused the run{why}. Your samples are kept, and you go on when the run does."
        if is_paused
        else f"{by or 'The organiser'} has the run go on{why}."
    )
    console.out.print(text, markup=False, highlight=False)


def _figures(progress: TrainProgress, num_peers: int) -> dict[str, Any]:
    return {
        "epoch": progress.epoch,
        "steps": progress.steps,
        "samples": progress.samples,
        "given": progress.given,
        "loss": progress.loss,
        "samples_per_second": progress.samples_per_second,
        "paused": progress.paused,
        "handed_in": progress.handed_in,
        "peers": num_peers,
    }
