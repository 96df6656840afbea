"""One peer's training in a run, from the manifest to the samples that it hands in.

    manifest ──▶ prepare ──▶ recipe ──▶ trainer ──▶ hand in
        └───────────┴───────────┴──────────┴───────────┴──▶ events

The command line and notebooks only present this: they say how to prepare (what a person is asked, what is fetched), and
show the events. Nothing is printed here. torch is imported when there is something to train, and not before.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from potluck import tasks
from potluck.errors import ConfigurationError, StoppedError
from potluck.peer.session import Session
from potluck.run.joined import Joined
from potluck.training.manifest.manifest import Manifest
from potluck.training.manifest.noticeboard import NoticeBoard
from potluck.training.manifest.readiness import check_ready, last_epoch

if TYPE_CHECKING:
    from potluck.optim.progress.tracker import RunProgress
    from potluck.paths.pathtrainer import PathProgress
    from potluck.training.trainer.config import TrainConfig
    from potluck.training.trainer.trainer import Trainer, TrainProgress

HAND_IN_SECONDS = 2.5


@dataclass(frozen=True, slots=True)
class ManifestAwaited:
    """The organiser has not said yet what to train."""


@dataclass(frozen=True, slots=True)
class RunIsOver:
    """There is nothing left to train."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A part of the preparation is done."""

    what: Literal["manifest", "torch", "model"]


@dataclass(frozen=True, slots=True)
class StateLoading:
    """So much of the run's state is here."""

    here_bytes: int
    all_bytes: int


@dataclass(frozen=True, slots=True)
class TrainingBegan:
    """The first step comes next."""

    recipe: str
    batch_size: int | None  # None: it is found on the way
    devices: tuple[str, ...]
    precision: str
    num_threads: int


@dataclass(frozen=True, slots=True)
class SlowLine:
    """This machine's line is slow for this run."""

    advice: str


@dataclass(frozen=True, slots=True)
class BatchSizeFound:
    """Batches have this size from now on."""

    size: int


@dataclass(frozen=True, slots=True)
class PauseChanged:
    """The organiser has paused the run, or has it go on."""

    is_paused: bool
    by: str
    reason: str


@dataclass(frozen=True, slots=True)
class Progressed:
    """This peer has made progress."""

    progress: TrainProgress
    num_peers: int


@dataclass(frozen=True, slots=True)
class PathBegan:
    """In a run with paths: this peer trains this path from now on."""

    path: tuple[int, ...]
    phase: int
    num_others: int  # who share it
    loss: float  # of the phase before


@dataclass(frozen=True, slots=True)
class HandingIn:
    """The last samples wait for the next epoch."""

    samples: int


@dataclass(frozen=True, slots=True)
class NotHandedIn:
    """The last samples are lost."""

    reason: str


Event = (
    ManifestAwaited
    | RunIsOver
    | Prepared
    | StateLoading
    | TrainingBegan
    | SlowLine
    | BatchSizeFound
    | PauseChanged
    | Progressed
    | PathBegan
    | HandingIn
    | NotHandedIn
)

TakeStage = Callable[[NoticeBoard, Manifest], Coroutine[Any, Any, None]]


