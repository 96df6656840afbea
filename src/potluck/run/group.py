"""A group of a run, as this peer takes part in it.

    critic = run.group("critic")              # in a program: join the group
    critic.members                            # who is in it now
    critic.links.handle(Greeting, greeted)    # messages of this group alone

A group is a name and who belongs to it. Every run has the group `main`. Each group has its own coordinator, lineage,
rounds, progress and states; a peer may be in several, and have rounds under way in several at once. What runs a round
or keeps a state takes a Group in place of a peer, and so knows nothing of the other groups.
"""

from __future__ import annotations

from typing import Protocol

from potluck.hub.presence import Presence
from potluck.hub.subjects import MAIN, check_group_name
from potluck.link.grouplinks import GroupLinks
from potluck.link.links import Links
from potluck.peer.groupsession import GroupSession
from potluck.peer.session import Session

ENTER_SECONDS = 20.0


class LinkedPeer(Protocol):
    """What a group needs of a peer; `potluck.run.peer.Peer` is one."""

    @property
    def session(self) -> Session:
        """Its session with the hub, open."""
        ...

    @property
    def links(self) -> Links:
        """Its links."""
        ...


class Group:
    """This peer's place in one group. Lives on the event loop; there is one for each group and peer."""

    def __init__(self, peer: LinkedPeer, name: str = MAIN) -> None:
        """`enter` makes the peer a member, for the others too; until then it only looks."""
        self.name = check_group_name(name)
        self.session = GroupSession(peer.session, name)
        self.links = GroupLinks(peer.links, "" if name == MAIN else name)

    @property
    def members(self) -> list[Presence]:
        """Who is in the group now, by id."""
        return sorted(self.session.roster, key=lambda presence: presence.peer)

    async def enter(self, timeout_seconds: float = ENTER_SECONDS) -> None:
        """Join the group. AccessError when this peer may not."""
        await self.session.enter(timeout_seconds)

    async def leave(self, timeout_seconds: float = ENTER_SECONDS) -> None:
        """Leave the group, once nothing of this peer runs in it any more."""
        self.close()
        await self.session.leave(timeout_seconds)

    def close(self) -> None:
        """Handle nothing more, and follow no more. Idempotent."""
        self.links.close()
        self.session.close()


def group_of(peer: LinkedPeer | Group) -> Group:
    """The group itself; a peer stands for its place in `main`."""
    return peer if isinstance(peer, Group) else Group(peer)
