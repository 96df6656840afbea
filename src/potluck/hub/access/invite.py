"""Invites: a secret that lets everybody who knows it become a member, within stated bounds.

Only a hash of the secret is kept. It is a plain SHA-256, since the secret is 128 random bits that nobody can guess.
The id, by which organisers speak of an invite, is the beginning of that hash: so a secret alone finds its record.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from typing import Literal

import msgspec

from potluck.errors import ConfigurationError
from potluck.hub.access.member import MAX_NOTE_CHARACTERS, Scopes
from potluck.hub.presence import Role
from potluck.messages import Message

SECRET_BYTES = 16
ID_CHARACTERS = 12
RECENT_SECONDS = 120.0  # a peer that was told to try again does so well within this time
MAX_RECENT = 16
MAX_SECRET_CHARACTERS = 128  # of what somebody presents as a secret; a real one has 22

Verdict = Literal["valid", "unknown_invite", "expired", "revoked", "used_up", "role"]


class Invite(Message, frozen=True, kw_only=True):
    """One invite: an entry of the `invites` store, under its id."""

    id: str
    secret_hash: str
    scopes: Scopes  # of those who come in by it; `seats` in it are the peers per person and service
    uses: int | None = None  # how many peers may join with it, not counting observers; None: any number
    used: int = 0
    recent: dict[str, float] = {}  # for which peers a use was counted of late, and when
    expires_at: float | None = None  # hub time; None: never
    person: str = ""  # whose invite it is: all who come in by it count as this person's peers
    revoked: bool = False
    note: str = ""
    created_at: float = 0.0
    created_by: str = ""

    def __post_init__(self) -> None:
        if self.uses is not None and self.uses < 1:
            raise ConfigurationError(f"an invite for {self.uses} uses lets nobody in: name at least 1, or no limit")
        if len(self.note) > MAX_NOTE_CHARACTERS:
            raise ConfigurationError(f"an invite's note has at most {MAX_NOTE_CHARACTERS} characters")
        if self.person and (":" not in self.person or len(self.person) > 200):
            raise ConfigurationError(f"{self.person!r} cannot name an invite's person: write it as in guest:alice")


def new_invite(
    *,
    scopes: Scopes,
    now: float,
    uses: int | None = None,
    lifetime_seconds: float | None = None,
    person: str = "",
    note: str = "",
    created_by: str = "",
) -> tuple[Invite, str]:
    """A new invite and its secret, which is told once and kept nowhere."""
    if lifetime_seconds is not None and lifetime_seconds <= 0:
        raise ConfigurationError(f"an invite cannot last {lifetime_seconds:g} seconds: name a time above 0, or none")
    secret = secrets.token_urlsafe(SECRET_BYTES)
    invite = Invite(
        id=invite_id(secret),
        secret_hash=secret_hash(secret),
        scopes=scopes,
        uses=uses,
        expires_at=None if lifetime_seconds is None else now + lifetime_seconds,
        person=person,
        note=note,
        created_at=now,
        created_by=created_by,
    )
    return invite, secret


def secret_hash(secret: str) -> str:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def invite_id(secret: str) -> str:
    """The id of the invite that a secret belongs to."""
    digest = hashlib.sha256(secret.encode()).digest()
    return base64.b32encode(digest).decode().lower()[:ID_CHARACTERS]


def check(invite: Invite | None, secret: str, role: Role, now: float, peer: str = "") -> Verdict:
    """Whether this secret lets a peer of this role in, and if not, the one reason to tell.

    Who does not know the secret learns nothing of the invite, so `unknown_invite` comes before all else.
    """
    if invite is None or not hmac.compare_digest(invite.secret_hash, secret_hash(secret)):
        return "unknown_invite"
    if invite.revoked:
        return "revoked"
    if invite.expires_at is not None and now >= invite.expires_at:
        return "expired"
    is_used_up = invite.uses is not None and invite.used >= invite.uses and not _is_counted(invite, peer, now)
    if is_used_up and counts(role):
        return "used_up"
    if role not in invite.scopes.roles:
        return "role"
    return "valid"


def counts(role: Role) -> bool:
    """Whether coming in so uses an invite up. Looking does not: each look is by a key of its own."""
    return role != "observer"


def granted(invite: Invite, role: Role) -> Scopes:
    """What a peer may do that comes in so: one that is not counted may look, and do nothing else."""
    return invite.scopes if counts(role) else Scopes(roles=(role,), seats=invite.scopes.seats)


def after_use(invite: Invite, peer: str = "", now: float = 0.0) -> Invite:
    """The record once one more peer has come in by it.

    A use is counted before the member is written down, and the hub may lose a server in between. So a peer that comes
    again soon is not counted again.
    """
    if _is_counted(invite, peer, now):
        return invite
    recent = {**invite.recent, peer: now} if peer else invite.recent
    newest = sorted(recent, key=lambda each: recent[each])[-MAX_RECENT:]
    young = {each: recent[each] for each in newest if now - recent[each] < RECENT_SECONDS}
    return msgspec.structs.replace(invite, used=invite.used + 1, recent=young)


def after_return(invite: Invite, peer: str = "") -> Invite:
    """The record once a use was given back, because the peer turned out to be a member already."""
    recent = {each: at for each, at in invite.recent.items() if each != peer}
    return msgspec.structs.replace(invite, used=max(0, invite.used - 1), recent=recent)


def _is_counted(invite: Invite, peer: str, now: float) -> bool:
    return peer in invite.recent and now - invite.recent[peer] < RECENT_SECONDS
