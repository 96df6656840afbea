"""The records that say who may take part: members, bans, requests for access, and the run's policy.

They stand in the hub's stores (registry.py), so that any guard of a cluster can decide, and a restarted one goes on.
Seats are counted by *person*: `hf:NAME` after a Hugging Face token, the person an invite was made out to,
or `key:PEER` when all that is known of somebody is a key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import msgspec

from potluck.errors import ConfigurationError
from potluck.hub.presence import Role
from potluck.hub.queues import EVERY, Rights, check_rights
from potluck.hub.subjects import MAIN, PEER_ID, check_group_name
from potluck.messages import Message

Service = Literal["local", "cloud", "colab", "kaggle"]
GroupRule = Literal["all", "invited"]  # any member may be in the group, or those whose invite names it
ROLES: tuple[Role, ...] = get_args(Role)
SERVICES: tuple[Service, ...] = get_args(Service)

DEFAULT_SEATS: dict[Service, int] = {"local": 8, "cloud": 32, "colab": 2, "kaggle": 2}
MAX_NAME_CHARACTERS = 64
MAX_NOTE_CHARACTERS = 500
MAX_DECLARED = 1024  # groups of a run


class Scopes(Message, frozen=True, kw_only=True):
    """What a member may do, beyond sending gradients."""

    roles: tuple[Role, ...] = ("trainer",)
    coordinates: bool = False  # may hold the coordinator's lease
    trusted: bool = False  # may reduce where a run lets only trusted peers do so
    organiser: bool = False  # may invite, approve and ban
    seats: dict[Service, int] = {}  # live peers per service, where it differs from the run's policy
    queues: Rights = {}  # what it may do with which queues and topics
    groups: tuple[str, ...] = ()  # that it may be in; none named: all

    def __post_init__(self) -> None:
        check_roles(self.roles)
        check_rights(self.queues)
        check_seats(self.seats)
        for group in self.groups:
            check_group_name(group)

    def allows_group(self, group: str) -> bool:
        """Whether it may be in a group."""
        return not self.groups or group in self.groups

    @property
    def queue_rights(self) -> Rights:
        """What it may do with queues: an organiser everything."""
        return {EVERY: ("put", "take")} if self.organiser else self.queues


class Member(Message, frozen=True, kw_only=True):
    """Somebody who is let in whenever it connects: an entry of the `members` store, under the peer's id."""

    peer: str
    person: str
    scopes: Scopes
    role: Role = "trainer"  # as it last applied
    service: Service = "local"
    name: str = ""
    admitted_at: float = 0.0  # hub time
    admitted_by: str = ""  # invite:ID, huggingface, the organiser's peer id, or host
    temporary: bool = False  # it only looks, by a key that is gone with its process: the record is removed after it
    pardoned_at: float = 0.0  # hub time: what audits had found of it by then is forgiven
    pardoned_by: str = ""  # the organiser's peer id


class Ban(Message, frozen=True, kw_only=True):
    """Who is kept out: an entry of the `bans` store, under `ban_key(target)`."""

    target: str  # a peer id or a person
    reason: str = ""
    banned_at: float = 0.0  # hub time
    banned_by: str = ""  # the organiser's peer id, or guard
    until: float = 0.0  # hub time, when the entry ends by itself; 0: not before an organiser lifts it


class AccessRequest(Message, frozen=True, kw_only=True):
    """Somebody who asked to be let in: an entry of the `requests` store, under the peer's id."""

    peer: str
    person: str
    role: Role
    service: Service = "local"
    name: str = ""
    message: str = ""  # to the organisers
    host: str = ""
    version: str = ""
    asked_at: float = 0.0
    denied: bool = False  # kept for a while, so that a denied peer is told so when it asks again
    reason: str = ""  # why it was denied


