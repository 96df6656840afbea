"""Asking to be let in: what an applicant says, and what the guard answers.

A stranger may do one thing in the hub: send an `Application` to its lobby subject. The guard decides (guard/lobby.py)
and tells the stranger by an `Answer`. An applicant that has to wait stays connected: the answer comes on
`_INBOX.PEER.lobby` when an organiser has decided.
"""

from __future__ import annotations

from typing import Literal

from potluck.hub.access.invite import MAX_SECRET_CHARACTERS
from potluck.hub.access.member import MAX_NAME_CHARACTERS, MAX_NOTE_CHARACTERS, Scopes
from potluck.hub.presence import Role
from potluck.hub.subjects import Subjects
from potluck.messages import PROTOCOL_VERSION, Message

MAX_APPLICATION_BYTES = 4096
MAX_TOKEN_CHARACTERS = 512

RefusalCode = Literal[
    "unknown_invite",
    "expired",
    "revoked",
    "used_up",
    "role",
    "banned",
    "kept_out",
    "denied",
    "seats",
    "version_too_old",
    "version_too_new",
    "bad_token",
    "not_listed",
    "token_service_down",
    "too_many_tries",
    "hub_busy",
    "lobby_full",
    "closed",
    "malformed",
]

TRY_LATER: frozenset[str] = frozenset(
    {"kept_out", "seats", "token_service_down", "too_many_tries", "hub_busy", "lobby_full", "closed"}
)


class Application(Message, frozen=True, kw_only=True):
    """What somebody says who wants in. At most one of `invite` and `token` is looked at, the invite first."""

    role: Role
    invite: str = ""  # the invite's secret
    token: str = ""  # a Hugging Face token: checked, never kept
    name: str = ""
    service: str = "local"
    version: str = ""
    protocol: int = PROTOCOL_VERSION
    message: str = ""  # to the organisers
    asks: bool = True  # to be put on the waiting list, where nothing else lets it in
    temporary: bool = False  # its key is gone with its process

    def __post_init__(self) -> None:
        limits = {
            "invite": MAX_SECRET_CHARACTERS,
            "token": MAX_TOKEN_CHARACTERS,
            "name": MAX_NAME_CHARACTERS,
            "service": MAX_NAME_CHARACTERS,
            "version": MAX_NAME_CHARACTERS,
            "message": MAX_NOTE_CHARACTERS,
        }
        for field, limit in limits.items():
            if len(getattr(self, field)) > limit:
                raise ValueError(f"{field} has more than {limit} characters")

    def __repr__(self) -> str:
        """Without the secrets: this ends up in logs."""
        return f"Application(role={self.role!r}, service={self.service!r}, version={self.version!r})"


class Answer(Message, frozen=True, kw_only=True):
    """What the guard says to an application: in, wait, or no."""

    status: Literal["admitted", "waiting", "refused"]
    code: RefusalCode | Literal[""] = ""  # why not
    message: str = ""  # the same in plain words, with what to do about it
    retry_after_seconds: float | None = None  # set when it may go better later
    place: int = 0  # in the waiting list, from 1
    role: Role = "trainer"
    scopes: Scopes | None = None  # once admitted; of whose role is refused, those that it may have
    person: str = ""


def waiting_subject(peer: str) -> str:
    """Where the guard tells a waiting peer what was decided."""
    return f"{Subjects.inbox(peer)}.lobby"


def why_we_wait(answer: Answer) -> str:
    """To tell the applicant's person: what it waits for."""
    if answer.code == "lobby_full":
        return (
            f"{answer.message[:1].upper()}{answer.message[1:]}. Trying again every {answer.retry_after_seconds:.0f} s"
        )
    return f"Waiting for an organiser to let you in (place {answer.place})"
