"""What packing the chunks of a state saves on the way, and what it costs; the baseline is sending them as they are.

    scripts/bench packing [--json] [--repeats 5]

The state is that of a small language model after some steps with Adam. Times are processor times of one core. Below
`worthwhile_megabytes_per_second` a way is so slow that packing and unpacking take less time than they save.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import reduce
from operator import add
from typing import Any

import torch

from harness import parser, report
from potluck.state.inventory import CHUNK_BYTES, MIB
from potluck.state.packing import pack, unpack
from toylm import Corpus, corpus, loss_of, make_model

WIDTH, NUM_LAYERS, LENGTH = 256, 4, 32
STEPS, BATCH = 60, 8
ITEM_BYTES = 4


def trained_state() -> dict[str, torch.Tensor]:
    """Parameters and Adam's statistics, each kind as one tensor."""
    model, texts = make_model(WIDTH, NUM_LAYERS, LENGTH), Corpus(corpus(1_000_000), LENGTH)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, texts.batch(step, BATCH)).backward()
        optimizer.step()
    parameters = list(model.parameters())
    kinds = {name: [optimizer.state[p][name] for p in parameters] for name in ("exp_avg", "exp_avg_sq")}
    kinds["parameters"] = parameters
    return {name: torch.cat([tensor.detach().flatten() for tensor in tensors]) for name, tensors in kinds.items()}


def chunks_of(tensor: torch.Tensor) -> list[memoryview]:
    """The tensor as it is kept."""
    data = memoryview(tensor.view(torch.uint8).numpy().tobytes())
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]


def cpu_seconds(work: Callable[[], object], repeats: int) -> float:
    """The median of some runs."""
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return statistics.median(times)


@dataclass(frozen=True, slots=True)
class Packed:
    """What became of one kind of tensors."""

    num_bytes: int
    travelled_bytes: int
    pack_seconds: float
    unpack_seconds: float

    @property
    def saved(self) -> float:
        """The share that does not travel."""
        return 1 - self.travelled_bytes / self.num_bytes

    def __add__(self, other: Packed) -> Packed:
        return Packed(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def measure(tensor: torch.Tensor, repeats: int) -> Packed:
    """Pack all of it and unpack it again."""
    chunks = chunks_of(tensor)
    packed = [pack(chunk, ITEM_BYTES) for chunk in chunks]
    smaller = [(chunk, memoryview(small)) for chunk, small in zip(chunks, packed, strict=True) if small is not None]
    assert all(bytes(unpack(small, len(chunk))) == bytes(chunk) for chunk, small in smaller), "nothing is lost"
    return Packed(
        num_bytes=tensor.nbytes,
        travelled_bytes=tensor.nbytes - sum(len(chunk) - len(small) for chunk, small in smaller),
        pack_seconds=cpu_seconds(lambda: [pack(chunk, ITEM_BYTES) for chunk in chunks], repeats),
        unpack_seconds=cpu_seconds(lambda: [unpack(small, len(chunk)) for chunk, small in smaller], repeats),
    )


def main() -> None:
    chosen = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    kinds = {name: measure(tensor, chosen.repeats) for name, tensor in trained_state().items()}
    whole = reduce(add, kinds.values())
    figures: dict[str, Any] = {f"{name}_saved": kind.saved for name, kind in kinds.items()}
    figures |= {
        "saved": whole.saved,
        "pack_milliseconds_per_mebibyte": 1e3 * whole.pack_seconds * MIB / whole.num_bytes,
        "unpack_milliseconds_per_mebibyte": 1e3 * whole.unpack_seconds * MIB / whole.num_bytes,
        "worthwhile_megabytes_per_second": (whole.num_bytes - whole.travelled_bytes)
        / (whole.pack_seconds + whole.unpack_seconds)
        / 1e6,
    }
    report(figures, as_json=chosen.json, title="chunks of a trained state, packed")


if __name__ == "__main__":
    main()
