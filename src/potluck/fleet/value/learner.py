"""The learner: takes everybody's fragments from the queue, trains the value network, publishes versions.

`ValueLearner` is the training without any network (so that tests and benchmarks run the same code); `serve` is its life
between a queue and a topic. A learner that is started again goes on from the version that was published last.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from potluck.errors import ConfigurationError, ProtocolError, QueueFullError, RetryableError
from potluck.fleet.sync import Fleet, SyncItem
from potluck.fleet.value.fragment import Fragment, Origin, checked, staleness
from potluck.fleet.value.network import ValueNetwork
from potluck.fleet.value.training import TrunkOptimizer, ValueConfig, ValueTrainer
from potluck.fleet.value.version import MOST_HEADS, HeadRecord, ValueVersion, version_of

logger = logging.getLogger(__name__)

EXPERIENCE = "experience"
VALUE = "value"
TAKEN_AT_ONCE = 64
WAIT_SECONDS = 1.0
RETRY_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """How the learner learns."""

    value: ValueConfig = field(default_factory=lambda: ValueConfig(width=128, passes=16))
    """The network. A learner has the time for more passes than a laptop that also trains a policy."""

    max_staleness: int = 8
    """Fragments that are behind by more versions are thrown away and counted."""

    updates_per_version: int = 1
    """Batches of fragments between two published versions."""

    seed: int = 0
    """Of the first weights."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0 or self.updates_per_version < 1:
            raise ConfigurationError(
                f"max_staleness is at least 0 and updates_per_version at least 1, not {self.max_staleness} and "
                f"{self.updates_per_version}"
            )


class ValueLearner:
    """The network that all laptops feed."""

    def __init__(
        self,
        config: LearnerConfig | None = None,
        resume: ValueVersion | None = None,
        trunk_optimizer: TrunkOptimizer | None = None,
    ) -> None:
        self.config = config or LearnerConfig()
        self.number = 0
        self.counts: Counter[str] = Counter()
        self._errors: dict[str, float] = {}
        self._heads: dict[str, HeadRecord] = {}
        if resume is None:
            import torch

            with torch.random.fork_rng():
                torch.manual_seed(self.config.seed)
                network = ValueNetwork(self.config.value.width, self.config.value.depth)
        else:
            wanted = (self.config.value.width, self.config.value.depth)
            if (resume.width, resume.depth) != wanted:
                raise ConfigurationError(
                    f"the version published last has a width and depth of {(resume.width, resume.depth)}, and "
                    f"{wanted} are configured: keep them, or use another topic"
                )
            network = resume.network()
            self.number, self._heads = resume.number, dict(resume.heads)
        self.network = network
        self._trainer = ValueTrainer(network, self.config.value, self.config.seed, trunk_optimizer)

    def learn(self, fragments: Iterable[Fragment]) -> int:
        """Learn from fragments that are fresh enough; returns how many were. Each call makes a new version."""
        batch = self._fresh([each for each in fragments if self._fits(each)])
        if not batch:
            return 0
        self._errors |= self._trainer.learn(batch)
        for origin, fragment in batch:
            before = self._heads.get(origin.head)
            newest = max(fragment.policy_version, before.policy_version if before else 0)
            self._heads[origin.head] = HeadRecord(origin, newest, (before.num_fragments if before else 0) + 1)
        self.number += 1
        self.counts["learnt"] += len(batch)
        return len(batch)

    def version(self) -> ValueVersion:
        """The network as it is now, to be published."""
        statistics = {f"error/{head}": error for head, error in self._errors.items()}
        statistics |= {f"fragments/{name}": float(count) for name, count in self.counts.items()}
        return version_of(self.network, self.number, self.config.value.depth, self._heads, statistics)

    def statistics(self) -> dict[str, float]:
        """How things stand, in few figures: for logs."""
        seen = self.counts["learnt"] + self.counts["too_old"]
        return {
            "version": self.number,
            "heads": len(self._heads),
            "loss": sum(self._errors.values()) / max(len(self._errors), 1),
            "staleness": self.counts["staleness"] / max(seen, 1),
            **{name: self.counts[name] for name in ("learnt", "too_old", "unusable")},
        }

    def _fits(self, fragment: Fragment) -> bool:
        """Whether a fragment can be learnt from; what nobody's PooledValue sends is counted and left out."""
        try:
            origin = checked(fragment).origin
            assert origin is not None
            known = self.network.num_features(origin.task) if origin.task in self.network.adapters else None
            if known is not None and known != fragment.num_features:
                raise ProtocolError(
                    f"{origin.head} sends observations of {fragment.num_features} features, and others of its task "
                    f"{known}: tasks with other observations need other names"
                )
            if origin.head not in self._heads and len(self._heads) >= MOST_HEADS:
                raise ProtocolError(f"there are {MOST_HEADS} heads already")
        except ProtocolError as error:
            self.counts["unusable"] += 1
            logger.warning("a fragment is thrown away: %s", error)
            return False
        return True

    def _fresh(self, fragments: list[Fragment]) -> list[tuple[Origin, Fragment]]:
        newest = {head: record.policy_version for head, record in self._heads.items()}
        for fragment in fragments:
            assert fragment.origin is not None
            newest[fragment.origin.head] = max(newest.get(fragment.origin.head, 0), fragment.policy_version)
        fresh = []
        for fragment in fragments:
            assert fragment.origin is not None
            behind = staleness(fragment, self.number, newest[fragment.origin.head])
            self.counts["staleness"] += behind
            if behind > self.config.max_staleness:
                self.counts["too_old"] += 1
            else:
                fresh.append((fragment.origin, fragment))
        return fresh


def serve(
    fleet: Fleet,
    config: LearnerConfig | None = None,
    *,
    experience: str = EXPERIENCE,
    value: str = VALUE,
    stop: threading.Event | None = None,
    on_version: Callable[[ValueLearner], None] | None = None,
) -> ValueLearner:
    """Learn until `stop` is set (for ever, unless given). Outages of the hub are waited through."""
    stop = stop or threading.Event()
    queue, topic = fleet.queue(experience, Fragment), fleet.topic(value, ValueVersion)
    newest = topic.latest()
    learner = ValueLearner(config, newest.value if newest is not None else None)
    if learner.number:
        logger.info("the value network goes on from version %d", learner.number)
    published = learner.number
    while not stop.is_set():
        try:
            items = queue.take(TAKEN_AT_ONCE, WAIT_SECONDS)
            if not items:
                continue
            learner.learn([item.value for item in items])
            if learner.number - published >= learner.config.updates_per_version:
                topic.publish(learner.version())
                published = learner.number
                if on_version is not None:
                    on_version(learner)
            _finish(items)
        except (RetryableError, QueueFullError) as error:
            logger.warning("the value network waits for the hub: %s", error)
            stop.wait(RETRY_SECONDS)
    return learner


def _finish(items: list[SyncItem[Fragment]]) -> None:
    for item in items:
        item.done()
