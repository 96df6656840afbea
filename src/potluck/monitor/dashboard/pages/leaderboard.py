"""Who has given how much."""

from __future__ import annotations

from potluck.monitor import figures
from potluck.monitor.dashboard.frame import Page
from potluck.monitor.dashboard.parts import Meter, box, card, words
from potluck.training.contributions import Given

SHOWN = 100
EVERY_SECONDS = 2.0
MEDALS = ("first", "second", "third")


class LeaderboardPage:
    """All who have given samples, the most generous first."""

    def __init__(self, page: Page) -> None:
        self._dashboard = page.dashboard
        self._shown: object = None
        with card("Leaderboard") as sheet:
            with sheet.default_slot.children[0]:
                self._note = words("", "card-note")
            self._list = box("list")
        words("Each peer has a signed receipt of what it gave to each epoch: `potluck receipts` shows them.", "quiet")
        page.live(self.refresh, EVERY_SECONDS)

    def refresh(self) -> None:
        """Show how it is now."""
        book = self._dashboard.follower.book
        here = {row.peer for row in self._dashboard.rows()}
        version = (book.epoch, frozenset(here))
        if version == self._shown:
            return
        self._shown = version
        ranked = book.ranked()
        total = sum(given.samples for _, given in ranked)
        missed = f"; {book.missed:,} of them could not be written down" if book.missed else ""
        self._note.text = f"{figures.number(total)} samples in {book.epoch:,} epochs{missed}"
        self._list.clear()
        with self._list:
            for place, (peer, given) in enumerate(ranked[:SHOWN]):
                self._show_one(place, peer, given, given.samples / ranked[0][1].samples, peer in here)
            if not ranked:
                words("Nobody has given anything yet. The first epoch fills this page.", "empty")

    @staticmethod
    def _show_one(place: int, peer: str, given: Given, share: float, is_here: bool) -> None:
        with box("item"):
            words(str(place + 1), f"rank {MEDALS[place] if place < len(MEDALS) else ''}")
            with box("item-text"):
                with box("").style("display:flex; gap:8px; align-items:center"):
                    words(given.name or peer[:12], "item-title")
                    if is_here:
                        words("here now", "chip good")
                Meter("slim").show(share)
                words(f"{given.epochs:,} epochs, the last one {given.last_epoch:,}", "item-note")
            words(figures.number(given.samples), "bar-figure large")
