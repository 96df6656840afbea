"""A host and its folder."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from runhouse import PATIENCE_SECONDS, host_config, open_run, until_see

from potluck.errors import ConfigurationError, FatalError, HubUnavailableError, NotAdmittedError
from potluck.hub.joinlink import JoinLink, fetch_address
from potluck.hub.privatefiles import write_private
from potluck.hub.server.configuration import ClusterConfig
from potluck.hub.server.embedded import EmbeddedHub
from potluck.peer.identity import Identity
from potluck.run.host import Host, HostConfig
from potluck.run.hostrecord import HOST_FILE, HostRecord, read_record, write_record
from potluck.run.peer import Peer, PeerConfig
from potluck.testing.polling import poll_until
from potluck.testing.ports import unused_tcp_port


async def test_a_host_is_the_same_after_a_restart(tmp_path: Path):
    async with open_run(tmp_path) as house:
        link, own = house.host.link, house.own_peer.peer_id
        record = house.host.record
        assert read_record(house.folder) == record
        assert link.invite == record.invite != ""
        assert record.invite not in record.link
        await house.restart()
        assert house.host.link == link
        assert house.own_peer.peer_id == own
        organiser = await house.organiser()
        assert len(await organiser.list_invites()) == 2  # the volunteers', and the host's own


async def test_a_revoked_invite_is_not_handed_out_again(tmp_path: Path):
    async with open_run(tmp_path) as house:
        organiser = await house.organiser()
        [volunteers] = [invite for invite in await organiser.list_invites() if invite.note == "volunteers"]
        await organiser.revoke_invite(volunteers.id)
        await house.restart()
        assert house.host.link.invite == ""
        with pytest.raises(NotAdmittedError, match="not let you in yet"):
            await house.join("Eve")
        again = await house.organiser()
        assert sum(invite.note == "volunteers" for invite in await again.list_invites()) == 1


async def test_a_new_invite_is_made_when_the_hub_has_forgotten_the_old(tmp_path: Path):
    async with open_run(tmp_path) as house:
        record = house.host.record

    write_record(
        tmp_path / "run", HostRecord(run=record.run, servers=(), ca_pem="", link=record.link, invite="lost" * 5)
    )
    async with open_run(tmp_path) as house:
        assert house.host.link.invite not in ("", "lost" * 5)
        ada = await house.join("Ada")
        await until_see(ada, house.own_peer, wanted={"Ada", "host"})


async def test_a_folder_belongs_to_one_run_and_one_host(tmp_path: Path):
    async with open_run(tmp_path) as house:
        with pytest.raises(ConfigurationError, match="another hub is running"):
            await Host(host_config(house.folder)).start()
        assert house.own_peer.session.hub.is_connected
    with pytest.raises(ConfigurationError, match="belongs to the run bakery"):
        await Host(host_config(tmp_path / "run", run="brewery")).start()


async def test_a_damaged_record_is_told(tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    write_private(folder / HOST_FILE, '{"run": 7}')
    with pytest.raises(ConfigurationError, match=r"host\.json cannot be read"):
        await Host(host_config(folder)).start()
    assert read_record(tmp_path) is None


async def test_a_hub_that_dies_is_started_again_and_in_the_end_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("potluck.hub.server.restarts.MAX_RESTARTS", 1)
    async with open_run(tmp_path) as house:
        hub = house.host._hub
        assert hub is not None
        living = asyncio.create_task(house.host.unless_failed(asyncio.Event().wait()))
        first, address = hub.pid, hub.address()
        os.kill(first, signal.SIGKILL)
        await poll_until(lambda: house.host.troubles.get("hub server"), PATIENCE_SECONDS, "another server")
        assert hub.pid != first
        assert hub.address() == address
        hears = house.host._guard._hears_hub
        await poll_until(lambda: hears() and house.own_peer.session.hub.is_connected, PATIENCE_SECONDS, "all are back")
        os.kill(hub.pid, signal.SIGKILL)
        with pytest.raises(FatalError, match=r"(?s)fails again and again.*code -9"):
            async with asyncio.timeout(PATIENCE_SECONDS):
                await living


async def test_a_host_may_have_no_peer_of_its_own(tmp_path: Path):
    host = Host(host_config(tmp_path / "run", peer=None))
    try:
        await host.start()
        assert host.peer is None
        assert host.address.servers[0].startswith("tls://127.0.0.1:")
    finally:
        await host.stop()
        await host.stop()


async def test_a_start_that_fails_releases_everything(tmp_path: Path):
    config = host_config(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=str(port)):
            await Host(replace(config, hub=replace(config.hub, port=port))).start()
    assert config.peer is not None
    with pytest.raises(ConfigurationError, match="cannot listen"):
        await Host(replace(config, peer=replace(config.peer, listen=("tcp://192.0.2.99:4000",)))).start()
    host = Host(config)
    with pytest.raises(RuntimeError, match="not started"):
        _ = host.link
    await host.start()  # nothing is in its way
    await host.stop()


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 0.6])
async def test_a_start_that_is_broken_off_releases_everything(tmp_path: Path, seconds: float):
    host = Host(host_config(tmp_path / "run"))

    async def start() -> None:
        async with asyncio.timeout(seconds):
            await host.start()
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await start()
    await host.stop()


async def test_an_existing_server_is_looked_for_first(tmp_path: Path):
    config = host_config(tmp_path / "run")
    with pytest.raises(ConfigurationError, match="tls://HOST:PORT"):
        replace(config, hub_url="127.0.0.1:4222")
    with pytest.raises(ConfigurationError, match="--hub-ca"):
        replace(config, hub_url="tls://127.0.0.1:4222")
    for url in ("nats://:4222", "nats://127.0.0.1:port", "nats://127.0.0.1:99999"):
        with pytest.raises(ConfigurationError):
            await Host(replace(config, hub_url=url, hub=replace(config.hub, advertised_hosts=()))).start()
    not_one = tmp_path / "ca.pem"
    not_one.write_text("no certificate")
    for path, words in ((tmp_path / "none.pem", "cannot be read"), (not_one, "not a certificate")):
        with pytest.raises(ConfigurationError, match=words):
            await Host(replace(config, hub_url="tls://127.0.0.1:4222", hub_ca=path)).start()
    with pytest.raises(ConfigurationError, match="tls://HOST:PORT,HOST:PORT"):
        replace(config, hub_url="nats://127.0.0.1:4222,tls://127.0.0.1:4223")
    ports = [unused_tcp_port(), unused_tcp_port()]
    with pytest.raises(HubUnavailableError, match=f"cannot be reached.*{ports[0]}.*{ports[1]}"):
        await Host(replace(config, hub_url=f"nats://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}")).start()


def cluster_config(folder: Path, number: int, ports: list[int]) -> HostConfig:
    config = host_config(folder, peer=None)
    routes = tuple(f"127.0.0.1:{port}" for port in ports)
    cluster = ClusterConfig(name="trio", server_name=f"hub-{number}", port=ports[number], routes=routes)
    return replace(
        config,
        hub=replace(config.hub, cluster=cluster, websocket_port=0 if number else None),
        guard=replace(config.guard, replicas=3),
    )


async def test_the_link_of_a_cluster_names_all_its_hubs_and_works_while_one_is_down(tmp_path: Path):
    ports = [unused_tcp_port() for _ in range(3)]
    folders = [tmp_path / f"hub-{number}" for number in range(3)]
    configs = [cluster_config(folder, number, ports) for number, folder in enumerate(folders)]
    first = EmbeddedHub(configs[0].hub)
    await first.start()  # it makes the identity that all have
    await first.stop()
    for folder in folders[1:]:
        shutil.copytree(folders[0] / "identity", folder / "identity")
    hosts = [Host(config) for config in configs]
    try:
        await asyncio.gather(*(host.start() for host in hosts))
        links = [host.link for host in hosts]
        clients = {urlsplit(host.address.servers[0]).port for host in hosts}
        for link, host in zip(links, hosts, strict=True):
            assert {place.port for place in link.places} == clients
            assert link.port == urlsplit(host.address.servers[0]).port
        await hosts[0].stop()
        address = await fetch_address(JoinLink.parse(str(links[0])), PATIENCE_SECONDS)
        assert links[0].port not in [urlsplit(server).port for server in address.servers[:1]]
        peer = Peer(address, links[0].run, Identity.temporary(), PeerConfig(invite=links[0].invite, client_mode=True))
        try:
            await peer.start()
            assert peer.peer_id in peer.session.roster
        finally:
            await peer.close()
    finally:
        for host in hosts:
            await host.stop()
