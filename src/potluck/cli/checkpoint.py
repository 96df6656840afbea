"""`potluck checkpoint`: states of a run on disk, and away from it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from potluck.cli import options as o
from potluck.hub.subjects import MAIN

if TYPE_CHECKING:
    from potluck.errors import ConfigurationError
    from potluck.run.peer import Peer
    from potluck.state.backupfile import BackupInfo
    from potluck.state.backups import Backups
    from potluck.state.fetched import FetchedState
    from potluck.state.shelf import Held
    from potluck.state.uploadtargets import UploadTarget
    from potluck.training.trainer.viewing import StateViewer

app = typer.Typer(
    help="States of a run: list, verify, save, export, upload.", no_args_is_help=True, rich_markup_mode="rich"
)

Run = Annotated[
    str, typer.Option("--run", help="A run that this machine hosts. Default: the run of the run.toml in this folder.")
]
Folder = Annotated[Path | None, typer.Option(help="The run's folder, if it is not the default one.")]
Backups_ = Annotated[Path | None, typer.Option("--path", help="A folder of backups instead, or a peer's --state-path.")]
InGroup = Annotated[str, typer.Option("--group", help="A group of the run. Default: main.")]
Epoch = Annotated[int | None, typer.Option(help="Its epoch. Default: the newest.")]
OfCut = Annotated[int | None, typer.Option("--cut", help="The group's part of this cut instead: see checkpoint list.")]
Best = Annotated[bool, typer.Option("--best", help="The one with the lowest held-out loss, not the newest.")]
AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]
FETCH_SECONDS = 600.0
BEST = "best"  # as monitor/evaluating.py keeps it
ALL_BROKEN = "None of the backups here can be read: potluck checkpoint verify says what is wrong with each."


@app.command("list")
def list_checkpoints(
    run: Run = "", folder: Folder = None, path: Backups_ = None, group: InGroup = "", as_json: AsJson = False
) -> None:
    """List the backups that the host has, or those in a folder. Exit code 1 if there are some and all are broken.

    Where a run has several groups, those of all are listed, unless one is named, with the cut that each is part of.

    Example: [bold]potluck checkpoint list --run my-run[/bold]
    """
    from potluck.cli import console
    from potluck.state.backups import Backups

    backups = _backups(run, folder, path, group)
    rows = [_row(info) for info in backups.infos()]
    others = {} if group else {name: Backups(each) for name, each in _groups_beside(backups.folder).items()}
    if others:
        both = {MAIN: backups, **others}
        rows = [{"group": name, "cut": i.cut, **_row(i)} for name, each in both.items() for i in each.infos()]
    if as_json:
        console.print_json(rows)
    else:
        rows = [{**row, "digest": row["digest"][:12]} for row in rows]
        console.show_table(rows, empty="There are no backups yet." if not backups.epochs() else ALL_BROKEN)
    raise typer.Exit(1 if backups.epochs() and not rows else 0)


@app.command("verify")
def verify(
    run: Run = "",
    folder: Folder = None,
    path: Backups_ = None,
    group: InGroup = "",
    epoch: Annotated[int | None, typer.Option(help="Its epoch. Default: all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read backups whole and check every byte by its hash. Exit code 1 if one is broken.

    Example: [bold]potluck checkpoint verify --path /mnt/share/my-run[/bold]
    """
    from potluck.cli import console
    from potluck.errors import BackupError
    from potluck.state.backupfile import read_info, record_path

    backups = _backups(run, folder, path, group)
    epochs = backups.epochs()
    if epoch is not None and epoch not in epochs:
        raise _no_backup(backups.folder, epoch, epochs)
    rows: list[dict[str, Any]] = []
    for each in epochs if epoch is None else [epoch]:
        try:
            backups.read(read_info(record_path(backups.folder, each))).release()
            rows.append({"epoch": each, "whole": True, "problem": ""})
        except BackupError as error:
            if epoch is None and each not in backups.epochs():
                continue  # a host that runs has made room for a newer one meanwhile
            rows.append({"epoch": each, "whole": False, "problem": str(error)})
    if as_json:
        console.print_json(rows)
    else:
        shown = [{"epoch": row["epoch"], "state": "whole" if row["whole"] else row["problem"]} for row in rows]
        console.show_table(shown, empty="There are no backups yet.")
    raise typer.Exit(0 if all(row["whole"] for row in rows) else 1)


