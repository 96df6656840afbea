"""How many local steps a peer of DiLoCo takes until its next exchange, so that it is ready when the others are (pure).

    usually         H, or fewer where it is slower than the others (methods/dylu.py)
    after a miss    as many as fit into what is left until the next round (methods/cadence.py); where none does, it
                    offers what it has at once. Then no more than fit between two rounds, and one more after each few
                    rounds that it was in: where one peer is much faster than most, rounds may follow its pace, and H
                    steps of the others would be late for every one of them

A peer that is not about as fast as the others may be ready long before them: a slow one took too few steps, or one is
faster than all others. It *stands by* then: the window for stragglers begins when others are ready who weigh half as
much as those of the last epoch, and not with this peer alone. Else a round would begin without most of them.
"""

from __future__ import annotations

from potluck.optim.methods.cadence import Cadence
from potluck.optim.methods.dylu import ALIKE_SHARE, inner_steps, steps_within
from potluck.optim.methods.streaming import FragmentSchedule
from potluck.optim.progress.pace import Pace
from potluck.round.member.intent import StandBy

AWAITED_SHARE = 0.5  # of the others' weight in the last epoch
LATER_SHARE = 1.25  # of the time that is left: how much later than expected a round may start
TRIED_ROUNDS = 8  # in a row that a peer was in, before it tries more steps
WORD_SECONDS = 0.5  # … and how long it takes at least to hear of it


class Stride:
    """One peer's local steps. For the thread that trains; `cadence` is told of commits by another."""

    def __init__(self, schedule: FragmentSchedule, *, by_speed: bool) -> None:
        """`by_speed`: fewer steps where others are faster."""
        self.pace = Pace()
        self.cadence = Cadence()
        self.steps = 0
        """Since the last exchange."""
        self._schedule = schedule
        self._by_speed = by_speed
        self._most: int | None = None  # steps until the next exchange, where it is to be sooner than usual
        self._fitting: int | None = None  # steps that fit between two rounds, after a miss
        self._num_in_time = 0  # exchanges since then, or since more steps were tried

    def steps_per_round(self, fast_steps_per_second: float) -> int:
        """From one exchange to the next, where the fast peers take so many steps a second; 0: nobody has said."""
        steps = self._schedule.steps_per_round
        if not self._by_speed:
            return steps
        by_speed = inner_steps(steps, self.pace.steps_per_second, fast_steps_per_second)
        return by_speed if self._fitting is None else min(by_speed, self._fitting)

    def overlap_steps(self, fast_steps_per_second: float) -> int:
        """After so many an exchange in the background is brought in: for all the same share of their steps."""
        steps = self._schedule.steps_per_round
        return self._schedule.overlap_steps * self.steps_per_round(fast_steps_per_second) // steps

    def is_done(self, fast_steps_per_second: float) -> bool:
        """Whether it is time for the next exchange."""
        steps = self.steps_per_round(fast_steps_per_second)
        return self.steps >= (steps if self._most is None else min(steps, self._most))

    def took_over(self, hub_now: float) -> None:
        """Another state was taken over than this peer made itself: go on in step with the others."""
        left_seconds = self.cadence.left_seconds(hub_now)
        if left_seconds is not None and self.cadence.seconds is not None:
            self._most = self.steps + steps_within(left_seconds, self.pace.seconds_per_step)
            self._fitting = max(1, steps_within(self.cadence.seconds, self.pace.seconds_per_step))
            self._num_in_time = 0

    def stand_by(
        self,
        *,
        own_weight: float,
        others_weight: float,
        fast_steps_per_second: float,
        hub_now: float,
        most_seconds: float,
    ) -> StandBy | None:
        """How to be there for the next round without starting it; None: be ready like everybody else.

        `others_weight` is that of the last epoch.
        """
        left_seconds = self.cadence.left_seconds(hub_now)
        is_fastest = 0 < fast_steps_per_second < ALIKE_SHARE * self.pace.steps_per_second
        is_like_others = self.steps >= self._schedule.steps_per_round and not is_fastest
        if is_like_others or left_seconds is None or others_weight <= 0:
            return None
        seconds = min(LATER_SHARE * left_seconds + WORD_SECONDS, most_seconds)
        return StandBy(awaits=own_weight + AWAITED_SHARE * others_weight, seconds=seconds, stays=True)

    def offered(self) -> None:
        """An exchange begins: count anew."""
        self.steps, self._most = 0, None
        self._num_in_time += 1
        if self._fitting is not None and self._num_in_time > TRIED_ROUNDS:
            more = self._fitting + max(1, self._fitting // TRIED_ROUNDS)
            self._fitting = more if more < self._schedule.steps_per_round else None
            self._num_in_time = 1
