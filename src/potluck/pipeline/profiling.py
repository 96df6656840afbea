"""What each block costs on this machine: measured once, kept in a file.

A block is timed with two sizes of micro-batch, several times each, and the fastest counts: the difference is the cost
per sample, the rest is fixed. Times of a busy machine are too long; run it when the machine is idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from potluck.errors import ConfigurationError
from potluck.pipeline.blocks import State, check_blocks
from potluck.pipeline.planning import BlockProfile, Profile

REPEATS = 3
MAX_FILE_BYTES = 1 << 20


def measure(blocks: Sequence[nn.Module], batch: Callable[[int], State], *, sizes: tuple[int, int] = (1, 8)) -> Profile:
    """The profile of these blocks; `batch` makes a micro-batch of so many samples."""
    check_blocks(blocks)
    small, large = sizes
    times: dict[int, list[tuple[float, float, int, int]]] = {}
    for size in (large, small):
        state: State = batch(size)
        rows = []
        for block in blocks:
            forward, backward, saved, state = _time(block, state)
            rows.append((forward, backward, saved, sum(tensor.nbytes for tensor in state)))
        times[size] = rows
    found = []
    for number, block in enumerate(blocks):
        few, many = times[small][number], times[large][number]
        forward, backward = ((many[way] - few[way]) / (large - small) for way in (0, 1))
        # Where a small micro-batch takes as long as a large one, all of it is fixed.
        forward, backward = max(forward, 1e-9), max(backward, 1e-9)
        fixed = max((few[0] - forward * small + few[1] - backward * small) / 2, 0.0)
        found.append(
            BlockProfile(
                forward_seconds=forward,
                backward_seconds=backward,
                fixed_seconds=fixed,
                parameter_bytes=sum(parameter.nbytes for parameter in block.parameters()),
                output_bytes=many[3] // large,
                saved_bytes=many[2] // large,
            )
        )
    return Profile(blocks=tuple(found), input_bytes=sum(tensor.nbytes for tensor in batch(large)) // large)


def _time(block: nn.Module, inputs: State) -> tuple[float, float, int, State]:
    """Seconds of forward and of backward, bytes kept between them, and what the next block gets."""
    saved = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.nbytes
        return tensor

    best_forward = best_backward = float("inf")
    outputs: State = ()
    for _ in range(REPEATS):
        state = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in inputs)
        saved = 0
        started = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            found = block(*state)
        outputs = found if isinstance(found, tuple) else (found,)
        forwarded = time.perf_counter()
        sources = [output for output in outputs if output.requires_grad]
        if sources:
            torch.autograd.backward(sources, [torch.ones_like(output) for output in sources])
        best_forward = min(best_forward, forwarded - started)
        best_backward = min(best_backward, time.perf_counter() - forwarded)
    for parameter in block.parameters():
        parameter.grad = None
    return best_forward, best_backward, saved, tuple(output.detach() for output in outputs)


def read_profile(path: Path) -> Profile:
    """A profile that `write_profile` wrote."""
    try:
        text = path.read_bytes()
        if len(text) > MAX_FILE_BYTES:
            raise ConfigurationError(f"{path} has {len(text)} bytes, more than any profile: give another file")
        return msgspec.json.decode(text, type=Profile)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{path} is no profile ({error}): remove it, and it is measured anew") from error


def write_profile(path: Path, profile: Profile) -> None:
    """Keep a profile for the next time."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(profile)))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written ({error.strerror}): give another --profile") from error
