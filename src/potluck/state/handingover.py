"""Leaving without taking the run's newest state along.

Aux peers take a state over now and then, so the last trainer to leave may be the only one that has the newest. It says
that it is leaving, and those who keep states fetch what only the leaving have (following.py). It waits for that.
"""

from __future__ import annotations

import logging

from potluck.peer.session import Session
from potluck.state.herald import Herald
from potluck.state.shelf import Shelf

logger = logging.getLogger(__name__)

HEARD_SECONDS = 0.5  # until it is known who else is leaving


async def hand_over(session: Session, herald: Herald, shelf: Shelf, timeout_seconds: float) -> bool:
    """Wait until somebody who stays has the newest state that this peer holds, or trains on; False: not in time."""
    newest = shelf.newest()
    if newest is None or not session.hub.is_connected or not _stays(session, herald, "aux"):
        return True  # there is nothing, or nobody, to hand over
    herald.part()
    began = session.clock.monotonic()
    while True:
        await herald.until_changed(HEARD_SECONDS)
        waited = session.clock.monotonic() - began
        if waited < HEARD_SECONDS:
            continue
        # Another's state of the same epoch is as good: machines that compute differently hold other bits.
        claims = herald.claims(newest.epoch)
        keepers = [c.peer for c in claims if c.state is not None and c.state.is_served and c.peer != session.peer_id]
        if any(not herald.announcements.is_leaving(peer) for peer in keepers) or _stays(session, herald, "trainer"):
            return True
        if waited >= timeout_seconds:
            logger.warning(
                "nobody has taken over the state of epoch %d within %g s: if nobody else comes with it, the run goes "
                "on from an earlier one",
                newest.epoch,
                timeout_seconds,
            )
            return False


def _stays(session: Session, herald: Herald, role: str) -> bool:
    """Whether somebody else in this role is there, and has not said that it leaves."""
    return any(
        presence.card.role == role and not herald.announcements.is_leaving(presence.peer)
        for presence in session.roster.alive()
        if presence.peer != session.peer_id
    )
