from __future__ import annotations

import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ConfigurationError, LinkFormatError
from potluck.hub.joinlink import MAX_HOSTS, HubPlace, JoinLink, check_invite, organiser_hash, seal_invite
from potluck.hub.keys import new_seed, public_key
from potluck.hub.wheelpin import WheelPin

HASH = "abcdefghijklmnopqrstuvwxyz234567"
SECRET = "dGhpcyBpcyBhIHNlY3JldA"
LINK = JoinLink(host="hub.example.org", port=4222, run="my-run", ca_hash=HASH, invite=SECRET, websocket_port=8443)
TEXT = str(LINK)

secrets = st.text(string.ascii_letters + string.digits + "-_", min_size=8, max_size=64)
ports = st.integers(1, 65535)
hosts = st.one_of(
    st.ip_addresses().map(str),
    st.from_regex(r"[a-z][a-z0-9]{0,10}(\.[a-z][a-z0-9-]{0,10}[a-z0-9]){0,3}", fullmatch=True),
)
places = st.builds(HubPlace, host=hosts, port=ports, websocket_port=ports | st.none())
wheels = st.builds(
    WheelPin,
    port=ports,
    version=st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,3}){1,2}(\.dev[0-9]{1,3})?", fullmatch=True),
    sha256=st.text("0123456789abcdef", min_size=64, max_size=64),
)
links = st.builds(
    JoinLink,
    host=hosts,
    port=ports,
    run=st.from_regex(r"[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?", fullmatch=True),
    ca_hash=st.text("abcdefghijklmnopqrstuvwxyz234567", min_size=32, max_size=32) | st.just(""),
    invite=secrets | st.just(""),
    websocket_port=ports | st.none(),
    others=st.lists(places, max_size=3).map(tuple),
    organiser_hash=st.text("abcdefghijklmnopqrstuvwxyz234567", min_size=26, max_size=26) | st.just(""),
    wheel=wheels | st.none(),
)


def test_a_link_reads_as_documented() -> None:
    assert f"potluck://hub.example.org:4222/my-run?ca={HASH}&ws=8443#{seal_invite(SECRET)}" == TEXT
    plain = JoinLink(host="::1", port=1, run="r", ca_hash="")
    assert str(plain) == "potluck://[::1]:1/r?ca=none#ask"


def test_a_link_may_name_several_hosts() -> None:
    places = (HubPlace(host="::1", port=2, websocket_port=443), HubPlace(host="hub3", port=3))
    link = JoinLink(host="hub1", port=1, run="r", ca_hash=HASH, websocket_port=80, others=places)
    assert str(link) == f"potluck://hub1:1,[::1]:2,hub3:3/r?ca={HASH}&ws=80,443,#ask"
    assert JoinLink.parse(str(link)) == link
    assert [str(place) for place in link.places] == ["hub1:1", "[::1]:2", "hub3:3"]
    for_all = JoinLink.parse(f"potluck://hub1:1,[::1]:2,hub3:3/r?ca={HASH}&ws=443#ask")
    assert {place.websocket_port for place in for_all.places} == {443}
    assert JoinLink.parse(str(for_all)) == for_all


@given(links, st.data())
def test_a_host_that_is_named_twice_counts_once(link: JoinLink, data: st.DataObject) -> None:
    again = data.draw(st.sampled_from(link.places))
    position = data.draw(st.integers(link.places.index(again) + 1, len(link.places)))
    places = [*link.places[:position], again, *link.places[position:]]
    doubled = JoinLink.parse(f"potluck://{','.join(map(str, places))}/r?ca={HASH}#ask")
    assert [str(place) for place in doubled.places] == [str(place) for place in link.places]


def test_too_many_hosts_are_refused() -> None:
    hosts = [f"hub:{port}" for port in range(1, MAX_HOSTS + 2)]
    assert len(JoinLink.parse(f"potluck://{','.join(hosts[1:])}/r?ca={HASH}#ask").places) == MAX_HOSTS
    with pytest.raises(LinkFormatError, match="are enough"):
        JoinLink.parse(f"potluck://{','.join(hosts)}/r?ca={HASH}#ask")


@given(links)
def test_a_link_survives_being_written_and_read(link: JoinLink) -> None:
    assert JoinLink.parse(str(link)) == link


@given(links, st.data())
def test_a_link_that_was_cut_anywhere_is_refused(link: JoinLink, data: st.DataObject) -> None:
    text = str(link)
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    if cut.endswith("#ask"):
        return  # an invite that begins like this: once in 10^5 links, and then access is asked for
    with pytest.raises(LinkFormatError):
        JoinLink.parse(cut)


