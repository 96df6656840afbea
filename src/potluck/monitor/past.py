"""The run's whole history in memory (pure): pages out of the store, in any order, and series out of them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import numpy as np

from potluck.monitor.series import EMPTY, Series, downsample
from potluck.training.books.history import (
    KEPT_FAILURES,
    KEPT_PREVIEWS,
    KEPT_ROUNDS,
    MAX_PAGES,
    PAGE_POINTS,
    POINT,
    FailureRecord,
    Points,
    Preview,
    RoundRecord,
)

Axis = Literal["epoch", "at"]
Column = Literal["loss", "rate", "alone", "trainers", "peers", "sent_bytes", "round_seconds"]

FEWEST_ROWS = 4 * PAGE_POINTS
MAX_CACHED = 32
FINENESS = 2048  # a series is computed anew when the history has grown by such a share


class Past:
    """All points of a run, its newest rounds, those that failed, and what the model said."""

    def __init__(self) -> None:
        self._rows = np.zeros(FEWEST_ROWS, POINT)
        self._end = 0
        self._missing: set[int] = set()  # pages before the newest that have not come
        self._rounds: dict[int, RoundRecord] = {}
        self._failures: dict[tuple[int, int, float], FailureRecord] = {}
        self._previews: dict[int, Preview] = {}
        self._cache: OrderedDict[tuple[Column, Axis, int, float], tuple[int, Series]] = OrderedDict()

    def __len__(self) -> int:
        return self._end

    @property
    def points(self) -> Points:
        """All points; those of pages that have not come yet are left out."""
        rows = self._rows[: self._end]
        return rows[rows["at"] > 0] if self._missing else rows

    def put(self, page: int, points: Points) -> None:
        """The points of a page as they are now; a page that is there already is replaced."""
        if not 0 <= page < MAX_PAGES or len(points) > PAGE_POINTS:
            return
        start = page * PAGE_POINTS
        end = start + len(points)
        while len(self._rows) < end:
            self._rows = np.concatenate([self._rows, np.zeros(len(self._rows), POINT)])
        self._missing |= set(range(self._end // PAGE_POINTS, page)) if start > self._end else set()
        self._missing.discard(page)
        self._rows[start:end] = points
        self._end = max(self._end, end)

    def put_round(self, record: RoundRecord) -> None:
        """One round; only the newest are kept."""
        self._rounds[record.epoch] = record
        if len(self._rounds) > KEPT_ROUNDS:
            del self._rounds[min(self._rounds)]

    def rounds(self, most: int = KEPT_ROUNDS) -> list[RoundRecord]:
        """The newest rounds, the last one last."""
        return [self._rounds[epoch] for epoch in sorted(self._rounds)[-most:]]

    def put_failure(self, record: FailureRecord) -> None:
        """One attempt that came to nothing; only the newest are kept."""
        self._failures[record.epoch, record.attempt, record.failed_at] = record
        if len(self._failures) > KEPT_FAILURES:
            del self._failures[min(self._failures)]

    def failures(self) -> list[FailureRecord]:
        """Attempts that came to nothing, the last one last."""
        return sorted(self._failures.values(), key=lambda record: record.failed_at)

    def put_preview(self, preview: Preview) -> None:
        """What the model said; only the newest are kept."""
        self._previews[preview.epoch] = preview
        if len(self._previews) > KEPT_PREVIEWS:
            del self._previews[min(self._previews)]

    def previews(self) -> list[Preview]:
        """What the model said, the newest last."""
        return [self._previews[epoch] for epoch in sorted(self._previews)]

    def series(self, column: Column, by: Axis, num_buckets: int = 500, *, since: float = 0.0) -> Series:
        """One figure over epochs or time, from hub time `since` on."""
        key = (column, by, num_buckets, since)
        version = self._end // max(1, self._end // FINENESS)
        known = self._cache.get(key)
        if known is not None and known[0] == version:
            return known[1]
        rows = self.points
        if since:
            rows = rows[np.searchsorted(rows["at"], since) :]
        series = downsample(rows[by], rows[column], num_buckets) if len(rows) else EMPTY
        self._cache[key] = (version, series)
        self._cache.move_to_end(key)
        while len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        return series

    def total(self, column: Column) -> float:
        """The sum over the whole run."""
        return float(np.nansum(self.points[column].astype(np.float64)))

    def started_at(self) -> float | None:
        """Hub time of the first point."""
        rows = self.points
        return float(rows["at"][0]) if len(rows) else None

    def loss_at(self, epoch: int) -> float | None:
        """The loss when that epoch was the newest; None where nothing is known of it."""
        rows = self.points
        index = int(np.searchsorted(rows["epoch"], epoch, side="right")) - 1
        if index < 0 or not np.isfinite(rows["loss"][index]):
            return None
        return float(rows["loss"][index])
