"""A first look at a hub before anything of it is trusted: does one answer there, and which certificates does it show?

By TCP a NATS server sends one line in the clear, INFO and JSON, and then both sides go on in TLS. By WebSocket it is
TLS from the first byte, then HTTP. Either way we leave as soon as we know; nothing of ours has been sent by then.
"""

from __future__ import annotations

import _ssl
import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from potluck.errors import CertificateError, HubUnavailableError
from potluck.hub.bulk.websocket import new_key, upgrade_request
from potluck.hub.server.configuration import host_port

_GOODBYE_SECONDS = 1.0


class _Info(msgspec.Struct):
    """What we read of a NATS server's first line."""

    server_id: str
    tls_required: bool = False
    tls_available: bool = False


def unverified_context() -> ssl.SSLContext:
    """Takes any certificate: only for finding out which one is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


async def look_by_tcp(host: str, port: int, context: ssl.SSLContext | None) -> list[bytes]:
    """The certificates (DER) that the NATS server there shows; none for a plain one, which needs no context.

    HubUnavailableError says why there is no hub; CertificateError that it cannot be trusted. Bound it with a timeout.
    """
    async with _connected(host, port, None) as (reader, writer):
        info = await _read_info(reader, host_port(host, port))
        if context is None:
            if info.tls_required:
                raise CertificateError(
                    "the link says that the hub speaks plain, but the hub asks for TLS: "
                    "ask the organiser for a new link"
                )
            return []
        if not (info.tls_required or info.tls_available):
            raise CertificateError(
                f"the hub at {host_port(host, port)} offers no TLS, though the link names its certificate: somebody "
                "may be in between, or the hub was set up anew. Ask the organiser for a new link"
            )
        await writer.start_tls(context, server_hostname=host)
        return certificate_chain(writer.get_extra_info("ssl_object"))


async def look_by_websocket(host: str, port: int, context: ssl.SSLContext | None) -> list[bytes]:
    """The same on the WebSocket port."""
    async with _connected(host, port, context) as (reader, writer):
        writer.write(upgrade_request(host_port(host, port), new_key()))
        await writer.drain()
        status = await _read_line(reader, host_port(host, port))
        if not status.startswith(b"HTTP/1.1 101"):
            raise _not_a_hub(host_port(host, port))
        return certificate_chain(writer.get_extra_info("ssl_object")) if context is not None else []


def certificate_chain(connection: Any) -> list[bytes]:
    """All certificates that the other side of a TLS connection showed, in DER, checked or not.

    Python 3.13 made this public. Before that the same method was there, one level down and with a type of its own.
    """
    if hasattr(connection, "get_unverified_chain"):
        public: list[bytes] = connection.get_unverified_chain() or []
        return public
    private = connection._sslobj.get_unverified_chain() or []
    return [certificate.public_bytes(_ssl.ENCODING_DER) for certificate in private]


@contextlib.asynccontextmanager
async def _connected(
    host: str, port: int, context: ssl.SSLContext | None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection for the length of the block. What the network does in there surfaces as one of our errors."""
    where = host_port(host, port)
    try:
        reader, writer = await asyncio.open_connection(
            host, port, ssl=context, server_hostname=host if context is not None else None
        )
        try:
            yield reader, writer
        finally:
            # Not a polite goodbye: one in TLS waits for the other side's answer, and we owe a stranger no patience.
            writer.transport.abort()
            with contextlib.suppress(OSError):
                async with asyncio.timeout(_GOODBYE_SECONDS):
                    await writer.wait_closed()
    except ssl.SSLCertVerificationError as error:
        raise CertificateError(
            f"the certificate of the hub at {where} is not accepted ({error.verify_message}): somebody may be in "
            "between, or this machine's clock is wrong by years. Check the clock, then ask the organiser for a new link"
        ) from error
    except ssl.SSLError as error:
        raise HubUnavailableError(
            f"what answers at {where} does not speak TLS as a hub does ({error.reason}): check the port"
        ) from error
    except OSError as error:
        raise HubUnavailableError(_explain(where, host, error)) from error


def _explain(where: str, host: str, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"there is no host called {host} ({error.strerror}): check the link, and that you are online"
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens at {where}: the hub is down, or its port has changed"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return f"what answers at {where} hung up on us: it is not a hub, or a firewall is in between"
    if isinstance(error, TimeoutError):
        return f"{where} does not answer: the hub is down, or a firewall is in between"
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return f"there is no way from here to {where}: check that you are online"
    return f"cannot connect to {where}: {error.strerror or error}"


async def _read_info(reader: asyncio.StreamReader, where: str) -> _Info:
    line = await _read_line(reader, where)
    if not line.startswith(b"INFO "):
        raise _not_a_hub(where)
    try:
        return msgspec.json.decode(line.removeprefix(b"INFO "), type=_Info)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _not_a_hub(where) from None


async def _read_line(reader: asyncio.StreamReader, where: str) -> bytes:
    """One line, within the reader's limit of 64 KiB."""
    try:
        return await reader.readuntil(b"\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        raise _not_a_hub(where) from None


def _not_a_hub(where: str) -> HubUnavailableError:
    return HubUnavailableError(f"what answers at {where} is not a hub: check host and port of the link")
