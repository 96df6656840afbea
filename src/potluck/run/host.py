"""A host: the hub, its guard, and an aux peer that dials others back and can coordinate.

A host lives in a folder. Started again on the same folder it is the same host: keys, certificate, ports, members and
streams are kept, so join links stay valid. hostrecord.py tells commands on this machine where the hub is. With
`hub_url` the hub is an existing NATS server or cluster, and only guard and peer are started here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from potluck import tasks
from potluck.errors import ConfigurationError, DeadlineExceededError, FatalError, HubUnavailableError
from potluck.hub.access.invite import invite_id
from potluck.hub.access.member import AccessRequest, Scopes
from potluck.hub.access.organise import Organiser
from potluck.hub.address import HubAddress
from potluck.hub.guard.guard import Guard, GuardConfig
from potluck.hub.joinlink import MAX_HOSTS, HubPlace, JoinLink, fetch_address, organiser_hash
from potluck.hub.keys import HubKeys
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.server.certificate import ca_hash
from potluck.hub.server.configuration import HubConfig
from potluck.hub.server.embedded import EmbeddedHub
from potluck.hub.server.ports import hold
from potluck.hub.server.supervisor import Supervisor
from potluck.hub.subjects import Subjects
from potluck.hub.wheelpin import WheelPin
from potluck.link.direct.addresses import local_interfaces
from potluck.peer.identity import Identity
from potluck.run.fileserver import FileServer, Offer
from potluck.run.hostnews import tell_troubles
from potluck.run.hostrecord import HostRecord, read_record, write_record
from potluck.run.peer import Peer, PeerConfig
from potluck.run.wheel import pack_wheel

logger = logging.getLogger(__name__)

VOLUNTEERS = Scopes(roles=("trainer", "aux", "observer"))
DEFAULT_PORT = 4222  # nats-server's
T = TypeVar("T")
OWN_PEER = Scopes(roles=("aux",), coordinates=True, trusted=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """What a person can choose about a host."""

    hub: HubConfig
    """The hub to start; with `hub_url`, only its folder, run and advertised hosts count."""

    guard: GuardConfig
    """Who may join the run."""

    hub_url: str = ""
    """An existing NATS server or cluster, as tls://HOST:PORT, to be used instead; several servers with commas."""

    hub_ca: Path | None = None
    """The authority that signs that server's certificate."""

    peer: PeerConfig | None = field(default_factory=lambda: PeerConfig(role="aux", name="host"))
    """The host's own peer; None for none."""

    wheel_port: int | None = None
    """Where this Potluck is served as a wheel, for newcomers; 0 picks a free one and keeps it, None serves none."""

    def __post_init__(self) -> None:
        if not self.hub_url:
            return
        if self.hub.cluster is not None:
            raise ConfigurationError("an existing hub has its own cluster: leave out the hub's URL or the cluster")
        schemes = {url.partition("://")[0] for url in self.hub_urls}
        if len(schemes) != 1 or not schemes <= {"tls", "nats"}:
            raise ConfigurationError(
                f"{self.hub_url!r} is not where a NATS server is: write it as in tls://HOST:PORT, or "
                "tls://HOST:PORT,HOST:PORT for a cluster"
            )
        if schemes == {"tls"} and self.hub_ca is None:
            raise ConfigurationError(f"{self.hub_url} speaks TLS: name the file with its authority by --hub-ca")

    @property
    def hub_urls(self) -> tuple[str, ...]:
        """The existing servers; those without a scheme have the first one's."""
        scheme = self.hub_url.partition("://")[0]
        parts = [part.strip() for part in self.hub_url.split(",")]
        return tuple(part if "://" in part else f"{scheme}://{part}" for part in parts)


