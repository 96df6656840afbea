"""What organisers ask of the guard, and how: messages for both sides, and functions for the organiser's.

Each request goes to `p.RUN.organise.PEER.VERB`. The hub lets only members through whose record says organiser, and
the guard looks at the record again. A request that fails is answered with a `Failure`, which the functions raise.
"""

from __future__ import annotations

from typing import TypeVar

from potluck.errors import ConfigurationError, PermissionDeniedError, PotluckError, RetryableError
from potluck.hub.access.invite import Invite
from potluck.hub.access.member import AccessRequest, Ban, Member, Policy, Scopes
from potluck.hub.connection import HubConnection
from potluck.hub.presence import State
from potluck.hub.subjects import Subjects
from potluck.messages import Message, decode, encode
from potluck.plaintext import clean_all

TIMEOUT_SECONDS = 10.0
MAX_ANSWER_BYTES = 8 * 1024 * 1024
PAGE_LENGTH = 200


class Done(Message, frozen=True, kw_only=True, tag=True):
    """It was done."""

    num_connections_cut: int = 0  # by a ban


class Failure(Message, frozen=True, kw_only=True, tag=True):
    """It was not done."""

    kind: str  # input: the request is wrong; forbidden: not an organiser; later: try again
    message: str


class CreateInvite(Message, frozen=True, kw_only=True, tag=True):
    """Make an invite; answered by InviteCreated."""

    scopes: Scopes = Scopes()
    uses: int | None = 1
    lifetime_seconds: float | None = None
    person: str = ""
    note: str = ""


class InviteCreated(Message, frozen=True, kw_only=True, tag=True):
    """The invite and its secret, which cannot be had again."""

    invite: Invite
    secret: str


class ListPage(Message, frozen=True, kw_only=True, tag=True):
    """One page of a list: those whose key comes after `after`."""

    after: str = ""


class InvitePage(Message, frozen=True, kw_only=True, tag=True):
    """Some invites, by id."""

    items: tuple[Invite, ...]
    more: bool


class RequestPage(Message, frozen=True, kw_only=True, tag=True):
    """Some requests for access, by peer."""

    items: tuple[AccessRequest, ...]
    more: bool


class MemberState(Message, frozen=True, kw_only=True):
    """A member and how it is doing."""

    member: Member
    state: State | None  # None: not in the roster
    since: float = 0.0
    host: str = ""
    banned: bool = False


class MemberPage(Message, frozen=True, kw_only=True, tag=True):
    """Some members, by peer."""

    items: tuple[MemberState, ...]
    more: bool


class BanPage(Message, frozen=True, kw_only=True, tag=True):
    """Some bans, by key."""

    items: tuple[Ban, ...]
    more: bool


class RevokeInvite(Message, frozen=True, kw_only=True, tag=True):
    """Let nobody else in by this invite; those who came in by it stay."""

    id: str


class Approve(Message, frozen=True, kw_only=True, tag=True):
    """Let a peer in: one that waits, or one that has not come yet."""

    peer: str
    scopes: Scopes | None = None  # None: the role it asked for and nothing more
    person: str = ""  # empty: as its request says


class Deny(Message, frozen=True, kw_only=True, tag=True):
    """Turn a waiting peer down."""

    peer: str
    reason: str = ""


class BanTarget(Message, frozen=True, kw_only=True, tag=True):
    """Cut the connections of a peer or person now, and keep it out."""

    target: str
    reason: str = ""


class Unban(Message, frozen=True, kw_only=True, tag=True):
    """Keep it out no longer."""

    target: str


class Pardon(Message, frozen=True, kw_only=True, tag=True):
    """Forgive a member what audits have found of it until now: it takes part in rounds again."""

    peer: str


class SetPolicy(Message, frozen=True, kw_only=True, tag=True):
    """Replace the run's policy."""

    policy: Policy


class PolicyAnswer(Message, frozen=True, kw_only=True, tag=True):
    """The run's policy."""

    policy: Policy


class PutUpManifest(Message, frozen=True, kw_only=True, tag=True):
    """Put up what the run trains, signed; members check that for themselves."""

    signed: bytes
    replaces: int  # the store's revision of the one before; 0: there is none


A = TypeVar("A", bound=Message)


