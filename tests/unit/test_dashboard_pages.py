"""What a dashboard is made of, without a browser: the organisers' gate, charts, figures, the run's state in a word."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from potluck.errors import ConfigurationError, PermissionDeniedError
from potluck.hub.presence import Beacon, Card, Presence, Role
from potluck.monitor import figures
from potluck.monitor.dashboard import charts
from potluck.monitor.dashboard.actions import Action, ActionLog
from potluck.monitor.dashboard.login import (
    ALL_TRIES,
    SECONDS_PER_TRY,
    SESSION_SECONDS,
    TRIES,
    Login,
    TooManyTriesError,
    is_same_origin,
    load_or_create_token,
)
from potluck.monitor.dashboard.state import status_of
from potluck.monitor.series import downsample
from potluck.monitor.view import Overview, PeerRow, RunView
from potluck.run.linknews import MAX_LINKS, LinkFigures, LinkNews
from potluck.training.books.history import FailureRecord, RoundMember, RoundRecord
from potluck.training.manifest.manifest import Settings

TOKEN = "an organiser's token, long enough"
SCRIPT = "<script>alert(1)</script>"


class FakeClock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


# The gate


def test_the_token_opens_a_session_that_ends_by_itself() -> None:
    clock = FakeClock()
    gate = Login(TOKEN, clock)
    session = gate.enter(f" {TOKEN}\n", "  Olga  Smith ", "1.2.3.4")
    assert len(session) >= 40
    visitor = gate.visitor(session)
    assert visitor is not None
    assert (visitor.name, visitor.address) == ("Olga Smith", "1.2.3.4")
    other = gate.enter(TOKEN, "Otto", "1.2.3.4")
    gate.leave(session)
    gate.leave("no such session")
    assert gate.visitor(session) is None
    assert gate.visitor(None) is None
    assert gate.visitor("") is None
    assert gate.visitor(other) is not None
    clock.now = SESSION_SECONDS + 1
    assert gate.visitor(other) is None


def test_who_guesses_has_to_wait() -> None:
    clock = FakeClock()
    gate = Login(TOKEN, clock)
    for _ in range(TRIES):
        with pytest.raises(PermissionDeniedError, match="not the organiser's token"):
            gate.enter("x" * 30, "Mallory", "6.6.6.6")
    with pytest.raises(TooManyTriesError, match="wait 20 seconds"):
        gate.enter("x" * 30, "Mallory", "6.6.6.6")
    with pytest.raises(PermissionDeniedError, match="not the organiser's token"):
        gate.enter("x" * 30, "Mallory", "1.2.3.4")  # others are not in its way
    clock.now = SECONDS_PER_TRY + 0.1
    with pytest.raises(PermissionDeniedError, match="not the organiser's token"):
        gate.enter("x" * 30, "Mallory", "6.6.6.6")


def test_wrong_tries_never_keep_out_the_right_token() -> None:
    gate = Login(TOKEN, FakeClock())
    for number in range(2 * ALL_TRIES):
        with pytest.raises(PermissionDeniedError):
            gate.enter("x" * 30, "Mallory", f"6.6.6.{number % 10}")
    assert gate.enter(TOKEN, "Olga", "6.6.6.6")


def test_many_addresses_do_not_help_who_guesses() -> None:
    gate = Login(TOKEN, FakeClock())
    for number in range(ALL_TRIES):
        with pytest.raises(PermissionDeniedError, match="not the organiser's"):
            gate.enter("x" * 30, "Mallory", f"6.6.6.{number}")
    with pytest.raises(TooManyTriesError):
        gate.enter("x" * 30, "Mallory", "7.7.7.7")


def test_organisers_say_who_they_are_and_tokens_are_long(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="enter your name"):
        Login(TOKEN, FakeClock()).enter(TOKEN, "  ", "1.2.3.4")
    with pytest.raises(ConfigurationError, match="token"):
        Login("secret", FakeClock())
    token = load_or_create_token(tmp_path)
    assert len(token) >= 32
    assert load_or_create_token(tmp_path) == token
    assert (tmp_path / "dashboard-token").stat().st_mode & 0o077 == 0


def test_requests_of_other_sites_are_known() -> None:
    assert is_same_origin(None, "bakery.example:8484")  # not a browser, or nothing another site can have done
    assert is_same_origin("http://Bakery.example:8484", "bakery.example:8484")
    for origin in (
        "http://evil.example",
        "null",
        "http://bakery.example",
        "",
        "https://bakery.example:8484.evil.example",
    ):
        assert not is_same_origin(origin, "bakery.example:8484")
    assert not is_same_origin("http://", "")


def test_what_was_done_is_written_down(tmp_path: Path) -> None:
    path = tmp_path / "organisers.log"
    log = ActionLog(path)
    for number in range(3):
        log.append(
            Action(at=float(number), who="Olga", address="1.2.3.4", what=f"ban {SCRIPT}\n{number}", outcome="done")
        )
    path.write_text(path.read_text() + "scribble\n")
    again = ActionLog(path)
    assert [action.at for action in again.recent()] == [2.0, 1.0, 0.0]
    assert path.stat().st_mode & 0o077 == 0
    memory = ActionLog(None)
    memory.append(again.recent()[0])
    assert len(memory.recent()) == 1


# What is shown


def overview(**changes: object) -> Overview:
    values: dict[str, object] = {
        "run": "bakery", "epoch": 7, "samples": 10, "target": 100, "samples_per_second": 5.0, "loss": 1.0,
        "seconds_per_epoch": 2.0, "due_in_seconds": 3.0, "num_trainers": 2, "num_peers": 3, "bytes_per_epoch": 10,
        "coordinator": "host", "committed_at": 1000.0,
    }  # fmt: skip
    return Overview(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("word", "changes", "settings", "is_connected"),
    [
        ("training", {}, None, True),
        ("hub away", {}, Settings(paused=True), False),
        ("paused", {}, Settings(paused=True), True),
        ("done", {}, Settings(end_epoch=7), True),
        ("training", {}, Settings(end_epoch=8), True),
        ("waiting for trainers", {"num_trainers": 0}, None, True),
        ("stalled", {"committed_at": 0.0, "samples_per_second": 0.0}, None, True),
        ("training", {"committed_at": 0.0, "target": 0, "due_in_seconds": None}, None, True),  # as DiLoCo does
        ("training", {"committed_at": None, "seconds_per_epoch": None}, None, True),
    ],
)
def test_how_a_run_is_doing_in_a_word(
    word: str, changes: dict[str, object], settings: Settings | None, is_connected: bool
) -> None:
    assert status_of(overview(**changes), settings, is_connected=is_connected, now=1001.0)[0] == word


def presence(peer: str, name: str = "", role: Role = "trainer") -> Presence:
    return Presence(peer=peer, card=Card(session="s", role=role, name=name), state="alive", host="h", person="p")


def test_links_are_drawn_once_and_only_between_those_who_are_here() -> None:
    view = RunView("bakery")
    for peer in ("a", "b", "c"):
        view.peer_changed(presence(peer))
    view.links_told("a", LinkNews(links=(LinkFigures(peer="b", path="direct", upload_bytes_per_second=5.0),)))
    view.links_told("b", LinkNews(links=(LinkFigures(peer="a", path="relay", download_bytes_per_second=math.inf),)))
    view.links_told("c", LinkNews(links=(LinkFigures(peer="gone", path="relay"), LinkFigures(peer="a", path="relay"))))
    view.links_told("stranger", LinkNews(links=(LinkFigures(peer="a", path="direct"),)))
    assert [(link.one, link.other, link.path, link.bytes_per_second) for link in view.links()] == [
        ("a", "b", "direct", 5.0),
        ("a", "c", "relay", None),
    ]
    [row] = [row for row in view.rows(0.0) if row.peer == "c"]
    assert (row.num_direct, row.num_relayed) == (0, 1)
    left = presence("b")
    view.peer_changed(Presence(peer="b", card=left.card, state="left", host="h", person="p"))
    assert len(view.links()) == 1


def test_shares_and_places_of_all_peers() -> None:
    view = RunView("bakery")
    for peer, rate in (("a", 30.0), ("b", 10.0)):
        view.peer_changed(presence(peer))
        view.beacon_came(peer, Beacon(session="s", samples_per_second=rate, loss=rate), 0.0)
    view.peer_changed(presence("host", role="aux"))
    assert [(row.peer, row.share) for row in view.rows(0.0)] == [("a", 0.75), ("b", 0.25), ("host", 0.0)]
    shown = view.overview(0.0)
    assert (shown.roles, shown.places, shown.loss) == ({"trainer": 2, "aux": 1}, {"local": 3}, 25.0)
    assert shown.fastest_samples_per_second == 30.0


def row(peer: str, name: str) -> PeerRow:
    return PeerRow(
        peer=peer, name=name, role="trainer", place="local", state="alive", reach="full", epoch=1, samples=1,
        samples_per_second=1.0, loss=1.0, upload_bytes_per_second=None, download_bytes_per_second=None,
    )  # fmt: skip


def keys_of(options: object) -> set[str]:
    if isinstance(options, dict):
        return set(options) | {key for value in options.values() for key in keys_of(value)}
    return {key for value in options for key in keys_of(value)} if isinstance(options, list | tuple) else set()


@given(st.text(min_size=1, max_size=30))
def test_what_peers_chose_is_never_a_key_of_a_chart(name: str) -> None:
    plain = RoundRecord(epoch=1, committed_at=0.0, seconds=1.0, members=(RoundMember(peer="a", name="plain"),))
    chosen = RoundRecord(epoch=1, committed_at=0.0, seconds=1.0, members=(RoundMember(peer="a", name=f":{name}"),))
    assert keys_of(charts.member_seconds(chosen)) == keys_of(charts.member_seconds(plain))
    assert keys_of(charts.network([row("a", f":{name}")], [])) == keys_of(charts.network([row("a", "plain")], []))


def test_peers_of_the_same_name_are_told_apart_in_the_network() -> None:
    drawn = charts.network([row("UA1", "Ada"), row("UB2", "Ada"), row("UC3", "Lin")], [])
    assert [node["name"] for node in drawn["series"][0]["data"]] == ["Ada (UA1)", "Ada (UB2)", "Lin"]


def test_members_of_the_same_name_are_told_apart_in_a_round() -> None:
    members = (RoundMember(peer="UA1", name="Ada", seconds=1.0), RoundMember(peer="UB2", name="Ada", seconds=2.0))
    drawn = charts.member_seconds(RoundRecord(epoch=1, committed_at=0.0, seconds=1.0, members=members))
    assert drawn["yAxis"]["data"] == ["Ada (UA1)", "Ada (UB2)"]


def test_a_round_that_failed_is_told_with_phase_reason_and_members() -> None:
    from potluck.monitor.dashboard.pages.rounds import failure_of, title_of_failure

    names = tuple(f"peer {number}" for number in range(8))
    failed = FailureRecord(
        epoch=1200, attempt=2, failed_at=5.0, seconds=12.0, phase="exchanging", reason="Ada was lost", members=names
    )
    assert title_of_failure(failed) == "Epoch 1,200, attempt 2 was given up"
    assert failure_of(failed) == (
        "exchanging after 12 s: Ada was lost · members: peer 0, peer 1, peer 2, peer 3, peer 4, peer 5 and 2 more"
    )
    unplanned = FailureRecord(epoch=1, attempt=1, failed_at=5.0, seconds=0.0, phase="planning", reason="nobody reduces")
    assert failure_of(unplanned) == "planning: nobody reduces"
    told = failure_of(replace(unplanned, troubles=dict.fromkeys(names, "no memory")))
    assert told.startswith("planning: nobody reduces · trouble: peer 0: no memory; peer 1: no memory;")
    assert told.endswith("peer 5: no memory; and 2 more")


def test_charts_can_be_sent_and_show_phases_and_trouble() -> None:
    members = (RoundMember(peer="a", seconds=1.5),)
    records = [
        RoundRecord(epoch=1, committed_at=0.0, seconds=2.0, since_last_seconds=3.0, members=members),
        RoundRecord(epoch=2, committed_at=9.0, seconds=1.0, left_out={"bob": "it was gone"}),
    ]
    assert charts.phases_of(records[0]) == (3.0, 1.5, 0.5)
    failures = [
        FailureRecord(epoch=2, attempt=number, failed_at=5.0, seconds=0.5, phase="exchanging", reason="bob was lost")
        for number in (1, 2)
    ]
    options = charts.round_phases(records, failures, with_training=True)
    bars = [[3.0, 0.0], [1.5, 0.0], [0.5, 1.0]]
    assert [series["data"] for series in options["series"]] == [*bars, [[1, 1.0]], [[1, 1.0]]]
    assert charts.round_phases(records, with_training=False)["series"][0]["name"] == "exchange"
    series = downsample(np.arange(1000.0), np.sin(np.arange(1000.0)), 50)
    line = charts.line("x", charts.pairs(series.x, series.mean, "at"), charts.BLUE)
    drawn = charts.chart([*charts.band(series, "at", charts.BLUE), line], by="at")
    assert drawn["title"]["show"] is False
    assert charts.chart([charts.line("x", [], charts.BLUE)])["title"]["show"] is True
    assert charts.band(downsample(np.arange(3.0), np.arange(3.0), 50), "at", charts.BLUE) == []
    json.dumps([options, drawn], allow_nan=False)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (figures.number(1234.4), "1,234"),
        (figures.number(12_345), "12.3k"),
        (figures.number(4_560_000), "4.56M"),
        (figures.number(999_999), "1M"),
        (figures.number(5e17), "500P"),
        (figures.number(-3e30), "-3e+30"),
        (figures.size(999_999), "1 MB"),
        (figures.size(5e17), "500 PB"),
        (figures.number(1.23456), "1.23"),
        (figures.number(0.0), "0"),
        (figures.number(None), "–"),
        (figures.size(1_500_000), "1.5 MB"),
        (figures.speed(None), "–"),
        (figures.duration(0.05), "50 ms"),
        (figures.duration(3.21), "3.2 s"),
        (figures.duration(75), "1 min 15 s"),
        (figures.duration(7200), "2 h"),
        (figures.duration(90_000), "1 d 1 h"),
        (figures.duration(math.inf), "–"),
        (figures.ago(0.0, 61.0), "1 min 1 s ago"),
        (figures.times(2.04), "2.0×"),
        (figures.epochs(1), "1 epoch"),
        (figures.epochs(1200), "1,200 epochs"),
        (figures.loss(math.nan), "–"),
    ],
)
def test_numbers_as_people_read_them(shown: str, expected: str) -> None:
    assert shown == expected


def test_no_more_links_are_told_than_fit() -> None:
    from potluck.link.counters import Counters, LinkStatistics, PeerStatistics
    from potluck.messages import decode, encode
    from potluck.run.linknews import MAX_NEWS_BYTES, link_news

    def link(path: str | None, sent: int) -> PeerStatistics:
        return PeerStatistics(
            path=path, queue_bytes=0, in_flight_bytes=0, window_bytes=0, rtt_seconds=0.01, upload_bytes_per_second=1e9,
            download_bytes_per_second=None, counters=Counters(bytes_sent=sent),
        )  # fmt: skip

    peers = {f"U{number:055}": link("direct" if number else None, number) for number in range(200)}
    peers["own"] = link("self", 10**9)
    statistics = LinkStatistics(
        total=Counters(), upload_bytes_per_second=None, download_bytes_per_second=None, reserved_bytes=0, peers=peers
    )
    news = link_news("own", statistics)
    assert len(news.links) == MAX_LINKS
    assert news.links[0].sent_bytes == 199
    assert decode(LinkNews, encode(news), limit_bytes=MAX_NEWS_BYTES) == news
