"""The embedded hub: a real nats-server that this process starts, watches and stops.

A hub's folder is all that it is; started again on it, also on another machine, it goes on where it was:

    identity/          keys and certificate authority; the hubs of a cluster have copies of it
    tls/               the server's certificate
    jetstream/         the streams
    log/               what the server says
    nats-server.conf   written at each start
    ports.json         the ports of the last start
    owner.lock, server.lock, server.pid   see folderlock.py
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx

from potluck import tasks
from potluck.errors import FatalError, HubUnavailableError, PotluckError
from potluck.hub.address import HubAddress
from potluck.hub.joinlink import JoinLink
from potluck.hub.keys import HubKeys
from potluck.hub.privatefiles import make_private_folder, write_private
from potluck.hub.server.certificate import HubCertificates, prepare_certificates
from potluck.hub.server.configuration import (
    ACCOUNT,
    HubConfig,
    HubPorts,
    host_port,
    log_file,
    render,
    server_name,
    streams_folder,
)
from potluck.hub.server.folderlock import FolderLock
from potluck.hub.server.ports import PortBusyError, busy, load_ports, pick_ports, save_ports
from potluck.hub.server.process import ServerProcess, check_configuration, find_binary

logger = logging.getLogger(__name__)

START_TIMEOUT_SECONDS = 60.0  # a hub with large streams reads them first
STOP_TIMEOUT_SECONDS = 10.0
CONFIGURATION_FILE = "nats-server.conf"
STATISTICS = (
    *("connections", "total_connections", "routes", "subscriptions", "slow_consumers"),
    *("in_msgs", "out_msgs", "in_bytes", "out_bytes", "mem", "cpu"),
)

_PORT_ATTEMPTS = 3
_POLL_SECONDS = 0.05
_MONITORING_SECONDS = 10.0


T = TypeVar("T")


class EmbeddedHub:
    """A hub in a process of its own, for as long as this one lives."""

    def __init__(self, config: HubConfig, *, binary: Path | None = None) -> None:
        self.config = config
        self._binary = binary  # None: found at start
        self._configuration_file = config.folder / CONFIGURATION_FILE
        self._lock = FolderLock(config.folder, self._configuration_file)
        self._keys: HubKeys | None = None
        self._certificates: HubCertificates | None = None
        self._ports: HubPorts | None = None
        self._process: ServerProcess | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._died: asyncio.Future[str] | None = None
        self._stopping = asyncio.Lock()

    async def start(self) -> None:
        """Start the server and wait until it answers. On failure everything is released again."""
        if self._process is not None:
            raise RuntimeError("this hub has been started already")
        try:
            binary = self._binary or find_binary()
            make_private_folder(self.config.folder)
            await self._lock.acquire()
            self._prepare()
            await self._start_on_free_ports(binary)
            await self._check_streams()
        except BaseException:
            await self.stop()
            raise
        logger.info("the hub of %s listens on %s", self.config.run, ", ".join(self.address().servers))

    async def restart(self) -> None:
        """Replace a server that has died or no longer works: same ports, certificate and streams.

        If that fails, `died` says why, and this may be called again.
        """
        async with self._stopping:
            await self._end_server()
            try:
                await self._start_server(self._binary or find_binary(), self.ports)
                await self._check_streams()
            except BaseException as error:
                await self._end_server()
                self._died = asyncio.get_running_loop().create_future()
                self._died.set_result(str(error) or type(error).__name__)
                raise

    async def stop(self) -> None:
        """Stop the server in good order. Idempotent, also after the server has died."""
        async with self._stopping:
            await self._end_server()
            self._lock.release()

    async def _end_server(self) -> None:
        watcher, self._watcher = self._watcher, None
        await tasks.end(watcher)
        if self._process is not None:
            await self._process.stop(STOP_TIMEOUT_SECONDS)
            self._process = None

    @property
    def keys(self) -> HubKeys:
        """The hub's secrets."""
        return _started(self._keys)

    @property
    def ports(self) -> HubPorts:
        """Where it listens."""
        return _started(self._ports)

    @property
    def ca_pem(self) -> str:
        """The certificate authority to trust; empty for a plain hub."""
        return self._certificates.ca_pem if self._certificates is not None else ""

    @property
    def pid(self) -> int:
        """The server's process id."""
        return _started(self._process).pid

    @property
    def died(self) -> asyncio.Future[str]:
        """Gets the reason when the server ends without being asked to. Then `restart` or `stop` (see supervisor.py)."""
        return _started(self._died)

    def address(self, host: str | None = None) -> HubAddress:
        """How to reach this hub by `host`: by default the first that it advertises, else this machine itself."""
        host = host or self._default_host()
        tcp, websocket = ("tls", "wss") if self.config.tls else ("nats", "ws")
        servers = [f"{tcp}://{host_port(host, self.ports.client)}"]
        if self.ports.websocket is not None:
            servers.append(f"{websocket}://{host_port(host, self.ports.websocket)}")
        return HubAddress(servers=tuple(servers), ca_pem=self.ca_pem)

    def join_link(self, invite: str = "", host: str | None = None) -> JoinLink:
        """The link to hand out."""
        return JoinLink(
            host=host or self._default_host(),
            port=self.ports.client,
            run=self.config.run,
            ca_hash=self._certificates.ca_hash if self._certificates is not None else "",
            invite=invite,
            websocket_port=self.ports.websocket,
        )

    async def statistics(self) -> Mapping[str, int | float]:
        """The server's own counters: connections, messages and bytes each way, memory, processor."""
        varz = await _ask(self.ports.monitoring, "varz")
        return {name: varz[name] for name in STATISTICS if isinstance(varz.get(name), int | float)}

    async def write_error(self) -> str:
        """Why streams cannot be written, in the server's words; empty when they can. HubUnavailableError: no answer."""
        health = await _ask(self.ports.monitoring, "healthz", expected_statuses=(200, 503))
        error = str(health.get("error", ""))
        return error if "write error" in error else ""  # in a cluster it also complains of replicas that catch up

    def _default_host(self) -> str:
        return self.config.advertised_hosts[0] if self.config.advertised_hosts else self._local_host()

    def _local_host(self) -> str:
        """The address by which this machine reaches the server."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.config.host, self.config.host)

    def _prepare(self) -> None:
        """Everything in the folder that the server needs."""
        config = self.config
        identity_folder = config.folder / "identity"
        self._keys = HubKeys.load_or_create(identity_folder)
        self._certificates = None
        if config.tls:
            self._certificates = prepare_certificates(identity_folder, config.folder / "tls", config.certified_hosts)
        make_private_folder(log_file(config.folder).parent)

    async def _start_on_free_ports(self, binary: Path) -> None:
        """Start the server; with other free ports, if somebody snatches one away before it listens."""
        remembered = load_ports(self.config.folder)
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            ports = await asyncio.to_thread(pick_ports, self.config, remembered)
            try:
                await self._start_server(binary, ports)
            except PortBusyError:
                if attempt == _PORT_ATTEMPTS:
                    raise
                logger.info("somebody took one of the ports %s first: trying others", ports)
                remembered = None
            else:
                self._ports = ports
                save_ports(self.config.folder, ports)
                return

    async def _start_server(self, binary: Path, ports: HubPorts) -> None:
        text = render(self.config, self.keys, self._certificates, ports)
        write_private(self._configuration_file, text)
        await check_configuration(binary, self._configuration_file)
        process = await ServerProcess.start(
            binary,
            self._configuration_file,
            log_file=log_file(self.config.folder),
            inherit=self._lock.server_descriptor,
        )
        try:
            self._lock.record_server(process.pid)
            await self._wait_until_ready(process, ports)
        except BaseException:
            await process.stop(STOP_TIMEOUT_SECONDS)
            raise
        self._process = process
        self._died = asyncio.get_running_loop().create_future()
        self._watcher = asyncio.create_task(self._watch(process, self._died), name="hub server watcher")

    async def _wait_until_ready(self, process: ServerProcess, ports: HubPorts) -> None:
        """Wait until every port answers; raise with the server's own words when it ends or takes too long."""
        name = server_name(self.config, self.keys)
        try:
            async with asyncio.timeout(START_TIMEOUT_SECONDS):
                while process.returncode is None:
                    if await self._answers(name, ports):
                        return
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise HubUnavailableError(
                f"the hub's server did not answer within {START_TIMEOUT_SECONDS:g} s. It said last:\n"
                f"{process.last_words()}"
            ) from None
        raise self._explain_end(process, ports)

    async def _answers(self, name: str, ports: HubPorts) -> bool:
        """Whether our server, and no other, is ready on all its ports. Asked on loopback, to disturb none of them."""
        try:
            if (await _ask(ports.monitoring, "varz")).get("server_name") != name:
                return False
            # Whether the streams are served, not whether a cluster has agreed on a leader: the others may start later.
            await _ask(ports.monitoring, "healthz?js-enabled-only=true")
        except HubUnavailableError:
            return False
        return True

    def _explain_end(self, process: ServerProcess, ports: HubPorts) -> PotluckError:
        """Why a server that has just ended did so, in our words where we know better."""
        said = process.said()
        if any("address already in use" in line for line in said):
            names = {"port": ports.client, "websocket_port": ports.websocket, "cluster.port": ports.cluster}
            for name, port in names.items():
                if any(f":{port}:" in line for line in said if "address already in use" in line):
                    return busy(name, self.config.host, port or 0)
            return PortBusyError(f"a port of the hub is already in use:\n{process.last_words()}")
        if any("[FTL] Can't start JetStream" in line and "directory" in line for line in said):
            return FatalError(
                f"the hub cannot use its streams in {streams_folder(self.config.folder)}: restore the folder from a "
                f"backup, or move it away to begin with an empty run. The server said:\n{process.last_words()}"
            )
        return HubUnavailableError(
            f"the hub's server ended with code {process.returncode} at its start. It said last:\n{process.last_words()}"
        )

    async def _check_streams(self) -> None:
        """A stream whose description is damaged is skipped by the server with a mere warning: we stop there.

        In a cluster the other hubs have the stream, and bring it back.
        """
        for line in _started(self._process).said():
            # A machine without a network has no address of its own; the hub serves that machine alone then.
            if "[WRN] Filestore" in line or ("[ERR]" in line and "can not be resolved" not in line):
                logger.warning("the hub's server says: %s", line)
        if self.config.cluster is not None:
            return
        folder = streams_folder(self.config.folder) / "jetstream" / ACCOUNT / "streams"
        on_disk = {path.parent.name for path in folder.glob("*/meta.inf")}
        if not on_disk:
            return
        details = (await _ask(self.ports.monitoring, "jsz?accounts=true&streams=true")).get("account_details") or []
        served = {stream["name"] for account in details for stream in account.get("stream_detail") or []}
        if lost := sorted(on_disk - served):
            raise FatalError(
                f"the hub's streams {', '.join(lost)} in {folder} are damaged and cannot be served: restore the folder "
                f"from a backup, or move them away to go on without what they hold. The server said:\n"
                f"{_started(self._process).last_words()}"
            )

    async def _watch(self, process: ServerProcess, died: asyncio.Future[str]) -> None:
        """Wait for an end that nobody asked for; `stop` ends this task first."""
        code = await process.wait()
        reason = f"the hub's server ended unexpectedly with code {code}. It said last:\n{process.last_words()}"
        logger.error("%s", reason)
        if not died.done():
            died.set_result(reason)


async def _ask(port: int, what: str, *, expected_statuses: tuple[int, ...] = (200,)) -> dict[str, Any]:
    """What the server tells about itself on loopback."""
    url = f"http://127.0.0.1:{port}/{what}"
    try:
        # A proxy for the outside world has no business on loopback, and plain HTTP has nothing to verify.
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=_MONITORING_SECONDS) as client:
            response = await client.get(url)
            if response.status_code not in expected_statuses:
                response.raise_for_status()
            answer = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise HubUnavailableError(f"the hub's server does not answer on {url}: {error!r}") from error
    if not isinstance(answer, dict):
        raise HubUnavailableError(f"the hub's server gave no sensible answer on {url}")
    return answer


def _started(thing: T | None) -> T:
    if thing is None:
        raise HubUnavailableError("this hub has not been started")
    return thing
