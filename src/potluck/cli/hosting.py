"""What `potluck host` does while it is open: tells who comes and goes, helps with the training, watches for alarms."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from potluck import tasks
from potluck.cli.hostrecipe import check_data, put_up, try_later, try_out

if TYPE_CHECKING:
    from potluck.cli.dashboardchild import DashboardOptions
    from potluck.monitor.alarms import Alarm, Kind
    from potluck.monitor.previews import Previewer
    from potluck.peer.session import Session
    from potluck.run.host import Host, HostConfig
    from potluck.state.backupfile import BackupInfo
    from potluck.state.config import StateConfig
    from potluck.training.books.history import Preview
    from potluck.training.manifest.noticeboard import NoticeBoard
    from potluck.training.staged.hosting import StagedWork
    from potluck.training.trainer.auxiliarywork import AuxiliaryWork

logger = logging.getLogger(__name__)

T = TypeVar("T")

ALARMS_EVERY_SECONDS = 5.0
RETRY_SECONDS = 1.0
EVALUATE_EVERY_SECONDS = 2.0  # a look for a backup that is to be evaluated


@dataclass(frozen=True, slots=True, kw_only=True)
class Backing:
    """How the host saves the run's state: a BackupConfig before torch is there."""

    every_epochs: int
    keep_last: int
    keep_every: int
    upload_to: str
    most_bytes: int = 10 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The host's work besides its hub: all that needs torch, whose import takes seconds."""

    run_file: Path | None
    """What to train; None: nothing yet."""

    backups: Backing
    dashboard: DashboardOptions | None

    is_tried: bool = False
    """Whether the recipe has learned from a sample on this machine."""

    announce: Callable[[Host, bool], Awaitable[None]] | None = None
    """Announces the open run instead of the usual text; such a host trains nothing and needs no torch."""


def dashboard_options(
    config: HostConfig, wanted: bool, listen: str, port: int | None, trusted_proxies: tuple[str, ...]
) -> DashboardOptions | None:
    """How to serve the dashboard; None where it is not wanted or not installed."""
    from potluck.cli.dashboard import is_installed
    from potluck.cli.dashboardchild import DashboardOptions
    from potluck.peer import environment

    if not wanted or environment.wants_no_dashboard() or not is_installed():
        return None
    hosts = config.hub.advertised_hosts
    return DashboardOptions(
        run=config.hub.run,
        folder=config.hub.folder,
        listen=listen,
        port=port,
        shown_host=hosts[0] if hosts and listen in ("0.0.0.0", "::") else "",
        trusted_proxies=trusted_proxies,
    )


async def serve(host: Host, work: Work, stop: asyncio.Event, as_json: bool) -> None:
    """Open the hub and announce it, and only then do slower work: after a crash, a whole run waits for the hub.

    At the first start nobody waits yet, and what is wrong with the recipe is better said before others come.
    """
    from potluck.cli import console
    from potluck.run.hostrecord import read_record

    async def start() -> bool:
        if host.config.hub.cluster is not None and not as_json:
            console.out.print("Waiting for the other hubs of the cluster: most of them must be there.")
        with nullcontext() if as_json else console.err.status("opening the hub"):
            await host.start()
        return True

    is_tried = False
    if work.run_file is not None and read_record(host.config.hub.folder) is None:  # later it is not waited for
        if not as_json:
            console.out.print("Trying what the run is to train.")
        tried = await console.unless_stopped(try_out(work.run_file), stop)
        if tried is None:
            return
        is_tried = tried
    if not await console.unless_stopped(start(), stop):
        return
    try:
        await (_announce if work.announce is None else work.announce)(host, as_json)
        if work.run_file is None:  # what the run trains is said elsewhere, or later
            if work.announce is None and not as_json:
                console.out.print(
                    "No run.toml was named, and there is none in this folder: programs of your own train here, and "
                    "`potluck join` has nothing to train. `potluck init` writes a run.toml."
                )
            host.serve(lambda _name: None)
        await _watch(host, replace(work, is_tried=is_tried or host.record.is_tried), stop, as_json)
    finally:
        await host.stop()


