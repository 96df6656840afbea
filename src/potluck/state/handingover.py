"""Leaving without taking the run's newest state along.

Aux peers take a state over now and then, so the last trainer to leave may be the only one that has the newest. It says
that it is leaving, and those who keep states fetch what only the leaving have (following.py). It waits for that.
"""

from __future__ import annotations

import logging

from potluck.peer.session import Session
from potluck.state.directory import StateDirectory
from potluck.state.shelf import Shelf

logger = logging.getLogger(__name__)

HEARD_SECONDS = 0.5  # until it is known who else is leaving


async def hand_over(session: Session, directory: StateDirectory, shelf: Shelf, timeout_seconds: float) -> bool:
    """Wait until somebody who stays has the newest state that this peer holds, or trains on; False: not in time."""
    newest = shelf.newest()
    if newest is None or not session.hub.is_connected or not _stays(session, directory, "aux"):
        return True  # there is nothing, or nobody, to hand over
    directory.part()
    began = session.clock.monotonic()
    while True:
        await directory.until_changed(HEARD_SECONDS)
        waited = session.clock.monotonic() - began
        if waited < HEARD_SECONDS:
            continue
        # Another's state of the same epoch is as good: machines that compute differently hold other bits.
        claims = directory.claims(newest.epoch)
        keepers = [c.peer for c in claims if c.state is not None and c.state.is_served and c.peer != session.peer_id]
        if any(not directory.announcements.is_leaving(peer) for peer in keepers) or _stays(
            session, directory, "trainer"
        ):
            return True
        if waited >= timeout_seconds:
            logger.warning(
                "nobody has taken over the state of epoch %d within %g s: if nobody else comes with it, the run goes "
                "on from an earlier one",
                newest.epoch,
                timeout_seconds,
            )
            return False


def _stays(session: Session, directory: StateDirectory, role: str) -> bool:
    """Whether somebody else in this role is there, and has not said that it leaves."""
    return any(
        presence.card.role == role and not directory.announcements.is_leaving(presence.peer)
        for presence in session.roster.alive()
        if presence.peer != session.peer_id
    )
