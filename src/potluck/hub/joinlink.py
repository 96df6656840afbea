"""The link that a person pastes to join a run.

    potluck://HOST:PORT/RUN?ca=HASH&ws=PORT&by=HASH&pip=PORT,VERSION,SHA256#INVITE
    potluck://HOST:PORT,HOST:PORT/RUN?ca=HASH&ws=PORT,PORT&by=HASH#INVITE

The second form names several hosts of one cluster, so that a newcomer gets in while one of them is down. `ca` is the
hash of the hub's certificate authority, so that nobody in between can pose as the hub; `ca=none` says on purpose that
the hub speaks plain. `ws` is the WebSocket port and may be missing: one for all hosts, or one for each, where nothing
between two commas means none. `by` is the hash of the organiser's key, who signs what the run trains: with it, not
even the hub's owner can have somebody train something else. It may be missing: then the key that is seen first counts,
and is remembered (peer/organisers.py). `pip` names the wheel that the first host serves (wheelpin.py), and may be
missing too. Versions before an option skip it, so such links work there too.

The invite ends with a checksum, so that a link that was cut short is told apart from one that was refused; `#ask`
stands for no invite: a person with such a link asks for access. Nothing else may be missing silently; each part that is
gets its own words.

`fetch_address` turns a link into an address that can be trusted.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, urlsplit

from potluck.errors import CertificateError, ConfigurationError, HubUnavailableError, LinkFormatError
from potluck.hub.address import HubAddress
from potluck.hub.handshake import look_by_tcp, look_by_websocket, unverified_context
from potluck.hub.server.certificate import CA_HASH_CHARACTERS, der_hash
from potluck.hub.server.configuration import check_host, host_port
from potluck.hub.subjects import check_run_name
from potluck.hub.wheelpin import WheelPin

_Look = Callable[[str, int, ssl.SSLContext | None], Awaitable[list[bytes]]]

SCHEME = "potluck"
MAX_HOSTS = 8
MAX_LINK_CHARACTERS = 4096  # eight of the longest host names fit

ORGANISER_HASH_CHARACTERS = 26

_NO_AUTHORITY = "none"
_NO_INVITE = "ask"
_CHECK_CHARACTERS = 6  # base32, so 30 bits: one cut link in a thousand million looks whole
_SECRET = re.compile(r"[A-Za-z0-9_-]{8,256}")
_AUTHORITY = re.compile(r"://([^/?#]*)")  # the part of a link that names its hosts
_ORGANISER_HASH = re.compile(rf"[a-z2-7]{{{ORGANISER_HASH_CHARACTERS}}}")
_CA_HASH = re.compile(rf"[a-z2-7]{{{CA_HASH_CHARACTERS}}}")

# What comes along when a link is copied out of a sentence, a chat or a terminal.
_OPENERS = "<([{\"'`\u2018\u201c\u00ab*"
_CLOSERS = ">)]}\"'`\u2019\u201d\u00bb*.,;:!?\u2026"
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad"))
_LINE_BREAK = re.compile(r"[ \t]*[\r\n]+[ \t]*")
_COPY_AGAIN = "Copy the whole link again, and put it in quotes: a shell cuts it at the first &"


def organiser_hash(public_key: str) -> str:
    """What stands in a link for an organiser's key: 130 bits of its hash."""
    digest = hashlib.sha256(b"potluck organiser " + public_key.encode("ascii")).digest()
    return base64.b32encode(digest).decode("ascii").lower()[:ORGANISER_HASH_CHARACTERS]


def seal_invite(secret: str) -> str:
    """The secret with a checksum at its end, as it stands in a link."""
    if not _SECRET.fullmatch(secret):
        raise ConfigurationError("an invite's secret has 8 to 256 letters, digits, - and _")
    return secret + _checksum(secret)


def check_invite(sealed: str) -> str:
    """The secret in a sealed invite; LinkFormatError when characters were lost or changed on the way."""
    secret, checksum = sealed[:-_CHECK_CHARACTERS], sealed[-_CHECK_CHARACTERS:]
    if not _SECRET.fullmatch(secret) or checksum != _checksum(secret):
        raise LinkFormatError(
            f"the link's invite (what follows #) was cut short or changed on the way: it does not match its checksum. "
            f"{_COPY_AGAIN}"
        )
    return secret


