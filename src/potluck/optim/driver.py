"""Carries a method of training through the epochs of a run: rounds and delays; recovery.py does the rest.

The driver lives in the user's thread; what must happen on the event loop goes through the run. `epoch` is the number of
updates that this peer's state holds. The lineage may be further: then this peer is behind, and fetches the state.

    round()        take part now, or as soon as it is due, wait for the result, and step
    begin_round()  the same in the background; `land()` brings the result in when it is there

What can go wrong in a round is one of three things. *It failed*: nothing was committed, the offer is withdrawn, its
work counts again in the next attempt. *It went on without us*: the epoch stands, and we do not have it; catch up.
*What came out is not finite*: back to the last good state, and say so.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from potluck.errors import ConfigurationError, RoundFailedError
from potluck.optim.collaboration import Collaboration, has_other_trainers
from potluck.optim.method import Hyperparameters, Method, Offer, StateSource
from potluck.optim.recovery import Recovery, RecoveryConfig
from potluck.optim.staging import Moment, StagedTensors, Staging
from potluck.round.member.intent import StandBy
from potluck.round.outcome import RoundResult
from potluck.run.calls import Call, ThreadResult
from potluck.run.joined import Joined

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 2.0  # for a round to be left: nothing in that waits for others
LOOK_UP_SECONDS = 0.5  # within so long it is seen that nobody wants a round any more
LAST_ROUND_SECONDS = 10.0  # for the round in the background to end, when this peer does


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverConfig:
    """How patient a driver is."""

    averaging_timeout_seconds: float = 120.0
    """A round in which nothing moves for so long has failed; its work counts again in the next."""

    load_state_timeout_seconds: float = 600.0
    """How long to look for somebody who has the run's state, and to wait for a keeper that sends nothing."""

    keep_last_good: bool = True
    """Keep a copy of the last finite state, to go back to."""

    def __post_init__(self) -> None:
        if self.averaging_timeout_seconds <= 0:
            raise ConfigurationError("averaging_timeout_seconds must be above 0")
        self.recovery()

    def recovery(self) -> RecoveryConfig:
        """What recovery needs of this."""
        return RecoveryConfig(
            load_state_timeout_seconds=self.load_state_timeout_seconds, keep_last_good=self.keep_last_good
        )


@dataclass(slots=True)
class _Pending:
    """A round in the background."""

    epoch: int
    offer: Offer
    result: Call[RoundResult | None]  # None: it stood by, and no round began
    staged: list[StagedTensors]  # what the round averages, as soon as the offer is made
    stepped: ThreadResult[Moment] | None = None  # where the step is delayed too

    @property
    def last(self) -> ThreadResult[Any]:
        """The outcome that completes last."""
        return self.stepped or self.result


