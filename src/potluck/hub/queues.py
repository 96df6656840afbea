"""Queues and topics: what they are, where they live in the hub, and who may use them (pure).

A *queue* hands each item to one taker; a *topic* keeps its newest item for everybody. Both are JetStream streams in an
account of their own, QUEUES. Members connect to a third account, FLEET, which holds no stream; it imports from QUEUES
only the subjects below. A NATS server never checks the reply subject of a request. Here that is harmless: a reply can
reach nothing but FLEET, where the only listeners are the members' own inboxes.

    q.RUN.put.NAME.PEER            an item of a queue, or the newest item of a topic
    q.RUN.part.NAME.PEER.ITEM.K    the parts of an item that is larger than a message
    q.RUN.done.NAME.ITEM           this item was done: it is never handed out again
    q.RUN.dead.NAME.PEER           an item that failed too often
    q.RUN.ask.PEER.VERB            request to the guard: list, create, purge, …
    q.RUN.news.NAME.PEER           the hub tells followers of a topic's new item

The guard creates streams and consumers. Items never pass through it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from potluck.errors import ConfigurationError
from potluck.hub.subjects import PEER_ID, Subjects, check_run_name
from potluck.messages import Message

QUEUES_ACCOUNT = "QUEUES"
FLEET_ACCOUNT = "FLEET"

Kind = Literal["queue", "topic"]
Right = Literal["put", "take"]
WhenFull = Literal["block", "refuse", "drop"]
Rights = dict[str, tuple[Right, ...]]

EVERY = "*"  # in rights: all queues and topics
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
ITEM_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
CONSUMER = "take"
KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
MAX_ITEM_BYTES = GIB
MAX_PENDING = 65_536  # items that are out with takers at the same time
MAX_DONE = 200_000  # done items that are remembered
DONE_SECONDS = 24 * 3600.0  # for how long, at most (and at least `id_window_seconds`)
PARTS_SECONDS = 7 * 24 * 3600.0  # parts of an item whose putter died halfway go after this
MAX_DEAD = 10_000
UNKNOWN = -1
_NANO = 10**9

SERVICES = ("q.*.put.*.*", "q.*.part.>", "q.*.done.*.*", "q.*.dead.*.*", "q.*.ask.*.*", "$JS.ACK.>")
STREAMED_SERVICES = ("$JS.API.CONSUMER.MSG.NEXT.*.*", "$JS.API.DIRECT.GET.*")
NEWS = "q.*.news.*.*"


class QueueDefinition(Message, frozen=True, kw_only=True):
    """One queue or topic, as its owner wants it."""

    name: str
    kind: Kind = "queue"
    max_items: int = 100_000
    max_bytes: int = 256 * MIB  # of items, and as much again of the parts of large ones
    max_age_seconds: float = 0.0  # 0: items stay until they are done
    when_full: WhenFull = "block"  # block the putter, refuse the item, or drop the oldest one
    tries: int = 5  # how often an item is handed out before it goes to the dead letters
    lease_seconds: float = 15.0  # a taker that is silent for so long has died, and its items go to others
    id_window_seconds: float = 600.0  # within it, an item with an id that was put before is not put again

    def __post_init__(self) -> None:
        check_queue_name(self.name)
        limits: dict[str, tuple[float, float]] = {
            "max_items": (1, 10_000_000),
            "max_bytes": (MIB, 1024 * GIB),
            "max_age_seconds": (0, 365 * 86400),
            "tries": (1, 1000),
            "lease_seconds": (1, 3600),
            "id_window_seconds": (1, 86400),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigurationError(f"{name} of the queue {self.name} is {value}: choose {least:g} to {most:g}")


class QueueDepth(Message, frozen=True, kw_only=True):
    """A queue and how full it is."""

    definition: QueueDefinition
    items: int = 0  # waiting, or out with takers
    out: int = 0  # with takers
    bytes: int = 0
    parts_bytes: int = 0
    dead: int = 0
    done: int = 0  # remembered
    newest: int = UNKNOWN  # the number of the newest item of a queue, where that is known for certain
    num_put: int = 0  # since it was made
    oldest_at: float = 0.0  # hub time at which the oldest item was put; 0: there is none
    rights: tuple[Right, ...] = ()  # of the member that asks


def check_queue_name(name: str) -> str:
    """The name itself, or ConfigurationError."""
    if not NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name[:60]!r} cannot name a queue or topic: use 1 to 40 lower-case letters, digits and inner hyphens"
        )
    return name


def check_item_id(item: str) -> str:
    """The id itself where it fits into a subject, else a hash of it; ConfigurationError when it is empty or huge."""
    if ITEM_ID.fullmatch(item):
        return item
    if not item or len(item) > 4096:
        raise ConfigurationError(f"an item's id has 1 to 4096 characters, not {len(item)}")
    return "h-" + hashlib.sha256(item.encode()).hexdigest()[:40]


def check_rights(rights: Rights) -> None:
    """Known names, each with at least one right."""
    for name, granted in rights.items():
        if name != EVERY:
            check_queue_name(name)
        if not granted or len(set(granted)) != len(granted):
            raise ConfigurationError(f"rights on {name} are {granted}: name put, take or both")


def parse_rights(texts: Iterable[str]) -> Rights:
    """Rights as people write them: NAME=put,take; a name alone means both."""
    rights: Rights = {}
    for text in texts:
        name, _, granted = text.partition("=")
        words = tuple(word.strip() for word in (granted or "put,take").split(","))
        try:
            rights = merged_rights(rights, {name: msgspec.convert(words, tuple[Right, ...])})
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"{text!r} is no right on a queue: write it as experience=put,take") from error
    check_rights(rights)
    return rights


def merged_rights(first: Rights, second: Rights) -> Rights:
    """What both allow together."""
    return {name: tuple(dict.fromkeys((*first.get(name, ()), *second.get(name, ())))) for name in {**first, **second}}


def rights_on(rights: Rights, name: str) -> tuple[Right, ...]:
    """What a member with these rights may do with one queue or topic."""
    return tuple(dict.fromkeys((*rights.get(name, ()), *rights.get(EVERY, ()))))


class QueueSubjects:
    """Builds the subjects and the stream names of one run's queues."""

    def __init__(self, run: str) -> None:
        self.run = check_run_name(run)
        self.root = f"q.{run}"

    def put(self, name: str, peer: str) -> str:
        return f"{self.root}.put.{name}.{peer}"

    def part(self, name: str, peer: str, item: str, number: int | str) -> str:
        return f"{self.root}.part.{name}.{peer}.{item}.{number}"

    def done(self, name: str, item: str) -> str:
        return f"{self.root}.done.{name}.{item}"

    def dead(self, name: str, peer: str) -> str:
        return f"{self.root}.dead.{name}.{peer}"

    def ask(self, peer: str, verb: str) -> str:
        return f"{self.root}.ask.{peer}.{verb}"

    def news(self, name: str, peer: str) -> str:
        return f"{self.root}.news.{name}.{peer}"

    def stream(self, name: str) -> str:
        """The stream of the items."""
        return f"potluck_{self.run}_q_{name}"

    def next(self, name: str) -> str:
        """Where takers ask for items."""
        return f"$JS.API.CONSUMER.MSG.NEXT.{self.stream(name)}.{CONSUMER}"

    def read(self, name: str, what: Literal["", "done", "part", "dead"] = "") -> str:
        """Where single items, parts or records are read."""
        return f"$JS.API.DIRECT.GET.{self.stream(name)}{'_' + what if what else ''}"


