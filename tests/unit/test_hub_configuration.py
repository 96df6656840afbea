from __future__ import annotations

import re
from pathlib import Path

import pytest

from potluck.errors import ConfigurationError
from potluck.hub.keys import HubKeys
from potluck.hub.server.certificate import HubCertificates
from potluck.hub.server.configuration import (
    ACCOUNT,
    MAX_PAYLOAD_BYTES,
    ClusterConfig,
    HubConfig,
    HubPorts,
    host_port,
    render,
    render_accounts,
)

KEYS = HubKeys.create()
PORTS = HubPorts(client=4222, monitoring=8222, websocket=8443, cluster=6222)
CERTIFICATES = HubCertificates(ca_pem="-", chain_file=Path("/hub/tls/server.pem"), ca_file=Path("/hub/tls/ca.pem"))


def config(**changes) -> HubConfig:
    return HubConfig(**{"folder": Path("/hub"), "run": "my-run", **changes})


def section(text: str, name: str) -> str:
    """One top-level block of the configuration."""
    found = re.search(rf"^{name} \{{\n(.*?)^\}}$", text, re.MULTILINE | re.DOTALL)
    assert found, f"no {name} in\n{text}"
    return found.group(1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run": "My Run"}, "cannot name a run"),
        ({"host": "not a host"}, "neither a host name nor an IP address"),
        ({"advertised_hosts": ("hub.example.org", "tls://hub")}, "neither a host name"),
        ({"advertised_hosts": ("-",)}, "neither a host name"),
        ({"port": 65536}, "port is 65536"),
        ({"port": -1}, "port is -1"),
        ({"websocket_port": 70000}, "websocket_port is 70000"),
        ({"port": 4222, "websocket_port": 4222}, "both 4222"),
        ({"max_connections": 3}, "max_connections is 3"),
        ({"max_subscriptions": 0}, "max_subscriptions is 0"),
        ({"max_payload_bytes": 1024 * 1024}, "relay packets fit"),
        ({"max_payload_bytes": 64 * 1024 * 1024}, "at most"),
        ({"max_pending_bytes": MAX_PAYLOAD_BYTES}, "at least four messages"),
        ({"max_disk_bytes": 0}, "max_disk_bytes is 0"),
        ({"max_memory_bytes": -5}, "max_memory_bytes is -5"),
        ({"tls": False, "cluster": ClusterConfig(name="c", server_name="s", routes=("a:1",))}, "a cluster needs tls"),
    ],
)
def test_wrong_input_is_named_at_once(changes: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "two words"}, "cannot name a cluster"),
        ({"server_name": ""}, "cannot name a server"),
        ({"port": 99999}, "cluster.port is 99999"),
        ({"routes": ()}, "at least one other"),
        ({"routes": ("hub2.example.org",)}, "no route"),
        ({"routes": ("hub2:0",)}, "no route"),
        ({"routes": ("hub2:١٢",)}, "no route"),
        ({"routes": ("a b:6222",)}, "neither a host name"),
    ],
)
def test_wrong_cluster_input_is_named_at_once(changes: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ClusterConfig(**{"name": "c", "server_name": "s", "routes": ("a:1",), **changes})


def test_a_relative_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config(folder=Path("hub")).folder == tmp_path / "hub"


def test_access_is_the_guards_alone() -> None:
    text = render_accounts(KEYS)
    assert text in render(config(), KEYS, CERTIFICATES, PORTS)
    assert f"issuer: {KEYS.account_public}" in text
    assert f"account: {ACCOUNT}" in text
    assert f"auth_users: [ {KEYS.guard_public}, {KEYS.system_public}, {KEYS.queues_public} ]" in text
    assert "system_account: SYS" in text
    for open_door in ("no_auth_user", "token:", "password", KEYS.organiser_public):
        assert open_door not in text


def test_no_secret_is_written() -> None:
    text = render(config(), KEYS, CERTIFICATES, PORTS)
    for seed in (KEYS.account_seed, KEYS.guard_seed, KEYS.system_seed, KEYS.organiser_seed):
        assert seed.decode() not in text


def test_monitoring_is_on_loopback_whatever_the_host() -> None:
    text = render(config(host="0.0.0.0"), KEYS, CERTIFICATES, PORTS)
    assert re.findall(r"^.*8222.*$", text, re.MULTILINE) == ['http: "127.0.0.1:8222"']
    assert 'listen: "0.0.0.0:4222"' in text


def test_every_listener_has_tls() -> None:
    cluster = ClusterConfig(name="c", server_name="s1", routes=("hub2.example.org:6222", "[2001:db8::1]:6222"))
    text = render(config(cluster=cluster, advertised_hosts=("hub1.example.org",)), KEYS, CERTIFICATES, PORTS)
    assert 'cert_file: "/hub/tls/server.pem"' in section(text, "tls")
    websocket, routes = section(text, "websocket"), section(text, "cluster")
    assert "tls {" in websocket
    assert "compression: false" in websocket
    assert "verify: true" in routes
    assert 'ca_file: "/hub/tls/ca.pem"' in routes
    assert 'routes: [ "nats-route://hub2.example.org:6222", "nats-route://[2001:db8::1]:6222" ]' in routes
    assert "no_tls" not in text
    assert 'client_advertise: "hub1.example.org:4222"' in text
    assert 'advertise: "hub1.example.org:8443"' in websocket
    assert 'server_name: "s1"' in text


def test_a_plain_hub_has_no_tls_anywhere() -> None:
    text = render(config(tls=False), KEYS, None, PORTS)
    assert "tls {" not in text
    assert "no_tls: true" in section(text, "websocket")


def test_what_is_off_is_not_there() -> None:
    text = render(config(websocket_port=None), KEYS, CERTIFICATES, HubPorts(client=1, monitoring=2))
    assert "websocket {" not in text
    assert "cluster {" not in text


def test_certificates_and_tls_go_together() -> None:
    with pytest.raises(ConfigurationError, match="needs certificates"):
        render(config(), KEYS, None, PORTS)
    with pytest.raises(ConfigurationError, match="no use"):
        render(config(tls=False), KEYS, CERTIFICATES, PORTS)


def test_confirmed_writes_are_on_disk_unless_told_otherwise() -> None:
    assert "sync_interval: always" in section(render(config(), KEYS, CERTIFICATES, PORTS), "jetstream")
    text = render(config(sync_always=False), KEYS, CERTIFICATES, PORTS)
    assert 'sync_interval: "2m"' in section(text, "jetstream")  # unquoted, 2m would be two million


def test_odd_paths_are_quoted_and_impossible_ones_refused() -> None:
    text = render(config(folder=Path('/a "b" \\ c')), KEYS, CERTIFICATES, PORTS)
    assert r'"/a \"b\" \\ c/jetstream"' in text
    with pytest.raises(ConfigurationError, match="control character"):
        render(config(folder=Path("/a\nb")), KEYS, CERTIFICATES, PORTS)


def test_ipv6_hosts_get_brackets() -> None:
    assert host_port("::1", 1) == "[::1]:1"
    assert host_port("hub", 1) == "hub:1"
    assert 'listen: "[::]:4222"' in render(config(host="::"), KEYS, CERTIFICATES, PORTS)
