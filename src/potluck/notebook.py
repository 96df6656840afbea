"""Taking part from a notebook: one call in one cell, with a bar and a live plot, until the cell is stopped.

    from potluck.notebook import take_part

    take_part("potluck://…")

A notebook can only dial out, so this is a client peer, and it reaches the hub by WebSocket, which notebook services let
through. Training runs in a thread of its own; the cell's thread draws, and stopping the cell (KeyboardInterrupt) is
what Ctrl-C is on the command line: the step under way is finished, what was done is handed in, and the run is left in
good order; stopping it again leaves at once.
"""

from __future__ import annotations

import base64
import html
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from potluck.errors import ConfigurationError, StoppedError
from potluck.hub.access.application import why_we_wait
from potluck.hub.joinlink import JoinLink
from potluck.monitor.lossplot import plot_loss
from potluck.optim.progress.tracker import RunProgress
from potluck.peer import environment
from potluck.recipes.approval import approve, is_approved
from potluck.recipes.downloads import Download, Progress
from potluck.recipes.reference import compile_source, read_source
from potluck.run.joined import Joined, join
from potluck.training import participant as events
from potluck.training.books.receipts import receipts_folder, receipts_path
from potluck.training.manifest.manifest import Manifest
from potluck.training.manifest.requirements import (
    check_requirements,
    fetch_all,
    fetch_manifest,
    fetch_recipe,
    fetches_of,
)
from potluck.training.participant import HAND_IN_SECONDS, Participant
from potluck.training.trainer.config import TrainConfig
from potluck.training.trainer.machine import find_devices
from potluck.training.trainer.trainer import TrainProgress

DRAW_EVERY_SECONDS = 2.0
MOST_POINTS = 1000
WAIT_SECONDS = 24 * 3600.0  # for an organiser to let somebody in


def take_part(
    link: str = "",
    *,
    name: str = "",
    recipe: str | Path | None = None,
    yes: bool = False,
    batch_size: int | None = None,
    device: str = "",
    precision: str = "",
    max_steps: int | None = None,
    hand_in_seconds: float = HAND_IN_SECONDS,
) -> None:
    """Train with the others until the run ends or the cell is stopped.

    `link` is the join link (else POTLUCK_LINK); `name` what you want to be called. Where the organiser wrote the run's
    recipe, `yes=True` lets that code run here, or `recipe` names your own copy of it. Batch size, device and
    precision are found unless given. On leaving, the next epoch is waited for so long, to hand in what was done.
    """
    screen = _screen()
    config = TrainConfig(batch_size=batch_size, device=device, precision=precision, max_steps=max_steps)
    find_devices(device)  # before anybody is looked for
    copy = None if recipe is None else Path(recipe)
    if copy is not None:
        compile_source(read_source(copy), copy)
    _make_ready(link, yes, copy, screen)
    try:
        with _joined(link, name, screen) as run:
            train_in_cell(run, config, copy, hand_in_seconds, screen)
    except StoppedError:
        screen.show("<p>You left before training began.</p>")
    except KeyboardInterrupt:
        screen.show("<p>You have left.</p>")


def _make_ready(link: str, yes: bool, copy: Path | None, screen: Screen) -> None:
    """See to packages, consent and files before anybody asks to be let in; ConfigurationError says what is missing."""
    text = link or environment.link()
    if not text or "…" in text:
        return  # `_joined` says so
    parsed = JoinLink.parse(text)
    manifest = fetch_manifest(parsed)
    if manifest is None:
        return
    check_requirements(manifest)
    if copy is None and not is_approved(manifest.recipe):
        path = fetch_recipe(manifest, parsed)
        if not yes:
            raise ConfigurationError(
                f"this run trains with code of its organiser's own, {manifest.recipe.name}. Look at it ({path}), and "
                "let it run with take_part(…, yes=True)"
            )
        approve(manifest.recipe)

    def tell(download: Download) -> Progress:
        def progress(there: int, total: int | None) -> None:
            size = f" of {total / 1e6:.1f}" if total else ""
            screen.show(f"<p>Fetching {html.escape(download.name)}: {there / 1e6:.1f}{size} MB …</p>")

        return progress

    fetch_all(fetches_of(manifest, parsed), tell)


def _joined(link: str, name: str, screen: Screen) -> Joined:
    text = link or environment.link()
    if not text or "…" in text:
        raise ConfigurationError("which run? Paste its join link, from potluck:// to its end, between the quotes")
    places = JoinLink.parse(text).places
    screen.show(f"<p>Looking for the hub at {html.escape(', '.join(map(str, places)))} …</p>")
    return join(
        text,
        name=name or environment.person_name(),
        client_mode=True,
        websocket_only=any(place.websocket_port is not None for place in places),
        wait_seconds=WAIT_SECONDS,
        on_waiting=lambda answer: screen.show(f"<p>{html.escape(why_we_wait(answer))} …</p>"),
    )