def queue_permissions(
    subjects: QueueSubjects, peer: str, rights: Rights, definitions: dict[str, QueueDefinition]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a member may publish and subscribe to in FLEET, by the queues there are now.

    Streams have the queue's name inside of a token, which no wildcard can match: a right on every queue is spelt out.
    """
    publish = [subjects.ask(peer, "*")]
    subscribe = [f"{Subjects.inbox(peer)}.>"]
    for name, definition in definitions.items():
        granted = rights_on(rights, name)
        if "put" in granted:
            publish += [subjects.put(name, peer), subjects.part(name, peer, "*", "*")]
        if "take" in granted:
            publish += [subjects.read(name), subjects.read(name, "part")]
        if "take" in granted and definition.kind == "topic":
            subscribe.append(subjects.news(name, "*"))
        elif "take" in granted:
            stream = subjects.stream(name)
            publish += [
                subjects.next(name),
                f"$JS.ACK.{stream}.{CONSUMER}.>",
                subjects.done(name, "*"),
                subjects.dead(name, peer),
                subjects.read(name, "done"),
                subjects.read(name, "dead"),
            ]
    return tuple(publish), tuple(subscribe)


def sender_of(subject: str) -> str:
    """The peer whose id is the last token of a subject on which the hub lets nobody else publish."""
    peer = subject.rpartition(".")[2]
    return peer if PEER_ID.fullmatch(peer) else ""


def stream_configs(
    definition: QueueDefinition, subjects: QueueSubjects, replicas: int, max_message_bytes: int
) -> list[dict[str, Any]]:
    """How the hub keeps a queue or topic, in JetStream's words."""
    name = definition.name
    items: dict[str, Any] = {
        "name": subjects.stream(name),
        "subjects": [subjects.put(name, "*")],
        "metadata": {"potluck": msgspec.json.encode(definition).decode()},
        "max_msgs": definition.max_items,
        "max_bytes": definition.max_bytes,
        "max_age": int(definition.max_age_seconds * _NANO),
        "discard": "old" if definition.when_full == "drop" else "new",
        "duplicate_window": int(definition.id_window_seconds * _NANO),
    }
    parts: dict[str, Any] = {
        "name": f"{items['name']}_part",
        "subjects": [subjects.part(name, "*", "*", "*")],
        "max_bytes": definition.max_bytes,
        "max_age": int((definition.max_age_seconds or PARTS_SECONDS) * _NANO),
        "max_msgs_per_subject": 1,
        "discard": items["discard"],
    }
    kept = {"storage": "file", "num_replicas": replicas, "allow_direct": True, "max_msg_size": max_message_bytes}
    if definition.kind == "topic":
        items |= {
            "max_msgs_per_subject": 1,
            "discard": "old",
            "republish": {"src": subjects.put(name, "*"), "dest": f"{subjects.root}.news.{name}.{{{{wildcard(1)}}}}"},
        }
        # An item's parts go with the item that replaces it, by the publisher's two slots: no age ends the newest one.
        parts["max_age"] = items["max_age"]
        return [items | kept, parts | kept]
    items["retention"] = "workqueue"
    done = {
        "name": f"{items['name']}_done",
        "subjects": [subjects.done(name, "*")],
        "max_msgs": MAX_DONE,
        "max_msgs_per_subject": 1,
        "max_age": int(max(definition.id_window_seconds, DONE_SECONDS) * _NANO),
    }
    dead = {
        "name": f"{items['name']}_dead",
        "subjects": [subjects.dead(name, "*")],
        "max_msgs": MAX_DEAD,
        "max_bytes": definition.max_bytes // 4,
        "discard": "old",
        "duplicate_window": int(definition.id_window_seconds * _NANO),
    }
    return [items | kept, parts | kept, done | kept, dead | kept]


def consumer_config(definition: QueueDefinition) -> dict[str, Any]:
    """The one consumer that all takers of a queue share."""
    return {
        "durable_name": CONSUMER,
        "ack_policy": "explicit",
        "ack_wait": int(definition.lease_seconds * _NANO),
        # Takers count tries and move what failed too often to the dead letters. The server would only stop handing it
        # out, and keep it for ever.
        "max_deliver": -1,
        "max_ack_pending": MAX_PENDING,
        "max_waiting": 4096,
    }


def account_exports() -> str:
    """QUEUES lets FLEET use these subjects; in the server's own language."""
    lines = [f'{{ service: "{subject}" }}' for subject in SERVICES]
    lines += [f'{{ service: "{subject}", response_type: stream }}' for subject in STREAMED_SERVICES]
    lines += [f'{{ stream: "{NEWS}" }}']
    return "".join(f"      {line}\n" for line in lines)


def account_imports() -> str:
    """FLEET has nothing of its own but what it imports."""
    lines = [
        f'{{ service: {{ account: {QUEUES_ACCOUNT}, subject: "{subject}" }} }}'
        for subject in (*SERVICES, *STREAMED_SERVICES)
    ]
    lines += [f'{{ stream: {{ account: {QUEUES_ACCOUNT}, subject: "{NEWS}" }} }}']
    return "".join(f"      {line}\n" for line in lines)
