"""The lobby: the one place where invites, tokens and waiting are handled.

The guard gathers the `Facts` about an `Application` (access/application.py) and `decide` (pure) says what follows; the
guard carries it out and tells the applicant by an `Answer`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from potluck.hub.access import invite as invites
from potluck.hub.access.application import Answer, Application, RefusalCode
from potluck.hub.access.invite import Invite
from potluck.hub.access.member import (
    AccessRequest,
    Ban,
    Member,
    Policy,
    Scopes,
    known_service,
    parse_version,
    person_of_key,
    seats_for,
)
from potluck.hub.guard.huggingface import TokenAnswer, TokenOwner
from potluck.hub.guard.lobbycrowd import share_of_address
from potluck.hub.presence import Role
from potluck.hub.queues import merged_rights
from potluck.messages import PROTOCOL_VERSION

FULL_RETRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that a decision depends on, gathered by the guard."""

    peer: str
    host: str
    now: float  # hub time
    policy: Policy
    bans: tuple[Ban, ...] = ()  # of this peer, of its person, and of the invite's or token's person
    member: Member | None = None
    invite: Invite | None = None  # the one that the application's secret belongs to
    token: TokenAnswer | None = None  # None: not asked (yet)
    request: AccessRequest | None = None  # its own, if it has asked before
    place: int = 0  # of its own request
    num_waiting: int = 0
    num_from_address: int = 0  # of those who wait: from the applicant's address
    first_to_go: str = ""  # of those who wait: who makes room for the applicant if the list is full
    lobby_places: int = 500  # connections that the lobby holds
    seats_taken: int = 0  # live peers of the same person and service, this one not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Write the member record, then let it in."""

    member: Member
    invite_id: str = ""  # the invite of which a use must be counted first


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Write the request, unless it stands there already, and let it wait."""

    request: AccessRequest
    place: int
    is_new: bool
    displaces: str = ""  # whose request makes room for this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Say no, and why."""

    code: RefusalCode
    message: str
    retry_after_seconds: float | None = None
    scopes: Scopes | None = None  # what would be allowed, where it is about the role


Decision = Admit | Wait | Refuse


def needs_token_check(application: Application, member: Member | None, policy: Policy) -> bool:
    """Whether the decision depends on whose token it is."""
    if not application.token or application.invite or policy.token_holders == "refused":
        return False
    return member is None or application.role not in member.scopes.roles


def person_for(application: Application, facts: Facts) -> str:
    """Whose peer the applicant is, as far as is known: seats and bans count by this."""
    if facts.invite is not None and facts.invite.person and application.invite:
        return facts.invite.person
    if isinstance(facts.token, TokenOwner):
        return facts.token.person
    if facts.member is not None:
        return facts.member.person
    return person_of_key(facts.peer)


def with_person(facts: Facts, *, bans: tuple[Ban, ...], seats_taken: int) -> Facts:
    """The facts, completed by what depends on whose peer the applicant is."""
    return replace(facts, bans=bans, seats_taken=seats_taken)


def decide(application: Application, facts: Facts) -> Decision:
    """Who gets in. The order of the questions is the order in which a person would want to hear the answers."""
    if facts.bans:
        return banned(facts.bans, facts.now)
    if refusal := _check_version(application, facts.policy):
        return refusal
    member = facts.member
    if member is not None and application.role in member.scopes.roles:
        return _readmit(application, member, facts)
    if application.invite:
        return _by_invite(application, facts)
    if application.token and facts.policy.token_holders != "refused":
        return _by_token(application, facts)
    if member is not None:
        return _role_refused(application.role, member.scopes)
    return _wait(application, facts, otherwise=None)


def admitted(member: Member) -> Answer:
    """The answer to somebody who is a member now."""
    return Answer(status="admitted", role=member.role, scopes=member.scopes, person=member.person)


def waiting(place: int) -> Answer:
    """The answer to somebody who is in the list now."""
    return Answer(status="waiting", place=place, message="an organiser has to let you in; stay connected")


def refused(refusal: Refuse) -> Answer:
    """The answer to somebody who does not get in."""
    return Answer(
        status="refused",
        code=refusal.code,
        message=refusal.message,
        retry_after_seconds=refusal.retry_after_seconds,
        scopes=refusal.scopes,
    )


