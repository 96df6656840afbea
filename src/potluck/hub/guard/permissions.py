"""What a connection may publish and subscribe to (pure).

Everything that is not listed here is forbidden. A member publishes only on subjects that hold its own id, so every peer
that receives a message can read its sender off the subject. No connection may use the JetStream API, not even to read:
it answers wherever a request says, also on subjects and in stores that are closed to the asker. Members read through
the guard, which sees to it that the answer goes to their own inbox.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from potluck.hub.access.member import Scopes
from potluck.hub.guard.connections import Lane
from potluck.hub.queues import QueueDefinition, QueueSubjects, queue_permissions
from potluck.hub.stores import readable_stores, writable_stores
from potluck.hub.subjects import ANY_GROUP, MAIN, Subjects


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """Subjects with wildcards, as the hub enforces them."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]

    def as_claims(self) -> dict[str, Any]:
        """As they stand in a user's token."""
        return {"pub": {"allow": list(self.publish)}, "sub": {"allow": list(self.subscribe)}}


def lobby_permissions(subjects: Subjects, peer: str) -> Permissions:
    """A stranger may apply for access and hear the answer."""
    return Permissions(publish=(subjects.lobby(peer),), subscribe=(f"{Subjects.inbox(peer)}.>",))


def bulk_permissions(subjects: Subjects, peer: str) -> Permissions:
    """A member's second connection, which carries link packets and nothing else."""
    return Permissions(publish=(subjects.relay("*", peer),), subscribe=(subjects.relay(peer, "*"),))


def main_permissions(subjects: Subjects, peer: str, scopes: Scopes) -> Permissions:
    """A member's main connection."""
    readable = [store.name for store in readable_stores()]
    groups = [subjects.of_group(group) for group in scopes.groups or (ANY_GROUP,) if group != MAIN]
    publish = [
        subjects.card(peer),
        subjects.beacon(peer),
        subjects.leave(peer),
        subjects.ask(peer, "*"),
        *(subjects.read(peer, store) for store in readable),
        subjects.news(peer, ">"),
        *(group.beacon(peer) for group in groups),
        *(group.news(peer, ">") for group in groups),
    ]
    if scopes.organiser:
        publish.append(subjects.organise(peer, "*"))
    if scopes.coordinates:
        publish += [subjects.plan(peer), *(group.plan(peer) for group in groups)]
    publish += [subjects.write(peer, store.name, ">") for store in writable_stores(scopes.coordinates)]
    subscribe = [
        f"{Subjects.inbox(peer)}.>",
        subjects.beacon("*"),
        subjects.plan("*"),
        subjects.news("*", ">"),
        *(subject for group in groups for subject in (group.beacon("*"), group.plan("*"), group.news("*", ">"))),
        *(subjects.store_change(store, ">") for store in readable),
    ]
    return Permissions(publish=tuple(publish), subscribe=tuple(subscribe))


def queue_lane_permissions(
    subjects: Subjects, peer: str, scopes: Scopes, queues: Iterable[QueueDefinition]
) -> Permissions:
    """A member's connection in the account of the fleet, by the queues that there are now."""
    by_name = {queue.name: queue for queue in queues}
    publish, subscribe = queue_permissions(QueueSubjects(subjects.run), peer, scopes.queue_rights, by_name)
    return Permissions(publish=publish, subscribe=subscribe)


def permissions_for(
    lane: Lane, subjects: Subjects, peer: str, scopes: Scopes, queues: Iterable[QueueDefinition] = ()
) -> Permissions:
    """What a member may do on a lane."""
    match lane:
        case "queue":
            return queue_lane_permissions(subjects, peer, scopes, queues)
        case "lobby":
            return lobby_permissions(subjects, peer)
        case "bulk":
            return bulk_permissions(subjects, peer)
        case "main":
            return main_permissions(subjects, peer, scopes)
