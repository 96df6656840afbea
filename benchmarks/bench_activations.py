"""What the codecs of activations cost: held-out loss of a pipelined model after the same steps, by codec.

The recipe stdlib-lm in four stages, in one process. What a stage hands on, and the gradient that comes back, goes
through the codec as it does between machines. Each seed has other first values and other data, the same for all codecs.

    scripts/bench activations --json
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from harness import parser, report, say
from potluck.pipeline.blocks import seed_of
from potluck.pipeline.blueprint import Blueprint
from potluck.pipeline.layout import Layout
from potluck.pipeline.wire import ACTIVATION_CODECS, decode_tensors, encode_gradients, encode_tensors
from potluck.recipes.stdlib_lm import Config, StdlibLM

CPU = torch.device("cpu")
NUM_STAGES = 4
BATCH = 32


class _Travels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, codec: str) -> Tensor:
        ctx.codec = codec
        return decode_tensors(*encode_tensors((value,), codec), CPU)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return decode_tensors(*encode_gradients(gradients, ctx.codec), CPU)[0], None


def train(recipe: StdlibLM, codec: str, seed: int, steps: int) -> float:
    """The held-out loss after these steps."""
    blueprint = Blueprint.of(recipe.blocks, seed)
    blocks = blueprint.make(range(blueprint.num_blocks))
    stages = Layout.even(blueprint.num_blocks, NUM_STAGES).stages
    optimizer = torch.optim.AdamW([p for block in blocks.values() for p in block.parameters()], lr=3e-3)

    def loss_of(text: Tensor) -> Tensor:
        state: tuple[Tensor, ...] = (text,)
        for stage, numbers in enumerate(stages):
            if stage:
                state = tuple(_Travels.apply(t, codec) if t.is_floating_point() else t for t in state)  # type: ignore[no-untyped-call]
            for number in numbers:
                found = blocks[number](*state)
                state = found if isinstance(found, tuple) else (found,)
        return state[0]

    step, shard = 0, 0
    while step < steps:
        samples = list(recipe.samples(shard % recipe.num_shards, torch.Generator().manual_seed(seed_of(seed, shard))))
        shard += 1
        for first in range(0, len(samples) - BATCH + 1, BATCH):
            (text,) = recipe.collate(samples[first : first + BATCH])
            optimizer.zero_grad()
            loss_of(text).backward()
            torch.nn.utils.clip_grad_norm_([p for block in blocks.values() for p in block.parameters()], 1.0)
            optimizer.step()
            step += 1
            if step == steps:
                break
    with torch.no_grad():
        return loss_of(recipe._evaluation_windows).item()


def main() -> None:
    options = parser(__doc__, repeats=None)
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--seeds", type=int, default=3)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    recipe = StdlibLM(Config(layers=6, width=64, heads=4, context=64))
    losses: dict[str, list[float]] = {codec: [] for codec in ACTIVATION_CODECS}
    for seed in range(arguments.seeds):
        for codec in ACTIVATION_CODECS:
            losses[codec].append(train(recipe, codec, seed, arguments.steps))
            say(f"seed {seed}, {codec}: {losses[codec][-1]:.4f}")
    figures: dict[str, Any] = {f"{codec}_loss": statistics.mean(found) for codec, found in losses.items()}
    for codec in ACTIVATION_CODECS[1:]:
        each = [ours - raw for ours, raw in zip(losses[codec], losses["raw"], strict=True)]
        figures |= {f"{codec}_more": statistics.mean(each), f"{codec}_most_more": max(each)}
    report(figures, as_json=arguments.json, title="held-out loss by codec of activations")


if __name__ == "__main__":
    main()
