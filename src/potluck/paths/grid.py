"""Levels, modules and paths: which path goes through which module (pure).

    levels (2, 2)      level 0: a, b      level 1: c, d      4 paths: (0, 0) = a·c, (0, 1) = a·d, (1, 0), (1, 1)

What stands before and after the levels, the embedding and the head, is one module that all paths share, or each path's
own. A module's name is the name of its group: `level-0-1`, `shared`, `own-1-0`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

from potluck.errors import ConfigurationError

MAX_PATHS = 4096
MAX_LEVELS = 8
ENDS = ("embedding", "head")
SHARED = "shared"

Path = tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """All paths of a model."""

    levels: tuple[int, ...]
    """How many modules each level has."""

    shared: tuple[str, ...] = ENDS
    """Which ends of the model all paths share; the others are each path's own."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.levels) <= MAX_LEVELS or min(self.levels) < 1:
            raise ConfigurationError(
                f"levels = {list(self.levels)}: say how many modules each of 1 to {MAX_LEVELS} levels has, as in [2, 2]"
            )
        if self.num_paths > MAX_PATHS:
            raise ConfigurationError(f"levels = {list(self.levels)} make {self.num_paths} paths: at most {MAX_PATHS}")
        if unknown := sorted(set(self.shared) - set(ENDS)):
            raise ConfigurationError(f"shared = {unknown}: what can be shared beside levels is {', '.join(ENDS)}")

    @property
    def num_paths(self) -> int:
        """One for each choice of a module per level."""
        return math.prod(self.levels)

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """All of them, in order; a path's place is its number."""
        return tuple(itertools.product(*map(range, self.levels)))

    @cached_property
    def _numbers(self) -> dict[Path, int]:
        return {path: number for number, path in enumerate(self.paths)}

    def number_of(self, path: Path) -> int:
        """The place of a path; ConfigurationError where there is none such."""
        if path not in self._numbers:
            most = path_name(self.paths[-1])
            raise ConfigurationError(
                f"there is no path {path_name(path)}: they go from {path_name(self.paths[0])} to {most}"
            )
        return self._numbers[path]

    @property
    def has_shared(self) -> bool:
        """Whether there is a module that all paths go through, beside levels."""
        return bool(self.shared)

    @property
    def has_own(self) -> bool:
        """Whether each path has a module of its own."""
        return set(self.shared) != set(ENDS)

    def modules_of(self, path: Path) -> tuple[str, ...]:
        """Names of the modules that a path goes through."""
        names = [level_name(level, index) for level, index in enumerate(path)]
        return (*([SHARED] if self.has_shared else []), *names, *([own_name(path)] if self.has_own else []))

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Names of all modules."""
        return tuple(dict.fromkeys(name for path in self.paths for name in self.modules_of(path)))

    @cached_property
    def _through(self) -> dict[str, tuple[Path, ...]]:
        through: dict[str, list[Path]] = {name: [] for name in self.modules}
        for path in self.paths:
            for name in self.modules_of(path):
                through[name].append(path)
        return {name: tuple(paths) for name, paths in through.items()}

    def paths_through(self, module: str) -> tuple[Path, ...]:
        """The paths that share a module."""
        return self._through[module]

    def parts_of(self, module: str) -> tuple[str, ...]:
        """Which parts of a path's model a module holds: `level-L`, `embedding`, `head`."""
        if module == SHARED:
            return tuple(end for end in ENDS if end in self.shared)
        if module.startswith("own-"):
            return tuple(end for end in ENDS if end not in self.shared)
        return (module.rpartition("-")[0],)


def level_name(level: int, index: int) -> str:
    """The group of a module of a level."""
    return f"level-{level}-{index}"


def own_name(path: Path) -> str:
    """The group of what is a path's own."""
    return "own-" + "-".join(map(str, path))


def path_name(path: Path) -> str:
    """As people read it: (1, 0)."""
    return f"({', '.join(map(str, path))})"


def read_path(text: str) -> Path:
    """A path as people write it: 1,0 or (1, 0)."""
    try:
        return tuple(int(part) for part in text.strip().strip("()").split(",") if part.strip())
    except ValueError:
        raise ConfigurationError(f"{text!r} names no path: write one module per level, as in 1,0") from None
