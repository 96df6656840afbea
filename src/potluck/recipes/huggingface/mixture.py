"""Several sources of texts with weights, as one stream (pure).

    sources = "0.7 wiki/*.txt; 0.3 hf://USER/NAME@SUBSET"

Each text is drawn from a source by its weight. A source that ends before the others begins anew, so the weights hold to
the end of a pass, which comes when every source has been read whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from potluck.errors import ConfigurationError

T = TypeVar("T")

_SOURCE = re.compile(r"(?P<weight>\d+(?:\.\d+)?|\.\d+)\s+(?P<what>\S+)")
HUB = "hf://"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One of them: files by a name or pattern, or a data set with its subset."""

    weight: float = 1.0
    files: str = ""
    dataset: str = ""
    subset: str = ""


def parse_sources(text: str) -> list[Source]:
    """The sources that a run.toml names; ConfigurationError shows how they are written."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = _SOURCE.fullmatch(part)
        if match is None or not float(match["weight"]):
            raise ConfigurationError(
                f"sources={text!r}: write a weight above 0 and files or a data set, with ; between them, as in "
                "'0.7 wiki/*.txt; 0.3 hf://USER/NAME@SUBSET'"
            )
        weight, what = float(match["weight"]), match["what"]
        if what.startswith(HUB):
            name, _, subset = what.removeprefix(HUB).partition("@")
            found.append(Source(weight=weight, dataset=name, subset=subset))
        else:
            found.append(Source(weight=weight, files=what))
    return found


def mixed(sources: Sequence[tuple[float, Callable[[], Iterator[T]]]], generator: torch.Generator) -> Iterator[T]:
    """Items of all sources, each drawn by its source's weight, until each source has been read whole at least once.

    Sources without any item are passed over.
    """
    if len(sources) == 1:
        yield from sources[0][1]()
        return
    weights = torch.tensor([weight for weight, _ in sources], dtype=torch.float64)
    streams = [open_() for _, open_ in sources]
    is_read = [False] * len(sources)
    while not all(is_read):
        chosen = int(torch.multinomial(weights, 1, generator=generator))
        item = next(streams[chosen], None)
        if item is None:
            is_read[chosen] = True
            if all(is_read):
                return
            streams[chosen] = sources[chosen][1]()
            item = next(streams[chosen], None)
            if item is None:
                weights[chosen] = 0.0
                if not weights.any():
                    return
                continue
        yield item
