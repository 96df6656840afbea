"""Which addresses to listen on, to announce, and to dial, and in which order.

An address on the wire is `tcp://HOST:PORT` with a literal IP: names are resolved once, by the peer that announces them,
since a look-up takes its time, and what it finds may differ from place to place. A peer dials only where an honest
peer could be: public addresses, the address that the hub sees the other come from, and private ones where both are on
one LAN; never the ports below 1024, which belong to other services.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil

from potluck.errors import ConfigurationError

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
Reach = Literal["loopback", "link-local", "private", "public", "unusable"]

LOWEST_PORT = 1024
MAX_ADDRESSES = 8  # of one peer; more are ignored


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """One place to listen or to dial: a literal IP address and a port."""

    ip: IpAddress
    port: int

    @classmethod
    def parse(cls, text: str, *, lowest_port: int = LOWEST_PORT) -> Endpoint:
        """Read `tcp://HOST:PORT`, with an IPv6 host in brackets; ConfigurationError when it is anything else."""
        scheme, separator, rest = text.partition("://")
        host, colon, port = rest.rpartition(":")
        if scheme != "tcp" or not separator or not colon or not port.isascii() or not port.isdigit() or len(port) > 5:
            raise ConfigurationError(f"{text!r} is not an address: write tcp://HOST:PORT, as in tcp://203.0.113.7:4000")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ConfigurationError(f"{text!r} has an IPv6 host without brackets: write tcp://[2001:db8::1]:4000")
        ip = parse_ip(host)
        if ip is None:
            raise ConfigurationError(f"{text!r} does not name its host by an IP address: resolve the name first")
        if not lowest_port <= int(port) <= 65535:
            raise ConfigurationError(f"{text!r} has port {port}: links use ports from {LOWEST_PORT} to 65535")
        return cls(ip, int(port))

    @property
    def reach(self) -> Reach:
        """From how far away this address can be meant."""
        return reach_of(self.ip)

    def __str__(self) -> str:
        return f"tcp://[{self.ip}]:{self.port}" if self.ip.version == 6 else f"tcp://{self.ip}:{self.port}"


@dataclass(frozen=True, slots=True)
class Interface:
    """One address of this machine, with the network it is in."""

    ip: IpAddress
    network: IpNetwork


def parse_ip(text: str) -> IpAddress | None:
    """The IP address, an IPv4 one also when it comes in IPv6 clothes; None when it is none, or has a zone."""
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.scope_id:
            return None
        return ip.ipv4_mapped or ip
    return ip


def reach_of(ip: IpAddress) -> Reach:
    """How far an address reaches; carrier-grade NAT and documentation ranges count as private."""
    if ip.is_unspecified or ip.is_multicast:
        return "unusable"
    if ip.is_loopback:
        return "loopback"
    if ip.is_link_local:
        return "link-local"
    if ip.is_global:
        return "public"
    return "unusable" if ip.version == 4 and ip.is_reserved else "private"


def local_interfaces() -> list[Interface]:
    """The addresses of this machine's interfaces that are up."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        if name in states and not states[name].isup:
            continue
        for address in addresses:
            if address.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            ip = parse_ip(address.address)
            if ip is not None and reach_of(ip) not in ("unusable", "link-local"):
                found.append(Interface(ip, _network(ip, address.netmask)))
    return found


def announced_hosts(listen: str) -> tuple[str, ...]:
    """What to put into a join link when nobody says: the address listened on, or this machine's own on the network."""
    if listen not in ("0.0.0.0", "::"):
        return (listen,)
    addresses = [i.ip for i in local_interfaces() if not i.ip.is_loopback and not i.ip.is_link_local]
    return tuple(str(ip) for ip in addresses if ip.version == 4) or ("127.0.0.1",)


def default_listen(interfaces: Iterable[Interface]) -> tuple[str, ...]:
    """Where to listen when nobody said: every IPv4 interface, and IPv6 where this machine has it. Any free port."""
    has_ipv6 = any(interface.ip.version == 6 and not interface.ip.is_loopback for interface in interfaces)
    return ("tcp://0.0.0.0:0", "tcp://[::]:0") if has_ipv6 else ("tcp://0.0.0.0:0",)


