"""Cuts on a disk: the whole model's state at one step, a file for each unit, and a record that makes it count.

    step-00000120/unit-00003.safetensors …     any tool reads them
    step-00000120/cut.json                     written last

The one who saves never has more than one unit in memory.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from potluck.errors import BackupError
from potluck.pipeline.messages import Cut
from potluck.pipeline.tensorfile import read_tensors, write_tensors
from potluck.pipeline.transfer import Copy, digest_of
from potluck.pipeline.wire import pack

logger = logging.getLogger(__name__)

_FOLDER = re.compile(r"step-(\d{8,})")
RECORD = "cut.json"


class CutShelf:
    """The cuts of one run on one machine."""

    def __init__(self, folder: Path, *, keep_last: int = 3) -> None:
        self._folder = folder
        self._keep_last = keep_last
        self._recent: tuple[int, int, Copy] | None = None
        self.cuts = self._look()

    def _look(self) -> tuple[Cut, ...]:
        found = []
        for path in sorted(self._folder.glob("step-*")) if self._folder.is_dir() else ():
            record = path / RECORD
            try:
                if _FOLDER.fullmatch(path.name) and record.is_file():
                    found.append(msgspec.json.decode(record.read_bytes(), type=Cut))
            except (OSError, msgspec.MsgspecError) as error:
                logger.warning("%s is no cut (%s): passed over", path, error)
        return tuple(found[-64:])

    def path(self, step: int) -> Path:
        """Where a cut is."""
        return self._folder / f"step-{step:08d}"

    def unit_path(self, step: int, unit: int) -> Path:
        """Where a unit of a cut is."""
        return self.path(step) / f"unit-{unit:05d}.safetensors"

    async def save(self, cut: Cut, num_units: int, fetch: Callable[[int], Awaitable[Mapping[str, Any]]]) -> int:
        """Write a cut, unit by unit; returns its bytes. BackupError where the disk does not take it."""
        draft = self._folder / f".step-{cut.step:08d}.draft"
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            num_bytes = 0
            for unit in range(num_units):
                tensors: dict[str, Tensor] = dict(await fetch(unit))
                path = draft / f"unit-{unit:05d}.safetensors"
                shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
                num_bytes += await asyncio.to_thread(write_tensors, path, shapes, tensors.values())
            (draft / RECORD).write_bytes(msgspec.json.encode(cut))
            shutil.rmtree(self.path(cut.step), ignore_errors=True)
            draft.rename(self.path(cut.step))
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise BackupError(
                f"the cut of step {cut.step} cannot be written ({error}): make room on the disk"
            ) from error
        self.cuts = self._look()
        for old in self.cuts[: -self._keep_last]:
            await asyncio.to_thread(shutil.rmtree, self.path(old.step), True)
        self.cuts = self._look()
        return num_bytes

    def load(self, unit: int, step: int) -> dict[str, Tensor]:
        """A unit's tensors in a cut; StateUnavailableError where they cannot be read."""
        return read_tensors(self.unit_path(step, unit))

    async def read(self, unit: int, step: int) -> Copy:
        """As in transfer.CutReader. The unit that was read last is kept, since it is asked for in pieces."""
        if self._recent is None or self._recent[:2] != (unit, step):
            specs, whole = await asyncio.to_thread(lambda: pack(self.load(unit, step)))
            self._recent = (unit, step, Copy(0, step, specs, whole, digest_of(whole), 0.0))
        return self._recent[2]