async def _watch(host: Host, work: Work, stop: asyncio.Event, as_json: bool) -> None:
    """Report joins and departures until asked to stop, or until the hub dies."""
    from potluck.cli import console

    assert host.peer is not None
    roster = host.peer.session.roster
    async with AsyncExitStack() as parts:  # closed here, where nobody cancels: the dashboard has to be waited for
        host.listen_requests(lambda request: console.tell_request(request, as_json))
        parts.callback(roster.listen(lambda event: console.tell_roster_event(event, roster.num_working, as_json)))
        _serve_parcels(host)
        await console.unless_stopped(host.unless_failed(_help(host, work, parts, as_json)), stop)


def _serve_parcels(host: Host) -> None:
    """Serve the parcels of `potluck fleet up` to a fleet's machines."""
    from potluck.fleet.jobs.control import FOLDER
    from potluck.fleet.jobs.parcels import ParcelFolder

    assert host.peer is not None
    roster = host.peer.session.roster

    def is_machine(peer: str) -> bool:
        presence = roster.get(peer)
        return presence is not None and presence.card.role == "machine"

    ParcelFolder(host.config.hub.folder / FOLDER).serve(host.peer.links, is_machine)


async def _help(host: Host, work: Work, parts: AsyncExitStack, as_json: bool) -> None:
    """Say what to train; have the host's own peer reduce and coordinate, for ever."""
    from potluck.cli import console
    from potluck.cli.dashboardchild import DashboardChild
    from potluck.training.manifest.requirements import keep_manifest, offer_of

    if work.announce is not None:
        if work.dashboard is not None:
            parts.push_async_callback(DashboardChild(work.dashboard, as_json).close)
        await asyncio.Event().wait()
    module = await console.import_slowly("potluck.training.trainer.auxiliarywork")
    assert host.peer is not None
    recipe = None
    if work.run_file is not None:
        run_file = work.run_file
        recipe = await _persist(lambda: put_up(run_file, host))
        is_tried = work.is_tried or await _persist(lambda: try_later(run_file, host))
        host.note(recipe_file=recipe, is_tried=is_tried)
    helper = await _start_helping(host, work, module, recipe, as_json)
    parts.push_async_callback(helper.close)
    host.serve(offer_of(helper.board))
    keep_manifest(host.config.hub.folder, helper.board)
    helper.board.listen(lambda _newest: keep_manifest(host.config.hub.folder, helper.board))
    if work.run_file is not None:
        check_data(helper.board, recipe)
    is_staged = helper.board.manifest is not None and helper.board.manifest.pipeline is not None
    alarms = asyncio.create_task(
        tell_alarms(host.peer.session, as_json, but=("standstill",) if is_staged else ()), name="alarms"
    )
    alarms.add_done_callback(lambda task: tasks.log_failures([task]))  # at once: a host may go on for months
    parts.push_async_callback(tasks.end, alarms)
    if work.dashboard is not None:
        parts.push_async_callback(DashboardChild(replace(work.dashboard, recipe=recipe), as_json).close)
    # Monitors elsewhere show what the model says, too. Nobody holds the whole of a pipeline's.
    if not is_staged and (work.dashboard is None or _evaluates(helper.board)):
        previews = await console.import_slowly("potluck.monitor.previews")
        previewer = _previewer(previews, host, cast("AuxiliaryWork", helper), recipe)
        previewer.start()
        parts.push_async_callback(previewer.close)
    await asyncio.Event().wait()


async def _start_helping(
    host: Host, work: Work, module: Any, recipe: Path | None, as_json: bool
) -> AuxiliaryWork | StagedWork:
    """What the host's own peer does: reduces and coordinates, or conducts a pipeline."""
    assert host.peer is not None
    peer = host.peer
    if work.run_file is not None:
        from potluck.training.manifest.runfile import read_run_file

        if read_run_file(work.run_file).pipeline is not None:
            from potluck.cli.staged import tell
            from potluck.training.staged.hosting import StagedWork

            return await _persist(
                lambda: StagedWork.start(
                    peer,
                    host.config.hub.folder,
                    every_steps=work.backups.every_epochs,
                    keep_last=work.backups.keep_last,
                    recipe_file=recipe,
                    tell=lambda event, about: tell(event, about, as_json),
                )
            )
    states = state_config(host, _often_enough(work))
    helper: AuxiliaryWork = await _persist(lambda: module.AuxiliaryWork.start(peer, states))
    return helper


def _evaluates(board: NoticeBoard) -> bool:
    return board.manifest is not None and board.manifest.evaluation.every_epochs > 0


