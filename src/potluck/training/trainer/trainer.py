"""One peer's training loop: batches in, gradients or changes out to the run, until told to stop.

The loop knows nothing of rounds: the optimizer takes part in them. It follows the manifest: what may change while a run
trains is looked at before each step.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from potluck.errors import ConfigurationError, StoppedError
from potluck.optim import compiler
from potluck.optim.optimizer import Optimizer
from potluck.optim.sharedoptimizer import SharedOptimizer
from potluck.optim.staging import has_streams
from potluck.recipes.recipe import Batch, Recipe, RecipeConfig, require_downloads
from potluck.round.plan.messages import Commit
from potluck.run.joined import Joined
from potluck.training.books.contributions import given_by
from potluck.training.books.shards import LeasedShards
from potluck.training.manifest.curriculum import data_at
from potluck.training.manifest.manifest import Manifest, Settings, SyncSettings
from potluck.training.trainer.auxiliarywork import keep_receipts, open_desks
from potluck.training.trainer.batchsize import BatchSearch
from potluck.training.trainer.computing import Computing
from potluck.training.trainer.config import TrainConfig
from potluck.training.trainer.evaluating import share_evaluation
from potluck.training.trainer.feed import AHEAD_BATCHES, Feed
from potluck.training.trainer.inneroptimizer import STATE_TENSORS
from potluck.training.trainer.machine import free_cache, is_out_of_memory
from potluck.training.trainer.optimizers import follow, make_optimizer
from potluck.training.trainer.smoothed import SmoothedLoss

logger = logging.getLogger(__name__)

MEMORY_EVERY_STEPS = 16  # between two looks at how much memory is used
PAUSE_SECONDS = 0.5
END_SECONDS = 1.5  # of the time in which this peer leaves, for what comes after its last round
TELL_EVERY_SECONDS = 0.5
SMALLEST_SHARE = 4  # a batch found by trial is at most such a share of the target: several peers fill it


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """How far this peer is."""

    epoch: int
    steps: int
    samples: int  # that this peer has computed since it started
    loss: float  # smoothed
    samples_per_second: float
    paused: bool = False
    handed_in: int = 0  # samples that would have been lost by leaving at once
    given: int = 0  # samples of it that epochs hold, as the run's book says
    seconds: float = 0.0  # since it began to train
    seconds_waiting: float = 0.0  # … of these, for rounds

    def describe_given(self) -> str:
        """For a person who leaves: what is in the model, and what of the work is not."""
        if self.given >= self.samples:
            return f"You gave {self.given:,} samples, up to epoch {self.epoch}. Thank you!"
        return (
            f"You gave {self.given:,} samples, up to epoch {self.epoch}; {self.samples - self.given:,} more that you "
            "computed came too late for an epoch. Thank you!"
        )


class Trainer:
    """Trains until the run ends, or somebody says stop. Lives in the thread that calls `train`."""

    def __init__(
        self,
        run: Joined,
        manifest: Callable[[], Manifest],
        recipe: Recipe[Any],
        config: TrainConfig | None = None,
        on_progress: Callable[[TrainProgress], None] | None = None,
        *,
        on_model: Callable[[], None] = lambda: None,
        on_batch_size: Callable[[int], None] = lambda _size: None,
    ) -> None:
        """`manifest` returns the newest one each time it is asked.

        `on_model` is called when the model is there and the run's state is about to be looked for, `on_batch_size` when
        the batch size is found while it trains.
        """
        self._run = run
        self._manifest = manifest
        self._recipe = recipe
        self._config = config or TrainConfig()
        self._on_progress = on_progress or (lambda _progress: None)
        self._on_batch_size = on_batch_size
        self._told_at = 0.0
        first = manifest()
        require_downloads(recipe)
        self.computing = Computing(recipe, first, self._config)
        self.model = self.computing.model
        self._memory = self.computing.memory
        self._search: BatchSearch | None = None
        self.batch_size = self._config.batch_size or self._first_batch_size(first)
        self.computing.open_pool(run, first.seed)
        on_model()
        self.optimizer: SharedOptimizer = make_optimizer(run, self.model, manifest, self._config.state)
        self._lease = self.optimizer.collaboration.averager.lease
        open_desks(run, self.optimizer.collaboration, manifest)
        if self._config.receipts is not None:
            keep_receipts(run, self.optimizer.collaboration, self._config.receipts)
        self._seed = zlib.crc32(run.peer_id.encode())
        self.steps = 0
        self.samples = 0
        self.given = 0.0
        """Samples of this peer that committed epochs hold."""
        self.optimizer.collaboration.averager.listen(self._committed)
        self._loss = SmoothedLoss()
        self._evaluated_epoch = self.optimizer.epoch

    @property
    def loss(self) -> float:
        """Smoothed. Reading it waits for the device."""
        return self._loss.read()

    @property
    def is_searching(self) -> bool:
        """Whether batches of several sizes are still tried."""
        return self._search is not None

    def train(self, stop: threading.Event) -> TrainProgress:
        """Go on until `stop` is set, the steps are done, or the run has reached its end."""
        self._memory.begin_trials()
        feed = self._open_feed()
        started = time.monotonic()
        self.optimizer.driver.gives_up = lambda: stop.is_set() and self._cannot_wait()
        try:
            while not stop.is_set() and not self._is_done():
                if self._is_paused():
                    started += self._wait_while_paused(started, stop)
                    continue
                if self._data() != self._recipe.data:  # a feed reads ahead, and goes by what counted when it was opened
                    feed.close()
                    self._search_anew()
                    feed = self._open_feed()
                if self._step(feed):
                    self._tell(started)
                    self._share_evaluation()
                    if self.steps % MEMORY_EVERY_STEPS == 0 and self._memory.is_exceeded():
                        self._halve_batches(feed)
        except StoppedError:  # while it caught up with the others; what it has done may still be handed in
            pass
        finally:
            feed.close()
        return self._progress(started)

    def _share_evaluation(self) -> None:
        """At an epoch that is due, evaluate this peer's part, if it is trusted to (evaluating.py)."""
        epoch, every = self.optimizer.epoch, self._manifest().evaluation.every_epochs
        if not every or epoch % every or epoch == self._evaluated_epoch or self.computing.is_sharded:
            return
        self._evaluated_epoch = epoch
        try:
            share_evaluation(self._run, self.optimizer, self._recipe, self.model)
        except ConfigurationError as error:  # the host evaluates too, and training goes on
            logger.warning("this peer takes no part in evaluating: %s", error)

    def _wait_while_paused(self, started: float, stop: threading.Event) -> float:
        """Do nothing, and say so, until the run goes on or `stop` is set; how many seconds that took."""
        began = time.monotonic()
        self.optimizer.rest()
        while self._is_paused() and not stop.is_set():
            self._run.check()
            self._tell(started, paused=True)
            stop.wait(PAUSE_SECONDS)
        self.optimizer.go_on()
        return time.monotonic() - began

    def _cannot_wait(self) -> bool:
        """Whether this peer, which was told to leave, waits for nobody any more."""
        return not self._run.peer.session.hub.is_connected or not self._run.seconds_to_leave(math.inf) > END_SECONDS

    def hand_in(self, timeout_seconds: float) -> int:
        """Before leaving: bring the samples so far into the run's next epoch, if that comes in time; how many did."""
        seconds = self._run.seconds_to_leave(timeout_seconds + END_SECONDS) - END_SECONDS
        return self.optimizer.hand_in(seconds) if self.unfinished_samples and seconds > 0 else 0

    @property
    def leave_seconds(self) -> float:
        """How long leaving may take in all, once this peer was told to."""
        return self._run.leave_seconds

    @leave_seconds.setter
    def leave_seconds(self, seconds: float) -> None:
        self._run.leave_seconds = seconds

    @property
    def unfinished_samples(self) -> int:
        """Of this peer, towards the next epoch, if one is to come."""
        return 0 if self._is_paused() or self._is_over() else self.optimizer.samples

    def _committed(self, commit: Commit) -> None:
        self.given += given_by(self._run.peer_id, commit)

    def _data(self) -> RecipeConfig:
        return data_at(self._recipe, self._manifest(), self.optimizer.epoch)

    def _open_feed(self) -> Feed:
        self._recipe.data = self._data()
        readers = [
            LeasedShards(self._run, self._lease.view, self._recipe.num_shards, self._seed + number, number)
            for number in range(self._config.num_readers)
        ]
        pins = has_streams(self.computing.device)
        return Feed(self._recipe, readers, self.batch_size, self._seed, self._ahead_batches, pins=pins)

    @property
    def _ahead_batches(self) -> int:
        return 0 if self._search is not None else AHEAD_BATCHES  # which size is next is known after each step

    def _halve_batches(self, feed: Feed) -> None:
        limit = self._memory.describe()
        if self.batch_size == 1:
            raise ConfigurationError(
                f"training needs more than {limit}, even in batches of 1: allow more, take another --device, or take "
                "part as an aux peer (potluck aux)"
            )
        self.batch_size //= 2
        logger.warning("training needs more than %s: batches of %d from here on", limit, self.batch_size)
        if self._search is not None:
            self._search = None
            self._on_batch_size(self.batch_size)
        feed.resize(self.batch_size)

    def _settings(self) -> Settings:
        return self._manifest().at(self.optimizer.epoch)

    def _is_paused(self) -> bool:
        """By the run's epoch and not by ours: who was left behind when it paused goes on with the others."""
        return self._manifest().at(max(self.optimizer.epoch, self.optimizer.collaboration.averager.epoch)).paused

    def _is_done(self) -> bool:
        most = self._config.max_steps
        return self._is_over() or (most is not None and self.steps >= most)

    def _is_over(self) -> bool:
        """Whether the run has reached its end."""
        end = self._settings().end_epoch
        return bool(end and self.optimizer.epoch >= end)

    def _step(self, feed: Feed) -> bool:
        """Train on a batch; False, and nothing done, where memory ends: the next one is smaller."""
        size, search = self.batch_size * self._num_parts, self._search
        computed = self._compute_parts(feed)
        if computed is None:
            self.optimizer.zero_grad()
            self._make_room(feed)
            return False
        loss, seconds = computed
        follow(self.optimizer, self._settings())
        counts = self.optimizer.driver.counts
        num_outdated = counts["outdated_batches"]
        if not self._take_step(size, feed):
            return False
        self.optimizer.zero_grad()
        if search is not None:
            self._observe(search, seconds, feed)
        self.steps += 1
        if self.steps == 1:
            compiler.import_meanwhile()
        if counts["outdated_batches"] == num_outdated:
            self.samples += size
        self._loss.add(loss)
        return True

    def _take_step(self, size: int, feed: Feed) -> bool:
        """Hand the gradients in; False where memory ended in the middle, and a good state was gone back to."""
        try:
            self.optimizer.step(batch_size=size, grad_scaler=self.computing.precision.scaler)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("a step needs more than %s: %s", self._memory.describe(), error)
        else:
            self.computing.precision.stepped()
            return True
        self.optimizer.zero_grad()
        free_cache(self.computing.device)
        self.optimizer.driver.start_over(f"{self._memory.describe()} was not enough for a step")
        self._halve_batches(feed)
        return False

    @property
    def _num_parts(self) -> int:
        """Batches of one step: several where a local step is to have more samples than this machine takes at once."""
        training = self._settings().training
        return (
            1 if isinstance(training, SyncSettings) else max(1, math.ceil(training.inner_batch_size / self.batch_size))
        )

    def _compute_parts(self, feed: Feed) -> tuple[Tensor, float] | None:
        """As `_compute`, over the parts of a step; the gradients are their mean."""
        num_parts = self._num_parts
        found = [self._compute(feed.next()) for _ in range(num_parts)]
        losses = [each for each in found if each is not None]
        if len(losses) < num_parts:
            return None
        if num_parts > 1:
            grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            torch._foreach_div_(grads, float(num_parts))
        return torch.stack([loss.detach() for loss, _ in losses]).mean(), sum(seconds for _, seconds in losses)

    def _compute(self, batch: Batch) -> tuple[Tensor, float] | None:
        """The loss, with its gradients made, and the seconds that took; None where memory ends."""
        # Before the first epoch there are no statistics, and a batch has to leave room for them.
        is_early = self._search is not None and self.optimizer.epoch == 0
        num_beside = STATE_TENSORS[self._settings().optimizer.name] if is_early else 0
        return self.computing.gradients(batch, num_beside, is_timed=self._search is not None)

    # The batch size, where it is found by trial

    def _first_batch_size(self, manifest: Manifest) -> int:
        self._search_anew()
        if self._search is not None:
            return self._search.size
        self._recipe.data = data_at(self._recipe, manifest, manifest.newest.from_epoch)  # what comes in the end
        size = self.computing.find_batch_size(STATE_TENSORS[manifest.newest.optimizer.name])
        logger.info("batches of %d samples suit this machine", size)
        return size

    def _search_anew(self) -> None:
        """Other data, other batches. Where steps are what counts, and where the size was given, it stays."""
        training = self._manifest().newest.training
        # Not on several devices: the others would wait for one whose memory has ended.
        if self._config.batch_size is None and isinstance(training, SyncSettings) and len(self.computing.devices) == 1:
            self._search = BatchSearch(max(1, training.target_batch_size // SMALLEST_SHARE))
            self.batch_size = self._search.size

    def _observe(self, search: BatchSearch, seconds: float, feed: Feed) -> None:
        """A batch was computed: go on with the size that the search says."""
        if self._memory.fits():
            search.observe(seconds)
        else:
            search.refuse()
        self._take_size(search, feed)

    def _make_room(self, feed: Feed) -> None:
        if self._search is not None and self.batch_size > 1:
            self._search.refuse()
            self._take_size(self._search, feed)
        else:
            self._halve_batches(feed)

    def _take_size(self, search: BatchSearch, feed: Feed) -> None:
        self.batch_size = search.size
        if search.is_over:
            self._search = None
            if isinstance(self.optimizer, Optimizer):
                self.optimizer.forget_pace()
            logger.info("batches of %d samples suit this machine", self.batch_size)
            self._on_batch_size(self.batch_size)
        feed.resize(self.batch_size, self._ahead_batches)

    def _tell(self, started: float, *, paused: bool = False) -> None:
        now = time.monotonic()
        if now - self._told_at >= TELL_EVERY_SECONDS:
            self._told_at = now
            loss = self.loss if self.steps else None  # one that is not finite is told too: it raises an alarm
            session = self._run.peer.session
            self._run.soon(lambda: session.update_beacon(loss=loss))
            self._on_progress(self._progress(started, paused=paused))

    def _progress(self, started: float, *, paused: bool = False) -> TrainProgress:
        seconds = max(time.monotonic() - started, 1e-9)
        return TrainProgress(
            epoch=self.optimizer.epoch,
            steps=self.steps,
            samples=self.samples,
            loss=self.loss,
            samples_per_second=0.0 if paused else self.samples / seconds,
            paused=paused,
            given=round(self.given),
            seconds=seconds,
            seconds_waiting=self.optimizer.driver.seconds_waiting,
        )
