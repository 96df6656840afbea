"""How a run goes on when nobody trains it any more: from the newest state of anyone (pure).

The lineage in the hub says which epoch the run is at; peers that start offer what they have, from memory or from disk.
If somebody has the state of that very epoch, everybody fetches it. If not, the coordinator waits a while for others to
come, takes the newest state that is offered and can be believed, and announces it as the state of the present epoch.
So the lineage is never broken or turned back, epochs are never used twice, and all go on from the same bits:

    offered < lineage   the updates in between are lost, and that is said
    offered = lineage   nothing is lost
    offered > lineage   the hub has lost its memory: the lineage goes on where it is, with the newer state
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from potluck.state.announcement import Verdict

BEGIN_SECONDS = 1.0  # for others to say that they have a state of epoch 0; they are asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a peer that wants to go on knows."""

    head_epoch: int
    """How many epochs the hub has as committed."""

    present: Verdict | None
    """The state of that epoch, if somebody who can be believed has it."""

    offers: Sequence[Verdict]
    """States of other epochs, and backups."""

    live: Verdict | None = None
    """The newest state that somebody has in memory, where epochs were committed while this peer looked."""

    is_alone: bool = False
    """Whether no other trainer is there."""

    is_coordinator: bool
    waited_seconds: float
    """Since this peer came, or the head last moved."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now."""

    kind: Literal["fetch", "join", "adopt", "begin", "wait"]
    """Take the state of the present epoch, or a little behind it where others train on; make another one the state of
    the present epoch; begin with nothing; or look again soon."""

    verdict: Verdict | None = None
    reason: str = ""


def next_step(situation: Situation, grace_seconds: float) -> Step:
    """How this peer should go on."""
    head = situation.head_epoch
    if situation.present is not None:
        return Step("fetch", situation.present)
    if situation.live is not None:  # others are training, and faster than they can tell us of it
        return Step("join", situation.live)
    is_late = situation.waited_seconds >= grace_seconds
    # That the hub has forgotten epochs is believed of nobody but those who could have committed them.
    offers = [offer for offer in situation.offers if offer.is_trusted or offer.made_at <= head]
    if not offers:
        # Who comes to a run that has begun takes its state; if nobody speaks of one, this peer's is as good as any.
        if head == 0 and (situation.is_alone or situation.waited_seconds >= min(BEGIN_SECONDS, grace_seconds)):
            return Step("begin", reason="nothing is committed, and nobody has a state")
        return Step("wait", reason=f"nobody offers a state, and the run is at epoch {head}")
    if not situation.is_coordinator:
        return Step("wait", reason=f"the coordinator has yet to choose the state to go on from at epoch {head}")
    best = max(offers, key=lambda offer: offer.made_at)
    if best.made_at != head and not is_late:
        return Step("wait", reason=f"others may have a state nearer to epoch {head} than that of {best.made_at}")
    return Step("adopt", best, _describe(best, head))


def _describe(best: Verdict, head: int) -> str:
    if best.made_at < head:
        lost = f"epoch {head}" if best.made_at == head - 1 else f"epochs {best.made_at + 1} to {head}"
        return (
            f"the run is at epoch {head}, and the newest state of anyone is that of epoch {best.made_at}: "
            f"the updates of {lost} are lost, and the run goes on at epoch {head} from that state"
        )
    if best.made_at > head:
        return (
            f"the hub knows of {head} epochs only, and there is a state of epoch {best.made_at}: the hub has lost its "
            f"memory, and the run goes on at epoch {head} from that state"
        )
    return f"the run goes on at epoch {head} from a backup of it: nothing is lost"
