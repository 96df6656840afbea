"""Which addresses a peer listens on, announces and dials."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ConfigurationError
from potluck.link.direct.addresses import (
    MAX_ADDRESSES,
    Endpoint,
    Interface,
    announceable,
    default_listen,
    dial_order,
    local_interfaces,
    parse_ip,
    reach_of,
    resolve,
    same_lan,
)


def interface(text: str) -> Interface:
    parsed = ipaddress.ip_interface(text)
    return Interface(parsed.ip, parsed.network)


LOOPBACK = interface("127.0.0.1/8")
HOME = interface("192.168.1.5/24")
VPN = interface("100.64.3.2/10")
PUBLIC = interface("5.6.7.8/24")


def order(*addresses: str, own: str = "9.9.9.9", theirs: str = "8.8.8.8", near_only: bool = False) -> list[str]:
    found = dial_order(
        addresses, own_host=own, their_host=theirs, interfaces=[LOOPBACK, HOME, VPN], near_only=near_only
    )
    return [str(endpoint) for endpoint in found]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tcp://1.2.3.4:4000", "tcp://1.2.3.4:4000"),
        ("tcp://[2001:DB8::0:1]:65535", "tcp://[2001:db8::1]:65535"),
        ("tcp://[::ffff:1.2.3.4]:4000", "tcp://1.2.3.4:4000"),
    ],
)
def test_an_address_is_read_and_written(text, shown):
    assert str(Endpoint.parse(text)) == shown
    assert Endpoint.parse(shown) == Endpoint.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1.2.3.4:4000",
        "udp://1.2.3.4:4000",
        "ipc:///etc/passwd",
        "inproc://elsewhere",
        "tcp://example.org:4000",
        "tcp://1.2.3.4",
        "tcp://1.2.3.4:",
        "tcp://1.2.3.4:80",
        "tcp://1.2.3.4:65536",
        "tcp://1.2.3.4:-5",
        "tcp://1.2.3.4:٤٠٠٠",
        "tcp://1.2.3.4:4000;5.6.7.8:1",
        "tcp://2001:db8::1:4000",
        "tcp://[fe80::1%eth0]:4000",
        "tcp://*:4000",
        "tcp://eth0:4000",
    ],
)
def test_anything_else_is_refused_with_a_remedy(text):
    with pytest.raises(ConfigurationError, match=r"write tcp://|resolve the name|links use ports"):
        Endpoint.parse(text)


@given(st.text(max_size=80) | st.builds("tcp://{}:{}".format, st.text(max_size=40), st.text(max_size=8)))
def test_no_text_makes_the_parser_fail_otherwise(text):
    try:
        endpoint = Endpoint.parse(text)
    except ConfigurationError:
        return
    assert Endpoint.parse(str(endpoint)) == endpoint
    assert 1024 <= endpoint.port <= 65535


@pytest.mark.parametrize(
    ("ip", "reach"),
    [
        ("127.3.2.1", "loopback"),
        ("::1", "loopback"),
        ("10.1.2.3", "private"),
        ("192.168.7.7", "private"),
        ("100.64.0.1", "private"),
        ("203.0.113.9", "private"),
        ("fd00::5", "private"),
        ("169.254.3.4", "link-local"),
        ("fe80::3", "link-local"),
        ("8.8.8.8", "public"),
        ("2a00:1450:4001::5", "public"),
        ("0.0.0.0", "unusable"),
        ("::", "unusable"),
        ("224.0.0.1", "unusable"),
        ("255.255.255.255", "unusable"),
    ],
)
def test_how_far_an_address_reaches(ip, reach):
    found = parse_ip(ip)
    assert found is not None
    assert reach_of(found) == reach


def test_a_wildcard_is_announced_by_its_interfaces_and_by_what_the_hub_sees():
    bound = [Endpoint.parse("tcp://0.0.0.0:4000")]
    found = announceable(bound, [LOOPBACK, HOME, PUBLIC], hub_sees="9.9.9.9")
    assert [str(endpoint) for endpoint in found] == [
        "tcp://5.6.7.8:4000",
        "tcp://9.9.9.9:4000",
        "tcp://192.168.1.5:4000",
    ]


def test_loopback_is_announced_only_where_there_is_nothing_else():
    bound = [Endpoint.parse("tcp://0.0.0.0:4000")]
    assert [str(endpoint) for endpoint in announceable(bound, [LOOPBACK])] == ["tcp://127.0.0.1:4000"]
    assert [str(endpoint) for endpoint in announceable([Endpoint.parse("tcp://127.0.0.1:4001")], [LOOPBACK, HOME])] == [
        "tcp://127.0.0.1:4001"
    ]


def test_families_are_not_mixed():
    bound = [Endpoint.parse("tcp://[::]:4000")]
    six = interface("2a00::5/64")
    assert [str(e) for e in announceable(bound, [HOME, six], hub_sees="9.9.9.9")] == ["tcp://[2a00::5]:4000"]
    assert default_listen([LOOPBACK, HOME]) == ("tcp://0.0.0.0:0",)
    assert default_listen([HOME, six]) == ("tcp://0.0.0.0:0", "tcp://[::]:0")


def test_public_addresses_are_dialled_from_anywhere():
    assert order("tcp://8.8.4.4:4000") == ["tcp://8.8.4.4:4000"]


def test_private_addresses_of_strangers_are_not_dialled():
    assert order("tcp://10.0.0.1:4000", "tcp://127.0.0.1:4000", "tcp://172.16.0.1:4000") == []


def test_neighbours_behind_the_same_nat_are_dialled_at_their_lan_address_first():
    assert order("tcp://8.8.4.4:4000", "tcp://10.0.0.1:4000", own="9.9.9.9", theirs="9.9.9.9") == [
        "tcp://10.0.0.1:4000",
        "tcp://8.8.4.4:4000",
    ]


def test_one_behind_the_same_nat_cannot_send_us_to_our_own_services():
    assert order("tcp://127.0.0.1:6379", own="9.9.9.9", theirs="9.9.9.9") == []


def test_loopback_is_dialled_on_the_same_machine():
    assert order("tcp://127.0.0.1:4000", own="127.0.0.1", theirs="127.0.0.1") == ["tcp://127.0.0.1:4000"]
    assert order("tcp://127.0.0.1:4000", own="192.168.1.5", theirs="192.168.1.5") == ["tcp://127.0.0.1:4000"]
    assert order("tcp://127.0.0.1:4000", own="9.9.9.9", theirs="127.0.0.1") == []


def test_addresses_in_a_network_of_this_machine_are_dialled():
    assert order("tcp://192.168.1.77:4000", "tcp://192.168.2.77:4000", "tcp://100.99.1.1:4000") == [
        "tcp://192.168.1.77:4000",
        "tcp://100.99.1.1:4000",
    ]


def test_where_the_hub_sees_a_peer_is_dialled_even_when_it_looks_private():
    assert order("tcp://203.0.113.9:4000", theirs="203.0.113.9") == ["tcp://203.0.113.9:4000"]


def test_unencrypted_links_stay_near():
    assert order("tcp://8.8.4.4:4000", "tcp://192.168.1.77:4000", near_only=True) == ["tcp://192.168.1.77:4000"]


def test_malformed_low_and_surplus_addresses_are_left_out():
    many = [f"tcp://8.8.4.{number}:4000" for number in range(30)]
    assert order("nonsense", "tcp://8.8.4.4:22", "tcp://8.8.4.4:4000", "tcp://8.8.4.4:4000") == ["tcp://8.8.4.4:4000"]
    assert len(order(*many)) == MAX_ADDRESSES


def test_what_the_hub_sees_decides_who_is_a_neighbour():
    endpoint = Endpoint.parse("tcp://192.168.1.77:4000")
    near = [LOOPBACK, HOME]
    assert same_lan(endpoint, own_host="192.168.1.5", their_host="192.168.1.77", interfaces=near)
    assert not same_lan(endpoint, own_host="9.9.9.9", their_host="8.8.8.8", interfaces=near)
    assert not same_lan(endpoint, own_host="", their_host="", interfaces=near)


def test_this_machine_has_a_loopback_interface():
    assert any(found.ip == ipaddress.ip_address("127.0.0.1") for found in local_interfaces())


async def test_a_name_is_resolved_once_by_whoever_announces_it():
    assert Endpoint.parse("tcp://127.0.0.1:4000") in await resolve("tcp://localhost:4000")
    assert await resolve("tcp://1.2.3.4:4000") == (Endpoint.parse("tcp://1.2.3.4:4000"),)
    with pytest.raises(ConfigurationError, match="cannot be found"):
        await resolve("tcp://no-such-host.invalid:4000")
    with pytest.raises(ConfigurationError):
        await resolve("udp://localhost:4000")
    with pytest.raises(ConfigurationError, match="links use ports"):
        await resolve("tcp://localhost:80")
