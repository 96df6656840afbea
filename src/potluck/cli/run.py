"""`potluck run`: steer a run while it trains. On the machine that hosts it."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from potluck.round.plan.messages import Commit
    from potluck.training.manifest.earlier import EarlierState
    from potluck.training.manifest.manifest import Manifest, Settings
    from potluck.training.manifest.steering import Steering

logger = logging.getLogger(__name__)

T = TypeVar("T")

app = typer.Typer(
    help="Steer a run while it trains: pause, resume, change settings, roll back. On the machine that hosts it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Run = Annotated[str, typer.Option("--run", help="The run's name. Default: the name in the run.toml of this folder.")]
Folder = Annotated[Path | None, typer.Option(help="The run's folder, if it is not the default one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]
By = Annotated[str, typer.Option("--by", help="Your name for the log. Default: POTLUCK_NAME, then your user name.")]
Reason = Annotated[str, typer.Option(help="The reason, for the public log.")]


@app.command("pause")
def pause(run: Run = "", folder: Folder = None, by: By = "", reason: Reason = "", as_json: AsJson = False) -> None:
    """Have all trainers wait, from now on. What they have computed is kept.

    Example: [bold]potluck run pause --reason "the loss rises"[/bold]
    """
    manifest = steer(run, folder, lambda helm, _where: helm.pause(by=_name(by), reason=reason))
    _tell(manifest, as_json, "The run is paused. `potluck run resume` has it go on.")


@app.command("resume")
def resume(run: Run = "", folder: Folder = None, by: By = "", reason: Reason = "", as_json: AsJson = False) -> None:
    """Have the trainers go on.

    Example: [bold]potluck run resume[/bold]
    """
    manifest = steer(run, folder, lambda helm, _where: helm.resume(by=_name(by), reason=reason))
    _tell(manifest, as_json, "The run goes on.")


@app.command("set")
def change(
    changes: Annotated[list[str], typer.Argument(metavar="NAME=VALUE…", help="As in learning_rate=1e-4; see `show`.")],
    run: Run = "",
    folder: Folder = None,
    from_epoch: Annotated[
        int | None, typer.Option(help="The first epoch with the change. Default: the next possible one.")
    ] = None,
    by: By = "",
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Change settings of the run. All peers follow at the same epoch.

    Examples: [bold]potluck run set learning_rate=1e-4[/bold]

    [bold]potluck run set target_batch_size=4096 --from-epoch 5000[/bold]
    """
    values = dict(_pair(text) for text in changes)

    async def work(helm: Steering, where: Path) -> tuple[Manifest, int | None]:
        before = (await helm.manifest()).revision
        manifest = await helm.change(
            values, by=_name(by), from_epoch=from_epoch, reason=reason, check_data=_data_check(where)
        )
        return manifest, manifest.history[-1].from_epoch if manifest.revision > before else None

    manifest, epoch = steer(run, folder, work)
    told = ", ".join(changes)
    text = f"From epoch {epoch} on: {told}." if epoch is not None else f"Nothing has changed: {told} already."
    _tell(manifest, as_json, text, from_epoch=epoch)


