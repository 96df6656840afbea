"""Which reducers recompute the chunks that others have lost (pure)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from potluck.round.plan.messages import Part


def reassign(
    parts: Iterable[Part], lost: Collection[int], held: Collection[int], reducers: Sequence[int]
) -> tuple[Part, ...] | None:
    """The parts anew: what reducers in `lost` had goes to `reducers` in turns, but for chunks that everybody `held`.

    Those stay as they are. Others get a higher generation, by which an average that comes late is told from the new
    one. None: there is something to do, and nobody to do it.
    """
    done: list[Part] = []
    turn = 0
    for part in parts:
        if part.reducer not in lost:
            done.append(part)
            continue
        for start, stop, is_held in _runs(part, held):
            if is_held:
                done.append(msgspec.structs.replace(part, start=start, stop=stop))
                continue
            if not reducers:
                return None
            for low, high in _split(start, stop, len(reducers)):
                reducer = reducers[turn % len(reducers)]
                turn += 1
                done.append(Part(reducer=reducer, start=low, stop=high, generation=part.generation + 1))
    return tuple(done)


def _runs(part: Part, held: Collection[int]) -> Iterable[tuple[int, int, bool]]:
    """The part cut into runs of chunks that all survivors hold, and runs that they do not."""
    start = part.start
    for chunk in range(part.start + 1, part.stop + 1):
        if chunk == part.stop or (chunk in held) != (start in held):
            yield start, chunk, start in held
            start = chunk


def _split(start: int, stop: int, pieces: int) -> Iterable[tuple[int, int]]:
    """A run of chunks in nearly equal pieces, none of them empty."""
    length = stop - start
    pieces = min(pieces, length)
    for piece in range(pieces):
        yield start + length * piece // pieces, start + length * (piece + 1) // pieces
