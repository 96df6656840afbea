"""A picture of a pipeline: stages side by side, their servers below each other, micro-batches flowing between them.

Lines are as wide as what flows on them. Names are peers' own words: they are escaped here, and nothing else is theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from potluck.training.staged.overview import Overview, StageShown

COLUMN, BOX_WIDTH, BOX_HEIGHT, GAP, TOP = 190, 132, 46, 14, 44
MAX_ROWS = 12  # servers of a stage that are drawn
MIN_LINE, MAX_LINE = 1.2, 9.0
NAME_LETTERS = 15


def draw_flow(overview: Overview, name_of: Callable[[str], str]) -> str:
    """The picture as SVG; its colours are classes of the dashboard's style sheet."""
    columns = _columns(overview)
    places = {
        (peer, column): (8 + column * COLUMN, TOP + row * (BOX_HEIGHT + GAP))
        for column, peers in enumerate(columns)
        for row, peer in enumerate(peers[:MAX_ROWS])
    }
    num_rows = max((min(len(peers), MAX_ROWS) for peers in columns), default=1) or 1
    width = 8 + len(columns) * COLUMN - (COLUMN - BOX_WIDTH) + 16
    height = TOP + num_rows * (BOX_HEIGHT + GAP) + 22
    parts = [
        f'<svg class="flow" viewBox="0 0 {width} {height}" style="max-width:{width * 1.25:.0f}px" role="img" '
        f'aria-label="{overview.stages} stages and what flows between them">'
    ]
    parts += _heads(overview, columns, height)
    parts += _lines(overview, places)
    for (peer, column), (left, top) in places.items():
        parts.append(_box(overview, peer, column - 1, left, top, name_of))
    return "".join([*parts, "</svg>"])


def _columns(overview: Overview) -> list[list[str]]:
    """Feeders first, then who serves and holds each stage."""
    sending = {flow.source for flow in overview.flows if flow.stage == 0}
    feeders = sorted(peer for peer, about in overview.peers.items() if about.feeds or peer in sending)
    return [feeders, *([*sorted(row.servers), *sorted(row.listeners)] for row in overview.rows)]


def _heads(overview: Overview, columns: list[list[str]], height: int) -> list[str]:
    found = [_text(8 + BOX_WIDTH / 2, 16, "Feeders", "flow-head")]
    for stage, row in enumerate(overview.rows):
        left = 8 + (stage + 1) * COLUMN
        if row.is_bottleneck:
            place = f'x="{left - 12}" y="2" width="{BOX_WIDTH + 24}" height="{height - 6}"'
            found.append(f'<rect class="flow-slowest" {place} rx="12"/>')
        found.append(_text(left + BOX_WIDTH / 2, 16, f"Stage {stage}", "flow-head"))
        found.append(_text(left + BOX_WIDTH / 2, 32, _about(row), "flow-note"))
    for column, peers in enumerate(columns):
        if len(peers) > MAX_ROWS:
            middle = 8 + column * COLUMN + BOX_WIDTH / 2
            found.append(_text(middle, height - 10, f"and {len(peers) - MAX_ROWS} more", "flow-note"))
    return found


def _about(row: StageShown) -> str:
    blocks = f"blocks {row.first_block}–{row.last_block}" if row.last_block > row.first_block else "1 block"
    speed = f", {row.samples_per_second:,.0f}/s" if row.samples_per_second else ""
    return f"{blocks}{speed}"


def _lines(overview: Overview, places: dict[tuple[str, int], tuple[int, int]]) -> list[str]:
    most = max((flow.per_second for flow in overview.flows), default=0.0)
    found = []
    for flow in overview.flows:
        start = places.get((flow.source, flow.stage))
        end = places.get((flow.target, flow.stage + 1))
        if start is None or end is None or not most:
            continue
        x1, y1 = start[0] + BOX_WIDTH, start[1] + BOX_HEIGHT / 2
        x2, y2 = end[0], end[1] + BOX_HEIGHT / 2
        middle = (x1 + x2) / 2
        wide = MIN_LINE + (MAX_LINE - MIN_LINE) * flow.per_second / most
        found.append(
            f'<path class="flow-line" d="M{x1},{y1}C{middle},{y1} {middle},{y2} {x2},{y2}" stroke-width="{wide:.1f}">'
            f"<title>{flow.per_second:.2f} micro-batches per second</title></path>"
        )
    return found


def _box(overview: Overview, peer: str, stage: int, left: float, top: float, name_of: Callable[[str], str]) -> str:
    about = overview.peers.get(peer)
    name, kind, note = name_of(peer), "feeder", "feeds"
    if stage >= 0:
        is_server = peer in overview.rows[stage].servers
        kind = "server" if is_server else "listener"
        note = "holds a copy"
        if is_server and about is not None:
            rate = f"{about.rate:,.0f} samples/s" if about.rate else "not measured"
            waiting = f"{about.rate:,.0f}/s, {about.waiting} waiting" if about.rate else f"{about.waiting} waiting"
            note = waiting if about.waiting else rate
        if about is not None and about.loading:
            kind, note = f"{kind} loading", f"loads {len(about.loading)} blocks"
    short = name if len(name) <= NAME_LETTERS else name[: NAME_LETTERS - 1] + "…"
    why = f"<title>{escape(name)}{': ' + escape(about.why) if about is not None and about.why else ''}</title>"
    return (
        f'<g class="flow-box {kind}">{why}'
        f'<rect x="{left}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="10"/>'
        + _text(left + BOX_WIDTH / 2, top + 20, short, "flow-name")
        + _text(left + BOX_WIDTH / 2, top + 36, note, "flow-note")
        + "</g>"
    )


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="middle">{escape(text)}</text>'