@given(secrets, st.data())
def test_an_invite_that_lost_or_changed_a_character_is_refused(secret: str, data: st.DataObject) -> None:
    sealed = seal_invite(secret)
    assert check_invite(sealed) == secret
    position = data.draw(st.integers(0, len(sealed) - 1))
    character = data.draw(st.sampled_from(string.ascii_letters + string.digits + "-_") | st.just(""))
    changed = sealed[:position] + character + sealed[position + 1 :]
    if changed != sealed:
        with pytest.raises(LinkFormatError, match="cut short or changed"):
            check_invite(changed)


@given(st.text(max_size=200) | st.text(string.printable, max_size=100).map(lambda text: "potluck://" + text))
def test_whatever_is_pasted_is_a_link_or_a_plain_error(text: str) -> None:
    try:
        link = JoinLink.parse(text)
    except LinkFormatError:
        return
    assert JoinLink.parse(str(link)) == link


@given(st.integers(0, len(TEXT) - 1), st.characters())
def test_a_changed_character_is_a_link_or_a_plain_error(position: int, character: str) -> None:
    try:
        link = JoinLink.parse(TEXT[:position] + character + TEXT[position + 1 :])
    except LinkFormatError:
        return
    assert link.invite == SECRET


@pytest.mark.parametrize(
    "pasted",
    [
        f"  {TEXT}\n",
        f"'{TEXT}'",
        f'"{TEXT}"',
        f"<{TEXT}>",
        f"({TEXT}).",
        f"`{TEXT}`",
        f"\u201c{TEXT}\u201d,",
        f"**{TEXT}**",
        f"{TEXT}.",
        f"{TEXT},",
        f"{TEXT}!",
        f"\u200b{TEXT}\ufeff",
        TEXT.replace("potluck://", "Potluck://"),
        TEXT.replace("hub.example", "HUB.Example"),
        TEXT.replace("&", "&amp;"),
        TEXT.replace("my-run", "My-Run"),
        TEXT.replace("my-run", "my-run/"),
        TEXT.replace("&ws", "\n  &ws"),
        TEXT.replace("&ws", "&colour=red&ws"),
    ],
)
def test_what_comes_along_with_pasting_does_no_harm(pasted: str) -> None:
    assert JoinLink.parse(pasted) == LINK


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no join link here"),
        ("   ", "no join link here"),
        ("hello", "is not a join link"),
        ("hub.example.org:4222", "is not a join link"),
        ("https://hub.example.org/my-run", "a https:// link, not a join link"),
        ("potluck://", "names no host"),
        ("potluck:///my-run?ca=none#ask", "names no host"),
        ("potluck://:4222/my-run?ca=none#ask", "names no host"),
        ("potluck://hub", "names no port"),
        ("potluck://hub/my-run?ca=none#ask", "names no port"),
        ("potluck://hub:x/my-run?ca=none#ask", "port cannot be read"),
        ("potluck://hub:0/my-run?ca=none#ask", "port 0 does not exist"),
        ("potluck://hub:70000/my-run?ca=none#ask", "port cannot be read"),
        ("potluck://[::1/my-run?ca=none#ask", "host cannot be read"),
        ("potluck://h_b!:1/my-run?ca=none#ask", "neither a host name nor an IP address"),
        ("potluck://me@hub:1/my-run?ca=none#ask", "an @ before its host"),
        ("potluck://hub:1", "names no run"),
        ("potluck://hub:1/", "names no run"),
        ("potluck://hub:1/a/b?ca=none#ask", "cannot name a run"),
        ("potluck://hub:1/my-run", "which certificate"),
        ("potluck://hub:1/my-run#ask", "which certificate"),
        ("potluck://hub:1/my-run?ca=#ask", "which certificate"),
        (f"potluck://hub:1/my-run?ca={HASH}", "has no invite"),
        (f"potluck://hub:1/my-run?ca={HASH}#", "has no invite"),
        (f"potluck://hub:1/my-run?ca={HASH[:-3]}#ask", "29 characters where 32"),
        (f"potluck://hub:1/my-run?ca={HASH[:-1]}1#ask", "is not whole"),
        (f"potluck://hub:1/my-run?ca={HASH}&ca={HASH}#ask", "ca= twice"),
        (f"potluck://hub:1/my-run?ca={HASH}&ws=#ask", "WebSocket port '' is not a number"),
        (f"potluck://hub:1/my-run?ca={HASH}&ws=99999#ask", "port 99999 does not exist"),
        (f"potluck://hub:1,/my-run?ca={HASH}#ask", "a comma too many"),
        (f"potluck://,hub:1/my-run?ca={HASH}#ask", "a comma too many"),
        (f"potluck://hub:1,,hub:2/my-run?ca={HASH}#ask", "a comma too many"),
        (f"potluck://hub:1,hub2/my-run?ca={HASH}#ask", "names no port"),
        (f"potluck://hub:1,me@hub2:1/my-run?ca={HASH}#ask", "has an @"),
        (f"potluck://hub:1,hub:99999/my-run?ca={HASH}#ask", "port cannot be read"),
        (f"potluck://hub:1,[::1:2/my-run?ca={HASH}#ask", "host cannot be read"),
        (f"potluck://hub:1,b{{ad:2/my-run?ca={HASH}#ask", "neither a host name"),
        (f"potluck://{'hub:1,' * 500}hub:1/my-run?ca={HASH}#ask", "are enough"),
        (f"potluck://hub:1,hub:2/my-run?ca={HASH}&ws=1,2,3#ask", "2 hosts and 3 WebSocket ports"),
        (f"potluck://hub:1,hub:2/my-run?ca={HASH}&ws=1,x#ask", "'x' is not a number"),
        (f"potluck://hub:1/my-run?ca={HASH}&pip=#ask", "pip=.* is not whole"),
        (f"potluck://hub:1/my-run?ca={HASH}&pip=8000,0.1.0#ask", "pip=8000,0.1.0, is not whole"),
        (f"potluck://hub:1/my-run?ca={HASH}&pip=x,0.1.0,{'0' * 64}#ask", "is not whole"),
        (f"potluck://hub:1/my-run?ca={HASH}&pip=8000,../etc,{'0' * 64}#ask", "is not whole"),
        (f"potluck://hub:1/my-run?ca={HASH}&pip=8000,0.1.0,{'0' * 63}#ask", "is not whole"),
        (f"potluck://hub:1/my-run?ca={HASH}&pip=8000,0.1.0,{'0' * 63}g#ask", "is not whole"),
        (TEXT[:-1], "cut short or changed"),
        (TEXT.split("&", maxsplit=1)[0], "put it in quotes"),
        (f"{TEXT} please", "a space in it"),
        ("potluck://" + "a" * 5000, "too long"),
        ("potluck://" + "a" * 10**6, "too long"),
    ],
)
def test_each_fault_has_its_own_words(text: str, words: str) -> None:
    with pytest.raises(LinkFormatError, match=words) as caught:
        JoinLink.parse(text)
    assert len(str(caught.value)) < 400


