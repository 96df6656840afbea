"""Which state a peer stands on: taken over at the start, caught up with, repaired, rolled back; and kept for others.

    begin       the run's state, from any peer that has it, in memory or on disk; this peer's own where there is none
    catch_up    the lineage is further than this peer: the averages that it missed; where nobody has them, the newest
                state there is, and what came since (epochlistener.py)
    mend        this peer's bits are not those of the others: the chunks that differ
    roll_back   a step made something that is not finite: another peer's state, or the last good one

Every one of them ends in the same way: the state is loaded, and kept. Where several epochs are put on one that was
fetched, others get the last: to copy and hash each of them takes longer than the steps do. What is kept for others is
copied by a worker while training goes on; so whatever changes the state goes through here, and waits for that copy
(`before_change`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from potluck.errors import ConfigurationError, DeadlineExceededError, FatalError, RetryableError
from potluck.optim.epochlistener import EpochListener, room_for
from potluck.optim.lastgood import LastGood
from potluck.optim.method import Hyperparameters, Method, Offer, Published, RunState, StateSource
from potluck.optim.parameters import are_finite
from potluck.round.averager import Averager
from potluck.run.joined import Joined

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
ELSEWHERE_SECONDS = 5.0  # for somebody to give a state that is finite
MOST_MISSED_EPOCHS = 8  # that are heard afterwards; for more than that a state is less to fetch
MEND_SECONDS = 30.0  # for a repair; the others train on meanwhile
MEND_SHARE = 0.05  # of the time
MEND_ALLOWANCE_SECONDS = 10.0  # beyond that, so that what happens once is repaired at once
FAILED_MEND_SECONDS = 5.0  # until the next attempt, and twice as long after each that fails
MOST_FAILED_MEND_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """How patient a peer is with those who have the state that it needs."""

    load_state_timeout_seconds: float = 600.0
    """How long to look for somebody who has the run's state."""

    keep_last_good: bool = True
    """Keep a copy of the last finite state, to go back to."""

    def __post_init__(self) -> None:
        if self.load_state_timeout_seconds <= 0:
            raise ConfigurationError("load_state_timeout_seconds must be above 0")


