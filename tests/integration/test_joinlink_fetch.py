"""From a join link to an address that can be trusted, with real hubs and with what else may answer there."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import uvloop

from potluck.errors import CertificateError, ConfigurationError, HubUnavailableError
from potluck.hub.joinlink import HubPlace, JoinLink, fetch_address
from potluck.hub.server.certificate import prepare_certificates
from potluck.hub.server.configuration import HubConfig
from potluck.hub.server.embedded import EmbeddedHub
from potluck.testing.ports import unused_tcp_port

PATIENCE_SECONDS = 60.0
SECRET = "s" * 22
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def running(folder: Path, **changes) -> AsyncIterator[EmbeddedHub]:
    hub = EmbeddedHub(HubConfig(**{"folder": folder, "run": "my-run", "host": "127.0.0.1", **changes}))
    await hub.start()
    try:
        yield hub
    finally:
        await hub.stop()


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[EmbeddedHub]:
    async with running(tmp_path / "hub") as running_hub:
        yield running_hub


@asynccontextmanager
async def serving(serve: Serve, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Something of our own that listens."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (ConnectionError, ssl.SSLError):
            pass  # the joiner has left
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


@contextmanager
def silent() -> Iterator[int]:
    """Something that lets us connect and says nothing, as a firewall that swallows packets looks to us."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def link_to(port: int, **changes) -> JoinLink:
    return JoinLink(**{"host": "127.0.0.1", "port": port, "run": "my-run", "ca_hash": "a" * 32, **changes})


async def test_a_link_leads_to_a_trusted_address(hub: EmbeddedHub) -> None:
    link = JoinLink.parse(str(hub.join_link(SECRET)))
    assert link.invite == SECRET
    assert await fetch_address(link, PATIENCE_SECONDS) == hub.address()
    assert hub.address().servers == (
        f"tls://127.0.0.1:{hub.ports.client}",
        f"wss://127.0.0.1:{hub.ports.websocket}",
    )


async def test_a_name_works_as_well_as_an_address(hub: EmbeddedHub) -> None:
    link = hub.join_link(SECRET, host="localhost")
    assert (await fetch_address(link, PATIENCE_SECONDS)).servers[0] == f"tls://localhost:{hub.ports.client}"


async def test_a_link_without_websocket_gives_one_server(hub: EmbeddedHub) -> None:
    link = dataclasses.replace(hub.join_link(SECRET), websocket_port=None)
    assert (await fetch_address(link, PATIENCE_SECONDS)).servers == (f"tls://127.0.0.1:{hub.ports.client}",)


async def test_websocket_alone_if_wished(hub: EmbeddedHub) -> None:
    address = await fetch_address(hub.join_link(SECRET), PATIENCE_SECONDS, websocket_only=True)
    assert address.servers == (f"wss://127.0.0.1:{hub.ports.websocket}",)
    without = dataclasses.replace(hub.join_link(SECRET), websocket_port=None)
    with pytest.raises(ConfigurationError, match="names no WebSocket port"):
        await fetch_address(without, PATIENCE_SECONDS, websocket_only=True)


@pytest.fixture(scope="module")
def libuv() -> None:
    """The first loop of a process makes a pipe that libuv keeps for all later ones: no leak of the test's."""
    uvloop.new_event_loop().close()


@pytest.mark.usefixtures("libuv")
def test_it_works_on_uvloop(tmp_path: Path) -> None:
    async def fetch_both_ways() -> None:
        async with running(tmp_path / "hub") as hub:
            link = hub.join_link(SECRET)
            assert await fetch_address(link, PATIENCE_SECONDS) == hub.address()
            blocked = dataclasses.replace(link, port=unused_tcp_port())
            assert (await fetch_address(blocked, PATIENCE_SECONDS)).ca_pem == hub.ca_pem

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(fetch_both_ways())


async def test_a_link_still_works_after_a_restart_and_a_new_certificate(tmp_path: Path) -> None:
    async with running(tmp_path / "hub") as hub:
        link, ca_pem = hub.join_link(SECRET), hub.ca_pem
    async with running(tmp_path / "hub", advertised_hosts=("hub.example.org",)):
        assert (await fetch_address(link, PATIENCE_SECONDS)).ca_pem == ca_pem


# Ways in


