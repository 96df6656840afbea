"""One peer's part in the group of a module: its copy, its rounds in the background, its state."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace

from potluck.optim.collaboration import join_collaboration
from potluck.optim.driver import Driver, DriverConfig
from potluck.optim.keptstates import source_of_states
from potluck.optim.methods.quorum import AdaptiveGrace
from potluck.paths.moduleloop import ModuleLoop
from potluck.paths.phasequorum import PhaseQuorum
from potluck.paths.stepfactors import StepFactors
from potluck.paths.weighing import MOST_WEIGHT, Alpha
from potluck.round.codecs import CodecChoice
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.round.coordinator.gathering import GatherConfig
from potluck.run.joined import Joined
from potluck.state.config import StateConfig

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5  # after a round that came to nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleConfig:
    """How a module's rounds go; the same for all peers of a run, but for `state`."""

    group: str
    num_paths: int
    """That go through the module."""

    alpha: Alpha = "normalised"
    min_phases: int = 1
    grace_seconds: float = 30.0
    codecs: CodecChoice = field(default_factory=CodecChoice)
    gather: GatherConfig = field(default_factory=GatherConfig)
    num_threads: int | None = None
    state: StateConfig = field(default_factory=StateConfig)
    driver: DriverConfig = field(default_factory=DriverConfig)

    @property
    def target_batch_size(self) -> None:
        """Epochs do not depend on samples."""
        return None

    def coordinator(self) -> CoordinatorConfig:
        """How rounds are started where this peer coordinates."""
        return coordinating_module(self.gather, self.num_paths, self.min_phases, self.grace_seconds)


def coordinating_module(
    gather: GatherConfig, num_paths: int, min_phases: int, grace_seconds: float
) -> CoordinatorConfig:
    """How the rounds of a module are started, by any coordinator."""
    grace = AdaptiveGrace(least_seconds=min(0.5, grace_seconds), most_seconds=grace_seconds)
    trigger = PhaseQuorum(num_paths=num_paths, min_phases=min(min_phases, num_paths), grace=grace)
    # An epoch of a module that several paths share must not die with the one peer that had a change for it.
    gather = replace(gather, weight_cap=None, most_weight=MOST_WEIGHT, is_held_twice=num_paths > 1)
    return CoordinatorConfig(gather=gather, trigger=trigger)


class ModuleDriver(Driver):
    """Fetches a state only when it is asked to, and not while it lands a round that went on without this peer.

    The peer that has that state may itself wait for a module that this peer has yet to bring in.
    """

    _is_landing = False

    def land(self, *, wait: bool = True) -> bool:
        """See Driver."""
        self._is_landing = True
        try:
            return super().land(wait=wait)
        finally:
            self._is_landing = False

    def catch_up(self) -> None:
        """See Driver."""
        if not self._is_landing:
            super().catch_up()


class ModulePart:
    """One module, as this peer has it. For the thread that trains."""

    def __init__(self, run: Joined, loop: ModuleLoop, config: ModuleConfig) -> None:
        """Enters the group, and takes over the module's state."""
        self.name = config.group
        self.loop = loop
        self.wants_round = False
        """Whether what waits is to go into the next round, rather than to wait for more."""
        self.num_steps = 0
        """Outer steps that hold something of this peer's."""
        self._run = run
        self._not_before = 0.0
        self._hear_at = 0.0
        factors = StepFactors(config.num_paths, config.alpha)
        loop.factor = factors.of
        self.collaboration = join_collaboration(run, config, loop.transform.codec)
        self.collaboration.averager.listen(factors.committed)
        if (head := self.collaboration.averager.lineage.head) is not None:
            factors.committed(head)
        states = source_of_states(run, self.collaboration, "keepers", config.state)
        self.driver = ModuleDriver(run, loop, self.collaboration, config.driver, states)
        self.driver.begin()

    @property
    def epoch(self) -> int:
        """How many outer steps this peer's copy holds."""
        return self.driver.epoch

    @property
    def next_epoch(self) -> int:
        """The one that a change which is added now would be in."""
        return max(self.epoch, self.run_epoch) + (2 if self.driver.is_busy else 1)

    @property
    def run_epoch(self) -> int:
        """How many outer steps the module has taken, as far as this peer knows."""
        return self.collaboration.averager.epoch

    def poll(self) -> bool:
        """Bring in a round that is over, and begin one that is wanted; whether something was brought in."""
        landed = False
        if self.driver.is_busy:
            landed = self._land()
        elif self._is_orphaned:
            self.hear_missed()
        if self.wants_round and not self.driver.is_busy and time.monotonic() >= self._not_before:
            if self.is_awaited and not self.hear_missed():
                self._not_before = time.monotonic() + RETRY_SECONDS
                return landed
            self.wants_round = False
            if self.loop.phases:
                self.catch_up()
                self.driver.begin_round(delay_step=False)
        return landed

    def _land(self) -> bool:
        if self.driver.land(wait=False):
            self.num_steps += 1
            return True
        if not self.driver.is_busy:  # it came to nothing, and what was offered waits again
            self.wants_round = bool(self.loop.phases)
            self._not_before = time.monotonic() + RETRY_SECONDS
        return False

    @property
    def is_awaited(self) -> bool:
        """Whether this peer's copy is older than the module's newest epoch, and nobody offers that one's state yet.

        Its maker may itself wait for a module that this peer has yet to bring in: so nobody should block here.
        """
        if self.driver.is_busy or not self.driver.is_behind:
            return False
        keeper = self.collaboration.keeper

        async def is_offered() -> bool:
            return keeper is None or keeper.directory.verdict(self.run_epoch) is not None

        return not self._run.call(is_offered())

    def hear_missed(self) -> bool:
        """Take the steps that this peer's copy lacks, by their averages, which their holders serve at any time.

        Returns whether the copy is up to date with the run.
        """
        now = time.monotonic()
        if self.driver.is_busy or now < self._hear_at or not self.driver.can_hear_missed:
            return False
        self._hear_at = now + RETRY_SECONDS
        return self.driver.hear_missed()

    @property
    def _is_orphaned(self) -> bool:
        """Whether this peer's copy is older than the newest epoch, and no trainer that is there has taken its step.

        So nobody would make its state, though aux peers have the averages. This peer can.
        """
        head = self.collaboration.averager.lineage.head
        if head is None or head.epoch <= self.epoch:
            return False
        holders = map(self._run.peer.session.roster.get, head.holders)
        return not any(holder is not None and holder.card.role == "trainer" for holder in holders)

    def catch_up(self) -> None:
        """Take over the newest state, where this peer's copy is older."""
        if not self.driver.is_busy and self.driver.is_behind:
            self.driver.catch_up()
