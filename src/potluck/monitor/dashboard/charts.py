"""Charts, as ECharts wants them (pure).

What peers chose (names) only ever stands in values, never in keys: NiceGUI takes a key that begins with a colon for
JavaScript. Tooltips are ECharts' own, which show text as text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from potluck.monitor import figures
from potluck.monitor.past import Axis
from potluck.monitor.series import Numbers, Series
from potluck.monitor.view import LinkRow, PeerRow
from potluck.training.books.history import FailureRecord, RoundRecord, shown_names

# In the middle between light and dark, so that both backgrounds do.
TOMATO, BLUE, GREEN, AMBER, PLUM, GREY = "#e8590c", "#4c8dd6", "#3f9d63", "#e0a21b", "#9b6bb3", "#8d867c"
RED = "#d64545"
FAINT = "rgba(141,134,124,.16)"
PALE = "rgba(141,134,124,.34)"
ROLE_COLOURS = {"trainer": TOMATO, "aux": BLUE, "observer": GREY}
MAX_DRAWN_LINKS = 600
# Large numbers with a letter; others as short as they are.
COMPACT = """value => { const size = Math.abs(value);
    if (size >= 1e21) return value.toExponential(2);
    for (const [limit, letter] of [[1e18, 'E'], [1e15, 'P'], [1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e4, 'k']])
        if (size >= limit) return +(value / (letter == 'k' ? 1e3 : limit)).toPrecision(4) + letter;
    return String(+value.toPrecision(6)); }"""

Options = dict[str, Any]


def chart(
    series: Sequence[Options], *, by: Axis = "epoch", unit: str = "", from_zero: bool = False, legend: bool = True
) -> Options:
    """Lines over epochs or time."""
    is_empty = not any(each["data"] for each in series)
    return {
        "title": {
            "show": is_empty,
            "text": "nothing to draw yet",
            "left": "center",
            "top": "middle",
            "textStyle": {"color": GREY, "fontSize": 13, "fontWeight": "normal"},
        },
        "animation": False,
        "textStyle": {"fontFamily": "inherit"},
        "grid": {"left": 8, "right": 18, "top": 34 if legend else 16, "bottom": 6, "containLabel": True},
        "legend": {
            "show": legend,
            "top": 0,
            "right": 8,
            "icon": "roundRect",
            "itemWidth": 12,
            "itemHeight": 4,
            "textStyle": {"color": GREY},
            "data": [each["name"] for each in series if each.get("name")],
        },
        "tooltip": _tooltip("axis"),
        "xAxis": {**_axis("time" if by == "at" else "value"), "splitLine": {"show": False}, "scale": True},
        "yAxis": {**_axis("value"), "name": unit, "scale": not from_zero},
        "series": list(series),
    }


def line(
    name: str, points: list[list[float]], colour: str, *, area: bool = False, dashed: bool = False, thin: bool = False
) -> Options:
    """One line."""
    options: Options = {
        "name": name,
        "type": "line",
        "data": points,
        "showSymbol": len(points) < 2,
        "symbolSize": 5,
        "lineStyle": {"width": 1.5 if thin else 2.25, "color": colour, "type": "dashed" if dashed else "solid"},
        "itemStyle": {"color": colour},
        "emphasis": {"disabled": True},
    }
    if area:
        stops = [{"offset": 0, "color": _with_alpha(colour, 0.28)}, {"offset": 1, "color": _with_alpha(colour, 0.02)}]
        options["areaStyle"] = {"color": {"type": "linear", "x": 0, "y": 0, "x2": 0, "y2": 1, "colorStops": stops}}
    return options


def band(series: Series, by: Axis, colour: str) -> list[Options]:
    """The range around a line that stands for many points; nothing where each point stands for itself."""
    if not (series.high > series.low).any():
        return []
    shared = {"type": "line", "stack": "range", "silent": True, "showSymbol": False, "lineStyle": {"opacity": 0}}
    quiet = {"tooltip": {"show": False}, "emphasis": {"disabled": True}}
    spread = series.high - series.low
    return [
        {**shared, **quiet, "data": pairs(series.x, series.low, by)},
        {**shared, **quiet, "data": pairs(series.x, spread, by), "areaStyle": {"color": _with_alpha(colour, 0.18)}},
    ]


def pairs(x: Numbers, y: Numbers, by: Axis) -> list[list[float]]:
    """Points as ECharts wants them: times in milliseconds, values with as many digits as anybody sees."""
    scale = 1000.0 if by == "at" else 1.0
    return [
        [round(one * scale), float(f"{other:.5g}")]
        for one, other in zip(x.tolist(), y.tolist(), strict=True)
        if math.isfinite(other)
    ]


def round_phases(
    rounds: Iterable[RoundRecord], failures: Iterable[FailureRecord] = (), *, with_training: bool
) -> Options:
    """How long each round took, and what for, and what failed before it; if wished, with the training before it."""
    records = list(rounds)
    phases = [phases_of(record) for record in records]
    phases = phases if with_training else [(0.0, exchange, commit) for _, exchange, commit in phases]
    bars = [
        {
            "name": name,
            "type": "bar",
            "stack": "round",
            "barMaxWidth": 22,
            "itemStyle": {"color": colour},
            "emphasis": {"disabled": True},
            "data": [round(phase[index], 3) for phase in phases],
        }
        for index, (name, colour) in enumerate((("training", PALE), ("exchange", BLUE), ("commit", GREEN)))
        if index or with_training
    ]
    lost: dict[int, float] = {}  # seconds, by epoch
    for failure in failures:
        lost[failure.epoch] = lost.get(failure.epoch, 0.0) + failure.seconds
    troubled = {index: sum(phases[index]) for index, record in enumerate(records) if has_trouble(record)}
    given_up = {index: lost[record.epoch] for index, record in enumerate(records) if record.epoch in lost}
    marks = [
        _marks(name, symbol, colour, heights)
        for name, symbol, colour, heights in (
            ("trouble", "triangle", AMBER, troubled),
            ("given up", "diamond", RED, given_up),
        )
        if heights  # else it would stand in the legend for nothing
    ]
    options = chart([*bars, *marks], from_zero=True)
    options["xAxis"] = {**_axis("category"), "data": [str(record.epoch) for record in records], "name": ""}
    return options


def _marks(name: str, symbol: str, colour: str, heights: Mapping[int, float]) -> Options:
    """Marks above some of the bars, by their places."""
    return {
        "name": name,
        "type": "scatter",
        "symbol": symbol,
        "symbolSize": 9,
        "itemStyle": {"color": colour},
        "data": [[index, round(height, 3)] for index, height in heights.items()],
    }


def phases_of(record: RoundRecord) -> tuple[float, float, float]:
    """Seconds of training before a round, of the exchange, and of the commit."""
    exchange = min(record.seconds, max((member.seconds for member in record.members if member.holds), default=0.0))
    return record.since_last_seconds or 0.0, exchange, max(0.0, record.seconds - exchange)


def has_trouble(record: RoundRecord) -> bool:
    """Whether something did not go as planned."""
    return bool(record.left_out or record.repairs or record.attempts > 1 or record.went_back_to is not None)


def member_seconds(record: RoundRecord, most: int = 24) -> Options:
    """How long each member of a round took to have all averages, the slowest on top."""
    slowest = sorted(record.members, key=lambda member: member.seconds)[-most:]
    bar = {
        "type": "bar",
        "barMaxWidth": 14,
        "itemStyle": {"color": BLUE, "borderRadius": [0, 4, 4, 0]},
        "emphasis": {"disabled": True},
        "data": [
            {"value": round(member.seconds, 3), "itemStyle": {"color": BLUE if member.holds else AMBER}}
            for member in slowest
        ],
    }
    options = chart([bar], from_zero=True, legend=False)
    options["xAxis"] = {**_axis("value"), "name": ""}
    called = shown_names([member.peer for member in slowest], {member.peer: member.name for member in slowest})
    options["yAxis"] = {**_axis("category"), "data": [called[member.peer] for member in slowest]}
    options["yAxis"]["axisLabel"] = {"color": GREY, "width": 110, "overflow": "truncate"}
    options["tooltip"] = _tooltip("item")
    return options


def network(rows: Sequence[PeerRow], links: Sequence[LinkRow]) -> Options:
    """Links between peers: green directly, amber through the hub, thicker where it is faster."""
    fastest = max((link.bytes_per_second or 0.0 for link in links), default=0.0) or 1.0
    drawn = sorted(links, key=lambda link: -(link.bytes_per_second or 0.0))[:MAX_DRAWN_LINKS]
    rate = max((row.samples_per_second for row in rows), default=0.0) or 1.0
    called = shown_names([row.peer for row in rows], {row.peer: row.name for row in rows})
    return {
        "animation": False,
        "textStyle": {"fontFamily": "inherit"},
        "tooltip": _tooltip("item"),
        "series": [
            {
                "type": "graph",
                "layout": "circular",
                "circular": {"rotateLabel": True},
                "roam": False,
                "left": 90,
                "right": 90,
                "top": 70,
                "bottom": 70,
                "label": {"show": len(rows) <= 60, "color": GREY, "fontSize": 11, "width": 84, "overflow": "truncate"},
                "lineStyle": {"curveness": 0.12},
                "emphasis": {"focus": "adjacency", "lineStyle": {"opacity": 1}},
                "data": [
                    {
                        "id": row.peer,
                        "name": called[row.peer],
                        "value": f"{row.samples_per_second:,.0f} samples/s" if row.role == "trainer" else row.role,
                        "symbolSize": round(8 + 20 * math.sqrt(max(0.0, row.samples_per_second) / rate), 1),
                        "itemStyle": {"color": ROLE_COLOURS.get(row.role, GREY)},
                    }
                    for row in rows
                ],
                "links": [
                    {
                        "source": link.one,
                        "target": link.other,
                        "value": f"{link.path}, {figures.speed(link.bytes_per_second)}",
                        "lineStyle": {
                            "color": GREEN if link.path == "direct" else AMBER,
                            "width": round(1.5 + 4 * math.sqrt((link.bytes_per_second or 0.0) / fastest), 1),
                            "opacity": 0.65,
                            "type": "solid" if link.path == "direct" else "dashed",
                        },
                    }
                    for link in drawn
                ],
            }
        ],
    }


def _axis(kind: str) -> Options:
    label: Options = {"color": GREY, "fontSize": 11, "hideOverlap": True}
    if kind == "value":
        label[":formatter"] = COMPACT
    return {
        "type": kind,
        "axisLine": {"show": False},
        "axisTick": {"show": False},
        "axisLabel": label,
        "nameTextStyle": {"color": GREY, "align": "left"},
        "splitLine": {"lineStyle": {"color": FAINT}},
    }


def _tooltip(trigger: str) -> Options:
    return {
        "trigger": trigger,
        "confine": True,
        "borderWidth": 0,
        "backgroundColor": "rgba(38,35,31,.94)",
        "textStyle": {"color": "#f4efe7", "fontSize": 12},
        "axisPointer": {"lineStyle": {"color": GREY}},
    }


def _with_alpha(colour: str, alpha: float) -> str:
    red, green, blue = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"
