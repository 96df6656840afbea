"""What members ask the guard about queues and topics, and its answers. Items never go this way (hub/queues.py)."""

from __future__ import annotations

from potluck.hub.queues import QueueDefinition, QueueDepth
from potluck.messages import Message


class ListQueues(Message, frozen=True, kw_only=True, tag=True):
    """Which queues and topics may I use, and how full are they? Answered by QueueList."""


class QueueList(Message, frozen=True, kw_only=True, tag=True):
    """Those that the sender has a right on; for an organiser all."""

    items: tuple[QueueDepth, ...]


class CreateQueue(Message, frozen=True, kw_only=True, tag=True):
    """Make a queue or topic, or change the limits of one."""

    definition: QueueDefinition


class DeleteQueue(Message, frozen=True, kw_only=True, tag=True):
    """Remove a queue or topic and all that is in it."""

    name: str


class PurgeQueue(Message, frozen=True, kw_only=True, tag=True):
    """Remove what is in a queue, or its dead letters. Takers may do the latter too: they could take and throw away."""

    name: str
    dead: bool = False
    up_to: int = 0  # only those up to this number; 0: all


class ForgetParts(Message, frozen=True, kw_only=True, tag=True):
    """The parts of a large item are needed no more."""

    name: str
    putter: str
    item: str
    others: bool = False  # those of all other items of this putter, and not this one's


class Purged(Message, frozen=True, kw_only=True, tag=True):
    """How many items were removed."""

    items: int
