"""The records of members, bans, invites and requests, in the hub's stores.

Each table is kept in memory, true to its store by a watch, because a connecting peer waits for the guard's answer.
What several guards might change at once (an invite's uses) is changed by compare-and-set. A record that no guard can
have written is put right again, from memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from potluck.errors import ProtocolError, RevisionConflictError
from potluck.hub.access import invite as invites
from potluck.hub.access.invite import Invite
from potluck.hub.access.member import AccessRequest, Ban, GroupRule, Member, Policy, ban_key
from potluck.hub.connection import Entry, HubConnection, Store, Subscription
from potluck.hub.presence import Role
from potluck.hub.queues import QueueDefinition
from potluck.messages import decode, encode

logger = logging.getLogger(__name__)

R = TypeVar("R")
Spawn = Callable[[Coroutine[Any, Any, None]], None]
MAX_CONFLICTS = 50  # of one change; each conflict means that somebody else's change went through
POLICY_KEY = "policy"


class Table(Generic[R]):
    """One kind of record in one store."""

    def __init__(self, store: Store, kind: type[R], spawn: Spawn) -> None:
        self._store = store
        self._kind = kind
        self._spawn = spawn
        self._records: dict[str, tuple[int, R]] = {}
        self._watch: Subscription | None = None
        self._listeners: list[Callable[[str, R | None], None]] = []
        self.num_invalid = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[R]:
        return iter([record for _, record in self._records.values()])

    def listen(self, listener: Callable[[str, R | None], None]) -> None:
        """Call `listener` with key and record (None: removed) for each change, also those of other guards."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Load what is there and follow every change."""
        self._watch = await self._store.watch(self._changed)

    async def stop(self) -> None:
        """Follow no more. Idempotent."""
        if self._watch is not None:
            await self._watch.cancel()
            self._watch = None

    def get(self, key: str) -> R | None:
        """The record in memory: at most moments behind the store."""
        known = self._records.get(key)
        return known[1] if known is not None else None

    async def fetch(self, key: str) -> R | None:
        """The record in the store."""
        entry = await self._store.get(key)
        if entry is None:
            self._drop(key)
        else:
            self._changed(entry)
        return self.get(key)

    async def put(self, key: str, record: R, *, ttl_seconds: float | None = None) -> None:
        """Write a record, whatever was there."""
        revision = await self._store.put(key, encode(record), ttl_seconds=ttl_seconds)
        self._set(key, revision, record)

    async def create(self, key: str, record: R, *, ttl_seconds: float | None = None) -> bool:
        """Write a record where there is none; False when there is one."""
        try:
            revision = await self._store.put(key, encode(record), expected=0, ttl_seconds=ttl_seconds)
        except RevisionConflictError:
            return False
        self._set(key, revision, record)
        return True

    async def change(self, key: str, new: Callable[[R], R | None]) -> R | None:
        """Replace a record by what `new` makes of it, by compare-and-set.

        None, and nothing is written, when there is no such record or `new` returns None.
        """
        for _ in range(MAX_CONFLICTS):
            entry = await self._store.get(key)
            record = self._decode(entry) if entry is not None else None
            changed = new(record) if record is not None else None
            if entry is None or changed is None:
                return None
            try:
                revision = await self._store.put(key, encode(changed), expected=entry.revision)
            except RevisionConflictError:
                continue
            self._set(key, revision, changed)
            return changed
        raise RevisionConflictError(f"{key} was changed by others {MAX_CONFLICTS} times in a row: try again")

    async def remove(self, key: str) -> None:
        """Remove a record; a missing one is no error."""
        await self._store.delete(key)
        self._drop(key)

    def _changed(self, entry: Entry) -> None:
        """One entry as it stands in the store."""
        known = self._records.get(entry.key)
        if known is not None and entry.revision <= known[0]:
            return
        record = self._decode(entry)
        if record is not None:
            self._set(entry.key, entry.revision, record)
        elif entry.value is None:
            self._drop(entry.key)
        else:
            self._spawn(self._put_right(entry, known[1] if known is not None else None))

    async def _put_right(self, entry: Entry, record: R | None) -> None:
        """Replace what cannot be read by the record as we know it, unless somebody did meanwhile."""
        try:
            if record is None:
                await self._store.delete(entry.key, expected=entry.revision)
            else:
                revision = await self._store.put(entry.key, encode(record), expected=entry.revision)
                self._set(entry.key, revision, record)
        except RevisionConflictError:
            logger.debug("the record %s was put right by somebody else", entry.key)

    def _decode(self, entry: Entry) -> R | None:
        if entry.value is None:
            return None
        try:
            return decode(self._kind, entry.value)
        except ProtocolError as error:
            self.num_invalid += 1
            logger.warning("the record %s was passed over: %s", entry.key, error)
            return None

    def _set(self, key: str, revision: int, record: R) -> None:
        known = self._records.get(key)
        if known is not None and known[0] >= revision:
            return
        self._records[key] = (revision, record)
        if known is None or known[1] != record:
            self._tell(key, record)

    def _drop(self, key: str) -> None:
        if self._records.pop(key, None) is not None:
            self._tell(key, None)

    def _tell(self, key: str, record: R | None) -> None:
        for listener in self._listeners:
            listener(key, record)


