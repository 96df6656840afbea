"""An aux peer takes a module's outer steps where no trainer is left who could.

Who dies may be the only trainer of a module, or the only one that was there for its last steps. The averages of a step
are with the aux peers that took part in its round, and an earlier state is with those that keep states. So the step is
not lost: it is taken here, to the same bits, and the state is kept for the module's next trainer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from potluck import tasks
from potluck.errors import PotluckError
from potluck.optim.auxiliary import AuxiliaryPeer
from potluck.optim.methods.outer import Nesterov, OuterOptimizer
from potluck.optim.methods.transform import Transform
from potluck.optim.parameters import PARAMETER, are_finite, without_prefix
from potluck.paths.moduleloop import ModuleLoop
from potluck.paths.stepfactors import StepFactors
from potluck.paths.weighing import Alpha
from potluck.round.codecs import CodecChoice
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.round.plan.messages import Commit
from potluck.run.group import Group
from potluck.state.config import StateConfig
from potluck.state.shelf import Held

logger = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 0.25
FAILED_PAUSE_SECONDS = 5.0  # each attempt copies a state


@dataclass(frozen=True, kw_only=True)
class ModuleMethod:
    """How a module's outer steps are taken: as by its trainers."""

    outer: Callable[[], OuterOptimizer] = Nesterov
    transform: Callable[[], Transform | None] = lambda: None
    codecs: CodecChoice = field(default_factory=CodecChoice)
    alpha: Alpha = "normalised"


class ModuleHeir:
    """A helper in a module's group that can take its steps. Lives on the event loop."""

    def __init__(self, group: Group, helper: AuxiliaryPeer, method: ModuleMethod, num_paths: int) -> None:
        """The helper is the heir's from now on, and closed with it."""
        self.helper = helper
        self.counts: Counter[str] = Counter()
        self._roster = group.session.roster
        self._method = method
        self._averager = helper.collaboration.averager
        self._factors = StepFactors(num_paths, method.alpha)
        self._averager.listen(self._factors.committed)
        if (head := self._averager.lineage.head) is not None:
            self._factors.committed(head)
        self._tried = ("", "")  # from which state to which averages: twice would come to the same
        self._watching = asyncio.create_task(self._watch(), name=f"paths: heir of {group.name}")

    @classmethod
    async def of(
        cls,
        group: Group,
        method: ModuleMethod,
        num_paths: int,
        *,
        coordinator: CoordinatorConfig,
        state: StateConfig,
    ) -> Self:
        """Help in a module's group, which was entered."""
        transform = method.transform()
        codec = transform.codec if transform is not None else None
        codecs = method.codecs if codec is None else method.codecs.with_gradients_in(codec)
        helper = await AuxiliaryPeer.of(group, coordinator=coordinator, codecs=codecs, state=state)
        return cls(group, helper, method, num_paths)

    async def close(self) -> None:
        """Idempotent."""
        await tasks.end(self._watching)
        await self.helper.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_SECONDS)
            head = self._averager.lineage.head
            if head is None or not self._is_orphaned(head):
                continue
            try:
                await self._inherit(head)
            except PotluckError as error:  # the run goes on from an older state, as it would without an heir
                self.counts["failed"] += 1
                logger.info("the steps up to epoch %d cannot be taken here: %s", head.epoch, error)
                await asyncio.sleep(FAILED_PAUSE_SECONDS)
            except Exception:  # a state may hold anything; logged, counted, tried again
                self.counts["errors"] += 1
                logger.exception("the steps up to epoch %d failed here", head.epoch)
                await asyncio.sleep(FAILED_PAUSE_SECONDS)

    def _is_orphaned(self, head: Commit) -> bool:
        """Whether nobody has the state of the newest epoch, and no trainer is there that is about to."""
        if self.helper.keeper.directory.verdict(head.epoch) is not None:
            return False
        holders = map(self._roster.get, head.holders)
        return not any(holder is not None and holder.card.role == "trainer" for holder in holders)

    async def _inherit(self, head: Commit) -> None:
        keeper = self.helper.keeper
        held = next((each for each in reversed(list(keeper.shelf)) if self._leads_to(each, head)), None)
        if held is None or self._tried == (held.snapshot.digest, head.digest):
            return
        base = held.snapshot.digest
        loop = await self._loop_at(held)
        for epoch in range(held.epoch + 1, head.epoch + 1):
            offer = loop.blank(epoch)
            await self._averager.hear_late(offer.tensors, epoch=epoch)
            await self._averager.work(lambda o=offer, e=epoch: loop.accept(o, epoch=e, alone=False))  # type: ignore[misc]
        if not are_finite(loop.shared.values()):
            self._tried = base, head.digest
            return  # trainers find that out for themselves, and go back
        tensors = loop.tensors()  # nobody changes them any more: a worker copies them
        await asyncio.wrap_future(keeper.publish(tensors, loop.metadata(), head.epoch, steady=tensors.keys()))
        self._tried = base, head.digest
        self.counts["steps"] += head.epoch - held.epoch
        logger.info("no trainer has the state of epoch %d any more: it was made here, and nothing is lost", head.epoch)

    def _leads_to(self, held: Held, head: Commit) -> bool:
        missing = range(held.epoch + 1, head.epoch + 1)
        is_before = not held.is_backup and held.made_at == held.epoch and bool(missing)
        return is_before and all(map(self._averager.can_hear_late, missing))

    async def _loop_at(self, held: Held) -> ModuleLoop:
        snapshot = held.snapshot.hold()
        try:
            tensors: dict[str, Tensor] = await self._averager.work(snapshot.tensors)
            loop = ModuleLoop(
                without_prefix(PARAMETER, tensors),
                self._method.outer(),
                transform=self._method.transform(),
                factor=self._factors.of,
            )
            loop.load(tensors, snapshot.metadata)
        finally:
            snapshot.release()
        return loop
