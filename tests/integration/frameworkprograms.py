"""Programs with a framework's trainer, in processes of their own: started, listened to and ended as tests need it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from trainchild import loss_of, make_inner, make_model, values_of
from traincompany import PATIENCE_SECONDS

from potluck.testing.processes import Children, ManagedProcess


class Programs:
    """Starts them. Each has a folder and an identity of its own, so that one that comes back is known again."""

    def __init__(self, children: Children, folder: Path, program: str) -> None:
        self._children = children
        self._folder = folder
        self._program = Path(__file__).with_name(program)

    def start(self, number: int, *arguments: str, link: str = "") -> ManagedProcess:
        """The link goes into the environment; without one, the program starts a run."""
        folder = self._folder / str(number)
        folder.mkdir(exist_ok=True)
        argv = [sys.executable, str(self._program), str(number), *arguments]
        return self._children.spawn(
            argv, name=f"program-{number}", env=environment(folder, link), cwd=folder, stdin=True
        )


def environment(folder: Path, link: str = "") -> dict[str, str]:
    """Of a program that accepts links on loopback alone."""
    identity = str(folder / "peer.nkey")
    return {
        "POTLUCK_LINK": link,
        "POTLUCK_IDENTITY": identity,
        "POTLUCK_LISTEN": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


async def printed_link(program: ManagedProcess) -> str:
    """The link of the run that a program has started, as a person reads it off the screen."""
    found = await program.until_line(r"POTLUCK_LINK='(potluck://\S+)'", PATIENCE_SECONDS)
    return found.group(1)


def told(program: ManagedProcess, key: str) -> list[dict[str, Any]]:
    """What a program has said so far, of one kind."""
    return [json.loads(line) for line in re.findall(rf'^\{{"{key}":.*\}}$', program.output(), re.MULTILINE)]


async def until_in(*programs: ManagedProcess) -> None:
    """Wait until all are in the run, and have them begin."""
    for program in programs:
        await program.until_line(r'"joined"', PATIENCE_SECONDS)
    for program in programs:
        program.send_line("go")


async def finish(*programs: ManagedProcess) -> list[list[float]]:
    """Wait until all are done, have them leave, and return the parameters that each has in the end."""
    for program in programs:
        await program.until_line(r'"finished"', PATIENCE_SECONDS)
    for program in programs:
        program.send_line("leave")
    for program in programs:
        assert await program.until_exit(PATIENCE_SECONDS) == 0, program.tail()
    return [told(program, "left")[0]["left"] for program in programs]


def digests(*programs: ManagedProcess) -> dict[int, set[str]]:
    """What they held after each epoch."""
    found: dict[int, set[str]] = {}
    for program in programs:
        for line in told(program, "done"):
            found.setdefault(line["done"], set()).add(line["digest"])
    return found


def num_left_behind(*programs: ManagedProcess) -> int:
    """How often a round began without one of them: it was silent for seconds, on a machine that was busy."""
    told_in_the_end = [line["statistics"] for program in programs for line in told(program, "finished")]
    return sum(counts.get("left_behind", 0) + counts.get("caught_up", 0) for counts in told_in_the_end)


def assert_as_one_process(values: list[float], num_epochs: int, *programs: ManagedProcess) -> None:
    """The parameters are what a plain loop makes of the same batches, with the weights of whoever came first."""
    batches: dict[int, list[int]] = {}
    for program in programs:
        for line in told(program, "batch"):
            batches.setdefault(line["epoch"], []).append(line["batch"])
    wanted = [torch.tensor(_plain(seed, num_epochs, batches)) for seed in range(len(programs))]
    assert any(torch.allclose(torch.tensor(values), each, rtol=1e-4, atol=1e-5) for each in wanted)


def _plain(seed: int, num_epochs: int, batches: dict[int, list[int]]) -> list[float]:
    model = make_model(seed)
    optimizer = make_inner(model)
    for epoch in range(1, num_epochs + 1):
        optimizer.zero_grad()
        for number in batches[epoch]:
            (loss_of(model, number) / len(batches[epoch])).backward()
        optimizer.step()
    return values_of(model)