class Organiser:
    """The organiser's side: one method per request, over a connection in an organiser's name."""

    def __init__(self, connection: HubConnection, subjects: Subjects, peer: str) -> None:
        self._connection = connection
        self._subjects = subjects
        self._peer = peer

    async def create_invite(
        self,
        *,
        scopes: Scopes | None = None,
        uses: int | None = 1,
        lifetime_seconds: float | None = None,
        person: str = "",
        note: str = "",
    ) -> tuple[Invite, str]:
        """A new invite and its secret, which cannot be had again."""
        request = CreateInvite(
            scopes=scopes or Scopes(), uses=uses, lifetime_seconds=lifetime_seconds, person=person, note=note
        )
        answer = await self._ask("invite", request, InviteCreated)
        return answer.invite, answer.secret

    async def list_invites(self) -> list[Invite]:
        """All invites, by id."""
        items: list[Invite] = []
        while True:
            page = await self._ask("invites", ListPage(after=items[-1].id if items else ""), InvitePage)
            items += page.items
            if not page.more or not page.items:
                return items

    async def list_requests(self) -> list[AccessRequest]:
        """All who asked for access and were not let in yet, by peer; the denied ones too, for a while."""
        items: list[AccessRequest] = []
        while True:
            page = await self._ask("requests", ListPage(after=items[-1].peer if items else ""), RequestPage)
            items += page.items
            if not page.more or not page.items:
                return items

    async def list_members(self) -> list[MemberState]:
        """All members and how they are doing, by peer."""
        items: list[MemberState] = []
        while True:
            page = await self._ask("members", ListPage(after=items[-1].member.peer if items else ""), MemberPage)
            items += page.items
            if not page.more or not page.items:
                return items

    async def list_bans(self) -> list[Ban]:
        """All bans, by target."""
        items: list[Ban] = []
        while True:
            page = await self._ask("bans", ListPage(after=items[-1].target if items else ""), BanPage)
            items += page.items
            if not page.more or not page.items:
                return items

    async def revoke_invite(self, invite_id: str) -> None:
        """Let nobody else in by this invite."""
        await self._ask("revoke", RevokeInvite(id=invite_id), Done)

    async def approve(self, peer: str, *, scopes: Scopes | None = None, person: str = "") -> None:
        """Let a peer in; if it waits, it gets in at once."""
        await self._ask("approve", Approve(peer=peer, scopes=scopes, person=person), Done)

    async def deny(self, peer: str, reason: str = "") -> None:
        """Turn a waiting peer down."""
        await self._ask("deny", Deny(peer=peer, reason=reason), Done)

    async def ban(self, target: str, reason: str = "") -> int:
        """Ban a peer or person; how many of its connections were cut."""
        return (await self._ask("ban", BanTarget(target=target, reason=reason), Done)).num_connections_cut

    async def unban(self, target: str) -> None:
        """Lift a ban."""
        await self._ask("unban", Unban(target=target), Done)

    async def pardon(self, peer: str) -> None:
        """Lift the exclusion of a member that an audit found out; it takes part in the next round."""
        await self._ask("pardon", Pardon(peer=peer), Done)

    async def policy(self) -> Policy:
        """The run's policy."""
        return (await self._ask("policy", ListPage(), PolicyAnswer)).policy

    async def set_policy(self, policy: Policy) -> None:
        """Replace the run's policy."""
        await self._ask("set_policy", SetPolicy(policy=policy), Done)

    async def put_up_manifest(self, signed: bytes, *, replaces: int) -> None:
        """Put up a manifest. RetryableError when another organiser came first: look at theirs, and try again."""
        await self._ask("manifest", PutUpManifest(signed=signed, replaces=replaces), Done)

    async def _ask(self, verb: str, request: Message, kind: type[A]) -> A:
        subject = self._subjects.organise(self._peer, verb)
        data = await self._connection.request(subject, encode(request), timeout_seconds=TIMEOUT_SECONDS)
        return read_answer(data, kind)


def read_answer(data: bytes, kind: type[A]) -> A:
    """The answer, or the error that a Failure stands for."""
    failed: Failure | A = clean_all(decode(Failure | kind, data, limit_bytes=MAX_ANSWER_BYTES))  # type: ignore[arg-type]
    if isinstance(failed, Failure):
        raise _error(failed)
    return failed


def _error(failure: Failure) -> PotluckError:
    errors: dict[str, type[PotluckError]] = {"input": ConfigurationError, "forbidden": PermissionDeniedError}
    return errors.get(failure.kind, RetryableError)(failure.message)