@app.command("save")
def save(
    link: o.Link = "",
    to: Annotated[Path, typer.Option("--to", help="Folder for the backup.")] = Path("checkpoints"),
    identity_path: Annotated[
        Path | None, typer.Option(help="File with the key you look by; a new one is made unless given.")
    ] = None,
    group: InGroup = "",
    cut: Annotated[bool, typer.Option("--cut", help="All groups: make a cut now, and save each group's part.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch the run's newest state from the peers that keep it, and save it here. Any member can.

    Example: [bold]potluck checkpoint save 'potluck://…' --to checkpoints[/bold]

    A run with several groups: [bold]potluck checkpoint save 'potluck://…' --to checkpoints --cut[/bold]
    """
    from potluck.cli import console
    from potluck.cli.joining import observe, parse_link
    from potluck.errors import ConfigurationError

    console.set_up_logging(verbose=False)
    if cut and group:
        raise ConfigurationError("a cut has all groups of the run: leave out --group, or --cut")
    saved: list[BackupInfo] = []

    async def fetch(peer: Peer, stop: asyncio.Event) -> None:
        await console.unless_stopped(_save_cut(peer, to, saved) if cut else _save(peer, group or MAIN, to, saved), stop)

    observe(parse_link(link, "potluck checkpoint save"), "checkpoint", identity_path, as_json, fetch)
    if not saved:
        raise typer.Exit(1)
    if as_json:
        console.print_json([{"cut": info.cut, **_row(info)} for info in saved] if cut else _row(saved[0]))
        return
    for info in saved:
        what = f"Cut {info.cut} of {info.run}: epoch" if cut else "Epoch"
        typer.echo(f"{what} {info.epoch} is saved in {info.tensors_path}.")


async def _save(peer: Peer, group: str, to: Path, saved: list[BackupInfo]) -> None:
    from potluck.cli import console

    viewing = await console.import_slowly("potluck.training.trainer.viewing")
    from potluck.errors import ConfigurationError
    from potluck.state.backups import BackupConfig, Backups

    known = {MAIN, *(name for presence in peer.session.roster for name in presence.card.groups)}
    if group not in known:
        raise ConfigurationError(f"the run has no group {group!r} now: there are {', '.join(sorted(known))}")
    viewer: StateViewer = await viewing.StateViewer.start(peer, group)
    try:
        with console.err.status("fetching the run's state"):
            fetched = await viewer.newest(timeout_seconds=FETCH_SECONDS)
        with fetched:
            backups = Backups(to, BackupConfig(keep_last=10**6), run=peer.session.subjects.of_group(group).scope)
            saved.append(await asyncio.to_thread(_write, backups, fetched))
    finally:
        await viewer.close()


async def _save_cut(peer: Peer, to: Path, saved: list[BackupInfo]) -> None:
    """Save each part in the layout of a peer's backups: the folder can be listed, verified and resumed from."""
    from potluck.cli import console

    viewing = await console.import_slowly("potluck.training.trainer.viewing")
    from potluck.state.backups import BackupConfig, Backups, backup_folder

    with console.err.status("waiting for a cut, and fetching it"):
        number, parts = await viewing.fetch_cut(peer)
    try:
        for group, held in sorted(parts.items(), key=lambda part: (part[0] != MAIN, part[0])):
            scope = peer.session.subjects.of_group(group).scope
            backups = Backups(backup_folder(to, group), BackupConfig(keep_last=10**6), run=scope)
            saved.append(await asyncio.to_thread(_write, backups, held, number))
    finally:
        for held in parts.values():
            held.snapshot.release()


def _write(backups: Backups, fetched: FetchedState | Held, cut: int = 0) -> BackupInfo:
    return backups.save(fetched.snapshot, epoch=fetched.epoch, made_at=fetched.made_at, cut=cut)


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="The file to write, as in model.safetensors; with hf, a folder.")],
    run: Run = "",
    folder: Folder = None,
    path: Backups_ = None,
    epoch: Epoch = None,
    best: Best = False,
    layout: Annotated[
        Literal["safetensors", "hf"],
        typer.Option("--format", help="hf: a folder for from_pretrained, with config, tokenizer and model card."),
    ] = "safetensors",
    group: InGroup = "",
    cut: OfCut = None,
    as_json: AsJson = False,
) -> None:
    """Write the model's weights alone, by the model's own names, for other programs: no optimizer, no bookkeeping.

    Examples: [bold]potluck checkpoint export model.safetensors --run my-run --epoch 500[/bold]

    [bold]potluck checkpoint export my-model --run my-run --format hf --best[/bold]
    """
    from potluck.cli import console
    from potluck.errors import ConfigurationError
    from potluck.state.backupfile import write_tensors
    from potluck.state.chunkpool import ChunkPool
    from potluck.state.snapshot import stage
    from potluck.training.trainer.models import weights_of

    backups = _of_best(_backups(run, folder, path, group), best)
    info = _chosen(backups, epoch, cut)
    if layout == "hf":
        _export_folder(file, backups, info, _host_folder(run, folder, path, backups), as_json)
        return
    snapshot = backups.read(info)
    try:
        weights = weights_of(snapshot.tensors())
    finally:
        snapshot.release()
    try:
        staged = stage(weights, {}, ChunkPool()).hashed()
        write_tensors(file, staged, {"run": info.run, "epoch": str(info.epoch)})
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be written: {error.strerror or error}") from error
    if as_json:
        console.print_json({"epoch": info.epoch, "file": str(file), "tensors": len(weights)})
    else:
        typer.echo(f"{console.count(len(weights), 'tensor')} of epoch {info.epoch} are in {file}.")


