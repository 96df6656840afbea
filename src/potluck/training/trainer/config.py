"""How one machine trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from potluck.errors import ConfigurationError
from potluck.state.config import StateConfig
from potluck.training.books.shards import MAX_READERS
from potluck.training.trainer.precision import PRECISIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How this machine trains."""

    batch_size: int | None = None
    """Samples per step; None: found by trial, while it trains where that is possible (batchsize.py)."""

    device: str = ""
    """Where to compute, as torch names it, or on several devices, with commas between; empty: the fastest there are."""

    precision: str = ""
    """In which numbers to compute (precision.py); empty: what suits the device."""

    compile: bool = False
    """Have torch compile the model, which takes minutes, and makes steps faster."""

    shard: bool | None = None
    """Whether several devices hold a part of the model each (sharding.py); None: where it fits on none of them."""

    max_steps: int | None = None
    """End after so many steps; None: go on until the run ends."""

    receipts: Path | None = None
    """The file that receipts are kept in; None: they are not."""

    num_readers: int = 1
    """Threads that read data, each with a shard of its own."""

    num_threads: int | None = None
    """Threads that torch computes with; None: this machine's cores, shared among its peers (machine.py)."""

    max_memory_bytes: int | None = None
    """What this process may use: batches are chosen, and halved, so that it stays below; None: whatever there is."""

    state: StateConfig = field(default_factory=StateConfig)
    """Whether to keep states for others, and where and how often to write backups."""

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigurationError(f"batch_size={self.batch_size}: a step needs at least 1 sample")
        if self.max_steps is not None and self.max_steps < 0:
            raise ConfigurationError(f"max_steps={self.max_steps}: it must be 0 or more")
        if self.precision and self.precision not in PRECISIONS:
            raise ConfigurationError(f"precision={self.precision}: choose one of {', '.join(PRECISIONS)}")
        if not 1 <= self.num_readers <= MAX_READERS:
            raise ConfigurationError(f"n_workers={self.num_readers}: choose 1 to {MAX_READERS}")
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigurationError(f"threads={self.num_threads}: torch needs at least 1")
