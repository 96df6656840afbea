"""A local service that answers `whoami` as Hugging Face does, on its good and its bad days."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

USERS = {
    "hf_alice": {"type": "user", "name": "alice", "orgs": []},
    "hf_bob": {"type": "user", "name": "bob", "orgs": [{"name": "bakers", "roleInOrg": "read"}]},
    "hf_carol": {"type": "user", "name": "carol", "orgs": [{"name": "brewers"}]},
}


class HuggingFaceLike:
    """Knows three users; a token that names a status gets that status; `hf_slow` gets no answer at all."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._end = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if ": " in line)
        token = lines.get("authorization", "").removeprefix("bearer ")
        self.asked.append(token)
        if token == "hf_slow":
            await self._end.wait()
        writer.write(self._answer(token))
        try:
            await writer.drain()
        except ConnectionError:  # it was not waited for
            pass
        finally:
            writer.close()

    def _answer(self, token: str) -> bytes:
        if token in USERS:
            return _response("200 OK", json.dumps(USERS[token]).encode())
        if token == "hf_429":
            return _response("429 Too Many Requests", b"{}", "Retry-After: 21\r\n")
        if token == "hf_500":
            return _response("500 Internal Server Error", b"<html>sorry</html>")
        return _response("401 Unauthorized", b'{"error":"Invalid credentials in Authorization header"}')

    def stop(self) -> None:
        self._end.set()


def _response(status: str, body: bytes, headers: str = "") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Connection: close\r\n{headers}\r\n"
    ).encode() + body


@asynccontextmanager
async def huggingface_like() -> AsyncIterator[tuple[HuggingFaceLike, str]]:
    """The service and its address."""
    service = HuggingFaceLike()
    server = await asyncio.start_server(service.handle, "127.0.0.1", 0)
    try:
        yield service, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        service.stop()
        server.close()
        await server.wait_closed()