def _export_folder(target: Path, backups: Backups, info: BackupInfo, where: Path, as_json: bool) -> None:
    from potluck.cli import console
    from potluck.training.trainer.exporting import export_folder, kept_manifest

    figures = export_folder(target, backups, info, kept_manifest(where))
    if as_json:
        console.print_json({"epoch": info.epoch, "folder": str(target), **figures})
    else:
        typer.echo(f"Epoch {info.epoch} is in {target}: load it with from_pretrained({str(target)!r}).")


def _upload_model(target: UploadTarget, backups: Backups, info: BackupInfo, where: Path) -> None:
    import tempfile

    from potluck.training.trainer.exporting import export_folder, kept_manifest

    with tempfile.TemporaryDirectory(prefix="potluck-export-") as made:
        export_folder(Path(made), backups, info, kept_manifest(where))
        target.upload_folder(Path(made), f"Epoch {info.epoch}")


def _of_best(backups: Backups, best: bool) -> Backups:
    """The backup with the lowest held-out loss, which the host keeps beside the newest."""
    from potluck.state.backups import Backups

    return Backups(backups.folder.parent / BEST) if best else backups


def _host_folder(run: str, folder: Path | None, path: Path | None, backups: Backups) -> Path:
    """The file in which the host of these backups has recorded the run's recipe."""
    from potluck.cli.folders import backups_of_run

    where = folder if folder is not None or path is not None else backups_of_run(run, None)[0].parent.parent
    return where or backups.folder.parent.parent


