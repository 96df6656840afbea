"""What a provider of machines can do: the seam between the runner and a cloud.

PotluckError
└── RetryableError
    ├── NoCapacityError    the provider has no such machine now: try another kind, or later
    └── ThrottledError     too many requests: ask again later
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from potluck.errors import RetryableError
from potluck.spot.tiers import Slot


class NoCapacityError(RetryableError):
    """The provider has no such machine now, or not at that price."""


class ThrottledError(RetryableError):
    """The provider wants fewer requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine that the provider says is there."""

    id: str
    slot: str  # as its tag says, `worker-3`; empty where it has none
    kind: str  # the instance type
    state: Literal["starting", "running", "ending"]
    started_at: float = 0.0  # seconds since 1970


class Provider(Protocol):
    """Machines of one experiment. All calls may block for seconds: the runner makes them in a thread."""

    def machines(self) -> list[Machine]:
        """List the machines of the experiment that are not gone, by its tag."""
        ...

    def start(self, slot: Slot, kind: str) -> Machine:
        """Start one machine for a slot; NoCapacityError or ThrottledError if that is not possible now."""
        ...

    def end(self, ids: Sequence[str]) -> None:
        """End machines; those that are gone already are no error."""
        ...

    def prices(self, kinds: Sequence[str]) -> dict[str, float]:
        """Return dollars an hour for each kind that has a price."""
        ...

    def remove_everything(self) -> list[str]:
        """End all machines of the experiment and remove all else that carries its tag; return what was removed."""
        ...
