"""Which blocks make which stage, and which stages a machine serves. Pure.

    Layout.balanced(costs, num_stages=4)      # cut so that the most expensive stage is as cheap as can be
    layout.blocks_of(2)                       # range(5, 8)
    missing_blocks(old, Span(0, 1), new, Span(1, 1))   # what a server must fetch when the layout changes

A model is a list of blocks. A stage is a run of consecutive blocks. A server holds a span: one stage, or several
consecutive ones where its machine is large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from potluck.errors import ConfigurationError


@dataclass(frozen=True)
class Span:
    """Consecutive stages that one machine serves."""

    first: int
    num_stages: int = 1

    def __post_init__(self) -> None:
        if self.first < 0 or self.num_stages < 1:
            raise ConfigurationError(
                f"a span of {self.num_stages} stages from stage {self.first} on: it needs one stage at least, from 0 on"
            )

    @property
    def stages(self) -> range:
        """Its stages, in order."""
        return range(self.first, self.first + self.num_stages)


@dataclass(frozen=True)
class Layout:
    """How a model's blocks are cut into stages."""

    num_blocks: int
    starts: tuple[int, ...]
    """The first block of each stage; the first is 0, and every stage has a block."""

    def __post_init__(self) -> None:
        bounds = (*self.starts, self.num_blocks)
        if not self.starts or self.starts[0] != 0 or any(end <= start for start, end in pairwise(bounds)):
            raise ConfigurationError(
                f"stages that begin at blocks {list(self.starts)} of {self.num_blocks}: the first begins at 0, and "
                "each needs a block of its own"
            )

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.starts)

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """The blocks of each stage."""
        return tuple(range(start, end) for start, end in pairwise((*self.starts, self.num_blocks)))

    def blocks_of(self, stage: int) -> range:
        """The blocks of one stage."""
        return self.stages[stage]

    def blocks_in(self, span: Span) -> range:
        """The blocks of a span."""
        if span.stages.stop > self.num_stages:
            raise ConfigurationError(
                f"stages {span.first} to {span.stages.stop - 1} of {self.num_stages}: there are not so many"
            )
        return range(self.stages[span.first].start, self.stages[span.stages.stop - 1].stop)

    def stage_of(self, block: int) -> int:
        """The stage that has this block."""
        return next(stage for stage, blocks in enumerate(self.stages) if block in blocks)

    @classmethod
    def balanced(cls, costs: Sequence[float], num_stages: int) -> Layout:
        """The cut whose most expensive stage is cheapest.

        Dynamic programming over prefixes: best[k][i] is the least possible maximum of the first i blocks in k stages.
        Among equals the earlier cut wins, so that everybody comes to the same layout.
        """
        num_blocks = len(costs)
        check_num_stages(num_blocks, num_stages)
        until = [0.0, *accumulate(costs)]
        best = list(until)  # one stage
        cuts: list[list[int]] = [[0] * (num_blocks + 1)]
        for stages in range(2, num_stages + 1):
            row, cut = [float("inf")] * (num_blocks + 1), [0] * (num_blocks + 1)
            for end in range(stages, num_blocks + 1):
                for start in range(stages - 1, end):
                    worst = max(best[start], until[end] - until[start])
                    if worst < row[end]:
                        row[end], cut[end] = worst, start
            best = row
            cuts.append(cut)
        starts, end = [], num_blocks
        for cut in reversed(cuts):
            end = cut[end]
            starts.append(end)
        return cls(num_blocks, tuple(reversed(starts)))

    @classmethod
    def even(cls, num_blocks: int, num_stages: int) -> Layout:
        """Stages of as many blocks each as can be."""
        return cls.balanced([1.0] * num_blocks, num_stages)


def check_num_stages(num_blocks: int, num_stages: int) -> None:
    """ConfigurationError where a model of so many blocks cannot have so many stages."""
    if not 1 <= num_stages <= num_blocks:
        raise ConfigurationError(
            f"{num_stages} stages for a model of {num_blocks} blocks: choose 1 to {num_blocks}, or have the recipe's "
            "blocks() cut it finer"
        )


def missing_blocks(old: Layout, had: Span | None, new: Layout, serves: Span) -> tuple[int, ...]:
    """The blocks that a server must fetch to serve a span of the new layout."""
    if old.num_blocks != new.num_blocks:
        raise ConfigurationError(f"a layout of {old.num_blocks} blocks cannot become one of {new.num_blocks}")
    held = old.blocks_in(had) if had is not None else range(0)
    return tuple(block for block in new.blocks_in(serves) if block not in held)


def servers_of(spans: Mapping[str, Span], num_stages: int) -> tuple[tuple[str, ...], ...]:
    """The servers of each stage, sorted."""
    found: list[list[str]] = [[] for _ in range(num_stages)]
    for server in sorted(spans):
        for stage in spans[server].stages:
            if stage < num_stages:
                found[stage].append(server)
    return tuple(tuple(servers) for servers in found)


def spans_by_room(layout: Layout, block_bytes: Sequence[int], rooms_bytes: Mapping[str, int]) -> dict[str, Span]:
    """Spans that cover all stages once, with as few machines as their memory allows; the largest take the most.

    ConfigurationError where the machines cannot hold the model: it says which stage is left over.
    """
    spans: dict[str, Span] = {}
    stage = 0
    for server, room in sorted(rooms_bytes.items(), key=lambda item: (-item[1], item[0])):
        first, free = stage, room
        while stage < layout.num_stages:
            needed = sum(block_bytes[block] for block in layout.blocks_of(stage))
            if needed > free:
                break
            free -= needed
            stage += 1
        if stage > first:
            spans[server] = Span(first, stage - first)
        if stage == layout.num_stages:
            return spans
    needed = sum(block_bytes[block] for block in layout.blocks_of(stage))
    raise ConfigurationError(
        f"stage {stage} needs {needed} bytes, and no machine has so much room left: cut the model into more stages, or "
        "bring another machine"
    )
