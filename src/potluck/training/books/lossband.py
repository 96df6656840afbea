"""Whether a held-out loss is like those before it (pure), and whose work came in since the last one that was.

    usual difference  the median of |l₁ − l₀| over the last evaluations
    band              the last good loss, and above it `band` usual differences, or such a share of the loss

A loss below the band is good news. A loss above it, or one that is no number, is judged to have left it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from potluck.training.books.history import RoundRecord
from potluck.training.manifest.method import Evaluation

LOOKED_AT = 8  # evaluations
FEWEST = 3  # before anything is judged


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What the model was worth at an epoch."""

    epoch: int
    loss: float


def upper_edge(good: Sequence[Evaluated], config: Evaluation) -> float:
    """The largest loss that is like those before; infinite while too little is known."""
    last = [each.loss for each in good[-LOOKED_AT:]]
    if len(last) < FEWEST:
        return math.inf
    usual = statistics.median(abs(after - before) for before, after in pairwise(last))
    return last[-1] + max(config.band * usual, config.band_at_least * abs(last[-1]))


def leaves_band(good: Sequence[Evaluated], newest: Evaluated, config: Evaluation) -> bool:
    """Whether an evaluation is out of line with the good ones before it."""
    return not newest.loss <= upper_edge(good, config)


def good_ones(evaluated: Iterable[Evaluated], config: Evaluation) -> list[Evaluated]:
    """Of evaluations in their order, those that were numbers and within the band when they came."""
    good: list[Evaluated] = []
    for each in evaluated:
        if math.isfinite(each.loss) and not leaves_band(good, each, config):
            good.append(each)
    return good


def members_between(rounds: Iterable[RoundRecord], after_epoch: int, up_to_epoch: int) -> list[str]:
    """By name: who gave something to these epochs."""
    names = {
        member.name
        for each in rounds
        if after_epoch < each.epoch <= up_to_epoch
        for member in each.members
        if member.weight > 0
    }
    return sorted(names)
