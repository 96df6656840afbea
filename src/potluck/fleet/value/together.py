"""The way `together`: all machines train the trunk of the value network among themselves, as a group of a run.

Each laptop has a network of its own and trains it on its own fragments, in a thread of its own. The trunk is the
group's: after some local steps the laptops average what they changed (`potluck.DiLoCo` with plain averaging). Adapters,
heads, μ and σ stay each laptop's own, and no experience leaves it. There is no learner that could die. While a round
does not come about, versions stop, and `PooledValue` goes on with the own critic.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from typing import Any

import torch
from torch import nn

from potluck.errors import FatalError, PotluckError, StoppedError
from potluck.fleet.value.fragment import Fragment
from potluck.fleet.value.learner import VALUE, LearnerConfig, ValueLearner
from potluck.fleet.value.version import ValueVersion
from potluck.optim.diloco import DiLoCo
from potluck.optim.methods.outer import OuterSGD
from potluck.run.joined import Joined

logger = logging.getLogger(__name__)

MOST_WAITING = 16  # fragments; the oldest go
INNER_STEPS = 128  # two fragments' worth of local updates
GRACE_SECONDS = 3.0
RETRY_SECONDS = 2.0
LEAVE_SECONDS = 10.0


class TogetherWay:
    """One laptop's part in the group."""

    def __init__(
        self, run: Joined, *, group: str = VALUE, config: LearnerConfig | None = None, inner_steps: int = INNER_STEPS
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._run, self._group, self._inner_steps = run, group, inner_steps
        self._config = config or LearnerConfig()
        self._waiting: deque[Fragment] = deque(maxlen=MOST_WAITING)
        self._came = threading.Event()
        self._closing = threading.Event()
        self._newest: ValueVersion | None = None
        self._trunk: DiLoCo | None = None
        self._thread = threading.Thread(target=self._work, name="potluck-value", daemon=True)
        self._thread.start()

    def offer(self, fragment: Fragment) -> bool:
        """Keep it for the thread; False when an older one goes for it."""
        is_full = len(self._waiting) == MOST_WAITING
        self.counts["dropped"] += is_full
        self._waiting.append(fragment)
        self._came.set()
        return not is_full

    def newest(self) -> ValueVersion | None:
        """What the thread made last."""
        return self._newest

    def statistics(self) -> dict[str, float]:
        """Rounds of the group, and fragments."""
        epoch = self._trunk.epoch if self._trunk is not None else 0
        return {"rounds": float(epoch), **{name: float(self.counts[name]) for name in ("learnt", "dropped", "failed")}}

    def close(self) -> None:
        """Train no more. Idempotent. What the group has is left when the run is."""
        self._closing.set()
        self._came.set()
        self._thread.join(LEAVE_SECONDS)

    def _work(self) -> None:
        learner: ValueLearner | None = None
        while not self._closing.is_set():
            self._came.wait()
            self._came.clear()
            try:
                learner = learner or ValueLearner(self._config, trunk_optimizer=self._make_optimizer)
                batch = []
                while self._waiting:
                    batch.append(self._waiting.popleft())
                if batch and not self._closing.is_set():
                    self.counts["learnt"] += learner.learn(batch)
                    self._newest = learner.version()
            except FatalError as error:  # banned, or the run was left: there is nothing to wait for
                if not self._closing.is_set():
                    logger.warning("the value network is trained together no more: %s", error)
                return
            except StoppedError:  # this way is closed, or the whole peer is about to leave
                return
            except PotluckError as error:
                self.counts["failed"] += 1
                logger.warning("the value network waits for the others: %s", error)
                self._closing.wait(RETRY_SECONDS)

    def _make_optimizer(self, trunk: nn.Module) -> Any:
        adam = torch.optim.Adam(trunk.named_parameters(), self._config.value.learning_rate, eps=1e-5)
        adam.register_step_pre_hook(self._check_open)
        self._trunk = DiLoCo(
            self._run,
            adam,
            group=self._group,
            inner_steps=self._inner_steps,
            outer=OuterSGD(1.0),
            grace_seconds=GRACE_SECONDS,
        )
        return self._trunk

    def _check_open(self, *_: object) -> None:
        """Before each update: a fragment's worth of them may take longer than `close` waits."""
        if self._closing.is_set():
            raise StoppedError("the value network is trained together no more")