class Recovery:
    """One peer's state in the run. For one thread, the user's; no round may be under way when it is called."""

    def __init__(
        self,
        run: Joined,
        method: Method,
        averager: Averager,
        config: RecoveryConfig,
        source: StateSource | None,
        hyperparameters: Hyperparameters,
    ) -> None:
        self.epoch = 0
        """How many updates of the run this peer's state holds."""
        self.num_loaded = 0
        """How often this peer took over another state than it had made itself."""
        self.counts: Counter[str] = Counter()
        self._run = run
        self._method = method
        self._averager = averager
        self._clock = run.clock
        self._config = config
        self._source = source
        self._set_hyperparameters = hyperparameters
        self._good = LastGood()
        self._published: list[Published] = []  # what may not be copied yet
        self._listens_on = False
        self._listener: EpochListener | None = None  # that goes on after a load
        self._num_restored = 0  # how often the run had gone back when this peer's state was taken over
        self._began_at = self._clock.monotonic()
        self._mend_at = 0.0  # not before
        self._mend_pause_seconds = FAILED_MEND_SECONDS
        self._mending_seconds = 0.0  # so far

    def statistics(self) -> dict[str, int]:
        """Counters, those of the method and of the source of states included."""
        of_source = self._source.statistics() if self._source is not None else {}
        return {**self.counts, **self._method.statistics(), **of_source}

    # At the start, and when behind

    def begin(self, *, listens_on: bool = False) -> None:
        """Take over the run's state; begin with this peer's own where nobody has one.

        With `listens_on` a peer that has loaded a state listens on until `hear_out`, which is called with its first
        batch: that takes longer than later ones, and an epoch that passes meanwhile would cost another whole state.
        """
        self._listens_on = listens_on
        self._num_restored = self._averager.num_restored
        is_of_run = self._source is not None and self._resume(self._source)
        if self._averager.epoch > self.epoch and is_of_run:
            self.catch_up()
        elif self._averager.epoch > self.epoch:
            self._fetch_newest()
        else:
            self.keep(at_once=True)  # many a program sets its weights right after it has made its optimizer
        self._listens_on = False  # a peer that missed an epoch later is waited for at once: its batches take no longer

    def _resume(self, source: StateSource) -> bool:
        """Go on from the state that the run has, if any."""
        patience = self._config.load_state_timeout_seconds
        with self._listening() as listener:
            base = self._method.tensors()
            snapshot = self._run.call_unless_leaving(
                listener.meanwhile(lambda: source.resume(base=base, timeout_seconds=patience))
            )
            if snapshot is not None:
                self.counts["resumed"] += 1
                self._take_up(snapshot, listener)
        return snapshot is not None

    def catch_up(self) -> None:
        """Stand where the run does, if it is further than this peer. What becomes of work done is up to the method."""
        if not self.hear_missed():
            self._fetch_newest()

    def _fetch_newest(self) -> None:
        """Take over the newest state of the run, whatever this peer has."""
        head = self._averager.epoch
        logger.info("this peer is at epoch %d and the run at %d: fetching its state", self.epoch, head)
        num_restored = self._averager.num_restored
        with self._listening() as listener:
            snapshot = self._fetch(head, listener)
            if num_restored > self._num_restored:
                self._num_restored = num_restored
                self.counts["went_back"] += 1
                with listener.turn:
                    self._method.forget()
            self.counts["caught_up"] += 1
            self._take_up(snapshot, listener)
        self.keep()

    @property
    def can_hear_missed(self) -> bool:
        """Whether this peer lacks epochs, and somebody who is there should have the averages of each."""
        missed = range(self.epoch + 1, self._averager.epoch + 1)
        if not 0 < len(missed) <= MOST_MISSED_EPOCHS or not self._is_of_one_line():
            return False

        async def look() -> bool:
            return all(map(self._averager.can_hear_late, missed))

        return self._run.call(look())

    def hear_missed(self) -> bool:
        """Stand where the run does, by the averages of the epochs that this peer lacks; False: some are missing."""
        self.hear_out()
        self._hear_missed()
        return self._averager.epoch <= self.epoch

    def _hear_missed(self) -> None:
        """Take the steps that the others have taken, as far as somebody has the averages of each."""
        before = self.epoch
        while self.epoch < self._averager.epoch <= self.epoch + MOST_MISSED_EPOCHS and self._is_of_one_line():
            if self.epoch == before:
                self._method.discard()
            heard = room_for(self._method, self.epoch + 1)
            try:
                self._run.call_unless_leaving(self._averager.hear_late(heard, epoch=self.epoch + 1))
            except RetryableError as error:
                logger.info("epoch %d cannot be heard afterwards: %s", self.epoch + 1, error)
                break
            self._step_by(heard)
            self.counts["heard_late"] += 1
        if self.epoch > before:
            self.num_loaded += 1
            self.keep()

    def _is_of_one_line(self) -> bool:
        """Whether the run has not gone back since this peer's state was made."""
        return self._averager.num_restored == self._num_restored

    @contextmanager
    def _listening(self) -> Iterator[EpochListener]:
        """Hear the epochs that pass meanwhile."""
        listener = EpochListener(self._method, self._averager)
        self._run.call(listener.start())
        try:
            yield listener
        finally:
            if self._listener is not listener:
                self._run.call(listener.close())

    def hear_out(self) -> None:
        """Listen no more after a load, and do what the others have done since."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        before = self.epoch
        try:
            if not self._run.is_leaving():
                self._run.call_unless_leaving(listener.finish())
                self._replay(listener)
        finally:
            self._run.call(listener.close())
        if self.epoch > before:
            self.num_loaded += 1  # for a thread that has begun a batch before
            self.keep()

    async def stop_listening(self) -> None:
        """On the event loop, when the run is left. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()

    def _take_up(self, snapshot: RunState, listener: EpochListener) -> None:
        """Stand on a state, and do what the others have done since. What comes out is to be kept."""
        with listener.turn:
            self._load(snapshot)
            if self._config.keep_last_good:
                self._good.take(snapshot)
        self._replay(listener)
        if self._listens_on and snapshot.epoch:
            self._listener = listener
            return
        self._run.call_unless_leaving(listener.finish())
        self._replay(listener)

    def _replay(self, listener: EpochListener) -> None:
        while (heard := listener.averages.get(self.epoch + 1)) is not None:
            with listener.turn:
                self._step_by(heard)
                self.counts["replayed"] += 1

    def _step_by(self, heard: Mapping[str, Tensor]) -> None:
        """Take the step of the next epoch with averages that were heard."""
        offer = self._method.blank(self.epoch + 1)
        for name, tensor in offer.tensors.items():
            tensor.copy_(heard[name])
        self.accept(offer, epoch=self.epoch + 1, alone=False)
        if self._bring_in(self.epoch + 1):
            self._remember()

    def accept(self, offer: Offer, *, epoch: int, alone: bool) -> None:
        """Have the method take in the averages of an epoch. The one call that may come from another thread."""
        self.before_change()
        self._set_hyperparameters(epoch - 1)  # a newcomer steps as the others did, before its own loop begins
        self._method.accept(offer, epoch=epoch, alone=alone)

    def advance(self, epoch: int) -> None:
        """The method has accepted the averages of this epoch: bring them in, or go back if they are of no use."""
        if self._bring_in(epoch):
            self.keep()

    def _bring_in(self, epoch: int) -> bool:
        self.epoch = epoch
        if not self.is_finite():
            self.roll_back()
            return False
        self._method.land()
        return True

    def _fetch(self, at_least_epoch: int, listener: EpochListener) -> RunState:
        source = self._source
        if source is None:
            raise FatalError(
                f"the run is at epoch {at_least_epoch} and this peer at {self.epoch}, and it was given no source of "
                "states: restart it from a checkpoint of the run, or give the optimizer a state source"
            )
        deadline = self._clock.monotonic() + self._config.load_state_timeout_seconds
        while (left := deadline - self._clock.monotonic()) > 0:
            fetch = self._fetching(source, at_least_epoch, left)
            try:
                return self._run.call_unless_leaving(listener.meanwhile(fetch))
            except RetryableError as error:
                self.counts["failed_fetches"] += 1
                logger.info("the run's state could not be fetched yet: %s", error)
                self._run.check()
                self._run.sleep(min(RETRY_SECONDS, max(0.0, left)))
        raise DeadlineExceededError(
            f"nobody gave this peer the state of epoch {at_least_epoch} within "
            f"{self._config.load_state_timeout_seconds:g} s: see whether a keeper of the run is there, and start again"
        )

    def _fetching(
        self, source: StateSource, at_least_epoch: int, timeout_seconds: float
    ) -> Callable[[], Coroutine[Any, Any, RunState]]:
        base = self._method.tensors()
        return lambda: source.fetch(
            at_least_epoch=max(at_least_epoch, self._averager.epoch), base=base, timeout_seconds=timeout_seconds
        )

    def _load(self, snapshot: RunState) -> None:
        # Nobody vouches for what a keeper says to be its own: other tensors than we ourselves have so are left out.
        method, own = self._method, snapshot.own
        tensors = {name: t for name, t in snapshot.tensors.items() if name not in own or method.is_own(name)}
        self.before_change()
        method.discard()
        method.load(tensors, snapshot.metadata)
        method.land()
        self.epoch = snapshot.epoch
        self.num_loaded += 1

    # Deviating

    def mend(self) -> bool:
        """Take over what most of the others hold, if this peer's tensors are others, or spoilt; whether they were."""
        if self._method.is_spoilt:
            self.roll_back()
            return True
        source, now = self._source, self._clock.monotonic()
        if source is None or not source.deviates() or now < self._mend_at:
            return False
        if self._mending_seconds > MEND_ALLOWANCE_SECONDS + MEND_SHARE * (now - self._began_at):
            return False
        try:
            snapshot = self._run.call_unless_leaving(
                source.repair(epoch=self.epoch, base=self._method.tensors(), timeout_seconds=MEND_SECONDS)
            )
        except RetryableError as error:
            self.counts["failed_mends"] += 1
            self._mend_at = self._clock.monotonic() + self._mend_pause_seconds
            self._mend_pause_seconds = min(2 * self._mend_pause_seconds, MOST_FAILED_MEND_SECONDS)
            logger.warning("this peer's state deviates from the others', and could not be repaired yet: %s", error)
            return False
        finally:
            self._mending_seconds += self._clock.monotonic() - now
        self._mend_pause_seconds = FAILED_MEND_SECONDS
        if snapshot is None:
            return False
        snapshot = self._with_own(snapshot)
        if not are_finite(snapshot.tensors.values()):
            return False
        if snapshot.is_as_base:
            self._take_numbers(snapshot)
        else:
            self._take_over(snapshot)
        self.keep()
        return not snapshot.is_as_base

    def _with_own(self, snapshot: RunState) -> RunState:
        """Somebody's state, with what is this peer's own in place of theirs."""
        tensors, metadata = self._method.tensors(), self._method.metadata()
        kept = {name: tensors.get(name, theirs) for name, theirs in snapshot.tensors.items() if name in snapshot.own}
        numbers = {"own": metadata["own"]} if "own" in metadata else {}
        return dataclasses.replace(
            snapshot, tensors={**snapshot.tensors, **kept}, metadata={**snapshot.metadata, **numbers}
        )

    def _take_numbers(self, snapshot: RunState) -> None:
        """The tensors are the same, and the numbers beside them differ, as a learning rate may: no work is lost."""
        self.before_change()
        self._method.load_numbers(snapshot.metadata)
        self.epoch = snapshot.epoch
        self.counts["mended_numbers"] += 1
        logger.debug("hyperparameters or schedule of epoch %d differed from the others': theirs are used", self.epoch)

    def _take_over(self, snapshot: RunState) -> None:
        logger.warning(
            "this peer's state of epoch %d is not what most others hold: repaired, by %d of %d chunks, to their state "
            "of epoch %d. Rounding does not explain it: if this comes again, test this machine's memory",
            self.epoch,
            snapshot.num_moved_chunks,
            snapshot.num_chunks,
            snapshot.epoch,
        )
        self._load(snapshot)
        self.counts["mended"] += 1
        self.counts["mended_chunks"] += snapshot.num_moved_chunks

    # Good and bad states

    def is_finite(self) -> bool:
        """Whether the state can be worked with."""
        return are_finite(self._method.tensors().values())

    def start_over(self, why: str) -> None:
        """What is here is no state, since a step ended in the middle: go back, and have it said."""
        self.epoch = max(self.epoch, self._averager.epoch)
        self.roll_back(f"{why}, and this peer's state is incomplete")

    def roll_back(self, why: str = "the parameters are not finite (NaN or infinity)") -> None:
        """A step made something that is of no use: go back, and have it said."""
        self.counts["rolled_back"] += 1
        bad_epoch = self.epoch
        if (snapshot := self._healthy_elsewhere(bad_epoch)) is not None:
            where = "another peer's state"
            self._load(snapshot)
        elif (good := self._good.snapshot()) is not None:
            where = f"this peer's own state of epoch {good.epoch}"
            self._load(good)
            self.epoch = bad_epoch  # the epoch stands; its update is left out, by all who saw the same
        else:
            raise FatalError(
                f"{why} after epoch {bad_epoch}, and there is no good state to go back to: "
                "start again from a checkpoint, with a smaller learning rate or with max_grad_norm"
            )
        logger.error(
            "%s after epoch %d: rolled back to %s. If this comes again, take a smaller learning rate or max_grad_norm",
            why,
            bad_epoch,
            where,
        )
        self._method.land()
        self.keep()

    def _healthy_elsewhere(self, epoch: int) -> RunState | None:
        if self._source is None:
            return None
        fetching = self._source.fetch(
            at_least_epoch=epoch, base=self._method.tensors(), timeout_seconds=ELSEWHERE_SECONDS
        )
        try:
            snapshot = self._run.call(fetching)
        except RetryableError:
            return None
        return snapshot if are_finite(snapshot.tensors.values()) else None

    def keep(self, *, at_once: bool = False) -> None:
        """This state is good: let others have it, and have it copied to go back to; `at_once`: before this returns."""
        live = self._live(at_once=at_once)
        published = self._source.publish(live) if self._source is not None else None
        if published is not None:
            self._published.append(published)
        if self._config.keep_last_good:
            self._good.keep(live, published)

    def _remember(self) -> None:
        """This state is good to go back to, and another one to be kept follows at once."""
        if self._config.keep_last_good:
            self._good.keep(self._live(), None)

    def _live(self, *, at_once: bool = False) -> RunState:
        tensors = self._method.tensors()
        return RunState(
            epoch=self.epoch,
            tensors=tensors,
            metadata=self._method.metadata(),
            own=frozenset(filter(self._method.is_own, tensors)),
            steady=frozenset() if at_once else frozenset(filter(self._method.is_steady, tensors)),
            is_held=self._config.keep_last_good,
        )

    def before_change(self) -> None:
        """What was published is about to change: wait until it is copied. Mostly it has been for long."""
        for published in self._published:
            published.wait_until_copied()
        self._published = []

    def load_state_dict(self, state: dict[str, Any], *, epoch: int) -> None:
        """Go on from a state that this peer has saved, as that of this epoch."""
        self.before_change()
        self._method.load_state_dict(state["method"])
        self._method.renumber(epoch - state["epoch"])
        self.epoch = epoch
        self.keep()
