"""Leaving without taking the run's newest state along.

Aux peers take a state over now and then, and a newcomer may still be loading, so the last trainer to leave may be the
only one that has the newest. It says that it is leaving, and those who keep states fetch what only the leaving have
(following.py). It waits for that: longer while somebody is being given the state, and not at all where all others are
leaving too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from potluck.hub.presence import Presence
from potluck.peer.groupsession import GroupSession
from potluck.state.directory import StateDirectory
from potluck.state.shelf import Shelf

logger = logging.getLogger(__name__)

HEARD_SECONDS = 0.5  # until it is known who else is leaving


async def hand_over(
    session: GroupSession,
    directory: StateDirectory,
    shelf: Shelf,
    num_given: Callable[[], int],
    *,
    timeout_seconds: float,
    most_seconds: float,
) -> bool:
    """Wait until somebody who stays has the newest state that this peer holds, or trains on; False: not in time.

    `num_given` counts the chunks that were given to others. It waits `most_seconds` at most, and no longer than
    `timeout_seconds` while nobody fetches the state.
    """
    newest = shelf.newest()
    if newest is None or not newest.epoch or not session.hub.is_connected or not _staying(session, directory):
        return True  # there is nothing, or nobody, to hand over
    directory.part()
    began = moved_at = session.clock.monotonic()
    given = num_given()
    while True:
        await directory.until_changed(HEARD_SECONDS)
        now = session.clock.monotonic()
        if now - began < HEARD_SECONDS:
            continue
        staying = _staying(session, directory)
        if any(_has(directory, presence, newest.epoch) for presence in staying):
            return True
        if num_given() != given:
            given, moved_at = num_given(), now
        is_late = now - moved_at >= timeout_seconds or now - began >= most_seconds
        if is_late or not staying:  # all leave: nobody will come for it
            logger.warning(
                "nobody has taken over the state of epoch %d within %.1f s: if nobody else comes with it, the run goes "
                "on from an earlier one",
                newest.epoch,
                now - began,
            )
            return False


def _staying(session: GroupSession, directory: StateDirectory) -> list[Presence]:
    """Others that could have the state, and have not said that they leave. One under suspicion may only be busy."""
    return [
        presence
        for presence in session.roster
        if presence.card.role in ("aux", "trainer")
        and presence.peer != session.peer_id
        and not directory.announcements.is_leaving(presence.peer)
    ]


def _has(directory: StateDirectory, presence: Presence, epoch: int) -> bool:
    """Whether a peer has a state of this epoch or a later one: other bits are as good, if another machine made them.

    A trainer has it where the commit says that it holds the averages. One that has just come counts on us.
    """
    is_holder = presence.card.role == "trainer" and presence.peer in directory.holders(epoch)
    return is_holder or directory.announcements.newest_of(presence.peer) >= epoch