class Host:
    """A running host."""

    def __init__(self, config: HostConfig) -> None:
        self.config = config
        self.peer: Peer | None = None
        self._hub: EmbeddedHub | None = None
        self._supervisor: Supervisor | None = None
        self._supervision: asyncio.Task[str] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._guard: Guard | None = None
        self._files: FileServer | None = None
        self._record: HostRecord | None = None
        self._is_invite_valid = False
        self._keys: HubKeys | None = None

    @property
    def keys(self) -> HubKeys:
        """The hub's secrets, the organiser's among them."""
        if self._keys is None:
            raise RuntimeError("the host is not started")
        return self._keys

    @property
    def address(self) -> HubAddress:
        """Where the hub is, seen from this machine."""
        return HubAddress(servers=self.record.servers, ca_pem=self.record.ca_pem)

    @property
    def record(self) -> HostRecord:
        """What stands in the folder."""
        if self._record is None:
            raise RuntimeError("the host is not started")
        return self._record

    @property
    def link(self) -> JoinLink:
        """The join link for volunteers; without an invite if an organiser has revoked theirs."""
        invite = self.record.invite if self._is_invite_valid else ""
        return replace(JoinLink.parse(self.record.link), invite=invite)

    async def start(self) -> None:
        """Start everything; on failure everything is released again."""
        try:
            keys, address, link = await self._start_hub()
            self._keys = keys
            await self._start_guard(keys, address)
            await self._settle(keys, address, link)
        except BaseException:
            await self.stop()
            raise

    def listen_requests(self, listener: Callable[[AccessRequest], None]) -> None:
        """Call `listener` for each peer that waits for an organiser to let it in."""
        assert self._guard is not None, "the host is not started"
        self._guard.listen_requests(listener)

    async def stop(self) -> None:
        """Stop everything, the hub last. Idempotent."""
        peer, guard, hub, files = self.peer, self._guard, self._hub, self._files
        self.peer = self._guard = self._hub = self._files = None
        supervision, self._supervision = self._supervision, None
        telling, self._telling = self._telling, None
        async with AsyncExitStack() as last_to_first:  # whatever fails, the rest is released
            if hub is not None:
                last_to_first.push_async_callback(hub.stop)
            last_to_first.push_async_callback(tasks.end, supervision)
            if guard is not None:
                last_to_first.push_async_callback(guard.stop)
            if files is not None:
                last_to_first.push_async_callback(files.stop)
            if peer is not None:
                last_to_first.push_async_callback(peer.close)
            last_to_first.push_async_callback(tasks.end, telling)

    def note(self, *, recipe_file: Path | None, is_tried: bool) -> None:
        """Write down what is known of the recipe, for commands on this machine and for the next start."""
        file = str(recipe_file.resolve()) if recipe_file is not None else ""
        self._record = msgspec.structs.replace(self.record, recipe_file=file, is_tried=is_tried)
        write_record(self.config.hub.folder, self._record)

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result; FatalError, at once, when the hub's server has died too often to be started again."""
        task, supervision = asyncio.create_task(work), self._supervision
        either: set[asyncio.Task[Any]] = {task} if supervision is None else {task, supervision}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if supervision is not None and supervision.done() and not task.done():
                raise FatalError(supervision.result())
            return task.result()
        finally:
            if not task.done():
                await tasks.end(task)

    @property
    def troubles(self) -> dict[str, str]:
        """What is wrong with the hub on this machine, and what to do about it; empty for a hub elsewhere."""
        return self._supervisor.troubles if self._supervisor is not None else {}

    async def _start_hub(self) -> tuple[HubKeys, HubAddress, JoinLink]:
        """The hub's keys, where this machine reaches it, and the link by which others do."""
        config = self.config
        known = read_record(config.hub.folder)
        if known is not None and known.run != config.hub.run:
            raise ConfigurationError(
                f"the folder {config.hub.folder} belongs to the run {known.run}: name that run, or another folder"
            )
        if config.hub_url:
            link = self._existing_link()
            await fetch_address(link)  # what every member will do
            return HubKeys.load_or_create(config.hub.folder / "identity"), self._existing_address(), link
        self._hub = EmbeddedHub(config.hub)
        await self._hub.start()
        self._supervisor = Supervisor(self._hub, config.hub.folder)
        self._supervision = asyncio.create_task(self._supervisor.run(), name="supervision of the hub")
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.hub.host, config.hub.host)
        return self._hub.keys, self._hub.address(local), self._hub.join_link()

    async def _start_guard(self, keys: HubKeys, address: HubAddress) -> None:
        """In a cluster stores need most of the hubs: they are waited for, however late their people start them."""
        while True:
            self._guard = Guard(self.config.guard, keys, address)
            try:
                return await self._guard.start()
            except (HubUnavailableError, DeadlineExceededError) as error:
                if self.config.hub.cluster is None:
                    raise
                logger.info("the cluster is not complete enough yet, trying on: %s", error)
            await self._guard.stop()

    def _existing_address(self) -> HubAddress:
        return HubAddress(servers=self.config.hub_urls, ca_pem=self._existing_authority())

    def _existing_authority(self) -> str:
        path = self.config.hub_ca
        if path is None:
            return ""
        try:
            return path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"the authority in {path} cannot be read ({error}): name its PEM file") from error

    def _existing_link(self) -> JoinLink:
        try:
            parts = [urlsplit(url) for url in self.config.hub_urls]
            places = [HubPlace(host=part.hostname or "", port=part.port or DEFAULT_PORT) for part in parts]
        except ValueError as error:
            raise ConfigurationError(f"{self.config.hub_url!r} is not where a NATS server is: {error}") from error
        advertised = self.config.hub.advertised_hosts
        authority = self._existing_authority()
        return JoinLink(
            host=advertised[0] if advertised else places[0].host,
            port=places[0].port,
            run=self.config.hub.run,
            ca_hash=ca_hash(authority) if authority else "",
            others=tuple(places[1:]),
        )

    async def _settle(self, keys: HubKeys, address: HubAddress, link: JoinLink) -> None:
        """The volunteers' invite, the host's own peer, and the record in the folder."""
        known = read_record(self.config.hub.folder)
        organiser_hub = await NatsConnection.connect(
            address, seed=keys.organiser_seed, run=self.config.hub.run, name="main"
        )
        try:
            organiser = Organiser(organiser_hub, Subjects(self.config.hub.run), keys.organiser_public)
            invite = await self._volunteers_invite(organiser, known.invite if known is not None else "")
            link = replace(
                self._with_other_hubs(link, organiser_hub), organiser_hash=organiser_hash(keys.organiser_public)
            )
            pin = await self._serve_files(link, JoinLink.parse(known.link).wheel if known is not None else None)
            link = replace(link, wheel=pin)
            self._record = HostRecord(
                run=self.config.hub.run, servers=address.servers, ca_pem=address.ca_pem, link=str(link), invite=invite
            )
            if known is not None:
                kept = {"recipe_file": known.recipe_file, "is_tried": known.is_tried}
                self._record = msgspec.structs.replace(self._record, **kept)
            write_record(self.config.hub.folder, self._record)
            if self.config.peer is not None:
                await self._start_peer(self.config.peer, organiser, address)
        finally:
            await organiser_hub.close()

    def serve(self, offer: Offer) -> None:
        """Let everybody with a join link get what the run ships; does nothing where the host serves no files."""
        if self._files is not None:
            self._files.offer = offer

    async def _serve_files(self, link: JoinLink, before: WheelPin | None) -> WheelPin | None:
        """Let newcomers get this Potluck and the run's files from here, on the port of the last start if it is free."""
        config = self.config
        if config.wheel_port is None or self._hub is None:  # links of an existing hub do not name this machine
            return None
        try:
            wheel = await asyncio.to_thread(pack_wheel)
        except ConfigurationError as error:
            logger.warning("newcomers cannot get Potluck from this host: %s", error)
            return None
        sock = hold("wheel_port", config.hub.host, config.wheel_port, before.port if before is not None else None)
        self._files = FileServer(wheel, sock, link.files_key)
        await self._files.start()
        return WheelPin(port=self._files.port, version=wheel.version, sha256=wheel.sha256)

    def _with_other_hubs(self, link: JoinLink, connection: NatsConnection) -> JoinLink:
        """The link with the other hubs of our cluster in it, as they advertise themselves."""
        if self._hub is None or self.config.hub.cluster is None:
            return link
        parts = [urlsplit(url) for url in connection.discovered_servers]
        places = [HubPlace(host=part.hostname, port=part.port) for part in parts if part.hostname and part.port]
        own = {host.lower() for host in (*self.config.hub.advertised_hosts, link.host)}
        others = [place for place in places if place.host not in own or place.port != link.port]
        return replace(link, others=tuple(others[: MAX_HOSTS - 1]))

    async def _volunteers_invite(self, organiser: Organiser, known: str) -> str:
        """The invite of earlier starts, even if it was revoked: the organiser who did so wants no new one."""
        revoked = {invite.id: invite.revoked for invite in await organiser.list_invites()}
        if known and invite_id(known) in revoked:
            self._is_invite_valid = not revoked[invite_id(known)]
            return known
        _, invite = await organiser.create_invite(scopes=VOLUNTEERS, uses=None, note="volunteers")
        self._is_invite_valid = True
        return invite

    def _outward(self, address: HubAddress) -> HubAddress:
        """The hub's address for our own peer: by loopback only where there is no other way.

        Others dial a peer back only where the hub sees it come from. By loopback it would never become a full peer.
        """
        config = self.config.hub
        if self._hub is None or config.host not in ("0.0.0.0", "::"):
            return address
        own = [interface.ip for interface in local_interfaces() if interface.ip.version == 4 or config.host == "::"]
        if not own:
            return address
        own.sort(key=lambda ip: (str(ip) not in config.advertised_hosts, ip.is_loopback, not ip.is_global))
        servers = (*self._hub.address(str(own[0])).servers, *address.servers)
        return replace(address, servers=tuple(dict.fromkeys(servers)))

    async def _start_peer(self, config: PeerConfig, organiser: Organiser, address: HubAddress) -> None:
        cluster = self.config.hub.cluster  # whose hubs have copies of the same folder, and a peer each
        name = "peer.nkey" if cluster is None else f"peer-{cluster.server_name}.nkey"
        identity = Identity.open(self.config.hub.folder / "identity" / name)
        try:
            members = {state.member.peer for state in await organiser.list_members()}
            invite = ""
            if identity.peer_id not in members:
                _, invite = await organiser.create_invite(scopes=OWN_PEER, uses=1, note="the host's own peer")
            self.peer = Peer(self._outward(address), self.config.hub.run, identity, replace(config, invite=invite))
        except BaseException:
            identity.close()
            raise
        await self.peer.start()
        telling = tell_troubles(self.peer.session, lambda: self.troubles)
        self._telling = asyncio.create_task(telling, name="news of the host")
