"""One peer's own pace, and what follows from it (pure): how fast it is, and whether another step is worth it.

`Pace` averages the seconds per sample, leaving out the time spent in rounds: others need to know how fast this peer
computes, not how long it waited for them.
"""

from __future__ import annotations

from potluck.errors import ConfigurationError


class Pace:
    """Seconds per sample, as a moving average."""

    def __init__(self, alpha: float = 0.1) -> None:
        """`alpha` is the weight of the newest step, after the first few, which count evenly."""
        if not 0.0 < alpha <= 1.0:
            raise ConfigurationError(f"performance_ema_alpha={alpha}: it must be above 0 and at most 1")
        self._alpha = alpha
        self._num_steps = 0
        self._seconds_per_sample = 0.0
        self._seconds_per_step = 0.0
        self._since: float | None = None

    @property
    def samples_per_second(self) -> float:
        """0 while nothing is known."""
        return 1.0 / self._seconds_per_sample if self._seconds_per_sample > 0 else 0.0

    @property
    def seconds_per_step(self) -> float:
        """0 while nothing is known."""
        return self._seconds_per_step

    @property
    def steps_per_second(self) -> float:
        """0 while nothing is known."""
        return 1.0 / self._seconds_per_step if self._seconds_per_step > 0 else 0.0

    def resume(self, now: float) -> None:
        """Computing goes on from here."""
        self._since = now

    def step_done(self, num_samples: int, now: float) -> None:
        """A step is done; the next one begins at once."""
        since, self._since = self._since, now
        if since is None or num_samples < 1 or now <= since:
            return
        self._num_steps += 1
        alpha = max(self._alpha, 1.0 / self._num_steps)
        seconds = now - since
        self._seconds_per_step += alpha * (seconds - self._seconds_per_step)
        self._seconds_per_sample += alpha * (seconds / num_samples - self._seconds_per_sample)


def is_worth_another_step(due_in_seconds: float | None, step_seconds: float) -> bool:
    """Whether to compute on, or rather wait for the round that is about to start.

    Another step ends after `step_seconds`, and everybody's round begins so much too late; waiting wastes what is left
    until it is due. Peers are more or less alike, so the smaller of the two is the better for all of them.
    """
    if due_in_seconds is None or step_seconds <= 0.0:
        return True
    return step_seconds - due_in_seconds <= due_in_seconds


def patience_seconds(due_in_seconds: float, step_seconds: float, grace_seconds: float) -> float:
    """How long to wait for a round that is about to start, before computing on after all.

    It was predicted and may not come: then a step's time is lost, and no more. But the round waits for us only until
    `due_in_seconds` + `grace_seconds`, and who would miss it in a long step loses all its samples of the epoch, and
    must fetch the state.
    """
    return min(step_seconds, due_in_seconds + grace_seconds)
