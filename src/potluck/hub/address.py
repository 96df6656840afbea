"""Where a hub is and how to know that it is the right one."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from potluck.errors import ConfigurationError

SCHEMES = ("nats", "tls", "ws", "wss")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAddress:
    """One hub or one cluster of hubs."""

    servers: tuple[str, ...]
    """URLs to try in order: tls://HOST:PORT, wss://HOST:PORT; nats:// and ws:// are plain, for loopback only."""

    ca_pem: str = ""
    """The certificate authority that signs every hub's certificate; empty where the hub speaks plain."""

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigurationError("a hub address needs at least one server, as in tls://hub.example.org:4222")
        for server in self.servers:
            scheme = server.partition("://")[0]
            if scheme not in SCHEMES:
                raise ConfigurationError(
                    f"{server!r} is not a hub address: it must start with tls://, wss:// or nats://"
                )

    def ssl_context(self) -> ssl.SSLContext | None:
        """A context that trusts only this hub's authority; None for a plain hub.

        Host names are not compared: volunteers reach the same hub by different names and addresses, and the pinned
        authority signs nothing but this run's hubs.
        """
        if not self.ca_pem:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.ca_pem)
        return context
