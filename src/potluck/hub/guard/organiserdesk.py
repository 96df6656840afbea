"""The organisers' desk: carries out what organise.py's messages ask for."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeVar

import msgspec

from potluck.clock import Clock
from potluck.errors import ConfigurationError, ProtocolError, RetryableError
from potluck.hub.access import organise
from potluck.hub.access.application import Answer
from potluck.hub.access.invite import Invite, new_invite
from potluck.hub.access.member import (
    AccessRequest,
    Ban,
    Member,
    Scopes,
    ban_key,
    check_target,
    person_of_key,
)
from potluck.hub.access.organise import Done, Failure
from potluck.hub.guard import lobby
from potluck.hub.guard.connections import Connection
from potluck.hub.guard.registry import POLICY_KEY, Registry
from potluck.hub.presence import Presence
from potluck.hub.stores import FLEET_KEY, MANIFEST_KEY
from potluck.hub.subjects import PEER_ID
from potluck.messages import Message, decode
from potluck.plaintext import check_plain

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 * 1024
DENIED_TTL_SECONDS = 24 * 3600

T = TypeVar("T")


class Surroundings(Protocol):
    """What the desk needs of the guard."""

    def presence_of(self, peer: str) -> Presence | None:
        """What the roster says of a peer."""
        ...

    async def tell_waiting(self, peer: str, answer: Answer) -> None:
        """Tell a peer in the lobby what was decided."""
        ...

    def connections_of(self, target: str) -> list[Connection]:
        """The open connections of a peer or person, as far as they are known here."""
        ...

    async def cut_banned(self, target: str, known: Iterable[Connection]) -> int:
        """Cut the connections of a banned peer or person: those known, and others that it has; how many there were."""
        ...


class OrganiserDesk:
    """Answers organisers' requests."""

    def __init__(self, registry: Registry, surroundings: Surroundings, clock: Clock) -> None:
        self._registry = registry
        self._guard = surroundings
        self._clock = clock
        self.counts: Counter[str] = Counter()
        self._verbs: dict[str, tuple[Any, Callable[[str, Any], Awaitable[Message]]]] = {
            "invite": (organise.CreateInvite, self._invite),
            "invites": (organise.ListPage, self._invites),
            "revoke": (organise.RevokeInvite, self._revoke),
            "requests": (organise.ListPage, self._requests),
            "approve": (organise.Approve, self._approve),
            "deny": (organise.Deny, self._deny),
            "members": (organise.ListPage, self._members),
            "ban": (organise.BanTarget, self._ban),
            "unban": (organise.Unban, self._unban),
            "bans": (organise.ListPage, self._bans),
            "pardon": (organise.Pardon, self._pardon),
            "policy": (organise.ListPage, self._policy),
            "set_policy": (organise.SetPolicy, self._set_policy),
            "manifest": (organise.PutUpManifest, self._put_up_manifest),
            "jobs": (organise.PutUpJobs, self._put_up_jobs),
        }

    async def answer(self, organiser: str, verb: str, payload: bytes) -> Message:
        """The answer to one request."""
        try:
            member = await self._registry.member(organiser)
            if member is None or not member.scopes.organiser or self._registry.is_banned(member):
                return self._fail("forbidden", "only an organiser of this run may ask for that")
            if verb not in self._verbs:
                return self._fail(
                    "input", f"there is no request {verb[:40]!r}: this hub may be older than your potluck"
                )
            kind, handle = self._verbs[verb]
            order = decode(kind, payload, limit_bytes=MAX_REQUEST_BYTES)
            check_plain(order)
            answer = await handle(organiser, order)
        except (ProtocolError, ConfigurationError) as error:
            return self._fail("input", str(error))
        except RetryableError as error:
            return self._fail("later", str(error))
        self.counts["answered"] += 1
        return answer

    def _fail(self, kind: str, message: str) -> Failure:
        self.counts[f"failed_{kind}"] += 1
        return Failure(kind=kind, message=message)

    # Invites

    async def _invite(self, organiser: str, request: organise.CreateInvite) -> Message:
        self._registry.policy.check_groups(request.scopes.groups)
        invite, secret = new_invite(
            scopes=request.scopes,
            now=self._clock.wall(),
            uses=request.uses,
            lifetime_seconds=request.lifetime_seconds,
            person=request.person,
            note=request.note,
            created_by=organiser,
        )
        await self._registry.invites.put(invite.id, invite)
        return organise.InviteCreated(invite=invite, secret=secret)

    async def _invites(self, _organiser: str, request: organise.ListPage) -> Message:
        items, more = _page(self._registry.invites, lambda invite: invite.id, request.after)
        return organise.InvitePage(items=items, more=more)

    async def _revoke(self, _organiser: str, request: organise.RevokeInvite) -> Message:
        def revoke(invite: Invite) -> Invite:
            return msgspec.structs.replace(invite, revoked=True)

        if await self._registry.invites.change(_check_invite_id(request.id), revoke) is None:
            raise ConfigurationError(f"there is no invite {request.id!r}: list them to see their ids")
        return Done()

    # Requests for access

    async def _requests(self, _organiser: str, request: organise.ListPage) -> Message:
        items, more = _page(self._registry.requests, lambda waiting: waiting.peer, request.after)
        return organise.RequestPage(items=items, more=more)

    async def _approve(self, organiser: str, request: organise.Approve) -> Message:
        peer = _check_peer(request.peer)
        waiting = await self._registry.requests.fetch(peer)
        known = await self._registry.member(peer)
        member = self._member_for(request, waiting, known, organiser)
        await self._registry.members.put(peer, member)
        if waiting is not None:
            await self._registry.requests.remove(peer)
        await self._guard.tell_waiting(peer, lobby.admitted(member))
        logger.info("%s let in %s of %s as %s", organiser, peer, member.person, member.role)
        return Done()

    def _member_for(
        self, request: organise.Approve, waiting: AccessRequest | None, known: Member | None, organiser: str
    ) -> Member:
        """The record of a person that an organiser lets in; of a member, the record with its new scopes."""
        if known is not None and waiting is None:
            scopes = request.scopes or known.scopes
            role = known.role if known.role in scopes.roles else scopes.roles[0]
            return msgspec.structs.replace(known, scopes=scopes, role=role, person=request.person or known.person)
        asked = dict.fromkeys((waiting.role if waiting is not None else "trainer", "observer"))
        scopes = request.scopes or Scopes(roles=tuple(asked))  # who helps may look, as by an invite
        role = waiting.role if waiting is not None and waiting.role in scopes.roles else scopes.roles[0]
        person = request.person or (waiting.person if waiting is not None else person_of_key(request.peer))
        return Member(
            peer=request.peer,
            person=person,
            scopes=scopes,
            role=role,
            service=waiting.service if waiting is not None else "local",
            name=waiting.name if waiting is not None else "",
            admitted_at=self._clock.wall(),
            admitted_by=organiser,
            pardoned_at=known.pardoned_at if known is not None else 0.0,
            pardoned_by=known.pardoned_by if known is not None else "",
        )

    async def _deny(self, organiser: str, request: organise.Deny) -> Message:
        peer = _check_peer(request.peer)
        waiting = await self._registry.requests.fetch(peer)
        if waiting is None:
            raise ConfigurationError(f"{peer} does not wait to be let in: list the requests to see who does")
        refused = msgspec.structs.replace(waiting, denied=True, reason=_check_reason(request.reason))
        await self._registry.requests.put(peer, refused, ttl_seconds=DENIED_TTL_SECONDS)
        await self._guard.tell_waiting(peer, lobby.refused(lobby.denied(request.reason)))
        logger.info("%s turned down %s of %s", organiser, peer, waiting.person)
        return Done()

    # Members

    async def _members(self, _organiser: str, request: organise.ListPage) -> Message:
        members, more = _page(self._registry.members, lambda member: member.peer, request.after)
        items: list[organise.MemberState] = []
        for member in members:
            presence = self._guard.presence_of(member.peer)
            items.append(
                organise.MemberState(
                    member=member,
                    state=presence.state if presence is not None else None,
                    since=presence.since if presence is not None else 0.0,
                    host=presence.host if presence is not None else "",
                    banned=self._registry.is_banned(member),
                )
            )
        return organise.MemberPage(items=tuple(items), more=more)

    async def _ban(self, organiser: str, request: organise.BanTarget) -> Message:
        target = check_target(request.target)
        own = await self._registry.member(organiser)
        if own is not None and target in (own.peer, own.person):
            raise ConfigurationError("you would ban yourself: another organiser has to do that")
        ban = Ban(
            target=target,
            reason=_check_reason(request.reason),
            banned_at=self._clock.wall(),
            banned_by=organiser,
        )
        # Looked up first: every guard begins to cut as soon as it hears of the ban.
        known = self._guard.connections_of(target)
        await self._registry.bans.put(ban_key(target), ban)
        num_cut = await self._guard.cut_banned(target, known)
        for waiting in [request for request in self._registry.requests if target in (request.peer, request.person)]:
            await self._registry.requests.remove(waiting.peer)
            await self._guard.tell_waiting(waiting.peer, lobby.refused(lobby.banned([ban], ban.banned_at)))
        logger.info("%s banned %s; %d connections cut", organiser, target, num_cut)
        return Done(num_connections_cut=num_cut)

    async def _unban(self, organiser: str, request: organise.Unban) -> Message:
        if await self._registry.bans.fetch(ban_key(request.target)) is None:
            raise ConfigurationError(f"{request.target} is not banned: list the bans to see who is")
        await self._registry.bans.remove(ban_key(request.target))
        logger.info("%s lifted the ban of %s", organiser, request.target)
        return Done()

    async def _bans(self, _organiser: str, request: organise.ListPage) -> Message:
        items, more = _page(self._registry.bans, lambda ban: ban.target, request.after)
        return organise.BanPage(items=items, more=more)

    async def _pardon(self, organiser: str, request: organise.Pardon) -> Message:
        now = self._clock.wall()

        def pardon(member: Member) -> Member:
            return msgspec.structs.replace(member, pardoned_at=now, pardoned_by=organiser)

        if await self._registry.members.change(_check_peer(request.peer), pardon) is None:
            raise ConfigurationError(f"{request.peer} is not a member: list the members to see who is")
        logger.info("%s pardoned %s", organiser, request.peer)
        return Done()

    # Policy

    async def _policy(self, _organiser: str, _request: organise.ListPage) -> Message:
        return organise.PolicyAnswer(policy=self._registry.policy)

    async def _set_policy(self, organiser: str, request: organise.SetPolicy) -> Message:
        await self._registry.policies.put(POLICY_KEY, request.policy)
        logger.info("%s changed the policy", organiser)
        return Done()

    # What the run trains

    async def _put_up_manifest(self, organiser: str, request: organise.PutUpManifest) -> Message:
        await self._registry.manifest.put(MANIFEST_KEY, request.signed, expected=request.replaces)
        logger.info("%s put up a manifest", organiser)
        return Done()

    async def _put_up_jobs(self, organiser: str, request: organise.PutUpJobs) -> Message:
        await self._registry.fleet.put(FLEET_KEY, request.signed, expected=request.replaces)
        logger.info("%s put up the jobs of the fleet", organiser)
        return Done()


def _page(records: Iterable[T], key: Callable[[T], str], after: str) -> tuple[tuple[T, ...], bool]:
    """The records after a key, as many as fit in one answer, and whether there are more."""
    rest = sorted((record for record in records if key(record) > after), key=key)
    return tuple(rest[: organise.PAGE_LENGTH]), len(rest) > organise.PAGE_LENGTH


def _check_peer(peer: str) -> str:
    if not PEER_ID.fullmatch(peer):
        raise ConfigurationError(f"{peer[:80]!r} is not a peer id: it starts with U and has 56 characters")
    return peer


def _check_invite_id(invite_id: str) -> str:
    if not invite_id.isalnum() or len(invite_id) > 64:
        raise ConfigurationError(f"{invite_id[:80]!r} is not an invite's id: list them to see their ids")
    return invite_id


def _check_reason(reason: str) -> str:
    if len(reason) > 500:
        raise ConfigurationError("a reason has at most 500 characters")
    return reason