async def test_websocket_is_the_way_where_tcp_is_refused(hub: EmbeddedHub) -> None:
    closed = unused_tcp_port()
    link = dataclasses.replace(hub.join_link(SECRET), port=closed)
    address = await fetch_address(link, PATIENCE_SECONDS)
    assert address.servers == (f"wss://127.0.0.1:{hub.ports.websocket}", f"tls://127.0.0.1:{closed}")
    assert address.ca_pem == hub.ca_pem


async def test_websocket_is_the_way_where_tcp_is_swallowed(hub: EmbeddedHub) -> None:
    with silent() as port:
        address = await fetch_address(dataclasses.replace(hub.join_link(SECRET), port=port), 6.0)
    assert address.servers == (f"wss://127.0.0.1:{hub.ports.websocket}", f"tls://127.0.0.1:{port}")


async def test_a_plain_hub_needs_a_link_that_says_so(tmp_path: Path) -> None:
    async with running(tmp_path / "hub", tls=False) as hub:
        link = JoinLink.parse(str(hub.join_link(SECRET)))
        assert "ca=none" in str(link)
        assert await fetch_address(link, PATIENCE_SECONDS) == hub.address()
        blocked = dataclasses.replace(link, port=unused_tcp_port())
        assert (await fetch_address(blocked, PATIENCE_SECONDS)).servers[0] == f"ws://127.0.0.1:{hub.ports.websocket}"
        pinned = dataclasses.replace(link, ca_hash="a" * 32)
        with pytest.raises(CertificateError, match="offers no TLS"):
            await fetch_address(pinned, PATIENCE_SECONDS)


async def test_a_plain_link_is_refused_by_a_hub_with_tls(hub: EmbeddedHub) -> None:
    with pytest.raises(CertificateError, match="says that the hub speaks plain"):
        await fetch_address(dataclasses.replace(hub.join_link(SECRET), ca_hash=""), PATIENCE_SECONDS)


# The wrong hub


async def test_another_hub_is_recognised(hub: EmbeddedHub) -> None:
    wrong = dataclasses.replace(hub.join_link(SECRET), ca_hash="a" * 32)
    with pytest.raises(CertificateError, match="Somebody may be in between, or the hub was set up anew"):
        await fetch_address(wrong, PATIENCE_SECONDS)
    by_websocket = dataclasses.replace(wrong, port=unused_tcp_port())
    with pytest.raises(CertificateError, match="Somebody may be in between"):
        await fetch_address(by_websocket, PATIENCE_SECONDS)


async def test_a_hub_that_was_set_up_anew_is_recognised(tmp_path: Path) -> None:
    async with running(tmp_path / "hub") as hub:
        link = hub.join_link(SECRET)
    shutil.rmtree(tmp_path / "hub" / "identity")
    async with running(tmp_path / "hub"):
        with pytest.raises(CertificateError, match="set up anew"):
            await fetch_address(link, PATIENCE_SECONDS)


