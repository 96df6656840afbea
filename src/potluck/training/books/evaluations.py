"""Evaluation shared out: each trusted trainer looks at its part of the held-out data, at every epoch that is due.

    trainer   at epoch e, which is due:  figures of its part  ──EvaluatedPart──▶  trusted aux peers, the host among them
    host      has a backup of epoch e:   all parts there? their mean, by samples.  Else it evaluates by itself

Nobody waits: a peer that has left, or is at another epoch, costs the host its own evaluation and nothing more.
Which part is whose follows from the roster, which all have alike; where two saw it differently, parts do not add up,
and do not count.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec

from potluck.hub.presence import Presence
from potluck.link.links import Incoming
from potluck.messages import Message

logger = logging.getLogger(__name__)

MOST_PARTS = 64  # more peers than that are not asked
MOST_EPOCHS = 16  # whose parts are kept
MOST_FIGURES = 32


class EvaluatedPart(Message, frozen=True, kw_only=True, tag="evaluation.part"):
    """What one trainer found in its part of the held-out data."""

    epoch: Annotated[int, msgspec.Meta(ge=0)]
    part: Annotated[int, msgspec.Meta(ge=0, lt=MOST_PARTS)]
    num_parts: Annotated[int, msgspec.Meta(ge=1, le=MOST_PARTS)]
    samples: Annotated[int, msgspec.Meta(ge=0)]
    figures: Annotated[dict[str, float], msgspec.Meta(max_length=MOST_FIGURES)] = {}


def part_of(peer: str, roster: Iterable[Presence]) -> tuple[int, int] | None:
    """Which part of how many is this trainer's (pure); None: none, since it is not trusted."""
    trusted = sorted(each.peer for each in roster if each.trusted and each.card.role == "trainer")[:MOST_PARTS]
    return (trusted.index(peer), len(trusted)) if peer in trusted else None


def readers_of(roster: Iterable[Presence]) -> list[str]:
    """Who makes something of it (pure): aux peers that are trusted, as a host's own peer is."""
    return sorted(each.peer for each in roster if each.trusted and each.card.role == "aux")


def combined(parts: Iterable[EvaluatedPart]) -> dict[str, float] | None:
    """The figures of all parts together, by their samples (pure); None while one is missing."""
    by_count: dict[int, dict[int, EvaluatedPart]] = {}
    for each in parts:
        if each.part < each.num_parts:
            by_count.setdefault(each.num_parts, {})[each.part] = each
    whole = next((found for count, found in sorted(by_count.items()) if len(found) == count), None)
    if whole is None:
        return None
    told = [each for each in whole.values() if each.samples]
    total = sum(each.samples for each in told)
    names = set.intersection(*(set(each.figures) for each in told)) if told else set()
    figures = {name: sum(each.figures[name] * each.samples for each in told) / total for name in sorted(names)}
    return figures or None


class EvaluationDesk:
    """Takes parts from trusted trainers. Lives on the event loop."""

    def __init__(self, peer: Any) -> None:
        """`peer` is this process's own, with session and links."""
        self.counts: Counter[str] = Counter()
        self._roster = peer.session.roster
        self._parts: dict[int, dict[str, EvaluatedPart]] = {}  # by epoch and peer
        peer.links.handle(EvaluatedPart, self._came)

    def figures_at(self, epoch: int) -> Mapping[str, float] | None:
        """What trusted trainers found at this epoch, all together; None: evaluate it yourself."""
        return combined(self._parts.get(epoch, {}).values())

    def _came(self, incoming: Incoming[EvaluatedPart]) -> None:
        found, presence = incoming.message, self._roster.get(incoming.sender)
        is_number = all(math.isfinite(value) or math.isnan(value) for value in found.figures.values())
        if presence is None or not presence.trusted or not is_number:
            self.counts["passed_over"] += 1
            return
        self.counts["taken"] += 1
        self._parts.setdefault(found.epoch, {})[incoming.sender] = found
        while len(self._parts) > MOST_EPOCHS:
            del self._parts[min(self._parts)]
