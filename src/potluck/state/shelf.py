"""The states that this peer holds: the newest few, a backup that was read, and what is being served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from potluck.state.announcement import KeptState
from potluck.state.snapshot import Snapshot

MAX_PINNED = 2


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """One state on the shelf. Two are never equal: the same state put there again takes the place of the first."""

    epoch: int
    snapshot: Snapshot
    made_at: int
    is_backup: bool = False
    cut: int = 0
    """Of which cut it is the group's part."""

    def announced(self) -> KeptState:
        """As others are told."""
        snapshot = self.snapshot
        return KeptState(
            epoch=self.epoch,
            digest=snapshot.digest,
            num_bytes=snapshot.inventory.num_bytes,
            made_at=self.made_at,
            is_backup=self.is_backup,
            common=None if snapshot.inventory.is_common else snapshot.common_digest,
            cut=self.cut,
        )


class Shelf:
    """Holds snapshots by epoch; at most `num_kept` of the run, and one backup."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._states: list[Held] = []  # the oldest first
        self._pinned: list[tuple[Held, float]] = []  # that somebody compares, and until when
        self._of_cuts: dict[int, Held] = {}  # by cut: its part, until it is safe elsewhere

    def __iter__(self) -> Iterator[Held]:
        """What others are told of: one state of each epoch, and the backup."""
        parts = {held.epoch: held for held in self._of_cuts.values()}
        states = []
        for held in self._states:
            part = None if held.is_backup else parts.pop(held.epoch, None)
            is_same = part is not None and part.snapshot.digest == held.snapshot.digest
            states.append(part if part is not None and is_same else held)
        return iter(sorted([*parts.values(), *states], key=lambda held: held.epoch))

    def put(self, epoch: int, snapshot: Snapshot, *, made_at: int, is_backup: bool = False, cut: int = 0) -> None:
        """Hold a snapshot too, in place of what there was for its epoch; the oldest has to go."""
        held = Held(epoch, snapshot.hold(), made_at, is_backup, cut)
        replaced = [other for other in self._states if _replaces(held, other)]
        self._states = sorted([*(s for s in self._states if s not in replaced), held], key=lambda state: state.epoch)
        for state in replaced:
            state.snapshot.release()
        self._drop([state for state in self._states if not state.is_backup][: -self._num_kept])

    def newest(self) -> Held | None:
        """The state of the newest epoch, without backups."""
        return next((state for state in reversed(self._states) if not state.is_backup), None)

    def find(self, digest: str) -> Snapshot | None:
        """The state with that digest."""
        states = [*self._states, *(held for held, _ in self._pinned), *self._of_cuts.values()]
        return next((state.snapshot for state in states if state.snapshot.digest == digest), None)

    def get(self, epoch: int) -> Held | None:
        """The state of an epoch, without backups."""
        states = [*self._states, *(held for held, _ in self._pinned), *self._of_cuts.values()]
        return next((state for state in states if state.epoch == epoch and not state.is_backup), None)

    def pin(self, held: Held, until: float) -> None:
        """Hold a state that somebody compares with others; of several, the newest few."""
        known = next((pin for pin in self._pinned if pin[0] is held), None)
        if known is not None:
            self._pinned.remove(known)
        else:
            held.snapshot.hold()
        self._pinned.append((held, until))
        self._unpin(self._pinned[:-MAX_PINNED])

    def expire(self, now: float) -> None:
        """Let go of what nobody compares any more."""
        self._unpin([pin for pin in self._pinned if pin[1] <= now])

    def keep_for_cut(self, cut: int, epoch: int) -> bool:
        """Hold the state of an epoch as the part of a cut; whether that is new. It must be here."""
        known, held = self._of_cuts.get(cut), self.get(epoch)
        if held is None or (known is not None and known.epoch == epoch):
            return False
        self._of_cuts[cut] = Held(epoch, held.snapshot.hold(), held.made_at, cut=cut)
        if known is not None:
            known.snapshot.release()
        return True

    def of_cut(self, cut: int) -> Held | None:
        """The part of a cut, if it is held here."""
        return self._of_cuts.get(cut)

    def release_cuts(self, is_needed: Callable[[int], bool]) -> bool:
        """Let go of the parts of cuts that need not be held any more; whether there was one."""
        over = [cut for cut in self._of_cuts if not is_needed(cut)]
        for cut in over:
            self._of_cuts.pop(cut).snapshot.release()
        return bool(over)

    def _unpin(self, pins: list[tuple[Held, float]]) -> None:
        for pin in list(pins):
            self._pinned.remove(pin)
            pin[0].snapshot.release()

    def drop_backup(self) -> None:
        """The run has gone on: the backup that was read is not needed in memory."""
        self._drop([state for state in self._states if state.is_backup])

    def clear(self) -> None:
        """Hold nothing any more."""
        self._drop(list(self._states))

    def close(self) -> None:
        """Hold nothing, for nobody."""
        self.clear()
        self._unpin(self._pinned)
        self.release_cuts(lambda _cut: False)

    def _drop(self, states: list[Held]) -> None:
        for state in states:
            self._states.remove(state)
            state.snapshot.release()


def _replaces(new: Held, old: Held) -> bool:
    return new.is_backup == old.is_backup and (new.is_backup or new.epoch == old.epoch)
