"""Who is here: a table, a picture of the links, and a page for each peer."""

from __future__ import annotations

import math
from typing import Any

from nicegui import ui

from potluck.monitor import figures
from potluck.monitor.dashboard import charts
from potluck.monitor.dashboard.frame import Page
from potluck.monitor.dashboard.parts import Chart, Figure, box, card, table, words
from potluck.monitor.view import PeerRow

EVERY_SECONDS = 2.0
COLUMNS = (
    ("name", "Name", "left"),
    ("rate", "Samples/s", "right"),  # what a phone shows without scrolling
    ("share", "Share", "left"),
    ("role", "Role", "left"),
    ("place", "Place", "left"),
    ("loss", "Loss", "right"),
    ("epoch", "Epoch", "right"),
    ("links", "Links", "left"),
    ("up", "Up", "right"),
    ("down", "Down", "right"),
    ("version", "Version", "left"),
)
LINK_COLUMNS = (
    ("other", "With", "left"),
    ("path", "Path", "left"),
    ("speed", "Speed", "right"),
    ("rtt", "Round trip", "right"),
)
# What peers chose stands between double braces: Vue shows it as text.
NAME_CELL = """<q-td :props="props"><span :class="'dot ' + props.row.state"></span>
    <a :href="'/peers/' + props.row.peer">{{ props.row.name }}</a>
    <span v-if="props.row.coordinates" class="chip good" style="margin-left:8px">coordinates</span></q-td>"""
SHARE_CELL = """<q-td :props="props"><span v-if="props.row.share > 0" class="share">
    <b><i :style="{width: props.row.share + '%'}"></i></b>{{ props.row.share }}%</span></q-td>"""


class PeersPage:
    """All peers."""

    def __init__(self, page: Page) -> None:
        self._dashboard = page.dashboard
        self._shown: list[dict[str, Any]] = []
        with card("Peers") as sheet:
            with sheet.default_slot.children[0]:
                search = ui.input(placeholder="Search").props("dense outlined clearable").classes("push")
                search.style("max-width: 220px")
            rows = [row_of(row) for row in self._dashboard.rows()]
            self._table = table(COLUMNS, rows, "peer", numbers=("rate", "loss", "epoch", "up", "down"))
            self._table.add_slot("body-cell-name", NAME_CELL)
            self._table.add_slot("body-cell-share", SHARE_CELL)
            self._table.bind_filter_from(search, "value")
        with card("Links between peers", "each peer tells of its links every ten seconds"):
            self._network = Chart({}, "chart tall")
            with box("legend"):
                for colour, kind, text in (
                    (charts.GREEN, "direct", "direct"),
                    (charts.AMBER, "relay", "through the hub"),
                    (charts.TOMATO, "spot", "trainer"),
                    (charts.BLUE, "spot", "aux"),
                    (charts.GREY, "spot", "observer"),
                ):
                    with box(""):
                        ui.element("i").style(f"border-color: {colour}").classes(kind)
                        ui.label(text).style("display: inline")
        page.live(self.refresh, EVERY_SECONDS)

    def refresh(self) -> None:
        """Show how it is now."""
        rows = self._dashboard.rows()
        shown = self._dashboard.shared("peer rows", rows, lambda: [row_of(row) for row in rows])
        if shown is not self._shown and shown != self._shown:
            self._shown = shown
            self._table.rows = shown
        links = self._dashboard.shared("links", rows, self._dashboard.follower.view.links)
        version = (
            tuple((row.peer, row.name, row.role) for row in rows),
            tuple((li.one, li.other, li.path) for li in links),
        )
        if self._network.is_due(version):
            by_id = sorted(rows, key=lambda row: row.peer)
            options = self._dashboard.shared("network", version, lambda: charts.network(by_id, links))
            self._network.show(options, version)


