"""A bare nats-server on this machine, with a fixed list of users: for tests of the hub connection alone.

The real hub (hub/server/embedded.py) asks a guard which users to let in; this one has no guard, so that a connection
can be tested without. It can be killed, frozen, started again on the same ports, and told to throw a user out.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import nkeys

from potluck.hub.address import HubAddress
from potluck.hub.guard.permissions import Permissions
from potluck.hub.server.process import find_binary
from potluck.testing.ports import unused_tcp_port
from potluck.testing.processes import ManagedProcess

READY = "Server is ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainUser:
    """A user of the server; without permissions, everything is permitted."""

    seed: bytes
    peer: str
    permissions: Permissions | None = None

    @classmethod
    def make(cls, permissions: Permissions | None = None) -> PlainUser:
        """A user with a new key."""
        seed = bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
        return cls(seed=seed, peer=nkeys.from_seed(bytearray(seed)).public_key.decode(), permissions=permissions)

    def with_permissions(self, permissions: Permissions) -> PlainUser:
        """The same user with these permissions."""
        return PlainUser(seed=self.seed, peer=self.peer, permissions=permissions)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """What a server needs to speak TLS, and what a client needs to trust it."""

    certificate: Path
    key: Path
    ca_pem: str


class PlainHub:
    """One nats-server process. `start` it; use it as a context manager, so that it ends for sure."""

    def __init__(
        self,
        folder: Path,
        users: Sequence[PlainUser],
        *,
        tls: TlsFiles | None = None,
        name: str = "plain",
        cluster_port: int = 0,
        routes: Sequence[int] = (),
    ) -> None:
        """Keep its files in `folder`. With a `cluster_port` it is one server of a cluster, whose ports are `routes`."""
        self.name = name
        self.port = unused_tcp_port()
        self.websocket_port = unused_tcp_port()
        self._folder = folder
        self._users = list(users)
        self._tls = tls
        self._cluster_port = cluster_port
        self._routes = routes
        self._process: ManagedProcess | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def process(self) -> ManagedProcess:
        """The running server."""
        assert self._process is not None, "the plain hub has not been started"
        return self._process

    @property
    def url(self) -> str:
        """Where it listens for NATS."""
        return f"{'tls' if self._tls else 'nats'}://127.0.0.1:{self.port}"

    @property
    def websocket_url(self) -> str:
        """Where it listens for WebSocket."""
        return f"{'wss' if self._tls else 'ws'}://127.0.0.1:{self.websocket_port}"

    def address(self, *servers: str) -> HubAddress:
        """Its address, or that of the servers given."""
        return HubAddress(servers=servers or (self.url,), ca_pem=self._tls.ca_pem if self._tls else "")

    def start(self, *, wait: bool = True) -> None:
        """Start it, on the same ports and with the same data as before."""
        self._configuration_file.write_text(self._configuration())
        if self._process is not None:
            self._process.close()
        self._process = ManagedProcess([find_binary(), "-c", self._configuration_file], name=f"nats-server {self.name}")
        if wait:
            self._process.wait_for_line(READY)

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()

    def restart(self) -> None:
        """Kill it and start it again."""
        self.kill()
        self.start()

    async def change_users(self, users: Sequence[PlainUser]) -> None:
        """Let only these in from now on; others are thrown out."""
        self._users = list(users)
        self._configuration_file.write_text(self._configuration())
        mark = self.process.mark()
        self.process.send_signal(signal.SIGHUP)
        await self.process.until_line("Reloaded server configuration", since=mark)

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def _configuration_file(self) -> Path:
        return self._folder / "nats-server.conf"

    def _configuration(self) -> str:
        tls = f'tls {{ cert_file: "{self._tls.certificate}", key_file: "{self._tls.key}" }}' if self._tls else ""
        lines = [
            f"server_name: {self.name}",
            f"listen: 127.0.0.1:{self.port}",
            f'jetstream {{ store_dir: "{self._folder / "data"}", max_memory_store: 256MB, max_file_store: 1GB }}',
            f"websocket {{ listen: 127.0.0.1:{self.websocket_port}, {tls or 'no_tls: true'} }}",
            f"authorization {{ users: [ {', '.join(map(_user_line, self._users))} ] }}",
            tls,
        ]
        if self._cluster_port:
            routes = ", ".join(f"nats://127.0.0.1:{port}" for port in self._routes)
            lines.append(f"cluster {{ name: potluck, listen: 127.0.0.1:{self._cluster_port}, routes: [{routes}] }}")
        return "\n".join(lines) + "\n"


def _user_line(user: PlainUser) -> str:
    if user.permissions is None:
        return f"{{ nkey: {user.peer} }}"
    publish = ", ".join(f'"{subject}"' for subject in user.permissions.publish)
    subscribe = ", ".join(f'"{subject}"' for subject in user.permissions.subscribe)
    rules = f"publish: {{ allow: [{publish}] }}, subscribe: {{ allow: [{subscribe}] }}"
    return f"{{ nkey: {user.peer}, permissions: {{ {rules}, allow_responses: true }} }}"