@app.command("upload")
def upload(
    target: Annotated[
        str, typer.Argument(help="hf://USER/REPOSITORY, or any folder that fsspec knows: s3://…, /mnt/…")
    ],
    run: Run = "",
    folder: Folder = None,
    path: Backups_ = None,
    epoch: Epoch = None,
    best: Best = False,
    layout: Annotated[
        Literal["backup", "hf"],
        typer.Option("--format", help="hf: config, weights, tokenizer and model card, as export writes them."),
    ] = "backup",
    group: InGroup = "",
    cut: OfCut = None,
    as_json: AsJson = False,
) -> None:
    """Upload a backup, tensors first and record last: a folder elsewhere is itself a folder of backups.

    With --format hf, upload the model for others to load. The Hugging Face hub needs a token that may write, in
    HF_TOKEN. Both need the extra `upload` (pip install).

    Examples: [bold]potluck checkpoint upload hf://bakers/bread --run my-run[/bold]

    [bold]potluck checkpoint upload hf://bakers/bread --run my-run --format hf --best[/bold]
    """
    from potluck.cli import console
    from potluck.state.uploadtargets import target_of

    backups = _of_best(_backups(run, folder, path, group), best)
    info = _chosen(backups, epoch, cut)
    with console.err.status(f"uploading epoch {info.epoch} to {target}"):
        to = target_of(target, keep_last=10**6)
        if layout == "hf":
            _upload_model(to, backups, info, _host_folder(run, folder, path, backups))
        else:
            to.upload(info)
    if as_json:
        console.print_json({"epoch": info.epoch, "target": target})
    else:
        typer.echo(f"Epoch {info.epoch} is in {target}.")


def _backups(run: str, folder: Path | None, path: Path | None, group: str = "") -> Backups:
    from potluck.cli import console
    from potluck.cli.folders import backups_of_run
    from potluck.errors import ConfigurationError
    from potluck.state.backups import Backups

    console.set_up_logging(verbose=False)
    name = ""
    if path is None:
        path, name = backups_of_run(run, folder)
    elif not _is_folder(path):
        raise ConfigurationError(f"there is no folder {path}: name one that has backups in it")
    elif _is_folder(path / "backups") or _is_folder(path / "groups"):
        path /= "backups"  # as a peer keeps them
    if not group or group == MAIN:
        return Backups(path, run=name)
    there = _groups_beside(path)
    if group not in there:
        raise ConfigurationError(f"there are no backups of a group {group!r}: there are {', '.join([MAIN, *there])}")
    return Backups(there[group], run=f"{name}/{group}" if name else "")


def _groups_beside(backups: Path) -> dict[str, Path]:
    """The backups of named groups that stand beside those of `main`, as a peer keeps them."""
    return {each.parent.name: each for each in sorted((backups.parent / "groups").glob("*/backups"))}


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:  # it lies in one that may not be looked into
        from potluck.errors import ConfigurationError

        raise ConfigurationError(f"{path} cannot be looked at: {error.strerror}") from error


def _chosen(backups: Backups, epoch: int | None, cut: int | None = None) -> BackupInfo:
    infos = backups.infos()
    if cut is not None:
        from potluck.errors import ConfigurationError

        if epoch is not None:
            raise ConfigurationError("name an epoch or a cut, not both: --epoch, --cut")
        found = next((info for info in infos if cut in info.cuts), None)
        if found is None:
            there = sorted({each for info in infos for each in info.cuts})
            raise ConfigurationError(
                f"{backups.folder} has no part of cut {cut}: there are {', '.join(map(str, there)) or 'none'}"
            )
        return found
    found = next((info for info in infos if epoch is None or info.epoch == epoch), None)
    if found is None:
        raise _no_backup(backups.folder, epoch, [info.epoch for info in infos])
    return found


def _no_backup(folder: Path, epoch: int | None, there: Sequence[int]) -> ConfigurationError:
    from potluck.errors import ConfigurationError

    which = f" of epoch {epoch}" if epoch is not None else ""
    return ConfigurationError(f"{folder} has no backup{which}: there are {', '.join(map(str, there)) or 'none'}")


def _row(info: BackupInfo) -> dict[str, Any]:
    return {
        "epoch": info.epoch,
        "run": info.run,
        "saved": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.saved_at)),
        "megabytes": round(info.inventory.num_bytes / 1e6, 1),
        "digest": info.digest,
        "file": str(info.tensors_path),
    }
