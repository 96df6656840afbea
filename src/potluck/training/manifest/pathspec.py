"""`[paths]` in run.toml: a model of many paths (paths/). Checked here; torch is not imported."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from potluck.errors import ConfigurationError
from potluck.messages import Message
from potluck.paths.grid import MAX_LEVELS, Grid

ROUTING_FILE = "paths-routing.json"

Levels = Annotated[tuple[Annotated[int, msgspec.Meta(ge=1)], ...], msgspec.Meta(min_length=1, max_length=MAX_LEVELS)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class PathSpec(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is cut into modules, and documents are routed."""

    levels: Levels = (2, 2)  # modules of each level: every choice of one per level is a path
    shared: tuple[Literal["embedding", "head"], ...] = (
        "embedding",
        "head",
    )  # what all paths share beside; else each path has its own
    route: str = "kmeans"  # or "discriminative", which begins as kmeans; or a JSON file with the path of each document
    route_prefix: AtLeastOne = 32  # tokens of a document that it is routed by; they are not scored
    reroute_every: Count = 0  # tokens, when evaluating: the next path is chosen by the window before; 0: never
    inner_steps: AtLeastOne = 150  # of a phase
    batch_size: AtLeastOne = 16  # windows of an inner step
    alpha: Literal["normalised", "raw"] = "normalised"  # how paths are weighed in a module's outer step
    min_phases: AtLeastOne = 1  # a module's round starts with so many, when the others have had their grace
    stop_after: Count = 0  # a path stops when its validation loss has not fallen for so many phases; 0: never

    def __post_init__(self) -> None:
        self.grid()
        if not self.route:
            raise ConfigurationError('route is empty: choose "kmeans", "discriminative", or a file')

    def grid(self) -> Grid:
        """All paths."""
        return Grid(tuple(self.levels), tuple(self.shared))


class Route(Message, frozen=True, kw_only=True):
    """Which routing counts from which phase on, for all paths alike."""

    from_phase: Count = 0
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    name: str = ROUTING_FILE