def _checksum(secret: str) -> str:
    digest = hashlib.sha256(b"potluck invite " + secret.encode("ascii")).digest()
    return base64.b32encode(digest).decode("ascii").lower()[:_CHECK_CHARACTERS]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPlace:
    """Where one server of the hub is."""

    host: str
    port: int
    websocket_port: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", self.host.lower())
        try:
            check_host(self.host)
        except ConfigurationError as error:
            raise LinkFormatError(f"the link does not work: {error}") from error
        for port in (self.port, self.websocket_port):
            if port is not None and not 0 < port < 65536:
                raise LinkFormatError(f"the link's port {port} does not exist: a port is between 1 and 65535")

    def __str__(self) -> str:
        """HOST:PORT."""
        return host_port(self.host, self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinLink:
    """Everything that a newcomer has to know."""

    host: str
    port: int
    run: str
    ca_hash: str
    """The hub's certificate authority (certificate.py); empty for a plain hub."""
    invite: str = field(default="", repr=False)
    """The invite's secret, without the checksum; empty where access has to be asked for."""
    websocket_port: int | None = None
    others: tuple[HubPlace, ...] = ()
    """Further servers of the same hub; one that is named twice counts once."""
    organiser_hash: str = ""
    """Of the organiser's public key (`organiser_hash`); empty where the link does not say."""
    wheel: WheelPin | None = None
    """The Potluck that the first host serves; None where it serves none."""

    def __post_init__(self) -> None:
        first = HubPlace(host=self.host, port=self.port, websocket_port=self.websocket_port)
        object.__setattr__(self, "host", first.host)
        distinct: dict[tuple[str, int], HubPlace] = {}
        for place in (first, *self.others):
            distinct.setdefault((place.host, place.port), place)
        object.__setattr__(self, "others", tuple(distinct.values())[1:])
        if len(self.others) >= MAX_HOSTS:
            raise LinkFormatError(f"the link names {len(self.others) + 1} hosts: {MAX_HOSTS} are enough")
        try:
            check_run_name(self.run)
            if self.invite:
                seal_invite(self.invite)
        except LinkFormatError:
            raise
        except ConfigurationError as error:
            raise LinkFormatError(f"the link does not work: {error}") from error
        if self.ca_hash and not _CA_HASH.fullmatch(self.ca_hash):
            raise LinkFormatError(
                f"the link's ca={self.ca_hash} is not whole: it has {len(self.ca_hash)} characters where "
                f"{CA_HASH_CHARACTERS} of a-z and 2-7 belong. {_COPY_AGAIN}"
            )

        if self.organiser_hash and not _ORGANISER_HASH.fullmatch(self.organiser_hash):
            raise LinkFormatError(
                f"the link's by={_shorten(self.organiser_hash)} is not whole: {ORGANISER_HASH_CHARACTERS} of a-z and "
                f"2-7 belong there. {_COPY_AGAIN}"
            )

    @property
    def places(self) -> tuple[HubPlace, ...]:
        """All servers, in the order in which to try them."""
        return (HubPlace(host=self.host, port=self.port, websocket_port=self.websocket_port), *self.others)

    def __str__(self) -> str:
        """The link as text; `parse` reads it back."""
        places = self.places
        websockets = ["" if place.websocket_port is None else str(place.websocket_port) for place in places]
        if len(set(websockets)) == 1:
            websockets = websockets[:1]
        websocket = f"&ws={','.join(websockets)}" if any(websockets) else ""
        invite = seal_invite(self.invite) if self.invite else _NO_INVITE
        authority = self.ca_hash or _NO_AUTHORITY
        organiser = f"&by={self.organiser_hash}" if self.organiser_hash else ""
        wheel = f"&pip={self.wheel}" if self.wheel is not None else ""
        hosts, options = ",".join(map(str, places)), f"ca={authority}{websocket}{organiser}{wheel}"
        return f"{SCHEME}://{hosts}/{self.run}?{options}#{invite}"

    @property
    def pip_line(self) -> str:
        """The command that installs the host's own Potluck; empty where the link names none."""
        return self.wheel.pip_line(self.host) if self.wheel is not None else ""

    @property
    def files_key(self) -> str:
        """The part of a path that the host's file server wants to see: who has any link of the run knows it."""
        told = f"potluck files {self.run} {self.ca_hash} {self.organiser_hash}"
        return hashlib.sha256(told.encode("ascii")).hexdigest()[:32]

    def files_url(self, name: str) -> str:
        """Where the host serves something of the run; empty where the link names no server."""
        if self.wheel is None:
            return ""
        return f"http://{host_port(self.host, self.wheel.port)}/{self.files_key}/{name}"

    def version_notice(self, own: str) -> str:
        """Says that the link's host runs another version than this one, and how to get it; else empty."""
        if self.wheel is None or self.wheel.version == own:
            return ""
        return f"this is Potluck {own}, and the run's host has {self.wheel.version}. To get the same: {self.pip_line}"

    @classmethod
    def parse(cls, text: str) -> JoinLink:
        """Read a link as a person pastes it; LinkFormatError says what is wrong with it."""
        authority_part, parts = _split(_clean(text))
        hosts = _read_hosts(authority_part)
        run = parts.path.removeprefix("/").removesuffix("/")
        if not run:
            raise LinkFormatError(
                f"the link names no run: after {host_port(*hosts[-1])}/ its name is missing. {_COPY_AGAIN}"
            )
        options = _read_options(parts.query)
        if not parts.fragment:
            raise LinkFormatError(
                f"the link has no invite: it must end with # and an invite (or #{_NO_INVITE} to ask for access). "
                f"{_COPY_AGAIN}"
            )
        invite = "" if parts.fragment == _NO_INVITE else check_invite(parts.fragment)
        authority = options["ca"].lower()
        websocket_ports = _read_websocket_ports(options.get("ws"), len(hosts))
        first, *others = (
            HubPlace(host=host, port=port, websocket_port=websocket_port)
            for (host, port), websocket_port in zip(hosts, websocket_ports, strict=True)
        )
        return cls(
            host=first.host,
            port=first.port,
            run=run.lower(),
            ca_hash="" if authority == _NO_AUTHORITY else authority,
            invite=invite,
            websocket_port=first.websocket_port,
            others=tuple(others),
            organiser_hash=options.get("by", "").lower(),
            wheel=WheelPin.parse(options["pip"]) if "pip" in options else None,
        )


def _clean(text: str) -> str:
    """The link without what was copied along with it."""
    if len(text) > 4 * MAX_LINK_CHARACTERS:
        raise LinkFormatError(f"this is too long for a join link ({len(text)} characters): copy the link alone")
    text = text.translate(_INVISIBLE).strip()
    text = text.lstrip(_OPENERS).rstrip(_CLOSERS).strip()
    text = _LINE_BREAK.sub("", text).replace("&amp;", "&")
    if not text:
        raise LinkFormatError("there is no join link here: it starts with potluck://")
    if any(character.isspace() for character in text):
        raise LinkFormatError("the join link has a space in it: copy the link alone, from potluck:// to its end")
    if len(text) > MAX_LINK_CHARACTERS:
        raise LinkFormatError(f"this is too long for a join link ({len(text)} characters): copy the link alone")
    return text


def _split(text: str) -> tuple[str, SplitResult]:
    """The part that names the hosts, and the link with a single host in its place, which is all that URLs know."""
    scheme, separator, _ = text.partition("://")
    if not separator:
        raise LinkFormatError(f"{_shorten(text)} is not a join link: it must start with {SCHEME}://")
    if scheme.lower() != SCHEME:
        raise LinkFormatError(
            f"this is a {_shorten(scheme)}:// link, not a join link: ask the organiser for the one that starts with "
            f"{SCHEME}://"
        )
    found = _AUTHORITY.search(text)
    assert found is not None, "there is ://"
    return found.group(1), urlsplit(text[: found.start(1)] + "hub" + text[found.end() :])


def _read_hosts(authority: str) -> list[tuple[str, int]]:
    hosts = authority.split(",")
    if len(hosts) > 4 * MAX_HOSTS:  # some may be named twice; so many cannot be meant
        raise LinkFormatError(f"the link names {len(hosts)} hosts: {MAX_HOSTS} are enough. {_COPY_AGAIN}")
    if len(hosts) > 1 and not all(hosts):
        raise LinkFormatError(f"the link has a comma too many among its hosts: a host is missing. {_COPY_AGAIN}")
    return [_read_host(host) for host in hosts]


def _read_host(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
    except ValueError as error:
        raise LinkFormatError(f"the link's host cannot be read ({error}). {_COPY_AGAIN}") from error
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise LinkFormatError(f"the link's port cannot be read: {error}. {_COPY_AGAIN}") from error
    if not host:
        raise LinkFormatError(f"the link names no host: HOST:PORT must follow {SCHEME}://. {_COPY_AGAIN}")
    if parts.username is not None:
        raise LinkFormatError(
            "the link has an @ before its host, which no join link has: ask the organiser for another"
        )
    if port is None:
        raise LinkFormatError(
            f"the link names no port: after {_shorten(host)} there must be : and a number. {_COPY_AGAIN}"
        )
    return host, port


def _read_options(query: str) -> dict[str, str]:
    """What stands after the question mark. Options that we do not know are those of a later version: skipped."""
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in options:
            raise LinkFormatError(f"the link says {name}= twice: ask the organiser for another")
        options[name] = value
    if not options.get("ca"):
        raise LinkFormatError(
            f"the link does not say which certificate the hub has (ca=): without it anybody could pose as the hub. "
            f"{_COPY_AGAIN}"
        )
    return options


def _read_websocket_ports(text: str | None, num_hosts: int) -> list[int | None]:
    """One for each host."""
    if text is None:
        return [None] * num_hosts
    ports = [_read_port(port) if port or num_hosts == 1 else None for port in text.split(",")]
    if len(ports) == 1:
        return ports * num_hosts
    if len(ports) != num_hosts:
        raise LinkFormatError(
            f"the link names {num_hosts} hosts and {len(ports)} WebSocket ports: it must be one port, or one for each. "
            f"{_COPY_AGAIN}"
        )
    return ports


def _read_port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text):
        raise LinkFormatError(f"the link's WebSocket port {_shorten(text)!r} is not a number. {_COPY_AGAIN}")
    return int(text)


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "…"


async def fetch_address(link: JoinLink, timeout_seconds: float = 15.0, *, websocket_only: bool = False) -> HubAddress:
    """Find the hub that a link names, make sure that it is the right one, and say how to reach it.

    The link's hosts are tried in turn: by TCP, then by WebSocket, which passes where nothing else does. The way that
    worked comes first in the address; with `websocket_only` nothing but WebSocket is in it. CertificateError when what
    answers is another hub than the link's, HubUnavailableError when there is none.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_seconds
    ways = [way for way in _ways(link) if not websocket_only or way.scheme in ("ws", "wss")]
    if not ways:
        raise ConfigurationError(
            "the link names no WebSocket port (ws=): leave out --websocket, or ask for another link"
        )
    failures: list[str] = []
    wrong_hub: CertificateError | None = None
    for number, way in enumerate(ways):
        # A firewall that swallows packets must not use up the time of the ways after it.
        patience_seconds = (deadline - loop.time()) / (len(ways) - number)
        try:
            async with asyncio.timeout(patience_seconds):
                ca_pem = await _fetch_authority(link, way)
        except TimeoutError:
            failures.append(f"{host_port(way.host, way.port)} did not answer within {patience_seconds:.3g} s")
        except HubUnavailableError as error:
            failures.append(str(error))
        except CertificateError as error:
            wrong_hub = wrong_hub or error
            if not link.others:
                raise
        else:
            others = sorted((other for other in ways if other != way), key=lambda other: other.scheme != way.scheme)
            return HubAddress(servers=tuple(each.url for each in (way, *others)), ca_pem=ca_pem)
    if wrong_hub is not None:
        raise wrong_hub
    raise HubUnavailableError(
        f"the hub of {link.run} cannot be reached: {'; '.join(failures)}. If the link is old, ask the organiser "
        "whether the hub still runs; otherwise try another network"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One of the ways to the hub."""

    scheme: str
    host: str
    port: int
    look: _Look

    @property
    def url(self) -> str:
        return f"{self.scheme}://{host_port(self.host, self.port)}"


def _ways(link: JoinLink) -> list[_Way]:
    """By TCP to each host, then by WebSocket."""
    tcp, websocket = ("tls", "wss") if link.ca_hash else ("nats", "ws")
    by_tcp = [_Way(scheme=tcp, host=place.host, port=place.port, look=look_by_tcp) for place in link.places]
    by_websocket = [
        _Way(scheme=websocket, host=place.host, port=place.websocket_port, look=look_by_websocket)
        for place in link.places
        if place.websocket_port is not None
    ]
    return [*by_tcp, *by_websocket]


async def _fetch_authority(link: JoinLink, way: _Way) -> str:
    """The certificate authority that the link pins, taken from the hub and proven; empty for a plain hub."""
    if not link.ca_hash:
        await way.look(way.host, way.port, None)
        return ""
    shown = await way.look(way.host, way.port, unverified_context())
    pinned = next((der for der in shown if der_hash(der) == link.ca_hash), None)
    if pinned is None:
        raise CertificateError(
            f"the hub at {host_port(way.host, way.port)} is not the one that the link names: none of its certificates "
            f"matches ca={link.ca_hash}. Somebody may be in between, or the hub was set up anew. Nothing was sent. Ask "
            "the organiser for a new link, and do not join before"
        )
    # So far anybody could have shown a copy of the authority's certificate. Who completes a handshake that trusts only
    # that authority has the hub's key.
    ca_pem = ssl.DER_cert_to_PEM_cert(pinned)
    address = HubAddress(servers=(f"tls://{host_port(way.host, way.port)}",), ca_pem=ca_pem)
    await way.look(way.host, way.port, address.ssl_context())
    return ca_pem
