"""Samples of shards, one after the other: in this process, or in one of their own that this one talks to.

A process of its own costs memory and a moment at its start, and in return neither tokenizing nor decoding pictures
takes anything from training. It runs this module, and gets by a pipe how to make the recipe (recipe.Origin); it asks
for shards by the same pipe. What comes back is the batch's bytes.

    parent ── size ──▶ child                    child ── take ──▶ parent ── shard, seed, skip ──▶ child
    parent ◀── places, kinds, shapes, bytes ── child
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import msgspec
import torch

from potluck.errors import ConfigurationError, PotluckError, StoppedError
from potluck.recipes.catalogue import reopen
from potluck.recipes.recipe import Batch, Origin, Recipe, Sample, data_of
from potluck.recipes.reference import RecipeRef
from potluck.recipes.shipped import RunFiles

logger = logging.getLogger(__name__)

MAX_EMPTY_SHARDS = 1000  # in a row; then the recipe has no data
RESTARTS = 3  # of a reading process that is killed, by the system when memory ends for one
CLOSE_SECONDS = 2.0
LENGTH_BYTES = 8


class Place(NamedTuple):
    """A shard to read, in which order, and from where on."""

    shard: int
    seed: int | None = None  # of the order; None: any
    skip: int = 0  # samples that are done


class Reached(NamedTuple):
    """How far a reader is: so many samples of a shard."""

    shard: int
    samples: int


class Gathered(NamedTuple):
    """A batch, and how far its reader is with it."""

    batch: Batch
    reached: Reached


class Reader(Protocol):
    """Gathers batches. Used by one thread; closed by another."""

    def gather(self, size: int) -> Gathered:
        """So many samples, from as many shards as that takes; StoppedError once it is closed."""
        ...

    def close(self) -> None:
        """End it, whatever it is doing. Idempotent."""
        ...

    def release(self) -> None:
        """Once nobody gathers any more: let go of what is left."""
        ...


Take = Callable[[], Place]


def open_reader(recipe: Recipe[Any], take: Take, seed: int) -> Reader:
    """A reader for this recipe: in a process of its own, unless reading costs nothing or only this one can."""
    if recipe.origin is None or recipe.is_light:
        return LocalReader(recipe, take, seed)
    return ProcessReader(recipe.origin, msgspec.to_builtins(recipe.data), take, seed)


class LocalReader:
    """Reads in the thread that asks."""

    def __init__(self, recipe: Recipe[Any], take: Take, seed: int) -> None:
        self._recipe = recipe
        self._take = take
        self._generator = torch.Generator().manual_seed(seed)
        self._reached = Reached(0, 0)
        self._closed = threading.Event()
        self._samples = self._read()

    def gather(self, size: int) -> Gathered:
        """So many samples."""
        found = list(islice(self._samples, size))
        if len(found) < size:
            raise StoppedError("reading was ended")
        return Gathered(self._recipe.collate(found), self._reached)

    def close(self) -> None:
        """End it."""
        self._closed.set()

    def release(self) -> None:
        """It holds nothing."""

    def _read(self) -> Iterator[Sample]:
        empty = 0
        while not self._closed.is_set():
            place = self._take()
            generator = self._generator if place.seed is None else torch.Generator().manual_seed(place.seed)
            before, empty = empty, empty + 1
            for number, sample in enumerate(self._recipe.samples(place.shard, generator), 1):
                empty = 0
                if number <= place.skip:
                    continue
                self._reached = Reached(place.shard, number)
                yield sample
                if self._closed.is_set():
                    return
            if before >= MAX_EMPTY_SHARDS:
                raise ConfigurationError(f"the recipe has no data: {before} shards in a row were empty")


# A process of its own


class ProcessReader:
    """Has a process read."""

    def __init__(self, origin: Origin, data: Mapping[str, Any], take: Take, seed: int) -> None:
        self._order = {
            "ref": msgspec.to_builtins(origin.ref),
            "options": dict(origin.options),
            "file": str(origin.file) if origin.file is not None else None,
            "folder": str(origin.files.folder) if origin.files.folder is not None else None,
            "paths": {name: str(path) for name, path in origin.files.paths.items()},
            "data": dict(data),
            "seed": seed,
        }
        self._take = take
        self._closed = threading.Event()
        self._restarts = 0
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "potluck.training.trainer.reading"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the trainer, who hands in before it leaves
        )
        _send(_pipe(process.stdin), self._order)
        return process

    def gather(self, size: int) -> Gathered:
        """So many samples. A process that was killed is started again, and goes on with another shard."""
        while not self._closed.is_set():
            try:
                return self._gather(size)
            except (BrokenPipeError, EOFError) as error:
                if self._closed.is_set():
                    break
                code = self._process.wait()
                self._restarts += 1
                if self._restarts > RESTARTS:
                    raise ConfigurationError(
                        f"the process that reads data has ended {self._restarts} times, with exit code {code} at last: "
                        "it may need more memory than there is"
                    ) from error
                logger.warning("the process that reads data has ended (exit code %s), and is started again", code)
                _close_pipes(self._process)
                self._process = self._start()
        raise StoppedError("reading was ended")

    def _gather(self, size: int) -> Gathered:
        into, out = _pipe(self._process.stdin), _pipe(self._process.stdout)
        _send(into, {"size": size})
        while True:
            said = _receive(out)
            if "take" in said:
                _send(into, {"place": list(self._take())})
            elif "error" in said:
                raise (ConfigurationError if said["ours"] else RuntimeError)(said["error"])
            else:
                parts = [_tensor(kind, shape, _read_exactly(out, length)) for kind, shape, length in said["parts"]]
                return Gathered(tuple(parts), Reached(*said["reached"]))

    def close(self) -> None:
        """End the process."""
        if self._closed.is_set():
            return
        self._closed.set()
        process = self._process
        process.kill()  # it has nothing to lose, and may be in the middle of a long read
        process.wait(CLOSE_SECONDS * 10)

    def release(self) -> None:
        """After the thread that gathers has ended."""
        _close_pipes(self._process)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                logger.debug("a reading process had ended before all was said")


def _pipe(pipe: Any) -> BinaryIO:
    assert pipe is not None, "opened with the process"
    found: BinaryIO = pipe
    return found


def _send(pipe: BinaryIO, message: dict[str, Any], *more: Any) -> None:
    body = msgspec.msgpack.encode(message)
    pipe.write(len(body).to_bytes(LENGTH_BYTES, "little") + body)
    pipe.writelines(more)
    pipe.flush()


def _receive(pipe: BinaryIO) -> dict[str, Any]:
    length = int.from_bytes(_read_exactly(pipe, LENGTH_BYTES), "little")
    message: dict[str, Any] = msgspec.msgpack.decode(_read_exactly(pipe, length))
    return message


def _read_exactly(pipe: BinaryIO, num_bytes: int) -> bytearray:
    found = bytearray(num_bytes)
    view, there = memoryview(found), 0
    while there < num_bytes:
        more = pipe.readinto(view[there:])  # type: ignore[attr-defined]
        if not more:
            raise EOFError("the other side has ended")
        there += more
    return found


def _tensor(kind: str, shape: list[int], data: bytearray) -> torch.Tensor:
    dtype = getattr(torch, kind)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def _bytes_of(tensor: torch.Tensor) -> Any:
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def main() -> None:
    """The process: read what is asked for until nobody asks any more."""
    into = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a recipe prints is not for our parent to decode
    asked = sys.stdin.buffer
    torch.set_num_threads(1)
    try:
        _serve(asked, into)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return


def _serve(asked: BinaryIO, into: BinaryIO) -> None:
    order = _receive(asked)

    def take() -> Place:
        _send(into, {"take": True})
        return Place(*_receive(asked)["place"])

    reader: LocalReader | None = None
    while True:
        size = _receive(asked)["size"]
        try:
            reader = reader or LocalReader(_recipe_of(order), take, order["seed"])
            gathered = reader.gather(size)
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:  # noqa: BLE001 - the recipe may do anything; the trainer raises it
            ours = isinstance(error, PotluckError)
            text = str(error) if ours else f"the recipe fails in reading: {traceback.format_exc()}"
            _send(into, {"error": text, "ours": ours})
            continue
        data = [_bytes_of(part) for part in gathered.batch]
        parts = [
            (str(part.dtype).removeprefix("torch."), list(part.shape), each.nbytes)
            for part, each in zip(gathered.batch, data, strict=True)
        ]
        _send(into, {"parts": parts, "reached": list(gathered.reached)}, *data)


def _recipe_of(order: dict[str, Any]) -> Recipe[Any]:
    paths = {name: Path(path) for name, path in order["paths"].items()}
    files = RunFiles(folder=Path(order["folder"]) if order["folder"] else None, paths=paths)
    file = Path(order["file"]) if order["file"] else None
    ref = msgspec.convert(order["ref"], RecipeRef)
    recipe = reopen(Origin(ref=ref, options=order["options"], file=file, files=files))
    recipe.data = data_of(recipe, order["data"])
    return recipe


if __name__ == "__main__":
    main()