def denied(reason: str) -> Refuse:
    """What an organiser's no means to the peer."""
    return Refuse(code="denied", message=f"an organiser has turned the request down{_because(reason)}")


def lobby_full(why: str) -> Refuse:
    """What a full lobby means to the peer."""
    message = f"the lobby is full: {why}. With an invite you can still get in: ask an organiser for one"
    return Refuse(code="lobby_full", message=message, retry_after_seconds=FULL_RETRY_SECONDS)


def banned(bans: Sequence[Ban], now: float) -> Refuse:
    """What bans, of which there is at least one, mean to the peer: the longest of them counts."""
    ban = max(bans, key=lambda each: each.until or math.inf)
    if ban.until:
        message = f"the hub keeps {ban.target} out for a while{_because(ban.reason)}: mend that, or ask an organiser"
        return Refuse(code="kept_out", message=message, retry_after_seconds=max(1.0, ban.until - now))
    member = f"you, {ban.target}" if ":" in ban.target else "you"  # an id tells nobody who they are
    return Refuse(code="banned", message=f"an organiser has banned {member}{_because(ban.reason)}")


def invite_refused(verdict: invites.Verdict, role: Role, scopes: Scopes) -> Refuse:
    """What is wrong with an invite, in plain words."""
    if verdict == "role":
        return _role_refused(role, scopes)
    messages: dict[invites.Verdict, str] = {
        "unknown_invite": "this hub does not know the invite: check that the whole join link was copied",
        "expired": "the invite has expired: ask an organiser for a new one",
        "revoked": "an organiser has revoked the invite: ask for a new one",
        "used_up": "the invite has let in as many peers as it may: ask an organiser for a new one",
    }
    if verdict == "valid":
        raise AssertionError("a valid invite is no reason to refuse")
    return Refuse(code=verdict, message=messages[verdict])


def _check_version(application: Application, policy: Policy) -> Refuse | None:
    if application.protocol != PROTOCOL_VERSION:
        code: RefusalCode = "version_too_old" if application.protocol < PROTOCOL_VERSION else "version_too_new"
        return Refuse(code=code, message=other_version(application.protocol, application.version))
    if _is_older(application.version, policy.minimum_version):
        return Refuse(
            code="version_too_old",
            message=f"this run needs potluck {policy.minimum_version} or newer, "
            f"yours is {application.version or 'older'}: update it",
        )
    return None


def other_version(protocol: int, version: str) -> str:
    """What to do where a peer and the hub do not speak the same protocol."""
    if protocol < PROTOCOL_VERSION:
        return (
            f"this run speaks protocol {PROTOCOL_VERSION} and your potluck{version and ' '}{version} only {protocol}: "
            "update yours"
        )
    return (
        f"the hub speaks protocol {PROTOCOL_VERSION} and you speak {protocol}: "
        "ask an organiser to update the host, or install an older potluck"
    )


def _is_older(version: str, minimum: str) -> bool:
    if not minimum:
        return False
    try:
        return parse_version(version) < parse_version(minimum)
    except ValueError:  # what they say is no version at all
        return True


def _readmit(application: Application, member: Member, facts: Facts) -> Decision:
    updated = msgspec.structs.replace(
        member,
        role=application.role,
        service=known_service(application.service),
        name=application.name or member.name,
    )
    return _seated(Admit(member=updated), facts)


def _by_invite(application: Application, facts: Facts) -> Decision:
    verdict = invites.check(facts.invite, application.invite, application.role, facts.now, facts.peer)
    invite = facts.invite
    if verdict != "valid" or invite is None:
        return invite_refused(verdict, application.role, invite.scopes if invite is not None else Scopes())
    scopes = invites.granted(invite, application.role)
    member = _new_member(application, facts, scopes=scopes, admitted_by=f"invite:{invite.id}")
    return _seated(Admit(member=member, invite_id=invite.id if invites.counts(application.role) else ""), facts)


