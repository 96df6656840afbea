"""A framework's trainer as a peer of a run: what `PotluckStrategy` and `PotluckCallback` have in common.

    made        the arguments are read, and what cannot be is refused; no run yet
    begin()     the run is joined, its state taken over, and steps are the run's from here on
    finish()    what is under way is brought in, and samples that wait are handed in
    leave()     the run is left, whatever has happened

The framework's own class says when, gives model, optimizer and schedule, and counts samples its own way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from potluck.errors import ConfigurationError, PotluckError
from potluck.integrations.algorithms import Algorithm, TrainingConfig
from potluck.integrations.embeddedrun import EmbeddedConfig
from potluck.integrations.naming import translated
from potluck.integrations.openrun import PEER_OPTIONS, JoinConfig, OpenRun, join_or_start
from potluck.integrations.runoptimizer import RunOptimizer
from potluck.integrations.samples import SampleCounter
from potluck.integrations.schedules import RunSchedule
from potluck.optim.parameters import buffers_of
from potluck.peer import environment
from potluck.run.joined import Joined
from potluck.training.trainer.ownloop import ProgramOptimizer

logger = logging.getLogger(__name__)

HAND_IN_SECONDS = 60.0


class TrainerPart:
    """One trainer's part in a run."""

    def __init__(
        self,
        counter: SampleCounter,
        *,
        target_batch_size: int | None,
        algorithm: Algorithm,
        initial_peers: str | list[str] | None,
        run_id: str,
        embedded: EmbeddedConfig | None,
        run: Joined | None,
        verbose: bool,
        options: Mapping[str, Any],
    ) -> None:
        """`options` are all others: of JoinConfig, of the algorithm, `hand_in_seconds`, or hivemind's names for them.

        To be made by the constructor of what the user makes: a warning about options names its caller.
        """
        chosen = translated(options)
        about_peer = {name: chosen.pop(name) for name in PEER_OPTIONS if name in chosen}
        if chosen.pop("auxiliary", False):
            raise ConfigurationError("an auxiliary peer has no model: start one with `potluck join LINK --role aux`")
        self._hand_in_seconds = float(chosen.pop("hand_in_seconds", HAND_IN_SECONDS))
        if not self._hand_in_seconds >= 0:
            raise ConfigurationError(f"hand_in_seconds={self._hand_in_seconds}: it must be 0 or more")
        self.counter = counter
        self.training = TrainingConfig(
            algorithm=algorithm,
            target_batch_size=target_batch_size or environment.target_batch_size(),
            options=chosen,
        )
        self._join = JoinConfig(
            initial_peers=initial_peers,
            run_id=run_id,
            embedded=embedded or EmbeddedConfig(),
            verbose=verbose,
            **about_peer,
        )
        self._given_run = run
        self.optimizer: RunOptimizer | None = None
        self.participation: OpenRun | None = None

    def wrap(self, optimizer: Optimizer) -> RunOptimizer:
        """The optimizer that the framework steps: the given one until training begins, and then the run's."""
        self.optimizer = RunOptimizer(optimizer, self.counter.take)
        return self.optimizer

    def begin(self, model: nn.Module, schedule: RunSchedule | None, clip: Callable[[Optimizer], None]) -> None:
        """Join the run, and take over its state; whatever a checkpoint brought is in place by now."""
        assert self.optimizer is not None, "an optimizer is wrapped first"
        self.participation = join_or_start(self._join, self._given_run)
        run, buffers = self.participation.run, buffers_of(model)
        self.optimizer.begin(
            lambda inner: self.training.make(run, inner, schedule=schedule, buffers=buffers), clip=clip
        )
        self.counter.reset()
        logger.info("training in the run %s as %s", run.peer.session.subjects.run, run.peer_id)

    def tell_loss(self, loss: Any) -> None:
        """Let those who watch the run know."""
        if self.participation is not None:
            self.participation.tell_loss(loss)

    @property
    def is_over(self) -> bool:
        """Whether the run has reached the end that its organiser set."""
        shared = self.optimizer.shared if self.optimizer is not None else None
        return shared is not None and shared.is_over

    def finish(self) -> None:
        """Training has come to its end: bring in what is under way, and hand in samples that wait for their epoch."""
        if self.optimizer is None:
            return
        if self.is_over:
            logger.info("the run is over: nothing is left to hand in")
            return
        try:
            handed_in = self.optimizer.finish(self._hand_in_seconds)
        except PotluckError as error:  # nothing is to be done about it any more: say it, and leave
            logger.warning("the last samples could not be handed in: %s", error)
        else:
            if handed_in:
                logger.info("the last %d samples were handed in", handed_in)

    def leave(self) -> None:
        """Leave the run, in whatever state. Idempotent."""
        participation, self.participation = self.participation, None
        try:
            if self.optimizer is not None:
                self.optimizer.end()
        finally:
            if participation is not None:
                participation.close()


class InRun:
    """What a strategy and a callback tell about the run that they are in."""

    _part: TrainerPart

    @property
    def link(self) -> str:
        """By which others join a run that was started here; empty where it was not, and before training."""
        return self._part.participation.link if self._part.participation is not None else ""

    @property
    def shared(self) -> ProgramOptimizer | None:
        """The run's optimizer, while training."""
        return self._part.optimizer.shared if self._part.optimizer is not None else None

    @property
    def epoch(self) -> int:
        """How many updates of the run this peer's parameters hold; 0 when not in a run."""
        return self.shared.epoch if self.shared is not None else 0

    @property
    def is_over(self) -> bool:
        """Whether the run has reached the end that its organiser set: the framework's training ends then."""
        return self._part.is_over

    @property
    def num_peers(self) -> int:
        """How many trainers are in the run now; 1 when not in a run."""
        return self._part.participation.num_peers if self._part.participation is not None else 1

    def statistics(self) -> dict[str, int | float]:
        """Counters of rounds, repairs and batches left out."""
        return self.shared.statistics() if self.shared is not None else {}

    def progress(self) -> dict[str, float]:
        """This peer's own progress, and the run's, by the names under which they are logged."""
        if self.shared is None:
            return {}
        own: dict[str, float] = {
            "potluck_epoch": self.shared.epoch,
            "potluck_own_samples": self._part.counter.total,
            "potluck_peers": self.num_peers,
        }
        latest = self.shared.collaboration.progress.latest
        if latest is None:
            return own
        return own | {
            "potluck_run_samples": latest.samples,
            "potluck_run_samples_per_second": round(latest.samples_per_second, 1),
        }