class Driver:
    """One method's way through the epochs. For one thread, the user's."""

    def __init__(
        self,
        run: Joined,
        method: Method,
        collaboration: Collaboration,
        config: DriverConfig,
        source: StateSource | None = None,
        hyperparameters: Hyperparameters = lambda _epoch: None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.gives_up: Callable[[], bool] = lambda: False
        """Whether to leave a round before its end: because this peer leaves, and its time for that is over."""
        self.last_result: RoundResult | None = None
        self.seconds_waiting = 0.0  # of the training thread, for rounds
        self._run = run
        self._method = method
        self._collaboration = collaboration
        self._averager = collaboration.averager
        self._clock = run.clock
        self._config = config
        self._recovery = Recovery(run, method, self._averager, config.recovery(), source, hyperparameters)
        self._pending: _Pending | None = None
        self._steps: concurrent.futures.ThreadPoolExecutor | None = None
        self._staging = Staging()
        run.attach(self._release)

    # Where we are

    @property
    def epoch(self) -> int:
        """How many updates of the run this peer's state holds."""
        return self._recovery.epoch

    def statistics(self) -> dict[str, int]:
        """Counters."""
        return {**self.counts, "local_epoch": self.epoch, **self._recovery.statistics()}

    @property
    def num_loaded(self) -> int:
        """How often this peer took over another state than it had made itself."""
        return self._recovery.num_loaded

    @property
    def is_busy(self) -> bool:
        """Whether a round is under way in the background."""
        return self._pending is not None

    @property
    def is_behind(self) -> bool:
        """Whether epochs are committed that this peer has not, and does not get by the round it is in."""
        expected = self.epoch if self._pending is None else self._pending.epoch
        return self._averager.epoch > expected

    # Rounds

    def round(
        self, *, stand_by: StandBy | None = None, delay_step: bool = False, timeout_seconds: float | None = None
    ) -> bool:
        """Take part in the next epoch, and step; False if our offer did not count (then it may have been caught up).

        With `stand_by` it is not due yet; if it does not become so in time, the offer counts again as well. After
        `timeout_seconds` the round is left, also if it goes on.
        """
        pending = self._start(timeout_seconds, stand_by=stand_by)
        self._pending = pending
        began = self._clock.monotonic()
        until = began + timeout_seconds if timeout_seconds is not None else math.inf
        is_over = False
        try:
            while not is_over and not self.gives_up() and (left := until - self._clock.monotonic()) > 0:
                is_over = pending.result.wait(min(LOOK_UP_SECONDS, left))
        finally:
            self.seconds_waiting += self._clock.monotonic() - began
            if not is_over:  # this peer is stopped, or Ctrl-C: leave the round before anything else
                self._leave_round()
                self._method.withdraw(pending.offer)
        if not is_over:
            return False
        if delay_step and _epoch_of(pending) is not None:
            self._step_later(pending)
            return True
        return self.land()

    def begin_round(self, *, delay_step: bool, stand_by: StandBy | None = None) -> None:
        """Take part in the next epoch in the background."""
        pending = self._start(stand_by=stand_by, in_background=True)
        self._pending = pending
        if delay_step:
            self._step_later(pending)

    def land(self, *, wait: bool = True) -> bool:
        """Bring in what the round in the background came to; False when there is none, or it failed, or is not done.

        A round that this peer gives up waiting for is left, and its offer counts again. What was heard since a state
        was loaded is brought in as well.
        """
        self._recovery.hear_out()
        pending = self._pending
        if pending is None or not (wait or pending.last.is_known):
            return False
        if not self._wait_for_round():
            self._leave_round()
            self._withdraw_unless_stepped(pending)
            return False
        self._pending = None
        return self._conclude(pending)

    def _wait_for_round(self) -> bool:
        """Wait for the end of the round in the background; False: this peer gives up before."""
        is_over, began = self._pending is None, self._clock.monotonic()
        while self._pending is not None and not is_over and not self.gives_up():
            is_over = self._pending.last.wait(LOOK_UP_SECONDS)
        self.seconds_waiting += self._clock.monotonic() - began
        return is_over or self._pending is None or self._pending.last.is_known

    def _withdraw_unless_stepped(self, pending: _Pending) -> None:
        if _epoch_of(pending) is None:
            self._method.withdraw(pending.offer)

    def close(self, *, wait_seconds: float = LAST_ROUND_SECONDS) -> None:
        """Bring in the round in the background, if it ends in time, else leave it. Idempotent.

        If all peers of a run ended in the middle of a round, its epoch would be committed, and nobody would have the
        state after it.
        """
        pending = self._pending
        if pending is not None and pending.last.wait(wait_seconds) and _epoch_of(pending) is not None:
            self.land()
        left = self._leave_round()
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.shutdown()
        if left is not None:
            self._withdraw_unless_stepped(left)  # a state that is saved after this has its work

    def _leave_round(self) -> _Pending | None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result.end(LEAVE_SECONDS)
        return pending

    async def _release(self) -> None:
        """On the event loop, when the run is left; after Ctrl-C nobody wants to wait for others."""
        await self._recovery.stop_listening()
        is_out = self._run.is_interrupted or self._run.peer.session.ended.done()
        wait_seconds = 0.0 if is_out else self._run.seconds_to_leave(LAST_ROUND_SECONDS)
        await asyncio.to_thread(lambda: self.close(wait_seconds=wait_seconds))

    def _start(
        self, timeout_seconds: float | None = None, *, stand_by: StandBy | None = None, in_background: bool = False
    ) -> _Pending:
        assert self._pending is None, "one round at a time"
        epoch = self.epoch + 1
        offer = self._method.offer(epoch)
        staged: list[StagedTensors] = []
        if not in_background:  # this thread has nothing else to do
            staged.append(self._staging.stage(offer.tensors))
        patience = timeout_seconds or self._config.averaging_timeout_seconds
        return _Pending(epoch, offer, self._run.submit(self._average(offer, staged, epoch, stand_by, patience)), staged)

    async def _average(
        self, offer: Offer, staged: list[StagedTensors], epoch: int, stand_by: StandBy | None, timeout_seconds: float
    ) -> RoundResult | None:
        if not offer.weight and not await has_other_trainers(self._collaboration.peer.session):
            raise RoundFailedError(f"nobody has anything for epoch {epoch}")
        if not staged:
            staged.append(await self._averager.work(lambda: self._staging.stage(offer.tensors)))
        tensors, copied = staged[0].host, staged[0].copied
        if not copied.is_now:
            await self._averager.work(copied.wait)
        if stand_by is None:
            return await self._averager.average(
                tensors, weight=offer.weight, epoch=epoch, timeout_seconds=timeout_seconds, phases=offer.phases
            )
        return await self._collaboration.stand_by(
            stand_by, tensors, weight=offer.weight, epoch=epoch, timeout_seconds=timeout_seconds
        )

    def _step_later(self, pending: _Pending) -> None:
        if self._steps is None:
            self._steps = concurrent.futures.ThreadPoolExecutor(1, "potluck-step")
        pending.stepped = ThreadResult()
        self._steps.submit(self._step_in_background, pending, pending.stepped)

    def _step_in_background(self, pending: _Pending, stepped: ThreadResult[Moment]) -> None:
        try:
            pending.result.wait()
            if (result := _epoch_of(pending)) is not None:
                self._accept(pending, result)
            stepped.settle(Moment(pending.offer.tensors.values() if pending.staged else ()))
        except BaseException as error:  # noqa: BLE001 - raised by who lands the round
            stepped.settle(error=error)

    def _accept(self, pending: _Pending, result: RoundResult) -> None:
        if not result.alone:  # else the tensors are as they were offered
            pending.staged[0].bring_back()
        self._recovery.accept(pending.offer, epoch=pending.epoch, alone=result.alone)

    def _conclude(self, pending: _Pending) -> bool:
        try:
            result = pending.result.result()
        except RoundFailedError as error:
            self.counts["failed_rounds"] += 1
            logger.warning("%s; the work done counts again in the next attempt", error)
            self._method.withdraw(pending.offer)
            self.catch_up()
            return False
        if result is None:
            self._method.withdraw(pending.offer)
            return False
        self.last_result = result
        if not result.holds:
            self._method.left_behind(pending.offer, contributed=result.contributed)
            self.counts["left_behind"] += 1
            assert result.left_behind is not None
            logger.warning("epoch %d stands without this peer: %s", result.commit.epoch, result.left_behind.reason)
            self.catch_up()
            return False
        if pending.stepped is not None:
            pending.stepped.result().wait_on_device()  # or raises what the step raised
        else:
            self._accept(pending, result)
        self.counts["epochs"] += 1
        self._recovery.advance(pending.epoch)
        return True

    # Taking over states

    def begin(self, *, listens_on: bool = False) -> None:
        """Take over the run's state; begin with this peer's own where nobody has one. See `Recovery.begin`."""
        self._recovery.begin(listens_on=listens_on)

    def catch_up(self) -> None:
        """Fetch the run's state, if it is further than this peer's. A round in the background is landed first."""
        if self._pending is not None:
            self.land()
        self._recovery.catch_up()

    @property
    def can_hear_missed(self) -> bool:
        """Whether this peer lacks epochs that it needs no state for: somebody should have the averages of each."""
        return self.is_behind and self._recovery.can_hear_missed

    def hear_missed(self) -> bool:
        """Take the steps that the others have taken, if no round is under way; whether this peer is where they are."""
        return self._pending is None and self._recovery.hear_missed()

    def mend(self) -> bool:
        """Repair this peer's state if it is not that of the others, unless a round is under way; whether it was."""
        return self._pending is None and self._recovery.mend()

    def start_over(self, why: str) -> None:
        """A step ended in the middle, and left no state: take over the others', or go back to this peer's last good."""
        self._leave_round()
        self._recovery.start_over(why)

    def before_change(self) -> None:
        """To be called before local steps change what was published: it may not be copied yet."""
        self._recovery.before_change()

    # Saved and loaded

    def state_dict(self) -> dict[str, Any]:
        """Everything. A round in the background is landed first."""
        self.land()
        return {"epoch": self.epoch, "method": self._method.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state. In a run that is not as far, epochs count from where the run is."""
        self.land()
        self._recovery.load_state_dict(state, epoch=min(state["epoch"], self._averager.epoch))


def _epoch_of(pending: _Pending) -> RoundResult | None:
    """The result of a round that is over and has an epoch for us."""
    call = pending.result
    result = call.result() if call.is_known and call.error is None else None
    return result if result is not None and result.holds else None
