"""What a peer holds of the model: blocks whose units stand at the run's step, and others on their way there.

A peer that is to hold a block builds it, and fetches its units' states from another holder. Meanwhile the run goes on:
the peer hears each step's averages from its assignment on, and keeps them. When the state has come, of whichever step,
the averages since then are applied, and the unit *stands* where the others do. So nobody waits for a newcomer. A unit
that missed an average falls behind, and is fetched again. The same way serves newcomers, listeners and morphs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from potluck.pipeline.blocks import unit_parameters
from potluck.pipeline.blueprint import Blueprint, place_parameter, tied_names
from potluck.pipeline.computethread import ComputeThread
from potluck.pipeline.messages import CommitNotice
from potluck.pipeline.unitstate import Optimizing, UnitState

logger = logging.getLogger(__name__)

MAX_HEARD = 64  # averages of a unit that are kept while its state is fetched; then it begins anew


@dataclass
class _Heard:
    """A committed average that waits for the state it belongs on."""

    average: Tensor
    factor: float
    is_applied: bool


@dataclass
class _Held:
    state: UnitState
    stands_at: int | None
    """None: its values are not the run's."""
    heard: dict[int, _Heard] = field(default_factory=dict)


class Holding:
    """The blocks of one peer. Lives on the event loop; values change in its one thread."""

    def __init__(self, blueprint: Blueprint, optimizing: Optimizing, device: torch.device | None = None) -> None:
        self.blueprint = blueprint
        self.device = device or torch.device("cpu")
        self._optimizing = optimizing
        self.blocks: dict[int, nn.Module] = {}
        self._units: dict[int, _Held] = {}
        self.life = 0
        self.step = 0
        self.thread = ComputeThread()
        self.changing = asyncio.Lock()
        """Held while units are added, stepped or copied."""
        self.on_standing: Callable[[], None] = lambda: None

    async def close(self) -> None:
        """End the thread. Idempotent."""
        self.thread.close()

    # What is held

    async def hold(self, blocks: Iterable[int], *, life: int, step: int, from_seed: bool) -> None:
        """Hold these blocks and no others; new ones stand at step 0 if the seed gives them their values."""
        async with self.changing:
            wanted = set(blocks)
            if life != self.life:  # the run went back: nothing here is of use
                self.life, self.step = life, step
                self.blocks, self._units = {}, {}
            for block in self.blocks.keys() - wanted:
                del self.blocks[block]
            kept = set(self.blueprint.units_in(wanted))
            self._units = {unit: held for unit, held in self._units.items() if unit in kept}
            if missing := wanted - self.blocks.keys():
                made = await self.thread.run(lambda: self.blueprint.make(missing, self.device))
                self._add(made, 0 if from_seed else None)
            self.step = max(self.step, step) if self._units else step
        self.on_standing()

    def _add(self, made: Mapping[int, nn.Module], stands_at: int | None) -> None:
        ties, first_tie = self.blueprint.ties, self.blueprint.num_blocks
        for block, module in made.items():
            for index in range(len(ties)):  # what is here already is shared
                held = self._units.get(first_tie + index)
                for name in tied_names(ties, block, index) if held is not None else ():
                    assert held is not None
                    place_parameter(module, name, next(iter(held.state.parameters.values())))
            self.blocks[block] = module
        units = unit_parameters(self.blocks, ties, sorted(self.blocks), first_tie)
        for unit, parameters in units.items():
            if unit not in self._units:
                self._units[unit] = _Held(UnitState(parameters, self._optimizing), stands_at)

    @property
    def missing(self) -> tuple[int, ...]:
        """Units whose state has to be fetched."""
        return tuple(unit for unit, held in self._units.items() if held.stands_at != self.step)

    @property
    def standing(self) -> tuple[int, ...]:
        """Blocks that are the run's, at `step`."""
        behind = set(self.missing)
        return tuple(b for b in sorted(self.blocks) if not behind.intersection(self.blueprint.units_in([b])))

    def stands(self, blocks: Iterable[int]) -> bool:
        """Whether all of these do."""
        return set(blocks) <= set(self.standing)

    def state_of(self, unit: int) -> UnitState | None:
        """A unit that stands at `step`; None where it does not."""
        held = self._units.get(unit)
        return held.state if held is not None and held.stands_at == self.step else None

    @property
    def units(self) -> tuple[int, ...]:
        """All that it holds or fetches."""
        return tuple(self._units)

    # Steps

    async def advance(self, step: int) -> None:
        """The run has come to this step: what does not stand there is behind, and is loaded again."""
        async with self.changing:
            self.step = max(self.step, step)

    def needed_from(self, unit: int) -> int:
        """The oldest state of this unit that helps: all averages since then were heard."""
        step = self.step
        heard = self._units[unit].heard if unit in self._units else {}
        while step - 1 in heard:
            step -= 1
        return step

    async def committed(self, notice: CommitNotice, averages: Mapping[int, Tensor], digests: Mapping[int, str]) -> bool:
        """A step is committed: apply it where the unit stands, keep it where its state is on its way.

        False where it was before the steps that this peer knows of.
        """
        async with self.changing:
            if notice.step < self.step:
                return False
            self.step = notice.step  # if steps were missed, no unit stands at this one
            steps: list[tuple[UnitState, Tensor]] = []
            for unit, held in self._units.items():
                average = averages.get(unit)
                is_right = average is not None and digests.get(unit) == notice.digests[unit]
                if held.stands_at == notice.step:
                    if not held.state.parameters or not notice.is_applied or is_right:
                        held.stands_at += 1
                        if average is not None and notice.is_applied and held.state.parameters:
                            steps.append((held.state, average))
                    else:
                        logger.warning("unit %d missed the average of step %d: it is loaded anew", unit, notice.step)
                        held.stands_at = None
                elif average is not None and is_right:
                    held.heard[notice.step] = _Heard(average, notice.factor, notice.is_applied)
                    for old in sorted(held.heard)[:-MAX_HEARD]:
                        del held.heard[old]

            def apply() -> None:
                for state, average in steps:
                    state.apply(average, notice.factor, notice.step)

            if steps:
                await self.thread.run(apply)
            self.step = notice.step + 1
            return True

    async def loaded(self, unit: int, step: int, tensors: Mapping[str, Tensor], *, life: int) -> bool:
        """A unit's state of this step has come: apply what was heard since; whether it stands now."""
        async with self.changing:
            held = self._units.get(unit)
            if held is None or life != self.life or step > self.step:
                return False
            later = range(step, self.step)
            if any(number not in held.heard for number in later):
                return False

            def load() -> None:
                held.state.load(tensors)
                for number in later:
                    heard = held.heard[number]
                    if heard.is_applied:
                        held.state.apply(heard.average, heard.factor, number)

            await self.thread.run(load)
            held.heard.clear()
            held.stands_at = self.step
        self.on_standing()
        return True