class Registry:
    """All that the guard decides by."""

    def __init__(self, connection: HubConnection, spawn: Spawn) -> None:
        self.members: Table[Member] = Table(connection.store("members"), Member, spawn)
        self.bans: Table[Ban] = Table(connection.store("bans"), Ban, spawn)
        self.invites: Table[Invite] = Table(connection.store("invites"), Invite, spawn)
        self.requests: Table[AccessRequest] = Table(connection.store("requests"), AccessRequest, spawn)
        self.policies: Table[Policy] = Table(connection.store("policy"), Policy, spawn)
        self.queues: Table[QueueDefinition] = Table(connection.store("queues"), QueueDefinition, spawn)
        self.manifest = connection.store("manifest")  # written for organisers; the guard itself decides nothing by it
        self.fleet = connection.store("fleet")  # likewise
        self._person_of: dict[str, str] = {}
        self._peers_of: dict[str, set[str]] = {}
        self.members.listen(self._index_member)

    async def start(self, first_policy: Policy) -> None:
        """Load everything, and write the first policy if there is none yet."""
        for table in self._tables():
            await table.start()
        await self.policies.create(POLICY_KEY, first_policy)
        await self.policies.fetch(POLICY_KEY)

    async def declare_groups(self, groups: Mapping[str, GroupRule]) -> None:
        """Which groups the run has beside `main`; none: any that a program makes."""
        if self.policy.groups != groups:
            await self.policies.change(POLICY_KEY, lambda policy: msgspec.structs.replace(policy, groups=dict(groups)))

    async def stop(self) -> None:
        """Follow the stores no more. Idempotent."""
        for table in self._tables():
            await table.stop()

    @property
    def policy(self) -> Policy:
        """The run's policy as it stands; one that cannot be read lets nobody new in."""
        policy = self.policies.get(POLICY_KEY)
        return policy if policy is not None else Policy(waiting_list=False)

    async def member(self, peer: str) -> Member | None:
        """The member of that id. The store is asked before we say no: another guard may just have let it in."""
        known = self.members.get(peer)
        return known if known is not None else await self.members.fetch(peer)

    def members_of(self, person: str) -> list[Member]:
        """All members that count as one person's."""
        found = (self.members.get(peer) for peer in self._peers_of.get(person, ()))
        return [member for member in found if member is not None]

    def bans_of(self, *targets: str) -> tuple[Ban, ...]:
        """The bans of any of these peers and persons."""
        found = (self.bans.get(ban_key(target)) for target in dict.fromkeys(targets) if target)
        return tuple(ban for ban in found if ban is not None)

    def is_banned(self, member: Member) -> bool:
        """Whether a member is banned, itself or as a person."""
        return bool(self.bans_of(member.peer, member.person))

    async def invite_for(self, secret: str) -> Invite | None:
        """The invite that a secret belongs to, if there is one of that id."""
        return await self.invites.fetch(invites.invite_id(secret))

    async def use_invite(self, invite_id: str, secret: str, role: Role, now: float, peer: str = "") -> invites.Verdict:
        """Count one use of an invite, if it is still valid: of two who take the last use, one is told so."""
        verdict: invites.Verdict = "unknown_invite"

        def use(invite: Invite) -> Invite | None:
            nonlocal verdict
            verdict = invites.check(invite, secret, role, now, peer)
            return invites.after_use(invite, peer, now) if verdict == "valid" else None

        await self.invites.change(invite_id, use)
        return verdict

    async def return_invite_use(self, invite_id: str, peer: str = "") -> None:
        """Take back one use."""
        await self.invites.change(invite_id, lambda invite: invites.after_return(invite, peer))

    def waiting(self) -> list[AccessRequest]:
        """Those who wait, in the order in which they asked."""
        return sorted((r for r in self.requests if not r.denied), key=lambda r: (r.asked_at, r.peer))

    def num_invalid(self) -> int:
        """How many records could not be read."""
        return sum(table.num_invalid for table in self._tables())

    def _index_member(self, peer: str, member: Member | None) -> None:
        before = self._person_of.pop(peer, None)
        if before is not None:
            self._peers_of[before].discard(peer)
            if not self._peers_of[before]:
                del self._peers_of[before]
        if member is not None:
            self._person_of[peer] = member.person
            self._peers_of.setdefault(member.person, set()).add(peer)

    def _tables(self) -> tuple[Table[Any], ...]:
        return self.members, self.bans, self.invites, self.requests, self.policies, self.queues
