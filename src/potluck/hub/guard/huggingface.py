"""Whose Hugging Face token it is.

The token is sent to the service's `whoami` and to nobody else; it is never logged, stored, or part of a message.
Each way in which that can fail is told apart, because some mean "your token is wrong" and others "try later".
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

import httpx
import msgspec

from potluck.errors import ConfigurationError

DEFAULT_BASE_URL = "https://huggingface.co"
WHOAMI_PATH = "/api/whoami-v2"
MAX_BODY_BYTES = 256 * 1024
MAX_RETRY_AFTER_SECONDS = 3600.0
RETRY_SECONDS = 30.0  # when the service does not say

FailureKind = Literal["bad_token", "too_many", "server_error", "timeout", "unreachable", "not_json", "too_large"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOwner:
    """The user that a token belongs to."""

    user: str
    organisations: tuple[str, ...] = ()

    @property
    def person(self) -> str:
        """How this user is called in the run's records."""
        return f"hf:{self.user}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFailure:
    """Why it is not known whose token it is."""

    kind: FailureKind
    message: str
    retry_after_seconds: float | None = None  # None: trying again is no use


TokenAnswer = TokenOwner | TokenFailure


class _Organisation(msgspec.Struct):
    name: str


class _WhoAmI(msgspec.Struct):
    """The part of the answer that we read. `type` is `user` for a person's token, else `org` or `app`."""

    name: str
    type: str = "user"
    orgs: list[_Organisation] = []


_decoder = msgspec.json.Decoder(_WhoAmI)


def check_base_url(base_url: str) -> str:
    """The URL itself, or ConfigurationError. Plain http is for a service on this machine: it would show the token."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"{base_url!r} is not a URL: {error}") from error
    loopback = url.host in ("127.0.0.1", "::1", "localhost")
    if not url.host or not (url.scheme == "https" or (url.scheme == "http" and loopback)):
        raise ConfigurationError(f"{base_url!r} cannot be asked about tokens: it must start with https://")
    return base_url.rstrip("/")


async def whoami(token: str, *, base_url: str = DEFAULT_BASE_URL, timeout_seconds: float = 10.0) -> TokenAnswer:
    """Ask the service whose token it is; answers within `timeout_seconds`, whatever the service does."""
    if not token.isascii() or not token.isprintable() or " " in token:  # it could not stand in a header
        return _bad_token()
    try:
        async with asyncio.timeout(timeout_seconds):
            return await _ask(token, base_url.rstrip("/") + WHOAMI_PATH, timeout_seconds)
    except (TimeoutError, httpx.TimeoutException):
        return _later("timeout", f"Hugging Face did not answer within {timeout_seconds:g} s")
    except httpx.HTTPError as error:
        # Only the kind: the text of an error may quote what was sent.
        return _later("unreachable", f"Hugging Face cannot be reached from the hub ({type(error).__name__})")


async def _ask(token: str, url: str, timeout_seconds: float) -> TokenAnswer:
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
    # No redirects: the token goes to the address that was configured. A proxy from the environment may carry it only
    # where it cannot read it.
    encrypted = url.startswith("https:")
    async with (
        httpx.AsyncClient(timeout=timeout_seconds, follow_redirects=False, trust_env=encrypted) as client,
        client.stream("GET", url, headers=headers) as response,
    ):
        if response.status_code in (401, 403):
            return _bad_token()
        if response.status_code == 429:
            seconds = _retry_after(response.headers.get("retry-after", ""))
            return _later("too_many", "Hugging Face answers no more questions for a while", seconds)
        if response.status_code != 200:
            return _later("server_error", f"Hugging Face answered with status {response.status_code}")
        body = await _read_body(response)
    if body is None:
        return _later("too_large", f"Hugging Face answered with more than {MAX_BODY_BYTES} bytes")
    return _read_owner(body)


async def _read_body(response: httpx.Response) -> bytes | None:
    """The body, or None as soon as it is too large."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


def _read_owner(body: bytes) -> TokenAnswer:
    try:
        answer = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _later("not_json", "Hugging Face answered with something that is not a user")
    if answer.type != "user" or not answer.name:
        return TokenFailure(kind="bad_token", message="the token is not a person's: use a token of your own account")
    return TokenOwner(user=answer.name, organisations=tuple(organisation.name for organisation in answer.orgs))


def _retry_after(header: str) -> float:
    """Seconds to wait as the service asks, within reason. The form with a date is rare and treated as not given."""
    if header.isascii() and header.isdigit() and len(header) < 10:
        return min(float(header), MAX_RETRY_AFTER_SECONDS)
    return RETRY_SECONDS


def _bad_token() -> TokenFailure:
    return TokenFailure(
        kind="bad_token",
        message="Hugging Face does not accept the token: check that it was copied whole and was not revoked",
    )


def _later(kind: FailureKind, what: str, seconds: float = RETRY_SECONDS) -> TokenFailure:
    message = f"{what}; try again in {seconds:.0f} s, or join with an invite"
    return TokenFailure(kind=kind, message=message, retry_after_seconds=seconds)