@app.command("rollback")
def rollback(
    to: Annotated[
        int | None,
        typer.Option(metavar="EPOCH", help="The epoch to go back to. Without it, the possible epochs are listed."),
    ] = None,
    digest: Annotated[
        str,
        typer.Option(help="Of that epoch's state, where only a stranger's disk has it: see checkpoint list --json."),
    ] = "",
    cut: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", help="A cut instead: all groups of the run go back. See checkpoint list."),
    ] = None,
    run: Run = "",
    folder: Folder = None,
    by: By = "",
    reason: Reason = "",
    wait_seconds: Annotated[float, typer.Option(help="How many seconds to wait until it is done.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Have the run go on from the state of an earlier epoch: a backup of the host's, or what others have.

    Epochs go on counting: what was epoch 120 becomes, say, epoch 346. All peers drop what they have and take it over.

    Examples: [bold]potluck run rollback[/bold] lists what there is; [bold]potluck run rollback --to 120[/bold]; a run
    with several groups: [bold]potluck run rollback --cut 7[/bold]
    """
    if cut is not None and (to is not None or digest):
        raise typer.BadParameter("a cut names an epoch of each group: give --cut alone, or --to")
    if to is None and cut is None:
        _list_earlier(steer(run, folder, _earlier), as_json)
        return

    async def work(helm: Steering, where: Path) -> tuple[Manifest, Commit | None]:
        from potluck.hub.subjects import MAIN
        from potluck.training.manifest.earlier import chosen

        part = (await helm.cut(cut)).parts[MAIN] if cut is not None else None
        epoch, wanted = (part.epoch, part.digest) if part is not None else (to or 0, digest)
        there = [] if wanted else await _earlier(helm, where)
        is_paused = (await helm.manifest()).newest.paused
        state = chosen(there, epoch, digest=wanted, is_paused=is_paused)
        manifest = await helm.roll_back(state, by=_name(by), reason=reason, cut=cut or 0)
        assert manifest.rollback is not None
        return manifest, await helm.until_restored(manifest.rollback, wait_seconds)

    manifest, commit = steer(run, folder, work)
    assert manifest.rollback is not None
    to = manifest.rollback.to_epoch
    others = f" of main; the other groups go back to cut {cut} as soon as each can" if cut is not None else ""
    if as_json:
        from potluck.cli import console

        epoch = commit.epoch if commit is not None else None
        told = {"revision": manifest.revision, "to": to, "done": commit is not None, "epoch": epoch}
        console.print_json(told if cut is None else {**told, "cut": cut})
    elif commit is not None:
        typer.echo(f"The run went back to epoch {to}, and is at epoch {commit.epoch} with that state{others}.")
    else:
        typer.echo(
            f"Ordered: back to epoch {to}{others}. Nobody has carried it out yet; the next coordinator will. See "
            "`potluck run show`."
        )


@app.command("show")
def show(run: Run = "", folder: Folder = None, as_json: AsJson = False) -> None:
    """Show the run's settings as they count now, and what is ordered or planned.

    Example: [bold]potluck run show --json[/bold]
    """

    async def work(helm: Steering, _where: Path) -> tuple[Manifest, Commit | None]:
        return await helm.manifest(), await helm.head()

    manifest, head = steer(run, folder, work)
    _show(_summary(manifest, head), as_json)


@app.command("log")
def log(run: Run = "", folder: Folder = None, as_json: AsJson = False) -> None:
    """List what organisers did: when, who, what, from which epoch on, and why.

    Example: [bold]potluck run log[/bold]
    """
    import msgspec

    from potluck.cli import console

    manifest = steer(run, folder, lambda helm, _where: helm.manifest())
    rows = [msgspec.structs.asdict(change) for change in manifest.history]
    if as_json:
        console.print_json(rows)
        return
    console.show_table(
        [{**row, "at": _when(row["at"])} for row in rows], empty="Nothing was changed since the run began."
    )


def steer(run: str, folder: Path | None, work: Callable[[Steering, Path], Awaitable[T]]) -> T:
    """Do something in the organiser's name, with the keys in the run's folder."""
    from potluck.cli import console
    from potluck.cli.folders import asking_host, hosted_run
    from potluck.hub.address import HubAddress
    from potluck.hub.keys import HubKeys
    from potluck.training.manifest.steering import steering

    console.set_up_logging(verbose=False)
    where, record = hosted_run(run, folder)
    keys = HubKeys.load_or_create(where / "identity")

    async def connected() -> T:
        address = HubAddress(servers=record.servers, ca_pem=record.ca_pem)
        async with steering(address, keys, record.run) as helm:
            return await work(helm, where)

    with asking_host(record.run):
        return console.run(connected())


def _data_check(where: Path) -> Callable[[Manifest, Settings], None]:
    """Ask the recipe, where this machine has it, whether it can use other data. Imports torch only when asked."""
    from potluck.errors import ConfigurationError
    from potluck.run.hostrecord import read_record

    def check(manifest: Manifest, settings: Settings) -> None:
        from potluck.recipes.catalogue import open_recipe
        from potluck.recipes.recipe import data_of

        record = read_record(where)
        file = Path(record.recipe_file) if record is not None and record.recipe_file else None
        try:
            recipe = open_recipe(manifest.recipe, manifest.model, file, manifest.files)
        except ConfigurationError as error:
            logger.warning("whether the recipe can use these data is not known here: %s", error)
        else:
            data_of(recipe, settings.data)

    return check


def _name(by: str) -> str:
    from potluck.peer import environment
    from potluck.training.manifest.organising import own_name

    return by or environment.person_name() or own_name()


def _pair(text: str) -> tuple[str, str]:
    from potluck.errors import ConfigurationError

    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise ConfigurationError(f"{text!r} is not NAME=VALUE: write it as in learning_rate=1e-4")
    return name.strip(), value.strip()


async def _earlier(helm: Steering, where: Path) -> list[EarlierState]:
    from potluck.state.backups import Backups

    manifest = await helm.manifest()
    return await helm.earlier(Backups(where / "states" / "backups", run=manifest.run).infos())


def _list_earlier(states: list[EarlierState], as_json: bool) -> None:
    from potluck.cli import console

    if as_json:
        console.print_json(states)
        return
    rows = [
        {
            "epoch": state.epoch,
            "who has it": ", ".join(state.keepers),
            "saved": _when(state.saved_at) if state.saved_at else "on disk" if state.is_on_disk else "in memory",
            "megabytes": round(state.num_bytes / 1e6, 1),
            "digest": state.digest[:12],
        }
        for state in states
    ]
    console.show_table(rows, empty="Nobody holds a state yet: the host saves them as --backup-every says.")


def _summary(manifest: Manifest, head: Commit | None) -> dict[str, Any]:
    from potluck.training.manifest.changes import values_of
    from potluck.training.manifest.rollback import pending

    epoch = head.epoch if head is not None else 0
    order = pending(manifest, head)
    now = manifest.at(epoch)
    coming = [entry for entry in manifest.settings if entry.from_epoch > epoch]
    return {
        "run": manifest.run,
        "epoch": epoch,
        "revision": manifest.revision,
        "paused": now.paused,
        "rollback": f"to epoch {order.to_epoch}, not carried out yet" if order is not None else "",
        "settings": values_of(now),
        "coming": [{"from_epoch": entry.from_epoch, **values_of(entry)} for entry in coming],
    }


def _show(summary: dict[str, Any], as_json: bool) -> None:
    from potluck.cli import console

    if as_json:
        console.print_json(summary)
        return
    typer.echo(f"{summary['run']}: epoch {summary['epoch']}{', paused' if summary['paused'] else ''}")
    if summary["rollback"]:
        typer.echo(f"ordered: back {summary['rollback']}")
    for name, value in summary["settings"].items():
        later = [
            f"{entry[name]} from epoch {entry['from_epoch']}"
            for entry in summary["coming"]
            if entry.get(name, value) != value
        ]
        typer.echo(f"  {name} = {value}" + (f"   ({', '.join(later)})" if later else ""))


def _tell(manifest: Manifest, as_json: bool, text: str, **more: object) -> None:
    from potluck.cli import console

    if as_json:
        console.print_json({"revision": manifest.revision, "paused": manifest.newest.paused, **more})
    else:
        typer.echo(text)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
