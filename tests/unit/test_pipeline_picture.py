"""What people see of a pipeline: rates of what flows, and the picture, whatever peers call themselves."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from potluck.errors import ProtocolError
from potluck.messages import decode, encode
from potluck.monitor.flowpicture import MAX_ROWS, draw_flow
from potluck.pipeline.flows import FORGET_SECONDS, FlowMeter
from potluck.training.staged.overview import FlowShown, Overview, PeerShown, StageShown

SPACE = "http://www.w3.org/2000/svg"
SVG = f"{{{SPACE}}}"


def overview(num_servers: int = 2) -> Overview:
    servers = tuple(f"s{number}" for number in range(num_servers))
    last = StageShown(
        first_block=2, last_block=2, servers=("t",), listeners=("h",), samples_per_second=9, is_bottleneck=True
    )
    rows = (StageShown(first_block=0, last_block=1, servers=servers, samples_per_second=40.0), last)
    peers = {name: PeerShown(serves=(0,), rate=20.0, waiting=2, why="because") for name in servers}
    peers |= {"t": PeerShown(serves=(1,)), "h": PeerShown(listens=(1,), loading=(2,)), "f": PeerShown(feeds=True)}
    flows = (
        FlowShown(source="f", target="s0", stage=0, per_second=8.0),
        FlowShown(source="f", target="s1", stage=0, per_second=2.0),
        FlowShown(source="s0", target="t", stage=1, per_second=8.0),
        FlowShown(source="gone", target="t", stage=1, per_second=8.0),
    )
    return Overview(step=3, stages=2, rows=rows, peers=peers, flows=flows)


def drawn(shown: Overview, name: str = "") -> ElementTree.Element:
    picture = draw_flow(shown, lambda peer: name or peer)
    return ElementTree.fromstring(picture.replace("<svg ", f'<svg xmlns="{SPACE}" ', 1))


def test_the_picture_has_a_box_for_each_part_and_a_line_for_each_flow() -> None:
    picture = drawn(overview())
    boxes = sorted(group.get("class", "") for group in picture.iter(f"{SVG}g"))
    assert boxes == ["flow-box feeder", "flow-box listener loading", *["flow-box server"] * 3]
    widths = [float(path.get("stroke-width", "0")) for path in picture.iter(f"{SVG}path")]
    assert len(widths) == 3, "one end of the fourth is not there"
    assert max(widths) == widths[0] > widths[1]
    assert len([rect for rect in picture.iter(f"{SVG}rect") if rect.get("class") == "flow-slowest"]) == 1


def test_names_are_text_and_many_servers_are_counted() -> None:
    picture = drawn(overview(MAX_ROWS + 5), name='<script>alert("x")</script>&')
    assert not list(picture.iter(f"{SVG}script"))
    texts = [text.text or "" for text in picture.iter(f"{SVG}text")]
    assert "and 5 more" in texts
    assert any(text.startswith("<script>") for text in texts)
    assert drawn(Overview(step=0)) is not None, "nobody is there yet"


def test_an_overview_travels_and_is_bounded() -> None:
    shown = overview()
    assert decode(Overview, encode(shown)) == shown
    assert Overview.of(shown.as_json()) == shown
    with pytest.raises(ProtocolError):
        decode(Overview, encode(Overview(step=1, waits="x" * 10_000)))


def test_flows_are_rates_of_counts_that_may_begin_anew() -> None:
    meter = FlowMeter()
    meter.heard("a", {("b", 1): 10}, 100.0)
    assert meter.per_second(100.0, "ab") == {}
    meter.heard("a", {("b", 1): 16}, 103.0)
    assert meter.per_second(103.0, "ab") == {("a", "b", 1): 2.0}
    meter.heard("a", {("b", 1): 99}, 103.1)  # too soon to tell
    assert meter.per_second(103.1, "ab") == {("a", "b", 1): 2.0}
    meter.heard("a", {("b", 1): 4}, 105.0)  # it serves another stage since, and counts anew
    assert meter.per_second(105.0, "ab") == {("a", "b", 1): 2.0}
    assert meter.per_second(105.0, "a") == {}
    assert meter.per_second(105.0 + FORGET_SECONDS, "ab") == {}
    meter.gone("a")
    assert meter.per_second(105.0, "ab") == {}
