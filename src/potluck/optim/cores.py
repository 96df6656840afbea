"""This machine's cores, where several peers share them: each computes with its part.

With one thread for each core in every process, peers on one machine wait for each other inside of each operation: two
trainers with two threads each on two cores do an eighth of the steps that they do with one. A peer that starts later
takes its share of what is there then; those before keep theirs.

Trainers are known by their command (`potluck join`), and, on Linux, by a mark: a socket in the abstract namespace that
bears the process's number, which everybody on the machine can see and which ends with the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from potluck.peer import environment

logger = logging.getLogger(__name__)

SOCKETS = Path("/proc/net/unix")
_MARK = re.compile(r"@potluck-trainer-(\d+)$", re.MULTILINE)
_is_chosen = False  # by a command's own option or choice, in this process


def share_cores(num_threads: int | None = None) -> int:
    """Have torch compute with so many threads; unless told, with this peer's share of the cores."""
    global _is_chosen
    _is_chosen = True
    if num_threads is None and environment.names_threads():
        return torch.get_num_threads()
    if num_threads is None:
        num_threads = max(1, available_cores() // max(1, num_peers_here()))
    torch.set_num_threads(num_threads)
    return num_threads


def share_cores_unless_chosen() -> None:
    """The same for a program of somebody's own, once, unless it or its environment has said how many threads."""
    before = torch.get_num_threads()
    if _is_chosen or environment.names_threads() or before not in _defaults():
        return
    if (num_threads := share_cores()) < before:
        logger.warning(
            "torch computes with %d of %d threads from here on, since other Potluck peers are on this machine. Call "
            "torch.set_num_threads before you make the optimizer to have it otherwise",
            num_threads,
            before,
        )
    elif num_threads > before:
        torch.set_num_threads(before)  # as torch itself chose, which knows the machine's cores better


def mark_trainer() -> Callable[[], None]:
    """Let others on this machine see that this process trains; returns what takes the mark back. Linux only."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mark.bind(f"\0potluck-trainer-{os.getpid()}")
    except OSError:  # another run of this process has it
        mark.close()
    return mark.close


def num_peers_here() -> int:
    """How many processes on this machine train with Potluck, this one included."""
    return 1 + len((trainers_by_command() | marked_trainers()) - {os.getpid()})


def trainers_by_command() -> set[int]:
    """The processes that were started by a command that trains."""
    return {process.pid for process in psutil.process_iter() if _is_peer(process)}


def marked_trainers() -> set[int]:
    """The processes that bear the mark."""
    with contextlib.suppress(OSError):
        return {int(pid) for pid in _MARK.findall(SOCKETS.read_text(errors="replace"))}
    return set()


def _is_peer(process: psutil.Process) -> bool:
    """By its command, which is all that can be seen from outside where there are no marks."""
    try:
        command = process.cmdline()
    except (psutil.Error, OSError):
        return False
    names = [Path(part).name for part in command[:4]]
    is_potluck = "potluck" in names or "potluck.cli" in names
    return is_potluck and any(verb in command for verb in ("join", "train"))


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1


def _defaults() -> set[int | None]:
    """What torch computes with where nobody has said anything: logical cores, or physical ones."""
    return {available_cores(), os.cpu_count(), psutil.cpu_count(logical=False)}
