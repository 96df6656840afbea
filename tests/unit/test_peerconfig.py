"""What a person chooses about a peer is checked before anybody is looked for; the hub is told what it needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from potluck.errors import ConfigurationError
from potluck.hub.joinlink import JoinLink
from potluck.run.peer import PeerConfig

LINK = JoinLink(host="127.0.0.1", port=4222, run="bakery", ca_hash="a" * 32, invite="secret-invite")


@pytest.mark.parametrize(
    "wrong",
    [
        {"wait_seconds": -1.0},
        {"wait_seconds": float("nan")},
        {"name": "x" * 100},
        {"message": "x" * 999},
        {"listen": ("tcp://nowhere",)},
        {"announce": ("localhost:4567",)},
        {"announce": ("tcp://127.0.0.1:99999",)},
        {"announce": ("tcp://example.org:80",)},
        {"announce": ("tcp://:4567",)},
        {"announce": ("tcp://example.org:port",)},
        {"client_mode": True, "announce": ("tcp://127.0.0.1:4567",)},
        {"client_mode": True, "listen": ("tcp://127.0.0.1:4567",)},
        {"relay_only": True, "listen": ("tcp://127.0.0.1:4567",)},
    ],
)
def test_what_cannot_be_is_the_users_mistake(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        PeerConfig(**wrong)


def test_an_address_may_be_announced_by_name() -> None:
    assert PeerConfig(announce=("tcp://example.org:4567",)).reachability().announce == ("tcp://example.org:4567",)


def test_a_token_is_shown_only_where_there_is_no_invite() -> None:
    assert PeerConfig(token="hf_x", link=replace(LINK, invite="")).application().token == "hf_x"
    assert PeerConfig(token="hf_x", link=LINK).application().token == ""
    assert PeerConfig(token="hf_x", invite="secret").application().token == ""


def test_who_only_looks_and_does_not_wait_asks_for_nothing() -> None:
    assert PeerConfig().application().asks, "its request stays on the list, and it comes again with the same key"
    assert PeerConfig(role="observer", wait_seconds=60.0).application().asks
    assert not PeerConfig(role="observer").application().asks
