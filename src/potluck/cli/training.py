"""What `potluck join` does once it is in: as a trainer it trains what the manifest says, as an aux peer it helps."""

from __future__ import annotations

import asyncio
import math
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from potluck import tasks

if TYPE_CHECKING:
    from potluck.cli.optiongroups import BackupOptions, TrainOptions
    from potluck.run.peer import Peer
    from potluck.state.config import StateConfig
    from potluck.training import participant as participants
    from potluck.training.manifest.manifest import Manifest
    from potluck.training.manifest.noticeboard import NoticeBoard
    from potluck.training.trainer.auxiliarywork import AuxiliaryWork
    from potluck.training.trainer.config import TrainConfig
    from potluck.training.trainer.trainer import TrainProgress


async def train(
    peer: Peer, options: TrainOptions, backups: BackupOptions | None, stop: asyncio.Event, as_json: bool
) -> None:
    """Train what the manifest says, in a thread of its own, until `stop`, the end of the run, or of our membership."""
    from potluck.cli import console
    from potluck.cli.requirements import see_to
    from potluck.errors import StoppedError
    from potluck.run.joined import Joined
    from potluck.run.loopthread import RunningLoop
    from potluck.training.participant import Participant

    importing = asyncio.create_task(
        console.import_slowly("potluck.training.trainer.leaving"), name="import"
    )  # takes longest
    loop, end = RunningLoop.of_this_thread(), threading.Event()

    async def started() -> Peer:
        return peer

    def prepare(manifest: Manifest) -> None:
        if peer.config.link is not None:  # mostly seen to before we got in
            see_to(manifest, peer.config.link, yes=options.yes, as_json=as_json, own_copy=options.recipe is not None)

    async def serve(board: NoticeBoard, manifest: Manifest) -> None:
        from potluck.cli.staged import take_stage

        await importing
        await take_stage(peer, board, manifest, options, stop, as_json)

    def work() -> TrainProgress | None:
        with Joined(started, loop) as run, Presenter(as_json) as presenter:
            participant = Participant(
                run,
                lambda manifest: _train_config(options, _state_config(backups, manifest.run, peer.peer_id), manifest),
                tell=presenter.tell,
                prepare=prepare,
                recipe_file=options.recipe,
                hand_in_seconds=options.hand_in_seconds,
                take_stage=serve,
            )
            return participant.take_part(end)

    stopping = asyncio.create_task(stop.wait())
    stopping.add_done_callback(lambda _task: end.set())
    try:
        last = await asyncio.to_thread(work)
    except StoppedError:
        console.err.print("You left before training began.")
        return
    finally:
        end.set()
        await tasks.end(stopping, importing)
    if last is None:
        return
    if as_json:
        console.print_json({"event": "trained", **_figures(last, peer.session.roster.num_working)})
    else:
        console.out.print(last.describe_given(), highlight=False)


def _train_config(options: TrainOptions, state: StateConfig, manifest: Manifest) -> TrainConfig:
    from potluck.training.books.receipts import receipts_folder, receipts_path
    from potluck.training.trainer.config import TrainConfig

    return TrainConfig(
        batch_size=options.batch_size,
        device=options.device,
        precision=options.precision,
        compile=options.compile,
        shard=options.shard,
        max_steps=options.max_steps,
        receipts=receipts_path(receipts_folder(), manifest.run),
        num_readers=options.n_workers,
        num_threads=options.threads,
        max_memory_bytes=options.max_memory_bytes,
        state=state,
    )


async def help_others(
    peer: Peer, options: TrainOptions, backups: BackupOptions | None, stop: asyncio.Event, as_json: bool
) -> None:
    """Reduce for the trainers, and coordinate if this peer may, until `stop` or the end of our membership.

    In a pipeline nobody reduces: it holds the stages that only one server has.
    """
    from potluck.cli import console
    from potluck.cli.joining import until_ended

    module = await console.import_slowly("potluck.training.trainer.auxiliarywork")
    if await _listen_in_pipeline(peer, options, stop, as_json):
        return
    state = _state_config(backups, peer.session.subjects.run, peer.peer_id)
    helper: AuxiliaryWork = await module.AuxiliaryWork.start(peer, state)
    try:
        await console.unless_stopped(until_ended(peer), stop)
    finally:
        await helper.close()


async def _listen_in_pipeline(peer: Peer, options: TrainOptions, stop: asyncio.Event, as_json: bool) -> bool:
    """Whether the run is a pipeline; if so, it is over when this returns."""
    from potluck.cli.requirements import see_to
    from potluck.cli.staged import take_stage
    from potluck.training.manifest.noticeboard import NoticeBoard

    board = NoticeBoard.of(peer.session)
    try:
        await board.start()
        manifest = board.manifest
        if manifest is None or manifest.pipeline is None:
            return False
        if (link := peer.config.link) is not None:
            own_copy = options.recipe is not None
            await asyncio.to_thread(see_to, manifest, link, yes=options.yes, as_json=as_json, own_copy=own_copy)
        await take_stage(peer, board, manifest, options, stop, as_json, only_listens=True)
        return True
    finally:
        await board.close()


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


