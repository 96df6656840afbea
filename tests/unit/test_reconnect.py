from __future__ import annotations

import random

import pytest

from potluck.errors import CertificateError, ConfigurationError, HubUnavailableError
from potluck.hub.nats.connection import ConnectionConfig
from potluck.hub.nats.linkkeeper import KeeperConfig
from potluck.hub.nats.reconnect import MAX_LEARNT, Absence, Backoff, ServerPool

A, B, C = "tls://a:4222", "tls://b:4222", "tls://c:4222"
WEB_A, WEB_B = "wss://a:443", "wss://b:443"


def test_the_first_time_servers_are_tried_as_given() -> None:
    pool = ServerPool([WEB_A, A, B, A])
    pool.learn([C])
    assert pool.first_order() == [WEB_A, A, B]


def test_after_a_loss_the_next_server_of_the_same_kind_comes_first_and_the_lost_one_last_of_them() -> None:
    pool = ServerPool([A, B, WEB_A, WEB_B])
    assert pool.order_after(A) == [B, A, WEB_A, WEB_B]
    assert pool.order_after(B) == [A, B, WEB_A, WEB_B]
    assert pool.order_after(WEB_A) == [WEB_B, WEB_A, A, B]


def test_a_single_hub_is_tried_again_before_its_websocket() -> None:
    assert ServerPool([A, WEB_A]).order_after(A) == [A, WEB_A]


def test_learnt_servers_are_tried_too() -> None:
    pool = ServerPool([A])
    pool.learn([B, A, C])
    assert pool.order_after(A) == [B, C, A]
    assert pool.order_after(B) == [C, A, B]
    assert [pool.is_learnt(server) for server in (A, B, C)] == [False, True, True]
    pool.learn([C])
    assert pool.order_after(A) == [C, A]


def test_a_server_that_is_no_longer_known_can_be_lost() -> None:
    pool = ServerPool([A, B])
    assert pool.order_after(C) == [A, B]


def test_no_more_servers_are_learnt_than_a_cluster_has() -> None:
    pool = ServerPool([A])
    pool.learn(f"tls://x{number}:4222" for number in range(1000))
    assert len(pool.order_after(A)) == MAX_LEARNT + 1


def test_the_wait_doubles_to_a_limit_with_jitter_and_starts_again() -> None:
    backoff = Backoff(0.1, 10.0, chance=random.Random(1))
    waits = [backoff.next_seconds() for _ in range(12)]
    for number, wait in enumerate(waits):
        longest = min(0.1 * 2**number, 10.0)
        assert longest / 2 <= wait <= longest
    assert len(set(waits[8:])) == 4
    backoff.reset()
    assert backoff.next_seconds() <= 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {"connect_timeout_seconds": 0},
        {"ping_every_seconds": -1},
        {"pong_within_seconds": 0},
        {"backoff_first_seconds": 0},
        {"backoff_first_seconds": 20.0},
        {"refusal_patience_seconds": -0.1},
    ],
)
def test_impatience_without_sense_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(changes))):
        KeeperConfig(**changes)


@pytest.mark.parametrize("name", ["reply_timeout_seconds", "backlog_messages", "backlog_bytes"])
def test_limits_without_sense_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        ConnectionConfig(**{name: 0})


def test_a_hub_that_stays_away_is_told_now_and_then() -> None:
    absence = Absence(0.0)
    told = [second for second in range(1, 3600) if absence.failed(HubUnavailableError("nothing answers"), second)]
    assert told == [60, 660, 1260, 1860, 2460, 3060]


def test_another_certificate_is_told_at_once_and_never_ends_the_attempts() -> None:
    absence = Absence(0.0)
    assert absence.failed(HubUnavailableError("nothing answers"), 1.0) == ""
    text = absence.failed(CertificateError("the certificate is another"), 2.0)
    assert text.startswith("the hub is away for 2 s: the certificate is another. This peer keeps its work")
    assert "join by the new link" in text
    assert absence.failed(CertificateError("the certificate is another"), 3.0) == ""
    assert absence.failed(HubUnavailableError("nothing answers"), 601.0) == ""
    assert absence.failed(CertificateError("the certificate is another"), 602.0) != ""