def row_of(row: PeerRow) -> dict[str, Any]:
    """One peer, as the table shows it."""
    links = [f"{row.num_direct} direct"] if row.num_direct else []
    links += [f"{row.num_relayed} relayed"] if row.num_relayed else []
    return {
        "peer": row.peer,
        "name": row.name,
        "role": row.role,
        "place": row.place,
        "state": row.state,
        "rate": figures.number(row.samples_per_second) if row.role == "trainer" else "",
        "rate_number": row.samples_per_second,
        "share": round(100 * row.share),
        "loss": figures.loss(row.loss) if row.role == "trainer" else "",
        "loss_number": row.loss if row.loss is not None and math.isfinite(row.loss) else None,
        "epoch": f"{row.epoch:,}" if row.role != "observer" else "",
        "epoch_number": row.epoch,
        "links": " · ".join(links) or figures.NOTHING,
        "up": figures.speed(row.upload_bytes_per_second),
        "up_number": row.upload_bytes_per_second,
        "down": figures.speed(row.download_bytes_per_second),
        "down_number": row.download_bytes_per_second,
        "version": row.version,
        "coordinates": row.coordinates,
    }


class PeerPage:
    """One peer."""

    def __init__(self, page: Page, peer: str) -> None:
        self._dashboard = page.dashboard
        self._peer = peer
        self._title = words("", "page-title")
        self._title.style("font-size: 22px; font-weight: 650; margin: 4px 0 0")
        words(peer, "quiet mono").style("margin-bottom: 16px; overflow-wrap: anywhere")
        with box("grid four"):
            self._rate = Figure("Samples per second")
            self._loss = Figure("Loss")
            self._given = Figure("Given in all")
            self._links = Figure("Links")
        with box("grid two"):
            with card("Its rounds", "seconds from the plan until it had the averages"):
                self._chart = Chart({}, "chart short")
            with card("About"), box("facts"):
                self._about = {}
                for name in ("State", "Role", "Place", "Reach", "Up", "Down", "Version", "Last epoch given to"):
                    words(name, "fact-name")
                    self._about[name] = words(figures.NOTHING, "fact-value")
        with card("Links"):
            self._table = table(LINK_COLUMNS, [], "peer")
        page.live(self.refresh, EVERY_SECONDS)

    def refresh(self) -> None:
        """Show how it is now."""
        rows = {row.peer: row for row in self._dashboard.rows()}
        row = rows.get(self._peer)
        given = self._dashboard.follower.book.peers.get(self._peer)
        self._given.show(
            f"{figures.number(given.samples)} samples" if given else figures.NOTHING,
            f"in {figures.epochs(given.epochs)}" if given else "",
        )
        self._title.text = row.name if row else (given.name if given and given.name else self._peer[:12])
        self._about["State"].text = row.state if row else "not here"
        self._about["Last epoch given to"].text = f"{given.last_epoch:,}" if given else figures.NOTHING
        if row is not None:
            self._show_row(row)
            self._show_links(rows)
        self._draw()

    def _show_row(self, row: PeerRow) -> None:
        self._rate.show(figures.number(row.samples_per_second), f"{100 * row.share:.0f}% of all")
        self._loss.show(figures.loss(row.loss), f"at epoch {row.epoch:,}")
        self._links.show(str(row.num_direct + row.num_relayed), f"{row.num_direct} direct, {row.num_relayed} relayed")
        reach = "others can dial it" if row.reach == "full" else "only dials out"
        for name, value in (
            ("Role", row.role + (", coordinates now" if row.coordinates else "")),
            ("Place", row.place),
            ("Reach", reach),
            ("Up", figures.speed(row.upload_bytes_per_second)),
            ("Down", figures.speed(row.download_bytes_per_second)),
            ("Version", row.version),
        ):
            self._about[name].text = value

    def _show_links(self, rows: dict[str, PeerRow]) -> None:
        shown = []
        for link in self._dashboard.follower.view.links():
            if self._peer in (link.one, link.other):
                other = link.other if link.one == self._peer else link.one
                shown.append(
                    {
                        "peer": other,
                        "other": rows[other].name if other in rows else other[:12],
                        "path": "direct" if link.path == "direct" else "through the hub",
                        "speed": figures.speed(link.bytes_per_second),
                        "rtt": figures.duration(link.rtt_seconds),
                    }
                )
        if shown != self._table.rows:
            self._table.rows = shown

    def _draw(self) -> None:
        rounds = self._dashboard.follower.past.rounds()
        version = rounds[-1].epoch if rounds else 0
        if self._chart.is_due(version):
            points = [
                [record.epoch, round(member.seconds, 3)]
                for record in rounds
                for member in record.members
                if member.peer == self._peer
            ]
            line = charts.line("seconds", points, charts.BLUE, area=True)
            self._chart.show(charts.chart([line], from_zero=True, legend=False), version)