class Policy(Message, frozen=True, kw_only=True):
    """Who may join a run, and on what terms. Organisers may change it while the run goes on."""

    token_holders: Literal["refused", "listed", "anyone"] = "refused"  # who gets in with a Hugging Face token
    users: tuple[str, ...] = ()  # listed user names
    organisations: tuple[str, ...] = ()  # listed organisations, whose members get in
    token_scopes: Scopes = msgspec.field(default_factory=Scopes)
    waiting_list: bool = True  # whether those without invite or sufficient token may ask and wait
    max_waiting: int = 200
    seats: dict[Service, int] = msgspec.field(default_factory=lambda: dict(DEFAULT_SEATS))  # live peers per person
    minimum_version: str = ""  # of the potluck package, as 0.1.0; empty: any
    groups: dict[str, GroupRule] = {}  # beside main; empty: programs may make groups of any name

    def __post_init__(self) -> None:
        check_seats(self.seats)
        check_declared(self.groups)
        if not 0 <= self.max_waiting <= 10_000:
            raise ConfigurationError(f"max_waiting is {self.max_waiting}: it must be from 0 to 10000")
        parse_version(self.minimum_version)

    def check_groups(self, names: Iterable[str]) -> None:
        """ConfigurationError if the run declares its groups, and one of these is not among them."""
        for name in names:
            if self.groups and name != MAIN and name not in self.groups:
                raise ConfigurationError(self._unknown(name))

    def refusal_of_group(self, group: str, scopes: Scopes) -> str:
        """Why a member with these scopes may not be in a group; empty: it may."""
        if self.groups and group != MAIN and group not in self.groups:
            return self._unknown(group)
        is_named = group in scopes.groups or (scopes.coordinates and scopes.trusted)  # as the host's own peer
        if scopes.allows_group(group) and (is_named or self.groups.get(group, "all") == "all"):
            return ""
        return (
            f"its invite does not name the group {group!r}. Ask an organiser for a link that does (potluck members "
            f"invite --group {group})"
        )

    def _unknown(self, group: str) -> str:
        known = ", ".join(sorted({MAIN, *self.groups}))
        return f"the run has no group {group!r}: it has {known}. Another one is added under [groups] in run.toml"


def seats_for(scopes: Scopes, policy: Policy, service: Service) -> int | None:
    """How many live peers of this service one person may have; None when nobody set a limit."""
    limit = scopes.seats.get(service)
    return policy.seats.get(service) if limit is None else limit


def known_service(name: str) -> Service:
    """The service of that name. One we do not know counts as `local`, so that made-up names win no seats."""
    for service in SERVICES:
        if service == name:
            return service
    return "local"


def person_of_key(peer: str) -> str:
    """The person of a peer of which only the key is known."""
    return f"key:{peer}"


def ban_key(target: str) -> str:
    """Where the ban of a peer or person stands. Hashed: a person's name may hold what a key may not."""
    return hashlib.sha256(target.encode()).hexdigest()[:40]


def check_target(target: str) -> str:
    """A peer id or a person that can be banned, or ConfigurationError."""
    if PEER_ID.fullmatch(target) or (":" in target and 3 <= len(target) <= 200):
        return target
    raise ConfigurationError(f"{target!r} is neither a peer id (U…) nor a person, as in hf:alice")


def check_roles(roles: tuple[Role, ...]) -> None:
    """At least one role, each once."""
    if not roles or len(set(roles)) != len(roles):
        raise ConfigurationError(f"roles are {roles}: name at least one of {', '.join(ROLES)}, each once")


def check_declared(groups: Mapping[str, GroupRule]) -> None:
    """Names of groups beside `main`, which every run has."""
    for name in groups:
        check_group_name(name)
    if MAIN in groups:
        raise ConfigurationError(f"every run has the group {MAIN}, and all members may be in it: leave it out")
    if len(groups) > MAX_DECLARED:
        raise ConfigurationError(f"{len(groups)} groups: declare at most {MAX_DECLARED}")


def check_seats(seats: dict[Service, int]) -> None:
    """No negative number of seats."""
    for service, number in seats.items():
        if number < 0:
            raise ConfigurationError(f"{number} seats for {service}: it must be 0 or more")


def parse_version(text: str) -> tuple[int, ...]:
    """`0.1.0` as (0, 1, 0), what follows the numbers left out; empty text as ()."""
    if not text:
        return ()
    numbers: list[int] = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits or len(digits) > 9:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    if not numbers:
        raise ConfigurationError(f"{text!r} is not a version: write it as in 0.1.0")
    return tuple(numbers)