def _often_enough(work: Work) -> Backing:
    """Evaluations use backups, so backups must be at least as frequent."""
    from potluck.training.manifest.runfile import read_run_file

    every = read_run_file(work.run_file).evaluation.every_epochs if work.run_file is not None else 0
    return replace(work.backups, every_epochs=min(every, work.backups.every_epochs)) if every else work.backups


def _previewer(module: Any, host: Host, helper: AuxiliaryWork, recipe: Path | None) -> Previewer:
    """The model's preview and its held-out loss: recorded, judged, and the run rolled back if necessary."""
    from potluck.monitor.evaluating import Evaluations
    from potluck.training.books.contributions import read_book
    from potluck.training.manifest.steering import steering
    from potluck.training.trainer.exporting import write_contributors

    async def roll_back(backup: BackupInfo, reason: str) -> None:
        async with steering(host.address, host.keys, host.record.run) as helm:
            await helm.roll_back(backup, by="gate", reason=reason)

    assert host.peer is not None
    session, board = host.peer.session, helper.board
    history = session.hub.store("history")
    folder = host.config.hub.folder
    evaluations = Evaluations(folder / "states", history, lambda: board.manifest, roll_back)

    async def made(preview: Preview, info: BackupInfo) -> None:
        await evaluations.judge(preview, info)
        book, _revision = await read_book(session)
        try:
            write_contributors(folder / "states", book)
        except OSError as error:  # a model card can do without them
            logger.warning("the contributors could not be recorded for model cards: %s", error)

    previewer: Previewer = module.Previewer(
        folder, lambda: board.manifest, history, recipe, made, helper.evaluations.figures_at
    )
    if _evaluates(board):
        previewer.every_seconds = EVALUATE_EVERY_SECONDS
    return previewer


async def _persist(step: Callable[[], Awaitable[T]]) -> T:
    """Run a step that needs the hub; retry while the hub is away, since its server may be restarting."""
    from potluck.errors import RetryableError

    while True:
        try:
            return await step()
        except RetryableError as error:
            logger.warning("the hub is away just now, trying on: %s", error)
        await asyncio.sleep(RETRY_SECONDS)


def state_config(host: Host, backups: Backing) -> StateConfig:
    from potluck.state.backups import BackupConfig
    from potluck.state.config import StateConfig

    config = BackupConfig(
        every_epochs=backups.every_epochs,
        keep_last=backups.keep_last,
        keep_every=backups.keep_every,
        most_bytes=backups.most_bytes,
    )
    return StateConfig(folder=host.config.hub.folder / "states", backups=config, upload_to=backups.upload_to or None)


async def tell_alarms(session: Session, as_json: bool, *, but: tuple[str, ...] = ()) -> None:
    """Say what is wrong with the run, when it begins and when it is over."""
    from potluck.cli import console
    from potluck.monitor.watcher import Watcher

    watcher = await Watcher.started(session)
    told: dict[tuple[Kind, str], Alarm] = {}
    try:
        while True:
            await asyncio.sleep(ALARMS_EVERY_SECONDS)
            now = {alarm.key: alarm for alarm in watcher.alarms() if alarm.kind not in but}
            for key, alarm in now.items():
                if key not in told:
                    console.tell_alarm(alarm.kind, alarm.text, alarm.peer, as_json)
            for key, alarm in told.items():
                if key not in now:
                    console.tell_alarm(alarm.kind, "", alarm.peer, as_json)
            told = now
    finally:
        await watcher.close()


async def _announce(host: Host, as_json: bool) -> None:
    from rich.markup import escape

    from potluck.cli import console

    assert host.peer is not None
    others = len(host.peer.session.roster) - 1
    if as_json:
        console.print_json({"event": "ready", "run": host.record.run, "link": str(host.link), "others": others})
        return
    console.out.print(f"[green]The run [bold]{host.record.run}[/bold] is open.[/green] Others join it with:\n")
    console.out.print(f"  potluck join '{escape(str(host.link))}'\n", soft_wrap=True, highlight=False)
    if host.link.wheel is not None:
        console.out.print("People without Potluck install it from here first:\n")
        console.out.print(f"  {escape(host.link.pip_line)}\n", soft_wrap=True, highlight=False)
    if others > 0:
        console.out.print(f"In the run already: {console.count(others, 'other')}.")
    console.out.print(
        "Members that join and leave are shown below. Ctrl-C ends the host. Start it again, and the run goes on."
    )