def train_in_cell(run: Joined, config: TrainConfig, copy: Path | None, hand_in_seconds: float, screen: Screen) -> None:
    """Train in a run that was joined, and show how it goes. `copy` is this machine's copy of the recipe, if any."""
    stop, picture = threading.Event(), Picture(run.peer.session.subjects.run)
    why_not: list[str] = []  # the last samples do not count, if so

    def tell(event: events.Event) -> None:
        match event:
            case events.ManifestAwaited():
                screen.show("<p>You are in. The organiser has not said yet what to train …</p>")
            case events.Prepared("manifest"):
                screen.show("<p>You are in. Loading the model …</p>")
            case events.RunIsOver(epoch):
                screen.show(f"<p>This run is over: it ended with epoch {epoch}, and nothing is left to train.</p>")
            case events.StateLoading(here_bytes, all_bytes):
                picture.load(here_bytes, all_bytes)
            case events.Progressed(progress):
                picture.add(progress)
            case events.HandingIn(samples):
                screen.show(
                    f"<p>Handing in your last {samples:,} samples with the next epoch … Stop the cell to leave at "
                    "once.</p>"
                )
            case events.NotHandedIn(reason):
                why_not.append(reason)

    def configure(manifest: Manifest) -> TrainConfig:
        return replace(config, receipts=receipts_path(receipts_folder(), manifest.run))

    participant = Participant(run, configure, tell=tell, recipe_file=copy, hand_in_seconds=hand_in_seconds)
    picture.ask = lambda: participant.run_progress
    pool = ThreadPoolExecutor(1, "potluck-train")
    training = pool.submit(participant.take_part, stop)
    try:
        try:
            _watch(training, picture, screen)
        except KeyboardInterrupt:
            screen.show("<p>Leaving: the step under way is finished first …</p>")
        stop.set()
        last = training.result()
    finally:
        stop.set()
        pool.shutdown(wait=training.done())  # a second stop of the cell does not wait: the run is left here
    if last is not None:
        screen.show(picture.html(" ".join([last.describe_given(), *why_not])))


def _watch(training: Future[TrainProgress | None], picture: Picture, screen: Screen) -> None:
    while not training.done():
        wait([training], timeout=DRAW_EVERY_SECONDS)
        if picture.progress is not None:
            screen.show(picture.html())
        elif picture.loaded is not None:
            here, of = (num_bytes / 1e6 for num_bytes in picture.loaded)
            screen.show(f"<p>You are in. Loading the run's state: {here:.0f} of {of:.0f} MB …</p>")


class Picture:
    """What the cell shows: a bar, a few figures, the loss so far."""

    def __init__(self, run: str) -> None:
        self.progress: TrainProgress | None = None
        self.loaded: tuple[int, int] | None = None
        """Bytes of the run's state that are here, and all of them, while it is loaded."""
        self.ask: Callable[[], RunProgress | None] = lambda: None
        """The coordinator's newest word on the run."""

        self._run = run
        self.points: list[tuple[float, float]] = []

    def load(self, here_bytes: int, all_bytes: int) -> None:
        """So much of the run's state is here."""
        self.loaded = here_bytes, all_bytes

    def add(self, progress: TrainProgress) -> None:
        """This peer has made progress."""
        self.progress = progress
        if not self.points or self.points[-1][0] < progress.epoch:
            self.points.append((progress.epoch, progress.loss))
        if len(self.points) > MOST_POINTS:
            del self.points[1::2]

    def html(self, word: str = "") -> str:
        """All of it; `word` comes last."""
        mine, everybody = self.progress, self.ask()
        facts = (
            [] if mine is None else [f"epoch {mine.epoch}", f"loss {mine.loss:.3f}", f"{mine.given:,} samples given"]
        )
        if mine is not None:
            facts.append("paused by the organiser" if mine.paused else f"{mine.samples_per_second:.1f} samples/s")
        if everybody is not None and everybody.num_trainers:
            facts.append(f"{everybody.num_trainers} training, {everybody.samples_per_second:.1f} samples/s together")
        image = base64.b64encode(plot_loss(self.points, title=f"loss in {self._run}")).decode()
        return (
            f"<p><b>{html.escape(self._run)}</b> &middot; {' &middot; '.join(facts)}</p>"
            f"{_bar(everybody)}"
            f'<img width="640" alt="loss" src="data:image/png;base64,{image}">'
            f"<p>{html.escape(word) or 'Stop the cell to leave.'}</p>"
        )


def _bar(everybody: RunProgress | None) -> str:
    if everybody is None or not everybody.target:
        return "<p><progress></progress></p>"
    label = f"{everybody.samples:,} of {everybody.target:,} samples towards epoch {everybody.epoch + 1}"
    return f'<p><progress max="{everybody.target}" value="{everybody.samples}"></progress> {label}</p>'


class Screen(Protocol):
    """Where a cell's output goes."""

    def show(self, page: str) -> None:
        """Put this page in the place of the one before."""
        ...


class _NotebookScreen:
    """One output that is written over."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None
        self._turn = threading.Lock()

    def show(self, page: str) -> None:
        content = self._display.HTML(page)
        with self._turn:  # while we wait for an organiser, the event loop's thread shows things too
            if self._handle is None:
                self._handle = self._display.display(content, display_id=True)
            else:
                self._handle.update(content)


def _screen() -> Screen:
    try:
        from IPython import display
    except ImportError as error:
        raise ConfigurationError("this is for notebooks: on a command line, use `potluck join`") from error
    return _NotebookScreen(display)