def _by_token(application: Application, facts: Facts) -> Decision:
    answer, policy = facts.token, facts.policy
    if answer is None:
        raise AssertionError("a token that matters is checked before the decision")
    if not isinstance(answer, TokenOwner):
        code: RefusalCode = "bad_token" if answer.kind == "bad_token" else "token_service_down"
        return Refuse(code=code, message=answer.message, retry_after_seconds=answer.retry_after_seconds)
    listed = answer.user in policy.users or not set(answer.organisations).isdisjoint(policy.organisations)
    if policy.token_holders != "anyone" and not listed:
        return _wait(application, facts, otherwise=_not_listed(answer.user))
    if application.role not in policy.token_scopes.roles:
        return _wait(application, facts, otherwise=_role_refused(application.role, policy.token_scopes))
    member = _new_member(application, facts, scopes=policy.token_scopes, admitted_by="huggingface")
    return _seated(Admit(member=member), facts)


def _seated(admit: Admit, facts: Facts) -> Decision:
    """Admit, if the person has a seat left on this service."""
    member = admit.member
    limit = seats_for(member.scopes, facts.policy, member.service)
    if limit is None or facts.seats_taken < limit:
        return admit
    return Refuse(
        code="seats",
        message=f"{member.person} runs {facts.seats_taken} peers on {member.service} already, and the run allows "
        f"{limit}: stop one of them first",
        retry_after_seconds=30.0,
    )


def _wait(application: Application, facts: Facts, *, otherwise: Refuse | None) -> Decision:
    """To the waiting list, if the run has one with room; else `otherwise`, or that the run is closed."""
    request, policy = facts.request, facts.policy
    if request is not None and request.denied:
        return denied(request.reason)
    if request is not None:
        return Wait(request=request, place=facts.place, is_new=False)
    if not policy.waiting_list or not application.asks:
        closed = "this run lets in only those with an invite: ask an organiser for a link that has one"
        return otherwise or Refuse(code="closed", message=closed)
    # Those who wait stay connected, some of them twice for a moment.
    places = min(policy.max_waiting, facts.lobby_places // 2)
    if facts.num_from_address >= share_of_address(places):
        return lobby_full(f"{facts.num_from_address} from your address are waiting to be let in, which is its share")
    displaced = facts.first_to_go if facts.num_waiting >= places else ""
    if facts.num_waiting >= places and not displaced:
        return lobby_full(f"{facts.num_waiting} others are waiting to be let in")
    new = AccessRequest(
        peer=facts.peer,
        person=person_for(application, facts),
        role=application.role,
        service=known_service(application.service),
        name=application.name,
        message=application.message,
        host=facts.host,
        version=application.version,
        asked_at=facts.now,
    )
    place = facts.num_waiting + (0 if displaced else 1)
    return Wait(request=new, place=place, is_new=True, displaces=displaced)


def _new_member(application: Application, facts: Facts, *, scopes: Scopes, admitted_by: str) -> Member:
    """The record of somebody who was let in; a member who got in by something wider keeps what it had."""
    if facts.member is not None:
        scopes = merged(facts.member.scopes, scopes)
    return Member(
        peer=facts.peer,
        person=person_for(application, facts),
        scopes=scopes,
        role=application.role,
        service=known_service(application.service),
        name=application.name,
        admitted_at=facts.now,
        admitted_by=admitted_by,
        temporary=application.temporary and scopes.roles == ("observer",),
        pardoned_at=facts.member.pardoned_at if facts.member is not None else 0.0,
        pardoned_by=facts.member.pardoned_by if facts.member is not None else "",
    )


def merged(first: Scopes, second: Scopes) -> Scopes:
    """What both allow together; of two limits on seats the second holds."""
    return Scopes(
        roles=tuple(dict.fromkeys(first.roles + second.roles)),
        coordinates=first.coordinates or second.coordinates,
        trusted=first.trusted or second.trusted,
        organiser=first.organiser or second.organiser,
        seats=first.seats | second.seats,
        queues=merged_rights(first.queues, second.queues),
        # One that names no group allows all.
        groups=tuple(dict.fromkeys(first.groups + second.groups)) if first.groups and second.groups else (),
    )


def _role_refused(role: Role, scopes: Scopes) -> Refuse:
    return Refuse(
        code="role",
        message=f"you may join this run only as {' or '.join(scopes.roles)}, not as {role}: do that "
        f"(potluck join --role {scopes.roles[0]}), or ask an organiser for a link that allows more",
        scopes=Scopes(roles=scopes.roles),
    )


def _not_listed(user: str) -> Refuse:
    return Refuse(
        code="not_listed", message=f"the Hugging Face user {user} is not on this run's list: ask an organiser"
    )


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""
