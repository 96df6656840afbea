"""Dial-back over real sockets: what can be reached is said, and nobody is a port scanner for others."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import pytest
from directpeers import DEADLINE_SECONDS, Peer, direct_config, open_peer

from potluck.errors import ConfigurationError, ProtocolError
from potluck.link.direct.addresses import Endpoint, local_interfaces
from potluck.link.direct.greeting import LinkKeys
from potluck.link.direct.reachability import (
    NO_ANSWER,
    DialBackAnswer,
    DialBackDesk,
    DialBackRequest,
    ReachabilityConfig,
    allowed_endpoints,
    decide,
    dial_back,
)
from potluck.messages import decode, encode
from potluck.sim.virtualclock import VirtualClock
from potluck.testing.polling import poll_until

PUBLIC = Endpoint.parse("tcp://8.8.4.4:4000")
OTHER_PUBLIC = Endpoint.parse("tcp://8.8.8.8:4000")
PRIVATE = Endpoint.parse("tcp://192.168.1.5:4000")


def request_of(peer: Peer, *addresses: str, plain: bool = False, key: str | None = None) -> DialBackRequest:
    probe = peer.carrier.invite_probe(seconds=60)
    return DialBackRequest(
        addresses=addresses or tuple(str(bound) for bound in peer.carrier.bound),
        link_key=key or peer.carrier.link_key,
        probe_key=probe.link_key,
        probe_secret=probe.secret,
        plain=plain,
    )


def endpoints(request: DialBackRequest) -> list[Endpoint]:
    return [Endpoint.parse(address) for address in request.addresses]


@pytest.mark.parametrize("plain", [False, True], ids=["sealed", "plain"])
async def test_a_peer_that_listens_is_reached_with_its_own_key(plain):
    async with open_peer("a", direct_config(plain=plain)) as a:
        request = request_of(a, plain=plain)
        request = decode(DialBackRequest, encode(request))
        answer = await dial_back(request, endpoints(request), timeout_seconds=DEADLINE_SECONDS)
        assert answer == DialBackAnswer(reached=request.addresses)
        await poll_until(lambda: a.stat("probes") == 1, DEADLINE_SECONDS, "the probe to be counted")
        await poll_until(lambda: a.stat("connections") == 0, DEADLINE_SECONDS, "the probe to be over")
        assert a.events.paths == []  # a probe is no peer


@pytest.mark.parametrize("plain", [False, True], ids=["sealed", "plain"])
async def test_somebody_else_at_the_address_does_not_count(plain):
    async with open_peer("a", direct_config(plain=plain)) as a:
        request = request_of(a, plain=plain, key=LinkKeys.generate().link_key)
        answer = await dial_back(request, endpoints(request), timeout_seconds=2.0)
        assert answer == DialBackAnswer(failed=dict.fromkeys(request.addresses, NO_ANSWER))


async def test_a_probe_that_was_not_invited_is_refused():
    async with open_peer("a") as a:
        probe = LinkKeys.generate()
        request = request_of(a)
        false = DialBackRequest(
            addresses=request.addresses,
            link_key=request.link_key,
            probe_key=probe.link_key,
            probe_secret=probe.secret,
        )
        answer = await dial_back(false, endpoints(false), timeout_seconds=2.0)
        assert answer.reached == ()
        assert a.stat("refused_unknown_key") == 1


async def test_closed_silent_and_foreign_ports_fail_each_in_time(unused_tcp_port):
    with closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        async with open_peer("a") as a:
            works = str(a.carrier.bound[0])
            closed, mute = f"tcp://127.0.0.1:{unused_tcp_port}", f"tcp://127.0.0.1:{silent.getsockname()[1]}"
            request = request_of(a, closed, mute, works, "nonsense", "tcp://127.0.0.1:22")
            allowed = [Endpoint.parse(address) for address in (closed, mute, works)]
            answer = await dial_back(request, allowed, timeout_seconds=3.0)
            assert answer.reached == (works,)
            assert set(answer.failed) == {closed, mute, "nonsense", "tcp://127.0.0.1:22"}


async def test_false_keys_are_no_crash():
    async with open_peer("a") as a:
        for changes in ({"probe_secret": "#" * 64}, {"probe_key": "#" * 64}, {"link_key": "#" * 64}):
            request = request_of(a)
            fields = {name: getattr(request, name) for name in request.__struct_fields__}
            answer = await dial_back(DialBackRequest(**{**fields, **changes}), endpoints(request), timeout_seconds=2.0)
            assert answer.reached == ()


def test_requests_and_answers_are_bounded():
    with pytest.raises(ProtocolError):
        decode(DialBackRequest, encode({"type": "dial_back", "addresses": ["x"] * 9, "link_key": "k" * 64}))
    with pytest.raises(ProtocolError):
        decode(DialBackAnswer, encode({"type": "dial_back_answer", "reached": ["x" * 65]}))


@pytest.mark.parametrize(
    ("address", "asker_host", "own_host", "allowed"),
    [
        ("tcp://8.8.4.4:4000", "8.8.4.4", "9.9.9.9", True),
        ("tcp://8.8.4.5:4000", "8.8.4.4", "9.9.9.9", False),  # somebody else's address
        ("tcp://8.8.4.4:80", "8.8.4.4", "9.9.9.9", False),
        ("tcp://10.1.1.1:4000", "8.8.4.4", "9.9.9.9", False),  # the dialler's own LAN
        ("tcp://127.0.0.1:4000", "8.8.4.4", "9.9.9.9", False),
        ("tcp://127.0.0.1:4000", "9.9.9.9", "9.9.9.9", False),  # a neighbour behind the same NAT
        ("tcp://10.1.1.1:4000", "9.9.9.9", "9.9.9.9", True),
        ("tcp://127.0.0.1:4000", "127.0.0.1", "127.0.0.1", True),  # one machine
        ("tcp://169.254.169.254:4000", "9.9.9.9", "9.9.9.9", False),
        ("tcp://0.0.0.0:4000", "9.9.9.9", "9.9.9.9", False),
        ("tcp://203.0.113.7:4000", "203.0.113.7", "198.51.100.1", True),
    ],
)
def test_only_the_askers_own_address_and_neighbours_are_dialled(address, asker_host, own_host, allowed):
    found = allowed_endpoints([address], asker_host=asker_host, own_host=own_host, interfaces=())
    assert bool(found) == allowed


async def test_the_desk_dials_back_and_leaves_strangers_ports_alone():
    async with open_peer("a") as a:
        listener = socket.create_server(("127.0.0.1", 0))
        with closing(listener):
            listener.setblocking(False)
            bystander = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            desk = DialBackDesk(interfaces=local_interfaces())
            request = request_of(a)
            answer = await desk.answer("a", request, asker_host="127.0.0.1", own_host="127.0.0.1")
            assert answer.reached == request.addresses
            request = request_of(a, bystander)
            answer = await desk.answer("a", request, asker_host="8.8.4.4", own_host="127.0.0.1")
            assert answer.reached == ()
            assert "not dialled" in answer.failed[bystander]
            with pytest.raises(BlockingIOError):
                listener.accept()
            assert desk.statistics()["addresses_dialled"] == 1


async def test_the_desk_answers_each_asker_only_now_and_then():
    clock = VirtualClock()
    desk = DialBackDesk(interfaces=(), clock=clock, every_seconds=10.0, burst=3)

    async def ask(asker: str) -> bool:
        keys = LinkKeys.generate()
        request = DialBackRequest(
            addresses=("tcp://8.8.4.4:4000",),
            link_key=keys.link_key,
            probe_key=keys.link_key,
            probe_secret=keys.secret,
        )
        answer = await desk.answer(asker, request, asker_host="1.1.1.1", own_host="9.9.9.9")
        return "too often" not in answer.failed["tcp://8.8.4.4:4000"]

    assert [await ask("a") for _ in range(5)] == [True, True, True, False, False]
    assert await ask("b")
    clock.advance(10.5)
    assert [await ask("a") for _ in range(2)] == [True, False]
    clock.advance(1000)
    assert [await ask("a") for _ in range(4)] == [True, True, True, False]
    assert desk.statistics()["refused"] == 4


async def test_the_desk_dials_only_so_many_at_once():
    async with open_peer("a") as a:
        with closing(socket.create_server(("127.0.0.1", 0))) as mute:
            address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
            desk = DialBackDesk(interfaces=(), max_at_once=2, timeout_seconds=1.0)
            request = request_of(a, address)
            answers = await asyncio.gather(
                *(desk.answer(name, request, asker_host="127.0.0.1", own_host="127.0.0.1") for name in "abc")
            )
            assert [answer.failed[address] for answer in answers].count("not dialled: asked too often") == 1


def test_the_answer_decides_full_or_client():
    reached = decide([PUBLIC, PRIVATE], [PUBLIC])
    assert (reached.mode, reached.addresses, reached.lan_addresses) == ("full", (str(PUBLIC),), (str(PRIVATE),))
    both = decide([PUBLIC, PRIVATE], [PRIVATE, PUBLIC])
    assert (both.mode, both.addresses, both.lan_addresses) == ("full", (str(PUBLIC), str(PRIVATE)), ())
    none = decide([PUBLIC, PRIVATE], [])
    assert (none.mode, none.addresses, none.lan_addresses) == ("client", (), (str(PRIVATE),))
    assert decide([PUBLIC, PRIVATE], None).reason == "nobody could be asked to dial back"
    assert decide([], [PUBLIC]).mode == "client"


def test_what_only_a_neighbour_reaches_makes_no_full_peer_unless_the_hub_is_a_neighbour_too():
    behind_nat = decide([PUBLIC, PRIVATE], [PRIVATE], hub_sees=str(PUBLIC.ip))
    assert (behind_nat.mode, behind_nat.addresses, behind_nat.lan_addresses) == ("client", (), (str(PRIVATE),))
    assert "neighbours" in behind_nat.reason
    inside = decide([PRIVATE], [PRIVATE], hub_sees=str(PRIVATE.ip))
    assert (inside.mode, inside.addresses, inside.lan_addresses) == ("full", (str(PRIVATE),), ())


def test_a_dialler_cannot_add_addresses_that_were_not_announced():
    assert decide([PUBLIC], [OTHER_PUBLIC]).mode == "client"
    assert decide([PUBLIC], [OTHER_PUBLIC, PUBLIC]).addresses == (str(PUBLIC),)


def test_what_the_user_says_goes_before_what_was_found():
    client = decide([PUBLIC, PRIVATE], [PUBLIC], client_mode=True)
    assert (client.mode, client.addresses, client.lan_addresses) == ("client", (), ())
    told = decide([PRIVATE], [], announce_override=[OTHER_PUBLIC])
    assert (told.mode, told.addresses, told.lan_addresses) == ("full", (str(OTHER_PUBLIC),), (str(PRIVATE),))
    assert "not confirmed" in told.reason
    assert "not confirmed" not in decide([PRIVATE], [OTHER_PUBLIC], announce_override=[OTHER_PUBLIC]).reason


def test_contradictory_options_are_refused():
    with pytest.raises(ConfigurationError, match="--client-mode"):
        ReachabilityConfig(client_mode=True, listen=("tcp://0.0.0.0:0",))
    with pytest.raises(ConfigurationError, match="--client-mode"):
        ReachabilityConfig(client_mode=True, announce=("tcp://8.8.4.4:4000",))
    with pytest.raises(ConfigurationError, match="write tcp://"):
        ReachabilityConfig(listen=("4000",))
    with pytest.raises(ConfigurationError, match="at most"):
        ReachabilityConfig(announce=("tcp://8.8.4.4:4000",) * 9)
    assert not ReachabilityConfig().client_mode