async def test_a_copy_of_the_authority_is_not_enough(hub: EmbeddedHub, tmp_path: Path) -> None:
    """Whoever is in between can show the true authority's certificate, but has no certificate signed by it."""
    impostor = prepare_certificates(tmp_path / "impostor" / "identity", tmp_path / "impostor" / "tls", ())
    chain = impostor.chain_file.read_text().replace(impostor.ca_pem, hub.ca_pem)
    assert hub.ca_pem in chain
    impostor.chain_file.write_text(chain)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(impostor.chain_file)
    handshakes = 0

    async def pose_as_hub(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal handshakes
        writer.write(b'INFO {"server_id": "X", "tls_required": true}\r\n')
        await writer.drain()
        handshakes += 1
        await writer.start_tls(context)
        await reader.read()

    async with serving(pose_as_hub) as port:
        link = dataclasses.replace(hub.join_link(SECRET), port=port, websocket_port=None)
        with pytest.raises(CertificateError, match=r"is not accepted .*somebody may be in between"):
            await fetch_address(link, PATIENCE_SECONDS)
    assert handshakes == 2, "the chain was not looked at first"


# No hub


async def test_of_several_hosts_the_first_that_answers_is_taken(hub: EmbeddedHub) -> None:
    living = HubPlace(host="127.0.0.1", port=hub.ports.client, websocket_port=hub.ports.websocket)
    dead = unused_tcp_port()
    with silent() as swallowed:
        link = link_to(
            dead,
            ca_hash=hub.join_link().ca_hash,
            others=(HubPlace(host="127.0.0.1", port=swallowed), living),
        )
        address = await fetch_address(JoinLink.parse(str(link)), 10)
    assert address.servers == (
        f"tls://127.0.0.1:{hub.ports.client}",
        f"tls://127.0.0.1:{dead}",
        f"tls://127.0.0.1:{swallowed}",
        f"wss://127.0.0.1:{hub.ports.websocket}",
    )
    assert address.ca_pem == hub.ca_pem


async def test_a_stranger_at_one_of_several_hosts_does_no_harm_and_is_named_when_no_other_answers(
    hub: EmbeddedHub, tmp_path: Path
) -> None:
    async with running(tmp_path / "stranger", run="other-run") as stranger:
        ca_hash = hub.join_link().ca_hash
        living = HubPlace(host="127.0.0.1", port=hub.ports.client)
        address = await fetch_address(link_to(stranger.ports.client, ca_hash=ca_hash, others=(living,)), 60)
        assert address.servers[0] == f"tls://127.0.0.1:{hub.ports.client}"
        assert address.ca_pem == hub.ca_pem
        nobody = HubPlace(host="127.0.0.1", port=unused_tcp_port())
        with pytest.raises(CertificateError, match="is not the one that the link names"):
            await fetch_address(link_to(stranger.ports.client, ca_hash=ca_hash, others=(nobody,)), 60)


async def test_all_hosts_are_named_when_none_answers() -> None:
    ports = [unused_tcp_port() for _ in range(3)]
    others = tuple(HubPlace(host="127.0.0.1", port=port) for port in ports[1:])
    with pytest.raises(HubUnavailableError) as caught:
        await fetch_address(link_to(ports[0], others=others), 60)
    assert all(str(port) in str(caught.value) for port in ports)


async def test_nothing_listens() -> None:
    with pytest.raises(HubUnavailableError, match=r"my-run cannot be reached: nothing listens at 127\.0\.0\.1"):
        await fetch_address(link_to(unused_tcp_port()), PATIENCE_SECONDS)


async def test_both_ways_fail_and_both_are_named() -> None:
    tcp, websocket = unused_tcp_port(), unused_tcp_port()
    with pytest.raises(HubUnavailableError) as caught:
        await fetch_address(link_to(tcp, websocket_port=websocket), PATIENCE_SECONDS)
    assert f":{tcp}:" in str(caught.value)
    assert f":{websocket}:" in str(caught.value)


async def test_the_name_is_unknown() -> None:
    with pytest.raises(HubUnavailableError, match=r"no host called nowhere\.invalid"):
        await fetch_address(link_to(4222, host="nowhere.invalid"), PATIENCE_SECONDS)


async def test_nobody_answers_in_time() -> None:
    with silent() as port, pytest.raises(HubUnavailableError, match=r"did not answer within 0\.2 s"):
        await fetch_address(link_to(port), 0.2)


async def greet_like_ssh(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
    await reader.read()


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    return


async def talk_for_ever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


async def answer_nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b'INFO {"server_id": 7, "tls_required": [' + b"[" * 5000 + b"\r\n")
    await reader.read()


async def speak_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    await reader.read()


@pytest.mark.parametrize("serve", [greet_like_ssh, hang_up, talk_for_ever, answer_nonsense])
async def test_what_answers_is_not_a_hub(serve: Serve) -> None:
    async with serving(serve) as port:
        with pytest.raises(HubUnavailableError, match=r"is not a hub|hung up on us"):
            await fetch_address(link_to(port), PATIENCE_SECONDS)


async def test_what_answers_by_websocket_is_not_a_hub() -> None:
    async with serving(speak_http) as port:
        link = link_to(unused_tcp_port(), ca_hash="", websocket_port=port)
        with pytest.raises(HubUnavailableError, match="is not a hub"):
            await fetch_address(link, PATIENCE_SECONDS)
    async with serving(greet_like_ssh) as port:
        link = link_to(unused_tcp_port(), websocket_port=port)
        with pytest.raises(HubUnavailableError, match="does not speak TLS as a hub does"):
            await fetch_address(link, PATIENCE_SECONDS)


async def test_a_hub_that_breaks_off_the_handshake_is_an_error() -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id": "X", "tls_required": true}\r\n')
        await reader.read(1)

    async with serving(break_off) as port:
        with pytest.raises(HubUnavailableError, match=r"hung up on us|does not speak TLS"):
            await fetch_address(link_to(port), PATIENCE_SECONDS)


async def test_a_fetch_that_is_cancelled_ends_at_once() -> None:
    with silent() as port:
        task = asyncio.create_task(fetch_address(link_to(port), PATIENCE_SECONDS))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