def announceable(
    bound: Sequence[Endpoint], interfaces: Sequence[Interface], *, hub_sees: str = ""
) -> tuple[Endpoint, ...]:
    """The addresses at which others might reach a socket bound to `bound`, the farthest-reaching first.

    `hub_sees` is the address that the hub sees this peer come from: behind a NAT that forwards the port it is the one
    that works, which the dial-back then finds out. Loopback is announced only where there is nothing else.
    """
    found: dict[Endpoint, None] = {}
    outside = parse_ip(hub_sees)
    for endpoint in bound:
        if not endpoint.ip.is_unspecified:
            found[endpoint] = None
            continue
        for interface in interfaces:
            if interface.ip.version == endpoint.ip.version:
                found[Endpoint(interface.ip, endpoint.port)] = None
        if outside is not None and outside.version == endpoint.ip.version:
            found[Endpoint(outside, endpoint.port)] = None
    order = {"public": 0, "private": 1, "loopback": 2}
    usable = sorted((e for e in found if e.reach in order), key=lambda e: order[e.reach])
    distant = [endpoint for endpoint in usable if endpoint.reach != "loopback"]
    return tuple((distant or usable)[:MAX_ADDRESSES])


def same_lan(endpoint: Endpoint, *, own_host: str, their_host: str, interfaces: Sequence[Interface]) -> bool:
    """Whether the hub's view says that a private or loopback address of another peer is near.

    Both come to the hub from one address (one machine, or one NAT), or the hub sees the other within a network of this
    machine. What the other says about itself does not count.
    """
    own, theirs = parse_ip(own_host), parse_ip(their_host)
    if own is None or theirs is None:
        return False
    if endpoint.reach == "loopback":  # this very machine: nobody behind the same NAT may send us to our own services
        return own == theirs and (own.is_loopback or any(interface.ip == own for interface in interfaces))
    return own == theirs or (_is_local(theirs, interfaces) and _is_local(endpoint.ip, interfaces))


def dial_order(
    addresses: Iterable[str],
    *,
    own_host: str,
    their_host: str,
    interfaces: Sequence[Interface],
    near_only: bool = False,
) -> list[Endpoint]:
    """The addresses of a peer that are worth dialling from here, nearest first; what is malformed is left out.

    Private addresses are dialled where they may lead to the peer: on the same LAN by the hub's view, in a network of
    this machine (a VPN, which the hub does not see), or where the hub sees the peer. A wrong guess costs one failed
    dial: a stranger that answers there does not have the other's key. `near_only` leaves out public addresses, since
    the links of a trusted LAN are not encrypted.
    """
    theirs = parse_ip(their_host)
    order = {"loopback": 0, "private": 1, "public": 2}
    chosen: dict[Endpoint, int] = {}
    for text in list(addresses)[:MAX_ADDRESSES]:
        try:
            endpoint = Endpoint.parse(text)
        except ConfigurationError:
            continue
        reach = endpoint.reach
        if reach not in order or (reach == "public" and near_only):
            continue
        likely = (
            reach == "public"
            or same_lan(endpoint, own_host=own_host, their_host=their_host, interfaces=interfaces)
            or (reach == "private" and (endpoint.ip == theirs or _is_local(endpoint.ip, interfaces)))
        )
        if likely:
            chosen.setdefault(endpoint, order[reach])
    return sorted(chosen, key=lambda endpoint: chosen[endpoint])


def parse_announced(text: str) -> Endpoint | tuple[str, int]:
    """What a user announces: an endpoint, or a name that has yet to be resolved and a port; else ConfigurationError."""
    try:
        return Endpoint.parse(text)
    except ConfigurationError:
        host, _, port = text.removeprefix("tcp://").rpartition(":")
        is_name = bool(host) and ":" not in host and parse_ip(host) is None
        if not text.startswith("tcp://") or not is_name or not port.isascii() or not port.isdigit():
            raise
    if not LOWEST_PORT <= int(port) <= 65535:
        raise ConfigurationError(f"{text!r} has port {port}: links use ports from {LOWEST_PORT} to 65535")
    return host, int(port)


async def resolve(text: str) -> tuple[Endpoint, ...]:
    """The endpoints behind `tcp://NAME:PORT`, for addresses that a user announces by name."""
    announced = parse_announced(text)
    if isinstance(announced, Endpoint):
        return (announced,)
    host, port = announced
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"the host of {text!r} cannot be found ({error}): announce an address that others can resolve"
        ) from error
    endpoints = (Endpoint.parse(f"tcp://[{info[4][0]}]:{port}") for info in found if parse_ip(str(info[4][0])))
    return tuple(dict.fromkeys(endpoints))


def _is_local(ip: IpAddress, interfaces: Sequence[Interface]) -> bool:
    """Whether an address is in a network that this machine is in, other than its loopback."""
    return any(ip in interface.network for interface in interfaces if not interface.ip.is_loopback)


def _network(ip: IpAddress, netmask: str | None) -> IpNetwork:
    """The network of an interface; psutil gives an IPv6 mask as an address, and none for some tunnels."""
    if netmask is None:
        return ipaddress.ip_network(ip)
    if ip.version == 6:
        prefix = int(ipaddress.IPv6Address(netmask)).bit_count()
        return ipaddress.ip_network((ip, prefix), strict=False)
    return ipaddress.ip_network(f"{ip}/{netmask}", strict=False)
