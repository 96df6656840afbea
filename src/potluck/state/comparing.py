"""What this peer had at each of the last epochs, against what the others had.

A state that deviates is found an epoch or two late: hashes take a while, and so does hearing of those of others. So a
few digests are remembered and told, and the newest epoch that all have spoken of decides. They are the newest, and then
ever fewer of older ones, so that peers whose epochs pass faster than words have some in common all the same.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec

from potluck.state.announcement import KeptState, Verdict

logger = logging.getLogger(__name__)

STRIDES = (1, 8, 64)  # of those that can be divided by so much …
NUM_OF_STRIDE = 3  # … so many are remembered


class Comparison:
    """This peer's own digests, and whether they are those of the others."""

    def __init__(self, verdict: Callable[[int], Verdict | None]) -> None:
        """`verdict` tells what the state of an epoch is, as far as can be told."""
        self.counts: Counter[str] = Counter()
        self.deviation: Verdict | None = None
        """What the others hold, where it is not what this peer has for the same epoch. Any thread may read it."""
        self._verdict = verdict
        self._own: dict[int, KeptState] = {}

    def note(self, state: KeptState) -> None:
        """This peer's state of an epoch."""
        self._own.pop(state.epoch, None)
        self._own[state.epoch] = msgspec.structs.replace(state, is_served=False, is_backup=False)
        kept = remembered(self._own)
        for epoch in self._own.keys() - kept:
            del self._own[epoch]

    def start_anew(self) -> None:
        """Another state was taken over: what this peer had before says nothing about it."""
        self._own.clear()
        self.deviation = None

    def past(self) -> Iterator[KeptState]:
        """To be told to others, the oldest first."""
        return (self._own[epoch] for epoch in sorted(self._own))

    def compare(self) -> None:
        """Somebody has spoken, or this peer has a new state: see whether they agree."""
        for epoch in sorted(self._own, reverse=True):
            verdict = self._verdict(epoch)
            if verdict is not None and verdict.is_settled:
                self._judged(verdict)
                return

    def _judged(self, verdict: Verdict) -> None:
        if verdict.common == self._own[verdict.epoch].compared:
            self.deviation = None
            return
        if self.deviation is None or self.deviation.epoch != verdict.epoch:
            self.counts["deviations"] += 1
            logger.info(
                "this peer's state of epoch %d is not that of %s: the chunks that differ have to be fetched",
                verdict.epoch,
                ", ".join(verdict.keepers) or "the others",
            )
        self.deviation = verdict


def remembered(epochs: Iterable[int]) -> set[int]:
    """Which epochs are worth remembering (pure)."""
    ordered = sorted(epochs)
    return {e for stride in STRIDES for e in [epoch for epoch in ordered if epoch % stride == 0][-NUM_OF_STRIDE:]}
