"""How fast chunks are encoded, decoded and accumulated, per core; beside a plain copy of memory.

    python benchmarks/bench_codecs.py [--elements 25000000] [--codec float16 …]

Prints one JSON object: for each codec milliseconds per pass over all elements, and `round_ms`, the tensor work of one
of four peers in a round: encode all of its values, add up four contributions to a quarter, encode that, decode all.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from potluck.round.codecs import CODEC_NAMES, CodecSpec, codec_for
from potluck.round.codecs.base import Fixed
from potluck.round.plan.chunks import ChunkGrid
from potluck.round.plan.specs import CodecSpan

PEERS = 4


def best_ms(work: Callable[[], None], repeats: int = 7) -> float:
    """The fastest of several runs: the machine's other work can only add."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1000 * min(times[1:])


def measure(name: str, values: torch.Tensor) -> dict[str, float]:
    """Milliseconds of each pass over all values."""
    spec = CodecSpec(name=name)
    codec = codec_for(spec)
    grid = ChunkGrid(runs=(CodecSpan(codec=spec, elements=values.numel()),))
    frames = [codec.encode(values[chunk.start : chunk.stop]) for chunk in grid.chunks]
    out = torch.zeros_like(values)

    def encode() -> None:
        for chunk, frame in zip(grid.chunks, frames, strict=True):
            if isinstance(codec, Fixed):
                codec.encode_into(values[chunk.start : chunk.stop], frame)
            else:
                codec.encode(values[chunk.start : chunk.stop])

    def decode() -> None:
        for chunk, frame in zip(grid.chunks, frames, strict=True):
            codec.decode_into(frame, out[chunk.start : chunk.stop])

    def accumulate(weight: float) -> Callable[[], None]:
        def work() -> None:
            for chunk, frame in zip(grid.chunks, frames, strict=True):
                codec.add_decoded(frame, weight, out[chunk.start : chunk.stop])

        return work

    passes = {
        "encode_ms": best_ms(encode),
        "decode_ms": best_ms(decode),
        "add_ms": best_ms(accumulate(1.0)),
        "add_weighted_ms": best_ms(accumulate(0.37)),
    }
    # Four contributions to a quarter are one pass over all; the average of a quarter is a quarter of a pass.
    passes["round_ms"] = 1.25 * passes["encode_ms"] + passes["add_ms"] + passes["decode_ms"]
    passes["encoded_bytes"] = sum(frame.nbytes for frame in frames)
    return {key: round(value, 2) for key, value in passes.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--codec", nargs="*", default=list(CODEC_NAMES), choices=CODEC_NAMES)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    values = torch.randn(arguments.elements, generator=torch.Generator().manual_seed(0)) * 1e-3
    copy = torch.empty_like(values)

    def plain_copy() -> None:
        copy.copy_(values)

    result: dict[str, object] = {
        "elements": arguments.elements,
        "threads": arguments.threads,
        "copy_float32_ms": round(best_ms(plain_copy), 2),
    }
    for name in arguments.codec:
        result[name] = measure(name, values)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
