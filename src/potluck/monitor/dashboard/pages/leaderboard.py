"""Who has given how much."""

from __future__ import annotations

from nicegui import ui

from potluck.monitor import figures
from potluck.monitor.dashboard.frame import Page
from potluck.monitor.dashboard.parts import Meter, box, card, words
from potluck.training.books.contributions import Given

SHOWN = 100
EVERY_SECONDS = 5.0
MEDALS = ("first", "second", "third")


class LeaderboardPage:
    """All who have given samples, the most generous first."""

    def __init__(self, page: Page) -> None:
        self._dashboard = page.dashboard
        self._shown: object = None
        self._rows: list[_Row] = []
        with card("Leaderboard") as sheet:
            with sheet.default_slot.children[0]:
                self._note = words("", "card-note")
            self._list = box("list")
            self._empty = words("No samples yet. The first epoch fills this page.", "empty")
        words(
            "Each peer has a signed receipt of what it gave to each epoch: the command “potluck receipts” shows them.",
            "quiet",
        )
        page.live(self.refresh, EVERY_SECONDS)

    def refresh(self) -> None:
        """Show how it is now."""
        book = self._dashboard.follower.book
        here = {row.peer for row in self._dashboard.rows()}
        version = (book.epoch, here)
        if version == self._shown:
            return
        self._shown = version
        ranked = self._dashboard.shared("ranked", book.epoch, book.ranked)
        total = sum(given.samples for _, given in ranked)
        missed = f"; {book.missed:,} of them could not be written down" if book.missed else ""
        self._note.text = f"{figures.number(total)} samples in {figures.epochs(book.epoch)}{missed}"
        self._empty.set_visibility(not ranked)
        with self._list:
            while len(self._rows) < min(SHOWN, len(ranked)):
                self._rows.append(_Row(len(self._rows)))
        for row, (peer, given) in zip(self._rows, ranked, strict=False):  # nobody ever leaves the book's top
            row.show(peer, given, given.samples / ranked[0][1].samples, peer in here)


class _Row:
    """One place; who has it may change."""

    def __init__(self, place: int) -> None:
        with box("item"):
            words(str(place + 1), f"rank {MEDALS[place] if place < len(MEDALS) else ''}")
            with box("item-text"):
                with box("item-head"):
                    self._name = words("", "item-title")
                    self._here: ui.label = words("here now", "chip good")
                self._meter = Meter("slim")
                self._note = words("", "item-note")
            self._figure = words("", "bar-figure large")

    def show(self, peer: str, given: Given, share: float, is_here: bool) -> None:
        self._name.text = given.name or peer[:12]
        self._here.set_visibility(is_here)
        self._meter.show(share)
        self._note.text = f"{figures.epochs(given.epochs)}, the last one {given.last_epoch:,}"
        self._figure.text = figures.number(given.samples)
