"""What a hub is made of, and the nats-server configuration that follows from it.

`HubConfig` is what a person can choose; `render` turns it into the server's own language. `render_accounts` gives the
part about access alone, for an administrator who adds a run to a NATS cluster that is already there.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from potluck.errors import ConfigurationError
from potluck.hub.keys import HubKeys
from potluck.hub.queues import FLEET_ACCOUNT, QUEUES_ACCOUNT, account_exports, account_imports
from potluck.hub.server.certificate import HubCertificates
from potluck.hub.subjects import check_run_name

ACCOUNT = "RUN"
SYSTEM_ACCOUNT = "SYS"

MIB = 1024 * 1024
# A relay packet carries up to 1 MiB of payload; its own header, and the NATS headers, need a little room beside it.
MAX_RELAY_PAYLOAD_BYTES = MIB
MAX_PAYLOAD_BYTES = MAX_RELAY_PAYLOAD_BYTES + 64 * 1024
MAX_QUEUE_BYTES = 8192 * MIB

# A stranger is asked for credentials, and the guard for its verdict, within this time.
AUTHORIZATION_SECONDS = 5
# A dead connection is found after this × (unanswered + 1). A live peer is not disturbed: its beacons count as life.
# Peers get more time than the guard gives them (`PresenceConfig.busy_seconds`): a busy process answers nothing.
PING_SECONDS = 5
PEERS_PINGS_OUTSTANDING = 20
HUBS_PINGS_OUTSTANDING = 2
# How long one flush to a member may take before it is cut off. The flush can be as large as what is pending for it, so
# this also bounds how slow a line may be: 16 MiB of relay packets in 30 s need 0.6 MB/s.
WRITE_DEADLINE_SECONDS = 30

_HOST_NAME = re.compile(
    r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*", re.IGNORECASE
)
_SERVER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """This hub's place in a cluster. All hubs of a cluster have copies of the same `identity` folder."""

    name: str
    """The same on all hubs of the cluster."""

    server_name: str
    """This hub's own; it must not change, since replicas belong to it."""

    routes: tuple[str, ...]
    """HOST:PORT of all the cluster's hubs; itself may be among them. A hub checks that the one it reaches is certified
    for that host, so each names it in its `advertised_hosts`."""

    port: int = 0
    """Where the other hubs connect; 0 picks a free one and remembers it."""

    @classmethod
    def of_list(cls, name: str, hubs: str, place: int) -> ClusterConfig:
        """This hub's place, counted from 1, in a list of all: HOST:PORT,HOST:PORT,HOST:PORT."""
        routes = tuple(hub.strip() for hub in hubs.split(","))
        if len(routes) < 3 or len(set(routes)) < len(routes) or not 1 <= place <= len(routes):
            raise ConfigurationError(
                f"{hubs!r} with place {place}: list at least three different hubs as HOST:PORT,HOST:PORT,HOST:PORT, "
                "and say which of them this machine is, counted from 1"
            )
        port = routes[place - 1].rpartition(":")[2]
        return cls(name=name, server_name=f"hub-{place}", routes=routes, port=int(port) if port.isdigit() else 0)

    def __post_init__(self) -> None:
        for what, name in (("cluster", self.name), ("server", self.server_name)):
            if not _SERVER_NAME.fullmatch(name):
                raise ConfigurationError(f"{name!r} cannot name a {what}: use 1 to 64 letters, digits, - and _")
        check_port("cluster.port", self.port)
        if not self.routes:
            raise ConfigurationError(
                "a hub in a cluster needs a route to at least one other, as in hub2.example.org:6222"
            )
        for route in self.routes:
            host, separator, port = route.rpartition(":")
            if not separator or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
                raise ConfigurationError(f"{route!r} is no route to another hub: write it as in hub2.example.org:6222")
            check_host(host.removeprefix("[").removesuffix("]"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig:
    """What a person can choose about an embedded hub."""

    folder: Path
    """Where keys, certificates, streams and logs live; a hub that is started again on it goes on where it was."""

    run: str
    """The run's name."""

    host: str = "0.0.0.0"
    """The address to listen on; 0.0.0.0 for all (IPv4), :: for all (IPv6 too)."""

    port: int = 0
    """The port for members; 0 picks a free one and remembers it in the folder, so that links stay valid."""

    websocket_port: int | None = 0
    """The same for WebSocket, for networks that let nothing else out; None turns it off."""

    advertised_hosts: tuple[str, ...] = ()
    """Names and addresses by which members reach the hub, the best first; the server's certificate names them."""

    max_connections: int = 4096
    """Connections at a time, over all members."""

    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    """The largest message; a relay packet must fit."""

    max_subscriptions: int = 1024
    """Subscriptions per connection."""

    max_pending_bytes: int = 64 * MIB
    """What may wait for one slow member before it is cut off. Relay credits keep it far below for honest members."""

    max_memory_bytes: int = 64 * MIB
    """For streams that are kept in memory."""

    max_disk_bytes: int = 4096 * MIB
    """For the run's own streams on disk."""

    max_queue_bytes: int = MAX_QUEUE_BYTES
    """For queues and topics on disk, beside that."""

    sync_always: bool = True
    """Whether each write to a stream reaches the disk before it is confirmed. Otherwise up to two minutes of confirmed
    commits are lost in a power failure. It costs 0.3 ms a write on a solid-state disk; bulk data never comes here."""

    tls: bool = True
    """False sends everything, invites included, in the clear: for tests and a trusted LAN only."""

    cluster: ClusterConfig | None = None
    """One of several hubs that replace each other; None for a hub on its own."""

    def __post_init__(self) -> None:
        # A server is recognised by the path on its command line (folderlock.py), so there must be one way to write it.
        object.__setattr__(self, "folder", Path(self.folder).expanduser().resolve())
        check_run_name(self.run)
        check_host(self.host)
        for host in self.advertised_hosts:
            check_host(host)
        check_port("port", self.port)
        if self.websocket_port is not None:
            check_port("websocket_port", self.websocket_port)
        if self.port and self.port == self.websocket_port:
            raise ConfigurationError(f"port and websocket_port are both {self.port}: choose two different ones")
        self._check_limits()
        if self.cluster is not None and not self.tls:
            raise ConfigurationError(
                "a cluster needs tls: its hubs know each other by certificate, and without it anybody could join them"
            )

    def _check_limits(self) -> None:
        for name in ("max_connections", "max_subscriptions"):
            if getattr(self, name) < 16:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: a run needs at least 16")
        for name in ("max_memory_bytes", "max_disk_bytes", "max_queue_bytes"):
            if getattr(self, name) < MIB:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: a run needs at least {MIB}")
        if not MAX_PAYLOAD_BYTES <= self.max_payload_bytes <= 8 * MIB:
            raise ConfigurationError(
                f"max_payload_bytes is {self.max_payload_bytes}: choose at least {MAX_PAYLOAD_BYTES}, so that relay "
                f"packets fit, and at most {8 * MIB}, so that one message cannot hold up the others"
            )
        if self.max_pending_bytes < 4 * self.max_payload_bytes:
            raise ConfigurationError(
                f"max_pending_bytes is {self.max_pending_bytes}: at least four messages must fit, that is "
                f"{4 * self.max_payload_bytes}"
            )

    @property
    def certified_hosts(self) -> tuple[str, ...]:
        """What the server's certificate names: where members reach it and where the other hubs do."""
        return (*self.advertised_hosts, self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPorts:
    """Where a hub listens, once the free ones are picked."""

    client: int
    monitoring: int  # on loopback only
    websocket: int | None = None
    cluster: int | None = None

    def __post_init__(self) -> None:
        for port in (self.client, self.monitoring, self.websocket, self.cluster):
            if port is not None and not 0 < port < 65536:
                raise ConfigurationError(f"{port} is not a port to listen on: it must be between 1 and 65535")


def server_name(config: HubConfig, keys: HubKeys) -> str:
    """How the server calls itself in its first line, by which we know that it is ours that answers."""
    if config.cluster is not None:
        return config.cluster.server_name
    return f"potluck-{config.run}-{keys.account_public[-8:]}"


def render(config: HubConfig, keys: HubKeys, certificates: HubCertificates | None, ports: HubPorts) -> str:
    """The text of a nats-server configuration file."""
    if config.tls != (certificates is not None):
        raise ConfigurationError("a hub with tls needs certificates, and one without has no use for them")
    sections = [
        _render_server(config, keys, ports),
        _render_limits(config),
        _render_jetstream(config),
        render_accounts(keys, config.max_queue_bytes),
    ]
    if certificates is not None:
        sections.append(_render_tls(certificates))
    if ports.websocket is not None:
        sections.append(_render_websocket(config, certificates, ports.websocket))
    if config.cluster is not None and certificates is not None and ports.cluster is not None:
        sections.append(_render_cluster(config, config.cluster, certificates, ports.cluster))
        if config.advertised_hosts:
            # Members learn the other hubs from the first one; tell them names that work from outside.
            sections.append(f"client_advertise: {_quote(host_port(config.advertised_hosts[0], ports.client))}\n")
    return "# Written by Potluck at each start: changes made here are lost.\n\n" + "\n".join(sections)


def render_accounts(keys: HubKeys, max_queue_bytes: int = MAX_QUEUE_BYTES) -> str:
    """The part about access: what the administrator of an existing NATS server adds to its configuration.

    Only the guard and the system user are known to the server. Everybody else is judged by the guard (auth callout),
    and refused while no guard answers. There is no user for those who name none.
    """
    return f"""\
accounts {{
  {ACCOUNT} {{
    jetstream: enabled
    users: [ {{ nkey: {keys.guard_public} }} ]
  }}
  {SYSTEM_ACCOUNT} {{
    users: [ {{ nkey: {keys.system_public} }} ]
  }}
  {QUEUES_ACCOUNT} {{
    jetstream: {{ max_file: {max_queue_bytes} }}
    users: [ {{ nkey: {keys.queues_public} }} ]
    exports: [
{account_exports()}    ]
  }}
  {FLEET_ACCOUNT} {{
    imports: [
{account_imports()}    ]
  }}
}}
system_account: {SYSTEM_ACCOUNT}
authorization {{
  timeout: {AUTHORIZATION_SECONDS}
  auth_callout {{
    issuer: {keys.account_public}
    account: {ACCOUNT}
    auth_users: [ {keys.guard_public}, {keys.system_public}, {keys.queues_public} ]
  }}
}}
"""


def _render_server(config: HubConfig, keys: HubKeys, ports: HubPorts) -> str:
    return f"""\
server_name: {_quote(server_name(config, keys))}
listen: {_quote(host_port(config.host, ports.client))}
http: "127.0.0.1:{ports.monitoring}"
log_file: {_quote(str(log_file(config.folder)))}
logfile_size_limit: {8 * MIB}
logfile_max_num: 3
"""


def _render_limits(config: HubConfig) -> str:
    return f"""\
max_connections: {config.max_connections}
max_subscriptions: {config.max_subscriptions}
max_payload: {config.max_payload_bytes}
max_pending: {config.max_pending_bytes}
write_deadline: "{WRITE_DEADLINE_SECONDS}s"
ping_interval: "{PING_SECONDS}s"
ping_max: {PEERS_PINGS_OUTSTANDING}
"""


def _render_jetstream(config: HubConfig) -> str:
    return f"""\
jetstream {{
  store_dir: {_quote(str(streams_folder(config.folder)))}
  max_memory_store: {config.max_memory_bytes}
  max_file_store: {config.max_disk_bytes + config.max_queue_bytes}
  sync_interval: {"always" if config.sync_always else '"2m"'}
}}
"""


def _render_tls(certificates: HubCertificates, *, indent: str = "", mutual: bool = False) -> str:
    chain_file = _quote(str(certificates.chain_file))
    lines = [
        "tls {",
        f"  cert_file: {chain_file}",
        f"  key_file: {chain_file}",
        '  min_version: "1.3"',
        "  timeout: 10  # seconds; a handshake over a bad line takes a few round trips",
    ]
    if mutual:
        lines += [f"  ca_file: {_quote(str(certificates.ca_file))}", "  verify: true"]
    return "".join(f"{indent}{line}\n" for line in [*lines, "}"])


def _render_websocket(config: HubConfig, certificates: HubCertificates | None, port: int) -> str:
    tls = _render_tls(certificates, indent="  ") if certificates is not None else "  no_tls: true\n"
    advertise = ""
    if config.cluster is not None and config.advertised_hosts:
        advertise = f"  advertise: {_quote(host_port(config.advertised_hosts[0], port))}\n"
    # Packets are encoded already: compressing them again costs time and gains nothing.
    return f"""\
websocket {{
  listen: {_quote(host_port(config.host, port))}
{advertise}\
  compression: false
  handshake_timeout: "10s"
{tls}}}
"""


def _render_cluster(config: HubConfig, cluster: ClusterConfig, certificates: HubCertificates, port: int) -> str:
    routes = ", ".join(_quote(f"nats-route://{route}") for route in cluster.routes)
    return f"""\
cluster {{
  name: {_quote(cluster.name)}
  listen: {_quote(host_port(config.host, port))}
  routes: [ {routes} ]
  ping_interval: "{PING_SECONDS}s"
  ping_max: {HUBS_PINGS_OUTSTANDING}
{_render_tls(certificates, indent="  ", mutual=True)}}}
"""


def log_file(folder: Path) -> Path:
    """Where the server writes what happens."""
    return folder / "log" / "nats-server.log"


def streams_folder(folder: Path) -> Path:
    """Where the streams live."""
    return folder / "jetstream"


def host_port(host: str, port: int) -> str:
    """HOST:PORT, with the brackets that IPv6 needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_host(host: str) -> str:
    """The host itself, or ConfigurationError when it is neither a name nor an address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not _HOST_NAME.fullmatch(host):
            raise ConfigurationError(
                f"{host!r} is neither a host name nor an IP address: write it as in hub.example.org, 192.0.2.7 or ::1"
            ) from None
    return host


def check_port(name: str, port: int) -> int:
    """The port itself, or ConfigurationError; 0 means that a free one is picked."""
    if not 0 <= port <= 65535:
        raise ConfigurationError(f"{name} is {port}: a port is between 1 and 65535, or 0 for any free one")
    return port


def _quote(text: str) -> str:
    """A string in the configuration's syntax."""
    if any(ord(character) < 32 for character in text):
        raise ConfigurationError(f"{text!r} cannot be part of the hub's configuration: it has a control character")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
