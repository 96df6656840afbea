"""What this peer had at each of the last epochs, against what the others had.

Equal digests are the end of it. Where they differ, the reason may be arithmetic: a machine of another kind computes
other last bits in every epoch, and that is no deviation. So values are compared (appraising.py), and a difference
counts where it is more than rounding explains; where it is in a few places only, as a flipped bit is and rounding is
not; or where learning rates or counters differ, and several peers hold the same. If a peer that was repaired for a
difference in a few places has one again, without having been equal in between, it is arithmetic all the same: from then
on only the size of a difference counts.

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
from potluck.state.sketch import Difference

logger = logging.getLogger(__name__)

STRIDES = (1, 8, 64)  # of those that can be divided by so much …
NUM_OF_STRIDE = 3  # … so many are remembered


class Comparison:
    """This peer's own digests, and whether they are those of the others."""

    def __init__(
        self,
        verdict: Callable[[int], Verdict | None],
        difference: Callable[[Verdict], Difference | None] = lambda _verdict: None,
        suspect: Callable[[KeptState], bool] = lambda _state: False,
    ) -> None:
        """`verdict` tells what the state of an epoch is, as far as can be told.

        `difference` tells how this peer's state differs from that by value, where that is known; `suspect` finds it out
        later, if others announce another state than this, and tells whether they do.
        """
        self.counts: Counter[str] = Counter()
        self.deviation: Verdict | None = None
        """What the others hold, where it is not what this peer has for the same epoch. Any thread may read it."""
        self._verdict = verdict
        self._difference = difference
        self._suspect = suspect
        self._own: dict[int, KeptState] = {}
        self._taken: set[int] = set()  # of these, what others have computed
        self._judged_epoch = 0
        self._is_unlike = False  # this peer computes other bits than those who vouch
        self._is_by_bits = False  # the deviation is one of bits, not of values
        self._is_on_probation = False  # it was repaired, and has not been equal since

    def note(self, state: KeptState, *, is_taken: bool = False) -> None:
        """This peer's state of an epoch, be it computed here or taken over."""
        self._own.pop(state.epoch, None)
        (self._taken.add if is_taken else self._taken.discard)(state.epoch)
        self._own[state.epoch] = msgspec.structs.replace(state, is_served=False, is_backup=False)
        kept = remembered(self._own)
        for epoch in self._own.keys() - kept:
            del self._own[epoch]
        self._taken &= kept

    def start_anew(self) -> None:
        """Another state was taken over: what this peer had before says nothing about it."""
        self._is_on_probation |= self.deviation is not None and self._is_by_bits
        self._own.clear()
        self._judged_epoch = 0
        self.deviation = None

    def past(self) -> Iterator[KeptState]:
        """To be told to others, the oldest first."""
        return (self._own[epoch] for epoch in sorted(self._own))

    def compare(self) -> None:
        """Somebody has spoken, or this peer has a new state: see whether they agree."""
        is_suspected = False
        for epoch in sorted(self._own, reverse=True):
            if epoch < self._judged_epoch:
                return  # what is newer has been judged
            verdict = self._verdict(epoch)
            if verdict is not None and verdict.is_settled:
                self._judged(verdict, self._own[epoch])
                return
            is_suspected = is_suspected or self._suspect(self._own[epoch])

    def checked(self, state: KeptState) -> None:
        """This state of this peer was compared by value, whatever it may have now."""
        verdict = self._verdict(state.epoch)
        if verdict is not None and verdict.is_settled:
            self._judged(verdict, state)

    def _judged(self, verdict: Verdict, own: KeptState) -> None:
        self._judged_epoch = max(self._judged_epoch, verdict.epoch)
        if verdict.common == own.compared:
            self.deviation = None
            self._is_on_probation &= verdict.epoch in self._taken
            return
        apart = self._difference(verdict)
        if apart is None:
            self._suspect(own)
        elif not apart.is_rounding:
            if self.deviation is None:
                logger.warning(
                    "this peer's state of epoch %d is %.3g times further from that of %s than rounding explains: it is "
                    "damaged, and is repaired. If this comes again, test this machine's memory",
                    verdict.epoch,
                    apart.excess,
                    ", ".join(verdict.vouchers),
                )
            self._deviates(verdict, by_bits=False)
        elif apart.is_confined and self._is_on_probation:
            self._differs_again()
        elif apart.is_confined and not self._is_unlike:
            self._deviates(verdict, by_bits=True)
        elif apart.has_other_numbers and len(verdict.vouchers) > 1:
            self._deviates(verdict, by_bits=False)
        else:
            self.deviation = None
            self.counts["rounding"] += 1

    def _differs_again(self) -> None:
        self._is_unlike, self._is_on_probation = True, False
        self.deviation = None
        logger.info("this peer computes other last bits than the others: only its values are compared from now on")

    def _deviates(self, verdict: Verdict, *, by_bits: bool) -> None:
        self._is_by_bits = by_bits
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
