"""`potluck checkpoint`: states of a run on disk, and away from it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.cli import options as o

if TYPE_CHECKING:
    from potluck.errors import ConfigurationError
    from potluck.run.peer import Peer
    from potluck.state.backupfile import BackupInfo
    from potluck.state.backups import Backups
    from potluck.training.trainer.viewing import StateViewer

app = typer.Typer(
    help="States of a run: list, verify, save, export, upload.", no_args_is_help=True, rich_markup_mode="rich"
)

Run = Annotated[
    str, typer.Option("--run", help="A run that this machine hosts; unless given, that of the run.toml here.")
]
Folder = Annotated[Path | None, typer.Option(help="The folder of that run, if it has one of its own.")]
Backups_ = Annotated[Path | None, typer.Option("--path", help="A folder of backups instead, or a peer's --state-path.")]
Epoch = Annotated[int | None, typer.Option(help="Which one; the newest unless given.")]
AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]
FETCH_SECONDS = 600.0
ALL_BROKEN = "None of the backups here can be read: potluck checkpoint verify says what is wrong with each."


@app.command("list")
def list_checkpoints(run: Run = "", folder: Folder = None, path: Backups_ = None, as_json: AsJson = False) -> None:
    """List the backups that the host has, or those in a folder. Exit code 1 if there are some and all are broken.

    Example: [bold]potluck checkpoint list --run my-run[/bold]
    """
    from potluck.cli import console

    backups = _backups(run, folder, path)
    rows = [_row(info) for info in backups.infos()]
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
    epoch: Annotated[int | None, typer.Option(help="Which one; all of them unless given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read backups whole and check every byte by its hash. Exit code 1 if one is broken.

    Example: [bold]potluck checkpoint verify --path /mnt/share/my-run[/bold]
    """
    from potluck.cli import console
    from potluck.errors import BackupError
    from potluck.state.backupfile import read_info, record_path

    backups = _backups(run, folder, path)
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
        console.show_table(rows, empty="There are no backups yet.")
    raise typer.Exit(0 if all(row["whole"] for row in rows) else 1)


@app.command("save")
def save(
    link: o.Link = "",
    to: Annotated[Path, typer.Option("--to", help="The folder that the backup goes to.")] = Path("checkpoints"),
    identity_path: Annotated[
        Path | None, typer.Option(help="File with the key you look by; a new one is made unless given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch the run's newest state from whoever keeps it, and save it here. Any member can.

    Example: [bold]potluck checkpoint save 'potluck://…' --to checkpoints[/bold]
    """
    from potluck.cli import console
    from potluck.cli.joining import observe, parse_link

    console.set_up_logging(verbose=False)
    saved: list[BackupInfo] = []

    async def fetch(peer: Peer, stop: asyncio.Event) -> None:
        await console.unless_stopped(_save(peer, to, saved), stop)

    observe(parse_link(link, "potluck checkpoint save"), "checkpoint", identity_path, as_json, fetch)
    if not saved:
        raise typer.Exit(1)
    if as_json:
        console.print_json(_row(saved[0]))
    else:
        typer.echo(f"Epoch {saved[0].epoch} is saved in {saved[0].tensors_path}.")


async def _save(peer: Peer, to: Path, saved: list[BackupInfo]) -> None:
    from potluck.cli import console

    viewing = await console.import_slowly("potluck.training.trainer.viewing")
    from potluck.state.backups import BackupConfig, Backups

    viewer: StateViewer = await viewing.StateViewer.start(peer)
    try:
        with console.err.status("fetching the run's state"):
            fetched = await viewer.newest(timeout_seconds=FETCH_SECONDS)
        with fetched:
            backups = Backups(to, BackupConfig(keep_last=10**6), run=peer.session.subjects.run)
            saved.append(await asyncio.to_thread(_write, backups, fetched))
    finally:
        await viewer.close()


def _write(backups: Backups, fetched: Any) -> BackupInfo:
    return backups.save(fetched.snapshot, epoch=fetched.epoch, made_at=fetched.made_at)


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="The file to write, as in model.safetensors.")],
    run: Run = "",
    folder: Folder = None,
    path: Backups_ = None,
    epoch: Epoch = None,
    as_json: AsJson = False,
) -> None:
    """Write the model's weights alone, by the model's own names, for other programs: no optimizer, no bookkeeping.

    Example: [bold]potluck checkpoint export model.safetensors --run my-run --epoch 500[/bold]
    """
    from potluck.cli import console
    from potluck.errors import ConfigurationError
    from potluck.state.backupfile import write_tensors
    from potluck.state.chunkpool import ChunkPool
    from potluck.state.snapshot import stage
    from potluck.training.trainer.models import weights_of

    backups = _backups(run, folder, path)
    info = _chosen(backups, epoch)
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


@app.command("upload")
def upload(
    target: Annotated[
        str, typer.Argument(help="hf://USER/REPOSITORY, or any folder that fsspec knows: s3://…, /mnt/…")
    ],
    run: Run = "",
    folder: Folder = None,
    path: Backups_ = None,
    epoch: Epoch = None,
    as_json: AsJson = False,
) -> None:
    """Upload a backup, tensors first and record last: a folder elsewhere is itself a folder of backups.

    The Hugging Face hub needs a token that may write, in HF_TOKEN. Both need the extra `upload` (pip install).

    Example: [bold]potluck checkpoint upload hf://bakers/bread --run my-run[/bold]
    """
    from potluck.cli import console
    from potluck.state.uploadtargets import target_of

    info = _chosen(_backups(run, folder, path), epoch)
    with console.err.status(f"uploading epoch {info.epoch} to {target}"):
        target_of(target, keep_last=10**6).upload(info)
    if as_json:
        console.print_json({"epoch": info.epoch, "target": target})
    else:
        typer.echo(f"Epoch {info.epoch} is in {target}.")


def _backups(run: str, folder: Path | None, path: Path | None) -> Backups:
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
    elif _is_folder(path / "backups"):
        path /= "backups"  # as a peer keeps them
    return Backups(path, run=name)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:  # it lies in one that may not be looked into
        from potluck.errors import ConfigurationError

        raise ConfigurationError(f"{path} cannot be looked at: {error.strerror}") from error


def _chosen(backups: Backups, epoch: int | None) -> BackupInfo:
    infos = backups.infos()
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