def test_errors_and_repr_do_not_show_the_invite() -> None:
    assert SECRET not in repr(LINK)
    for text in (TEXT[:-1], TEXT.replace("ca=", "cb="), TEXT.replace(":4222", "")):
        with pytest.raises(LinkFormatError) as caught:
            JoinLink.parse(text)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("secret", ["", "short", "with space in it", "with.dot.in.it", "é" * 10, "a" * 300])
def test_a_secret_that_a_link_cannot_carry_is_refused(secret: str) -> None:
    with pytest.raises(ConfigurationError, match="8 to 256"):
        seal_invite(secret)


def test_a_link_names_the_organiser_by_a_hash() -> None:
    key = public_key(new_seed("user"))
    link = replace(LINK, organiser_hash=organiser_hash(key))
    assert f"&by={organiser_hash(key)}#" in str(link)
    assert JoinLink.parse(str(link)) == link
    assert organiser_hash(key) != organiser_hash(public_key(new_seed("user")))
    with pytest.raises(LinkFormatError, match="by="):
        JoinLink.parse(str(link).replace(link.organiser_hash, link.organiser_hash[:-1]))


def test_a_link_names_the_wheel_that_its_host_serves() -> None:
    link = replace(LINK, wheel=WheelPin(port=8000, version="0.1.0", sha256="ab" * 32))
    assert f"&pip=8000,0.1.0,{'ab' * 32}#" in str(link)
    assert JoinLink.parse(str(link)) == link
    url = f"http://hub.example.org:8000/potluck_train-0.1.0-py3-none-any.whl#sha256={'ab' * 32}"
    assert link.pip_line == f"pip install 'potluck-train @ {url}'"
    assert "http://[::1]:8000/" in replace(link, host="::1").pip_line
    assert LINK.pip_line == ""  # as a link of before has none


def test_another_version_than_the_host_s_is_named_with_the_line_that_installs_it() -> None:
    link = replace(LINK, wheel=WheelPin(port=8000, version="0.2.0", sha256="ab" * 32))
    assert link.version_notice("0.2.0") == ""
    assert LINK.version_notice("0.1.0") == ""
    notice = link.version_notice("0.1.0")
    assert notice.startswith("this is Potluck 0.1.0, and the run's host has 0.2.0.")
    assert notice.endswith(link.pip_line)
