"""How a peer's training ends, on the command line and in a notebook alike: what it has done is handed in.

That takes a round, and on a slow line a round takes minutes. A volunteer who leaves waits for so long at most, and is
then told what is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from potluck.errors import PotluckError
from potluck.training.trainer.trainer import END_SECONDS, Trainer, TrainProgress


def train_and_hand_in(
    trainer: Trainer,
    stop: threading.Event,
    seconds: float,
    *,
    on_handing_in: Callable[[int], None],
    on_failure: Callable[[str], None],
) -> TrainProgress:
    """Train until `stop` or the end, and wait so long for the next epoch, to bring the last samples into it.

    `on_handing_in` is told how many they are, and `on_failure` why they do not count, if so.
    """
    trainer.leave_seconds = seconds + END_SECONDS
    last = trainer.train(stop)
    handed_in = _hand_in(trainer, seconds, on_handing_in, on_failure)
    return replace(last, handed_in=handed_in, epoch=trainer.optimizer.epoch, given=round(trainer.given))


def _hand_in(
    trainer: Trainer, seconds: float, on_handing_in: Callable[[int], None], on_failure: Callable[[str], None]
) -> int:
    samples = trainer.unfinished_samples
    if not samples or seconds <= 0:
        return 0
    on_handing_in(samples)
    try:
        handed_in = trainer.hand_in(seconds)
    except PotluckError as error:  # nothing is to be done about it any more: say it, and leave
        on_failure(f"{samples} samples are lost, since they could not be handed in: {error}")
        return 0
    if not handed_in:
        on_failure(
            f"{samples} samples are lost: the next epoch is not made within {seconds:g} s. (To wait longer for it: "
            "--hand-in-seconds)"
        )
    return handed_in