class Participant:
    """One peer that trains what the manifest says. Lives in a thread of its own."""

    def __init__(
        self,
        run: Joined,
        configure: Callable[[Manifest], TrainConfig],
        *,
        tell: Callable[[Event], None],
        prepare: Callable[[Manifest], None] = lambda _manifest: None,
        recipe_file: Path | None = None,
        hand_in_seconds: float = HAND_IN_SECONDS,
        take_stage: TakeStage | None = None,
    ) -> None:
        """`configure` says how this machine trains; `prepare` sees to packages, consent and files.

        `recipe_file` is this machine's copy of a recipe that is not built in. On leaving, the next epoch is waited for
        up to `hand_in_seconds`. `take_stage` is what this peer does in a pipeline, on the event loop, until it leaves.
        """
        self._run = run
        self._configure = configure
        self._tell = tell
        self._prepare = prepare
        self._recipe_file = recipe_file
        self._hand_in_seconds = hand_in_seconds
        self._take_stage = take_stage
        self._trainer: Trainer | None = None
        self._is_paused = False

    @property
    def run_progress(self) -> RunProgress | None:
        """How far the whole run is, as the coordinator says. Any thread may ask."""
        return self._trainer.optimizer.collaboration.progress.latest if self._trainer is not None else None

    def take_part(self, stop: threading.Event) -> TrainProgress | None:
        """Train until `stop` or the end of the run, and hand in; None: there was nothing to train.

        StoppedError where `stop` comes before training has begun.
        """
        run = self._run
        run.is_leaving = stop.is_set
        board = NoticeBoard.of(run.peer.session)
        run.attach(board.close)
        manifest = run.call_unless_leaving(_first_manifest(run.peer.session, board, self._tell))
        self._tell(Prepared("manifest"))
        self._prepare(manifest)
        check_ready(manifest, self._recipe_file)
        if (epoch := run.call(last_epoch(run.peer.session.store("lineage"), manifest))) is not None:
            self._tell(RunIsOver(epoch))
            return None
        if manifest.pipeline is not None:
            self._serve_stage(board, manifest)
            return None
        return (self._train if manifest.paths is None else self._train_paths)(board, manifest, stop)

    def _train(self, board: NoticeBoard, first: Manifest, stop: threading.Event) -> TrainProgress:
        from potluck.recipes.catalogue import open_recipe
        from potluck.training.trainer.leaving import train_and_hand_in
        from potluck.training.trainer.trainer import Trainer

        tell = self._tell
        tell(Prepared("torch"))

        def newest() -> Manifest:
            return board.manifest or first

        config = self._configure(first)
        state = replace(config.state, on_progress=lambda here, of: tell(StateLoading(here, of)))
        trainer = self._trainer = Trainer(
            self._run,
            newest,
            open_recipe(first.recipe, first.model, self._recipe_file, first.files),
            replace(config, state=state),
            lambda progress: self._progressed(progress, newest()),
            on_model=lambda: tell(Prepared("model")),
            on_batch_size=lambda size: tell(BatchSizeFound(size)),
        )
        tell(
            TrainingBegan(
                recipe=first.recipe.name,
                batch_size=None if trainer.is_searching else trainer.batch_size,
                devices=tuple(map(str, trainer.computing.devices)),
                precision=trainer.computing.precision.precision,
                num_threads=trainer.computing.num_threads,
            )
        )
        if advice := self._line_advice(trainer, newest()):
            tell(SlowLine(advice))
        return train_and_hand_in(
            trainer,
            stop,
            self._hand_in_seconds,
            on_handing_in=lambda samples: tell(HandingIn(samples)),
            on_failure=lambda why: tell(NotHandedIn(why)),
        )

    def _serve_stage(self, board: NoticeBoard, manifest: Manifest) -> None:
        if self._take_stage is None:
            raise ConfigurationError("this run is a pipeline: take part in it with `potluck join`")
        self._tell(Prepared("torch"))
        self._run.call(self._take_stage(board, manifest))

    def _train_paths(self, board: NoticeBoard, first: Manifest, stop: threading.Event) -> TrainProgress:
        from potluck.recipes.catalogue import open_recipe
        from potluck.training.trainer.pathwork import as_train_progress, path_trainer

        tell = self._tell
        tell(Prepared("torch"))
        config = self._configure(first)
        state = replace(config.state, on_progress=lambda here, of: tell(StateLoading(here, of)))
        self._run.leave_seconds = self._hand_in_seconds + 1.5
        told: tuple[tuple[int, ...], int] | None = None

        def progressed(progress: PathProgress) -> None:
            nonlocal told
            if progress.path is not None and told != (progress.path, progress.phase):
                told = (progress.path, progress.phase)
                tell(PathBegan(progress.path, progress.phase, progress.holders - 1, progress.loss))
            num_peers = self._run.peer.session.roster.num_working
            tell(Progressed(as_train_progress(progress, trainer.config.batch_size), num_peers))

        trainer = path_trainer(
            self._run,
            lambda: board.manifest or first,
            open_recipe(first.recipe, first.model, self._recipe_file, first.files),
            replace(config, state=state),
            progressed,
            self._prepare,
        )
        device = str(next(trainer.model.parameters()).device)
        tell(TrainingBegan(first.recipe.name, trainer.config.batch_size, (device,), "float32", config.num_threads or 1))
        return as_train_progress(trainer.train(stop), trainer.config.batch_size)

    def _line_advice(self, trainer: Trainer, manifest: Manifest) -> str:
        from potluck.training.trainer.lineadvice import line_advice, round_bytes

        card = self._run.peer.session.card
        up, down = card.upload_bytes_per_second, card.download_bytes_per_second
        return line_advice(round_bytes(trainer.model, manifest), up, down, manifest)

    def _progressed(self, progress: TrainProgress, manifest: Manifest) -> None:
        if progress.paused != self._is_paused:
            self._is_paused = progress.paused
            order = manifest.newest_change("paused" if progress.paused else "resumed")
            by, reason = (order.by, order.reason) if order is not None else ("", "")
            self._tell(PauseChanged(progress.paused, by, reason))
        self._tell(Progressed(progress, self._run.peer.session.roster.num_working))


async def _first_manifest(session: Session, board: NoticeBoard, tell: Callable[[Event], None]) -> Manifest:
    """What to train, as soon as the organiser has said it. Raises why our membership ended meanwhile, if so."""

    async def read() -> Manifest:
        await board.start()
        if board.manifest is None:
            tell(ManifestAwaited())
        return await board.first()

    coming = asyncio.create_task(read())
    try:
        either: set[asyncio.Future[Any]] = {coming, session.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if coming.done():
            return coming.result()
        session.ended.result()
        raise StoppedError("this peer has left the run")
    finally:
        if not coming.done():
            await tasks.end(coming)
