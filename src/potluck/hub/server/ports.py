"""Which ports a hub gets: those that were asked for, or free ones, the same again after a restart.

Join links name a port, so a port that was picked freely is remembered in the hub's folder.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import socket
from pathlib import Path

import msgspec

from potluck.errors import ConfigurationError
from potluck.hub.privatefiles import read_private, write_private
from potluck.hub.server.configuration import HubConfig, HubPorts, host_port

logger = logging.getLogger(__name__)

FILE_NAME = "ports.json"


class PortBusyError(ConfigurationError):
    """Something else listens on a port that the hub needs."""


def load_ports(folder: Path) -> HubPorts | None:
    """The ports of the last start; None before the first one."""
    path = folder / FILE_NAME
    text = read_private(path)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=HubPorts)
    except (msgspec.MsgspecError, ConfigurationError) as error:
        raise ConfigurationError(
            f"the hub's ports in {path} are damaged ({error}): delete the file, and check that links made so far name "
            "the port that the hub then picks"
        ) from error


def save_ports(folder: Path, ports: HubPorts) -> None:
    """Remember the ports for the next start."""
    write_private(folder / FILE_NAME, msgspec.json.encode(ports).decode("ascii") + "\n")


def pick_ports(config: HubConfig, remembered: HubPorts | None) -> HubPorts:
    """Ports that are free right now. PortBusyError when one that was asked for is not.

    All are held until the last one is picked, so that no two are the same. A quick program can still take one between
    here and the server's start; the server then says so.
    """
    held: list[socket.socket] = []
    last: dict[str, int | None] = {} if remembered is None else dataclasses.asdict(remembered)

    def pick(name: str, host: str, wanted: int, before: int | None) -> int:
        sock = hold(name, host, wanted, before)
        held.append(sock)
        port: int = sock.getsockname()[1]
        return port

    try:
        websocket = cluster = None
        client = pick("port", config.host, config.port, last.get("client"))
        if config.websocket_port is not None:
            websocket = pick("websocket_port", config.host, config.websocket_port, last.get("websocket"))
        if config.cluster is not None:
            cluster = pick("cluster.port", config.host, config.cluster.port, last.get("cluster"))
        monitoring = pick("monitoring", "127.0.0.1", 0, last.get("monitoring"))
        return HubPorts(client=client, websocket=websocket, cluster=cluster, monitoring=monitoring)
    finally:
        for sock in held:
            sock.close()


def busy(name: str, host: str, port: int) -> PortBusyError:
    """How we say that a port is taken."""
    return PortBusyError(
        f"{name} {port} on {host} is already in use, by another program or by a hub that still runs: stop that, or "
        f"choose another {name} (0 picks a free one)"
    )


def hold(name: str, host: str, wanted: int, last: int | None) -> socket.socket:
    """A socket that listens on the wanted port; else on the last one if that is free; else on any."""
    if wanted:
        return _listen(name, host, wanted)
    if last:
        try:
            return _listen(name, host, last)
        except PortBusyError:
            logger.warning("%s %d of the last start is in use: links that name it no longer work", name, last)
    return _listen(name, host, 0)


def _listen(name: str, host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigurationError(
            f"cannot listen on {host!r}: no such host on this machine ({error.strerror})"
        ) from error
    sock = socket.socket(family, kind, protocol)
    try:
        # As the server does: a port that is merely cooling down after its last use counts as free.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1)
    except OSError as error:
        sock.close()
        raise _explain(name, host, port, error) from error
    return sock


def _explain(name: str, host: str, port: int, error: OSError) -> ConfigurationError:
    if error.errno == errno.EADDRINUSE:
        return busy(name, host, port)
    if error.errno == errno.EACCES:
        return ConfigurationError(
            f"{name} {port} needs a privileged user: choose one above 1023, or allow this user to listen there"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigurationError(
            f"cannot listen on {host}: it is not an address of this machine. Choose one of its own, or 0.0.0.0 for all"
        )
    return ConfigurationError(f"cannot listen on {host_port(host, port)}: {error.strerror}")
