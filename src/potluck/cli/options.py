"""Options that several commands share: each is written once, and means the same everywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b|bit|bits|bytes)?(?:/s|ps)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

# Getting in
Link = Annotated[str, typer.Argument(help="The join link, in quotes; else POTLUCK_LINK.")]
Name = Annotated[str, typer.Option(help="Your name in the run; else POTLUCK_NAME.")]
Message = Annotated[str, typer.Option(help="A message to the organisers, if they have to let you in.")]
WaitMinutes = Annotated[float, typer.Option(help="How long to wait for an organiser to let you in.")]
IdentityPath = Annotated[
    Path | None, typer.Option(help="File with the key you are known by; else POTLUCK_IDENTITY, else one is made.")
]

# The network
ClientMode = Annotated[bool, typer.Option("--client-mode", help="Only dial out; accept no connections.")]
WebSocket = Annotated[
    bool,
    typer.Option("--websocket", help="Use only WebSocket to the hub, for networks that allow only web traffic."),
]
RelayOnly = Annotated[
    bool, typer.Option("--relay-only", help="Send everything through the hub, even if a direct link is possible.")
]
Listen = Annotated[list[str] | None, typer.Option(help="Accept links here, as tcp://HOST:PORT; may be repeated.")]
Announce = Annotated[
    list[str] | None, typer.Option(help="Tell others this address without checking it, as tcp://HOST:PORT.")
]
TrustedLan = Annotated[
    bool,
    typer.Option("--trusted-lan", help="Send bulk bytes in the clear; only where you trust everybody on the network."),
]
Bandwidth = Annotated[
    str, typer.Option(help="The most to send, and to receive, as in 20Mbit or 2.5MB (per second); or UP/DOWN.")
]

# Training
RecipeFile = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="Your copy of the organiser's own recipe, if the run has one."),
]
Yes = Annotated[
    bool,
    typer.Option("--yes", "-y", help="Let the organiser's own code run without being asked; it is signed by them."),
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Samples per step; found by trial unless given.")]
NumWorkers = Annotated[int, typer.Option("--n-workers", min=1, max=64, help="Processes that read data.")]
Device = Annotated[
    str, typer.Option(help="Devices to compute on: cpu, cuda:1 or cuda:0,cuda:1. Default: all of the fastest kind.")
]
Precision = Annotated[
    str, typer.Option(help="float32, bfloat16 or float16; unless given, what suits the device. Weights stay float32.")
]
Compile = Annotated[
    bool, typer.Option("--compile", help="Compile the model first: takes minutes, then steps are faster.")
]
Shard = Annotated[
    bool | None,
    typer.Option(
        "--shard/--no-shard",
        help="Have each of several devices hold a part of the model; unless given, where it fits on none of them.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Threads to compute with; unless given, your cores, shared by this machine's peers."),
]
MaxMemory = Annotated[str, typer.Option(help="The most memory to use, as in 4GB: batches are chosen by it.")]
MaxSteps = Annotated[int | None, typer.Option(min=1, help="Leave after so many steps.")]
Schedule = Annotated[str, typer.Option(help="Train only at these hours of your clock, as in 22:00-07:00.")]
BackupEveryStep = Annotated[
    int, typer.Option("--backup-every-step", help="Write a backup every so many epochs of the run; 0: never.")
]
StatePath = Annotated[Path | None, typer.Option(help="Folder for backups. Default: in your data folder.")]
HandInSeconds = Annotated[
    float, typer.Option(min=0, help="When leaving, wait so many seconds for the next epoch, to hand in your work.")
]
Stage = Annotated[
    int | None, typer.Option(min=0, help="In a pipeline, serve this stage. Default: the stage that needs it most.")
]
FeedData = Annotated[
    bool, typer.Option("--feed", help="In a pipeline, feed data and hold spare copies instead of serving a stage.")
]
Notice = Annotated[
    float | None,
    typer.Option(min=0, help="In a pipeline, seconds for the hand-over when this machine is stopped. Default: 2.5."),
]

SyncArgs = Annotated[bool, typer.Option("--sync-args", help="Take all settings from the run: Potluck always does.")]

# How it talks
AsJson = Annotated[bool, typer.Option("--json", help="Tell in JSON, one object a line.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")]


def bytes_of(text: str, option: str) -> float | None:
    """An amount as people write it (`4GB`, `512MiB`, `20Mbit`), in bytes; None for nothing. ConfigurationError else."""
    from potluck.errors import ConfigurationError

    if not text:
        return None
    found = _AMOUNT.fullmatch(text.strip())
    if found is None or not (amount := float(found[1])):
        raise ConfigurationError(f"{option} {text!r} is not an amount: write it as in 4GB, 512MiB or 20Mbit")
    base = 1024 if found[3] else 1000
    is_bits = (found[4] or "").lower().startswith("bit")
    return float(amount * base ** _POWERS[found[2].lower()] / (8 if is_bits else 1))


def bandwidth_of(text: str) -> tuple[float | None, float | None]:
    """The caps on sending and receiving, in bytes per second."""
    up, separator, down = text.partition("/") if not text.lower().rstrip().endswith("/s") else (text, "", "")
    return bytes_of(up, "--bandwidth"), bytes_of(down if separator else up, "--bandwidth")