class Presenter:
    """Says what happens while this peer trains: lines for people, or JSON for programs."""

    def __init__(self, as_json: bool) -> None:
        from potluck.cli.loading import Loading

        self._as_json = as_json
        self._loading = Loading(as_json)
        self._told_epoch = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loading.__exit__(kind, error, at)

    def tell(self, event: participants.Event) -> None:
        """Something happened. Called in the training thread and on the event loop."""
        from potluck.cli import console
        from potluck.training import participant as events

        match event:
            case events.StateLoading(here_bytes, all_bytes):
                self._loading.tell(here_bytes, all_bytes)
            case events.Prepared("torch"):
                self._loading.__enter__()
            case events.TrainingBegan():
                self._loading.__exit__(None, None, None)
            case events.NotHandedIn(reason):
                console.err.print(reason, markup=False)
        if self._as_json:
            if fields := _fields_of(event):
                console.print_json(fields)
        elif isinstance(event, events.Progressed):
            self._print_progress(event)
        elif text := _words_of(event):
            console.out.print(text, markup=False, highlight=False)

    def _print_progress(self, event: participants.Progressed) -> None:
        from potluck.cli import console

        progress = event.progress
        if progress.epoch != self._told_epoch:
            self._told_epoch = progress.epoch
            loss = "no loss yet" if math.isnan(progress.loss) and not progress.given else f"loss {progress.loss:.4f}"
            console.out.print(
                f"epoch {progress.epoch}: {loss}, {progress.samples_per_second:.1f} samples/s, "
                f"{progress.given} given, {console.count(event.num_peers, 'peer')}",
                highlight=False,
            )


def _words_of(event: participants.Event) -> str:
    """What a person is told; empty: nothing."""
    from potluck.cli import console
    from potluck.training import participant as events

    match event:
        case events.ManifestAwaited():
            return "The organiser has not said yet what to train. Waiting for that."
        case events.RunIsOver(epoch):
            return f"This run is over: it ended with epoch {epoch}, and nothing is left to train."
        case events.TrainingBegan():
            size = event.batch_size
            batches = "the batch size is found while it trains" if size is None else f"in batches of {size}"
            return (
                f"Training {event.recipe} on {', '.join(event.devices)} in {event.precision} {batches}, with "
                f"{console.count(event.num_threads, 'thread')}. Ctrl-C hands in what you have done, and leaves."
            )
        case events.SlowLine(advice):
            return advice
        case events.BatchSizeFound(size):
            return f"Batches of {size} from here on."
        case events.PauseChanged(is_paused, by, reason):
            who, why = by or "The organiser", f" ({reason})" if reason else ""
            if is_paused:
                return f"{who} has paused the run{why}. Your samples are kept, and you go on when the run does."
            return f"{who} has the run go on{why}."
        case events.PathBegan(path, phase, num_others, loss):
            others = f", with {console.count(num_others, 'other')}" if num_others else ""
            before = f" Loss {loss:.4f} in the phase before." if loss == loss else ""
            return f"You train path ({', '.join(map(str, path))}), phase {phase}{others}.{before}"
        case events.HandingIn(samples):
            return f"Handing in your last {console.count(samples, 'sample')} with the next epoch …"
        case _:
            return ""


def _fields_of(event: participants.Event) -> dict[str, Any]:
    """What a program is told; empty: nothing."""
    from potluck.training import participant as events

    match event:
        case events.ManifestAwaited():
            return {"event": "no manifest"}
        case events.RunIsOver(epoch):
            return {"event": "over", "epoch": epoch}
        case events.Prepared(what) if what != "manifest":
            return {"event": "prepared", "what": what}
        case events.TrainingBegan():
            return {
                "event": "training",
                "recipe": event.recipe,
                "batch_size": event.batch_size,
                "device": ",".join(event.devices),
                "precision": event.precision,
                "threads": event.num_threads,
            }
        case events.SlowLine(advice):
            return {"event": "slow line", "advice": advice}
        case events.BatchSizeFound(size):
            return {"event": "batch size", "batch_size": size}
        case events.PauseChanged(is_paused, by, reason):
            return {"event": "paused" if is_paused else "resumed", "by": by, "reason": reason}
        case events.Progressed(progress, num_peers):
            return {"event": "progress", **_figures(progress, num_peers)}
        case events.PathBegan(path, phase):
            return {"event": "path", "path": list(path), "phase": phase, "others": event.num_others}
        case events.HandingIn(samples):
            return {"event": "handing in", "samples": samples}
        case _:
            return {}


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
        "seconds": round(progress.seconds, 1),
        "seconds_waiting": round(progress.seconds_waiting, 1),
        "peers": num_peers,
    }
