"""Organisers' logins (pure): a random token gives a session.

The token is random, 192 bits, made at the first start and kept in the run's folder. A visitor who shows it gets a
session, whose id is random too and lives in a cookie that scripts cannot read and other sites cannot send. Sessions end
by themselves, and with the process.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from dataclasses import dataclass
from pathlib import Path

from potluck.clock import Clock
from potluck.errors import ConfigurationError, PermissionDeniedError
from potluck.hub.privatefiles import make_private_folder, read_private, write_private
from potluck.hub.ratelimit import RateLimit
from potluck.plaintext import clean

TOKEN_FILE = "dashboard-token"
TOKEN_BYTES = 24
FEWEST_TOKEN_CHARACTERS = 16
SESSION_SECONDS = 12 * 3600.0
MAX_SESSIONS = 256
TRIES = 5  # of one address at once
SECONDS_PER_TRY = 20.0  # until it has another
ALL_TRIES = 100  # of everybody together
SECONDS_PER_TRY_OF_ALL = 1.0
LONGEST_NAME = 40


@dataclass(frozen=True, slots=True)
class Visitor:
    """An organiser who has shown the token."""

    name: str  # as it says; for the log
    address: str
    until: float


class TooManyTriesError(PermissionDeniedError):
    """Wait a little."""


class Login:
    """Sessions of organisers."""

    def __init__(self, token: str, clock: Clock) -> None:
        if len(token) < FEWEST_TOKEN_CHARACTERS:
            raise ConfigurationError(
                f"the organiser's token has {len(token)} characters: it needs {FEWEST_TOKEN_CHARACTERS}. Delete it, "
                "and the next start makes one"
            )
        self._digest = _digest(token)
        self._clock = clock
        self._sessions: dict[str, Visitor] = {}
        self._of_address = RateLimit(burst=TRIES, per_second=1 / SECONDS_PER_TRY, clock=clock)
        self._of_all = RateLimit(burst=ALL_TRIES, per_second=1 / SECONDS_PER_TRY_OF_ALL, clock=clock)

    def enter(self, token: str, name: str, address: str) -> str:
        """A new session's id; PermissionDeniedError for a wrong token, TooManyTriesError after too many of them.

        The token is compared first, so nobody's wrong tries keep an organiser out. Guessing does not need the limit to
        be hopeless: it keeps guessers slow and their noise small.
        """
        if not hmac.compare_digest(_digest(token), self._digest):
            raise self._failed(address)
        who = clean(" ".join(name.split()))[:LONGEST_NAME]
        if not who:
            raise ConfigurationError("enter your name: your actions are logged under it")
        session = secrets.token_urlsafe(32)
        self._forget_old()
        self._sessions[session] = Visitor(who, address, self._clock.monotonic() + SESSION_SECONDS)
        return session

    def visitor(self, session: str | None) -> Visitor | None:
        """Whose session that is; None when it is nobody's, or over."""
        visitor = self._sessions.get(session) if session else None
        if visitor is None or visitor.until <= self._clock.monotonic():
            return None
        return visitor

    def leave(self, session: str | None) -> None:
        """End a session; one that does not exist is no error."""
        self._sessions.pop(session or "", None)

    def _failed(self, address: str) -> PermissionDeniedError:
        wait = max(self._of_address.seconds_until_next(address), self._of_all.seconds_until_next("all"))
        if wait > 0:
            return TooManyTriesError(f"too many wrong tokens: wait {math.ceil(wait)} seconds. The right one works")
        self._of_address.take(address)
        self._of_all.take("all")
        return PermissionDeniedError("that is not the organiser's token: `potluck host` prints it when it starts")

    def _forget_old(self) -> None:
        now = self._clock.monotonic()
        self._sessions = {key: visitor for key, visitor in self._sessions.items() if visitor.until > now}
        while len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[min(self._sessions, key=lambda key: self._sessions[key].until)]


def load_or_create_token(folder: Path) -> str:
    """The organiser's token of the run in this folder."""
    path = make_private_folder(folder) / TOKEN_FILE
    token = (read_private(path) or "").strip()
    if not token:
        token = secrets.token_urlsafe(TOKEN_BYTES)
        write_private(path, token + "\n")
    return token


def is_same_origin(origin: str | None, host: str | None) -> bool:
    """Whether a request comes from a page of ours. Browsers say the origin wherever another site could be behind it."""
    if origin is None:
        return True
    return bool(host) and origin.partition("://")[2].lower() == (host or "").lower()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.strip().encode()).digest()
