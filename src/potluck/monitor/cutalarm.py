"""Whether the cuts of a run with several groups still become safe (pure).

A cut is begun every minute, and is safe once all groups' parts are on trusted disks. If one group is not saved, no
newer cut becomes safe, and after a crash all groups go back to an old one. Nothing else looks wrong meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from potluck.hub.subjects import MAIN
from potluck.run.cutboard import Cut, PartRecord

NAMED = 3  # groups in a text


@dataclass(slots=True)
class CutAlarm:
    """How far the cuts of a run are."""

    _wanted: int = 0  # the number of the newest that was begun
    _safe: Cut | None = None  # the newest that is on trusted disks …
    _since: float | None = None  # … and since when there is no newer one
    _epochs: dict[str, int] = field(default_factory=dict)  # of the groups beside main
    _has_moved: bool = False  # whether one of them has made an epoch since
    _parts: dict[str, PartRecord] = field(default_factory=dict)

    def group_committed(self, group: str, epoch: int) -> None:
        """An epoch of a group beside `main` is final."""
        if epoch > self._epochs.get(group, 0):
            self._epochs[group], self._has_moved = epoch, True

    def cuts_changed(self, wanted: int, safe: Cut | None, now: float) -> None:
        """The number of the newest cut that was begun, and the newest that is on trusted disks."""
        if self._since is None or safe != self._safe:
            self._since, self._safe, self._has_moved = now, safe, False
        self._wanted = wanted

    def part_told(self, group: str, part: PartRecord) -> None:
        """How far a group is with its part of a cut."""
        self._parts[group] = part

    def text(self, now: float, patience_seconds: float) -> str:
        """What is wrong; empty: nothing, or not for long enough."""
        newest = self._safe.number if self._safe is not None else 0
        if self._since is None or not self._has_moved or self._wanted <= newest:
            return ""
        if now - self._since <= patience_seconds:
            return ""
        minutes = (now - self._since) / 60
        late = self._late()
        if newest:
            what = f"no cut since number {newest} is on trusted disks, for {minutes:.0f} minutes"
            then = f"if all machines stopped now, all groups would go back to cut {newest}"
        else:
            what = f"no cut of the run is on trusted disks after {minutes:.0f} minutes"
            then = "if all machines stopped now, its groups would go on from states that do not belong together"
        waits = f" Not saved: {', '.join(late[:NAMED])}." if late else ""
        return f"{what}: {then}.{waits} Have the host save every group (potluck host --group NAME), and see its log"

    def _late(self) -> list[str]:
        """The groups that hold the newest cut up, each with its trouble if it has told one."""
        late = {group for group in (MAIN, *self._epochs) if group not in self._parts}
        late |= {group for group, part in self._parts.items() if part.number < self._wanted or not part.is_saved}
        troubles = {group: part.trouble for group, part in self._parts.items() if part.trouble}
        return [f"{group} ({troubles[group]})" if group in troubles else group for group in sorted(late)]
