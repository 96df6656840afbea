"""Asking whose token it is, against a local service that behaves like Hugging Face and like its bad days."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from potluck.errors import ConfigurationError
from potluck.hub.guard.huggingface import MAX_BODY_BYTES, TokenFailure, TokenOwner, check_base_url, whoami

ALICE = {"type": "user", "name": "alice", "orgs": [{"name": "bakers", "roleInOrg": "admin"}], "isPro": False}


class Service:
    """Answers one way, and remembers what it was asked."""

    def __init__(self, status: str, body: bytes, headers: str = "") -> None:
        self.status, self.body, self.headers = status, body, headers
        self.requests: list[str] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
        head = f"HTTP/1.1 {self.status}\r\nContent-Length: {len(self.body)}\r\nConnection: close\r\n{self.headers}\r\n"
        try:
            writer.write(head.encode() + self.body)
            await writer.drain()
        except ConnectionError:  # the client had enough
            pass
        finally:
            writer.close()


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]


@asynccontextmanager
async def serving(handle: Handler) -> AsyncIterator[str]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0)  # type: ignore[arg-type]
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


async def ask(service: Service, token: str = "hf_token") -> TokenOwner | TokenFailure:
    async with serving(service.handle) as url:
        return await whoami(token, base_url=url, timeout_seconds=20)


async def test_a_user_and_the_organisations():
    service = Service("200 OK", json.dumps(ALICE).encode())
    answer = await ask(service)
    assert answer == TokenOwner(user="alice", organisations=("bakers",))
    assert answer.person == "hf:alice"
    assert service.requests[0].startswith("GET /api/whoami-v2 ")
    assert "authorization: bearer hf_token" in service.requests[0].lower()


async def test_an_organisations_token_is_nobodys():
    answer = await ask(Service("200 OK", json.dumps({**ALICE, "type": "org"}).encode()))
    assert isinstance(answer, TokenFailure)
    assert answer.kind == "bad_token"


@pytest.mark.parametrize(
    ("status", "headers", "kind", "retry_after"),
    [
        ("401 Unauthorized", "", "bad_token", None),
        ("403 Forbidden", "", "bad_token", None),
        ("429 Too Many Requests", "Retry-After: 17\r\n", "too_many", 17.0),
        ("429 Too Many Requests", "Retry-After: 99999999\r\n", "too_many", 3600.0),
        ("429 Too Many Requests", "Retry-After: Wed, 21 Oct 2026 07:28:00 GMT\r\n", "too_many", 30.0),
        ("429 Too Many Requests", "", "too_many", 30.0),
        ("500 Internal Server Error", "", "server_error", 30.0),
        ("302 Found", "Location: http://127.0.0.1:1/steal\r\n", "server_error", 30.0),
    ],
)
async def test_statuses(status: str, headers: str, kind: str, retry_after: float | None):
    answer = await ask(Service(status, b"{}", headers))
    assert isinstance(answer, TokenFailure)
    assert (answer.kind, answer.retry_after_seconds) == (kind, retry_after)
    assert "hf_token" not in answer.message


@pytest.mark.parametrize("body", [b"<html>busy</html>", b"[]", b'{"name": 7}', b'{"orgs": []}', b"\xff\xfe", b""])
async def test_not_a_user(body: bytes):
    answer = await ask(Service("200 OK", body))
    assert isinstance(answer, TokenFailure)
    assert answer.kind == "not_json"


async def test_too_large_a_body():
    answer = await ask(Service("200 OK", b" " * (MAX_BODY_BYTES + 1)))
    assert isinstance(answer, TokenFailure)
    assert answer.kind == "too_large"


async def test_a_service_that_does_not_answer():
    asked, done = asyncio.Event(), asyncio.Event()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await done.wait()
        writer.close()

    async with serving(never) as url:
        answer = await whoami("hf_token", base_url=url, timeout_seconds=0.2)
        assert asked.is_set()
        done.set()
    assert isinstance(answer, TokenFailure)
    assert answer.kind == "timeout"


async def test_a_service_that_answers_drop_by_drop():
    done = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not done.is_set():  # each byte is in time, the whole never comes
            writer.write(b" ")
            await asyncio.wait({asyncio.ensure_future(done.wait())}, timeout=0.02)
        writer.close()

    async with serving(slow) as url:
        answer = await whoami("hf_token", base_url=url, timeout_seconds=0.3)
        done.set()
    assert isinstance(answer, TokenFailure)
    assert answer.kind == "timeout"


async def test_a_service_that_is_not_there():
    async with serving(Service("200 OK", b"").handle) as url:
        pass
    answer = await whoami("hf_token", base_url=url, timeout_seconds=20)
    assert isinstance(answer, TokenFailure)
    assert answer.kind == "unreachable"
    assert answer.retry_after_seconds


@pytest.mark.parametrize("token", ["with space", "line\r\nX-Evil: 1", "ünïcode", "tab\t"])
async def test_a_token_that_could_not_stand_in_a_header_is_not_sent(token: str):
    service = Service("200 OK", json.dumps(ALICE).encode())
    answer = await ask(service, token)
    assert isinstance(answer, TokenFailure)
    assert answer.kind == "bad_token"
    assert service.requests == []


@pytest.mark.parametrize("url", ["http://huggingface.co", "ftp://x", "huggingface.co", "https://", ""])
def test_addresses_that_would_show_the_token(url: str):
    with pytest.raises(ConfigurationError):
        check_base_url(url)


def test_addresses_that_are_fine():
    assert check_base_url("https://huggingface.co/") == "https://huggingface.co"
    assert check_base_url("http://127.0.0.1:8000") == "http://127.0.0.1:8000"
