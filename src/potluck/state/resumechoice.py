"""How a run goes on when nobody trains it any more: from the newest state of anyone (pure).

The lineage in the hub says which epoch the run is at; peers that start offer what they have, from memory or from disk.
If somebody has the state of that very epoch, everybody fetches it. If not, the coordinator waits a while for others to
come, takes the newest state that is offered and can be believed, and announces it as the state of the present epoch.
So the lineage is never broken or turned back, epochs are never used twice, and all go on from the same bits:

    offered < lineage   the updates in between are lost, and that is said
    offered = lineage   nothing is lost
    offered > lineage   the hub has lost its memory: the lineage goes on where it is, with the newer state

A run with several groups goes back to one cut (run/cuts.py), though some groups have newer states: so all go on from
what belongs together.

A run that has nothing yet is begun by one trainer, with its own state, and the others take that. The coordinator says
who it is, since those who start at the same moment would each take themselves for the first. It does the same where
epochs are committed and their states are lost: all trainers died before a first backup, and nobody comes with one.

Nothing is taken over while trainers that have the averages of the present epoch are still there: they are about to make
its state. That takes seconds for a large model, and hundreds of steps with DiLoCo in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from potluck.state.announcement import Verdict

BEGIN_SECONDS = 1.0  # for others to say that they have a state of epoch 0; they are asked
BEGINNER_SECONDS = 30.0  # for the peer that was chosen to begin, to have a state for the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a peer that wants to go on knows."""

    head_epoch: int
    """How many epochs the hub has as committed."""

    present: Verdict | None
    """The state of that epoch, if somebody who can be believed has it."""

    offers: Sequence[Verdict]
    """States of other epochs, and backups."""

    cut: int = 0
    """The newest cut that is on trusted disks and has a part of this group; 0: there is none."""

    cut_offer: Verdict | None = None
    """That part, if somebody offers it."""

    live: Verdict | None = None
    """The newest state that somebody has in memory, where epochs were committed while this peer looked."""

    is_alone: bool = False
    """Whether no other trainer is there."""

    begins: bool | None = None
    """Whether the coordinator has chosen this peer to begin a run that has nothing, or nothing any more; None: it has
    chosen nobody."""

    is_coordinator: bool
    waited_seconds: float
    """Since this peer came, or the head last moved."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now."""

    kind: Literal["fetch", "join", "adopt", "begin", "begin anew", "wait"]
    """Take the state of the present epoch, or a little behind it where others train on; make another one the state of
    the present epoch; begin with nothing, or with nothing but the number of the epoch; or look again soon."""

    verdict: Verdict | None = None
    reason: str = ""
    cut: int = 0
    """That the state is part of, if the group goes back to one."""


def next_step(situation: Situation, grace_seconds: float) -> Step:
    """How this peer should go on."""
    head = situation.head_epoch
    if situation.present is not None:
        return Step("fetch", situation.present)
    if situation.live is not None:  # others are training, and faster than they can tell us of it
        return Step("join", situation.live)
    is_late = situation.waited_seconds >= grace_seconds
    if situation.cut and (situation.cut_offer is not None or not is_late):
        return _next_by_cut(situation, is_late=is_late)
    # That the hub has forgotten epochs is believed of nobody but those who could have committed them.
    offers = [offer for offer in situation.offers if offer.is_trusted or offer.made_at <= head]
    if not offers:
        return _next_without_offers(situation, grace_seconds)
    if not situation.is_coordinator:
        return Step("wait", reason=f"the coordinator has yet to choose the state to go on from at epoch {head}")
    best = max(offers, key=lambda offer: offer.made_at)
    if best.made_at != head and not is_late:
        return Step("wait", reason=f"others may have a state nearer to epoch {head} than that of {best.made_at}")
    return Step("adopt", best, _describe(best, head))


def _next_by_cut(situation: Situation, *, is_late: bool) -> Step:
    offer, head = situation.cut_offer, situation.head_epoch
    if not situation.is_coordinator:
        return Step("wait", reason=f"the coordinator has yet to go back to cut {situation.cut} at epoch {head}")
    # Where somebody has a state in memory, the newest may only be late: it is waited for as without cuts.
    is_anybody_up = any(not other.is_backup for other in situation.offers)
    if offer is None or (is_anybody_up and not is_late):
        return Step("wait", reason=f"others may have the state of cut {situation.cut}, or of epoch {head}")
    return Step("adopt", offer, _describe_cut(situation.cut, offer, head), situation.cut)


def _next_without_offers(situation: Situation, grace_seconds: float) -> Step:
    head, waited_seconds = situation.head_epoch, situation.waited_seconds
    if head and not situation.begins:
        return Step("wait", reason=f"nobody offers a state, and the run is at epoch {head}")
    if head:
        return Step("begin anew", reason=_describe_loss(head))
    if situation.begins is False:
        return Step("wait", reason="another trainer was chosen to begin the run, and has no state to give yet")
    # Without a coordinator nothing would be committed; when one comes, those who differ agree on one state.
    patience_seconds = BEGIN_SECONDS if situation.begins else grace_seconds
    if (situation.begins and situation.is_alone) or waited_seconds >= min(patience_seconds, grace_seconds):
        return Step("begin", reason="nothing is committed, and nobody has a state")
    return Step("wait", reason="nobody offers a state, and the coordinator has yet to choose who begins the run")


class Beginner:
    """The coordinator's choice of who begins."""

    def __init__(self) -> None:
        self.peer = ""
        self._since = 0.0

    def asked_by(self, peer: str, now: float, is_present: Callable[[str], bool]) -> bool:
        """A trainer asks for a state: it begins if it is the first, or the first has not done so; whether it is new."""
        if self.peer and is_present(self.peer) and (peer == self.peer or now < self._since + BEGINNER_SECONDS):
            return False
        self.peer, self._since = peer, now
        return True


def _describe_loss(head: int) -> str:
    lost = "epoch 1" if head == 1 else f"epochs 1 to {head}"
    return (
        f"the run is at epoch {head}, and nobody has a state of it, in memory or on disk: the updates of {lost} are "
        "lost, and this peer begins anew with the model as it is here. If somebody does have a backup, stop all "
        "peers and start that one first"
    )


def _describe_cut(cut: int, offer: Verdict, head: int) -> str:
    lost = "" if offer.epoch == head else f", and the updates since epoch {offer.epoch} are lost"
    return f"this group goes back to cut {cut}, as all groups of the run do: it goes on at epoch {head}{lost}"


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
