"""Whether others can reach this peer: the announced addresses are dialled back by somebody outside.

The asker makes keys for a probe, lets them in for a while, and hands them over with its addresses; the dialler makes a
real connection with them to each address and says which ones answered with the asker's own key. The answer decides
whether the asker is a full peer or a client peer.

A dialler must be no port scanner for others: it dials only the address that the hub sees the asker come from, or a
private one where both are on one LAN, never a port below 1024, only a few addresses, and each asker only now and then.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from potluck.clock import Clock, SystemClock
from potluck.errors import ConfigurationError, ProtocolError
from potluck.link.direct.addresses import (
    MAX_ADDRESSES,
    Endpoint,
    Interface,
    parse_announced,
    parse_ip,
    reach_of,
    same_lan,
)
from potluck.link.direct.connection import Connection, Shared
from potluck.link.direct.dialling import Dial
from potluck.link.direct.greeting import Key, LinkKeys
from potluck.link.direct.sealing import Slabs
from potluck.link.direct.sockets import SocketSettings
from potluck.messages import Message

Address = Annotated[str, msgspec.Meta(max_length=64)]
DIAL_BACK_SECONDS = 5.0
NO_ANSWER = "nobody with your key answers there"  # no more than that about neighbours, so that nobody can explore a LAN


class DialBackRequest(Message, frozen=True, kw_only=True, tag="dial_back"):
    """Please try whether these addresses lead to me."""

    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
    link_key: Key  # of the peer that a connection must lead to
    probe_key: Key  # the pair that the asker lets in for this
    probe_secret: Key
    plain: bool = False  # trusted-LAN mode


class DialBackAnswer(Message, frozen=True, kw_only=True, tag="dial_back_answer"):
    """What came of it."""

    reached: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)] = ()
    failed: Annotated[dict[Address, str], msgspec.Meta(max_length=MAX_ADDRESSES)] = {}  # with the reason for each
    is_busy: bool = False  # nothing was tried, so this proves nothing: ask somebody else


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachabilityConfig:
    """What the user says about being reachable: `--listen`, `--announce`, `--client-mode`."""

    listen: tuple[str, ...] = ()
    """Where to accept connections, tcp://HOST:PORT; empty: on all interfaces, at any free port."""

    announce: tuple[str, ...] = ()
    """Where others can reach this peer, tcp://HOST:PORT, believed without a test; for forwarded ports and tunnels."""

    client_mode: bool = False
    """Accept no connections at all."""

    def __post_init__(self) -> None:
        if self.client_mode and (self.listen or self.announce):
            raise ConfigurationError(
                "--client-mode accepts no connections, so --listen and --announce mean nothing with it: leave one out"
            )
        if len(self.announce) > MAX_ADDRESSES:
            raise ConfigurationError(f"--announce was given {len(self.announce)} times: use at most {MAX_ADDRESSES}")
        for address in self.listen:
            Endpoint.parse(address, lowest_port=0)
        for address in self.announce:
            parse_announced(address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachability:
    """How this peer presents itself: the two address fields of its card."""

    mode: Literal["full", "client"]
    addresses: tuple[str, ...]
    """Where anybody may dial it."""
    lan_addresses: tuple[str, ...]
    """Where its neighbours may."""
    reason: str
    """For the log and for `potluck doctor`."""


def decide(
    announced: Sequence[Endpoint],
    confirmed: Sequence[Endpoint] | None,
    *,
    client_mode: bool = False,
    announce_override: Sequence[Endpoint] = (),
    hub_sees: str = "",
) -> Reachability:
    """Full or client (pure). `announced` is where the peer listens; `confirmed` what a dial-back reached.

    None for `confirmed` means that nobody could be asked. Then, and when nothing was reached, only neighbours on the
    same LAN are told where to dial. So it is with a private address that a neighbour has reached, where the hub sees
    this peer come from a public one (`hub_sees`): peers elsewhere do not reach it.
    """
    if client_mode:
        return Reachability(mode="client", addresses=(), lan_addresses=(), reason="client mode was asked for")
    near = tuple(str(endpoint) for endpoint in announced if endpoint.reach in ("private", "loopback"))
    if announce_override:
        addresses = tuple(str(endpoint) for endpoint in announce_override)
        missing = [str(endpoint) for endpoint in announce_override if endpoint not in (confirmed or ())]
        reason = "announced by the user" + (f"; not confirmed by a dial-back: {', '.join(missing)}" if missing else "")
        lan = tuple(address for address in near if address not in addresses)
        return Reachability(mode="full", addresses=addresses, lan_addresses=lan, reason=reason)
    if not announced:
        return Reachability(mode="client", addresses=(), lan_addresses=(), reason="it listens nowhere")
    found = [endpoint for endpoint in announced if endpoint in (confirmed or ())]
    outside = parse_ip(hub_sees)
    is_inside = outside is None or reach_of(outside) != "public"  # the hub, and so the run, is on this LAN
    reached = tuple(str(endpoint) for endpoint in found if is_inside or endpoint.reach == "public")
    lan = tuple(address for address in near if address not in reached)
    if reached:
        return Reachability(mode="full", addresses=reached, lan_addresses=lan, reason="reached by a dial-back")
    reason = "only neighbours reach it" if found else "no dial-back reached it"
    if confirmed is None:
        reason = "nobody could be asked to dial back"
    return Reachability(mode="client", addresses=(), lan_addresses=lan, reason=reason)


async def dial_back(
    request: DialBackRequest, allowed: Sequence[Endpoint], *, timeout_seconds: float = DIAL_BACK_SECONDS
) -> DialBackAnswer:
    """Make a real connection to each of the addresses that are allowed, all at once, and say which ones work."""
    reached: list[str] = []
    failed: dict[str, str] = {}
    chosen: dict[str, Endpoint] = {}
    for address in request.addresses:
        try:
            endpoint = Endpoint.parse(address)
        except ConfigurationError as error:
            failed[address] = str(error)
            continue
        if endpoint in allowed:
            chosen[address] = endpoint
        else:
            failed[address] = "not dialled: it is neither where the hub sees you nor on my LAN"
    if chosen:
        results = await _probe(request, chosen, timeout_seconds)
        reached += [address for address, problem in results.items() if not problem]
        near = {address for address, endpoint in chosen.items() if endpoint.reach != "public"}
        failed |= {address: NO_ANSWER if address in near else why for address, why in results.items() if why}
    return DialBackAnswer(reached=tuple(reached), failed=failed)


def allowed_endpoints(
    addresses: Sequence[str], *, asker_host: str, own_host: str, interfaces: Sequence[Interface]
) -> tuple[Endpoint, ...]:
    """Of the addresses that an asker names, those that may be dialled on its behalf.

    `asker_host` and `own_host` are where the hub sees each come from.
    """
    allowed = []
    seen_at = parse_ip(asker_host)
    for address in addresses[:MAX_ADDRESSES]:
        try:
            endpoint = Endpoint.parse(address)
        except ConfigurationError:
            continue
        near = endpoint.reach in ("private", "loopback") and same_lan(
            endpoint, own_host=own_host, their_host=asker_host, interfaces=interfaces
        )
        if endpoint.reach in ("public", "private", "loopback") and (endpoint.ip == seen_at or near):
            allowed.append(endpoint)
    return tuple(allowed)


class DialBackDesk:
    """Answers requests, within limits: each asker now and then, and few at once."""

    def __init__(
        self,
        *,
        interfaces: Sequence[Interface],
        clock: Clock | None = None,
        every_seconds: float = 10.0,
        burst: int = 3,
        max_at_once: int = 8,
        timeout_seconds: float = DIAL_BACK_SECONDS,
    ) -> None:
        """`burst` requests of one asker are answered at once, then one each `every_seconds`."""
        self._interfaces = interfaces
        self._clock = clock or SystemClock()
        self._every_seconds = every_seconds
        self._burst = burst
        self._max_at_once = max_at_once
        self._timeout_seconds = timeout_seconds
        self._debts: dict[str, float] = {}  # until when an asker has used up its share; in the past: all paid
        self._at_work = 0
        self._counts: Counter[str] = Counter()

    def statistics(self) -> Mapping[str, int | float]:
        """Counters: answered, refused."""
        return {"answered": 0, "refused": 0, "addresses_dialled": 0, **self._counts}

    async def answer(self, asker: str, request: DialBackRequest, *, asker_host: str, own_host: str) -> DialBackAnswer:
        """Dial the asker back, or say why not."""
        if self._at_work >= self._max_at_once or not self._within_share(asker):
            self._counts["refused"] += 1
            failed = dict.fromkeys(request.addresses, "not dialled: asked too often")
            return DialBackAnswer(failed=failed, is_busy=True)
        allowed = allowed_endpoints(
            request.addresses, asker_host=asker_host, own_host=own_host, interfaces=self._interfaces
        )
        self._counts["addresses_dialled"] += len(allowed)
        self._at_work += 1
        try:
            answer = await dial_back(request, allowed, timeout_seconds=self._timeout_seconds)
        finally:
            self._at_work -= 1
        self._counts["answered"] += 1
        return answer

    def _within_share(self, asker: str) -> bool:
        now = self._clock.monotonic()
        self._debts = {peer: until for peer, until in self._debts.items() if until > now}
        until = max(self._debts.get(asker, now), now) + self._every_seconds
        if until - now > self._burst * self._every_seconds:
            return False
        self._debts[asker] = until
        return True


class _Probe:
    """One address being tried."""

    def __init__(self) -> None:
        self.result: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def settle(self, problem: str) -> None:
        if not self.result.done():
            self.result.set_result(problem)

    def dial_opened(self, dial: Dial, connection: Connection) -> None:
        connection.close()  # what was said last, the Ready, still gets there
        self.settle("")

    def dial_failed(self, dial: Dial, reason: str) -> None:
        self.settle(reason)

    def packet(self, connection: Connection, frame: memoryview, payload: memoryview | None) -> None:
        """Nothing is expected here, and nothing is read."""

    def room(self, connection: Connection) -> None:
        """Nothing waits to be sent."""

    def ended(self, connection: Connection, reason: str) -> None:
        """It was closed already."""


async def _probe(request: DialBackRequest, endpoints: Mapping[str, Endpoint], timeout_seconds: float) -> dict[str, str]:
    """What is wrong with each address; an empty text for those that lead to the asker."""
    try:
        keys = LinkKeys.parse(request.probe_key, request.probe_secret)
    except ProtocolError as error:
        return dict.fromkeys(endpoints, f"the probe's keys cannot be used: {error}")
    settings = SocketSettings(trusted_lan=request.plain, max_header_bytes=4096, max_payload_bytes=4096)
    shared = Shared(settings=settings, slabs=Slabs(slab_bytes=4096, most_kept=0), clock=SystemClock())
    probes: dict[str, _Probe] = {}
    dials: list[Dial] = []
    try:
        for address, endpoint in endpoints.items():
            probe = probes[address] = _Probe()
            try:
                dials.append(
                    Dial(
                        probe,
                        shared,
                        keys,
                        endpoint=endpoint,
                        their_key=request.link_key,
                        timeout_seconds=timeout_seconds,
                    )
                )
            except (OSError, ProtocolError) as error:
                probe.settle(f"cannot dial: {error}")
        return {address: await probe.result for address, probe in probes.items()}
    finally:
        for dial in dials:
            dial.close()
