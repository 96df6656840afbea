"""A state that was fetched, for the caller that wanted it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch import Tensor

from potluck.state.fetcher import FetchReport
from potluck.state.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class FetchedState:
    """The state of an epoch. Release it, or use it in a `with`, so that its memory can be used again."""

    epoch: int
    made_at: int
    """The epoch that it was made at; another than `epoch` when the run went on from a backup."""

    snapshot: Snapshot
    changed: frozenset[int] | None
    """The chunks that differ from the tensors that were given as base; None where there were none."""

    report: FetchReport

    @property
    def digest(self) -> str:
        """The digest of the state."""
        return self.snapshot.digest

    @property
    def metadata(self) -> dict[str, Any]:
        """What was published with the tensors."""
        return self.snapshot.metadata

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the tensors, on the CPU."""
        return self.snapshot.tensors()

    def write_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Put the state into tensors, in place: where they were given as base, only what differs."""
        self.snapshot.write_into(tensors, self.changed)

    def release(self) -> None:
        """Done with it. To be called once."""
        self.snapshot.release()

    def __enter__(self) -> FetchedState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
