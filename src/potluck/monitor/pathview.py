"""Paths × modules, as the hub's books have them: who trains what, how far, how well (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from potluck.monitor.view import GroupRow
from potluck.paths.grid import Grid, Path, path_name
from potluck.paths.phasebook import PhaseBook


@dataclass(frozen=True, kw_only=True)
class PathRow:
    """One path."""

    path: Path
    modules: tuple[str, ...]
    phases: int
    trainers: tuple[str, ...]
    tokens: int
    loss: float | None
    validation: float | None
    best: float | None
    is_over: bool
    returned: int

    def as_table(self) -> dict[str, Any]:
        """For people."""
        return {
            "path": path_name(self.path),
            "phases": self.phases,
            "trained by": ", ".join(self.trainers) or ("stopped early" if self.is_over else "nobody now"),
            "tokens": f"{self.tokens:,}",
            "loss": "" if self.loss is None else f"{self.loss:.4f}",
            "validation": "" if self.validation is None else f"{self.validation:.4f}",
            "came back": self.returned,
        }


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """One module."""

    module: str
    paths: int
    epoch: int
    members: int
    coordinator: str
    seconds_since: float | None
    """Since its last outer step."""

    def as_table(self) -> dict[str, Any]:
        """For people."""
        ago = "never" if self.seconds_since is None else f"{self.seconds_since:,.0f} s ago"
        return {
            "module": self.module,
            "paths": self.paths,
            "outer steps": self.epoch,
            "last": ago,
            "members": self.members,
            "coordinator": self.coordinator,
        }


@dataclass(frozen=True, kw_only=True)
class PathView:
    """All of it."""

    paths: list[PathRow]
    modules: list[ModuleRow]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {"paths": [asdict(row) for row in self.paths], "modules": [asdict(row) for row in self.modules]}


def view_paths(
    grid: Grid, book: PhaseBook | None, groups: Iterable[GroupRow], name_of: Callable[[str], str], hub_now: float
) -> PathView:
    """What a table or a page shows; `book` is None while nobody has asked for a phase."""
    there = {row.name: row for row in groups}
    paths = []
    for number, path in enumerate(grid.paths):
        entry = book.entries[number] if book is not None and number < len(book.entries) else None
        paths.append(
            PathRow(
                path=path,
                modules=grid.modules_of(path),
                phases=entry.done if entry is not None else 0,
                trainers=tuple(name_of(peer) for peer in book.holders(number)) if book is not None else (),
                tokens=entry.tokens if entry is not None else 0,
                loss=entry.loss if entry is not None else None,
                validation=entry.validation if entry is not None else None,
                best=entry.best if entry is not None else None,
                is_over=entry.is_over if entry is not None else False,
                returned=entry.returned if entry is not None else 0,
            )
        )
    modules = []
    for name in grid.modules:
        row = there.get(name)
        since = max(0.0, hub_now - row.committed_at) if row is not None and row.committed_at is not None else None
        modules.append(
            ModuleRow(
                module=name,
                paths=len(grid.paths_through(name)),
                epoch=row.epoch if row is not None else 0,
                members=row.num_members if row is not None else 0,
                coordinator=row.coordinator if row is not None else "",
                seconds_since=since,
            )
        )
    return PathView(paths=paths, modules=modules)
