"""What `Optimizer.step` costs between rounds, as a share of a step of a small transformer.

    scripts/bench step [--json] [--repeats 9]

One peer with a hub in memory and no round. Times are processor times, so that a busy machine disturbs them little: what
the training thread spends in `step`, against its forward and backward passes, and what all other threads of the process
spend meanwhile. Adding gradients up is part of it, though plain PyTorch would do that too. The ways take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from harness import parser, report, say
from potluck.clock import SystemClock
from potluck.optim.optimizer import Optimizer
from potluck.peer.identity import Identity
from potluck.run.joined import Joined
from potluck.run.loopthread import LoopThread
from potluck.sim.memoryrun import MemoryPeer, MemoryRun
from toylm import Corpus, corpus, loss_of, make_model

WIDTH, NUM_LAYERS, LENGTH, BATCH_SIZE = 128, 4, 64, 16
STEPS_PER_TURN = 10
NEVER = 10**9  # samples: the target is not reached


class Turn:
    """One way of stepping, a few steps at a time."""

    def __init__(self, forward_backward: Callable[[int], None], step: Callable[[], None]) -> None:
        self._forward_backward = forward_backward
        self._step = step
        self._number = 0
        self.computing: list[float] = []
        self.stepping: list[float] = []
        self.others: list[float] = []

    def take(self) -> None:
        computing = stepping = 0.0
        others = time.process_time() - time.thread_time()
        for _ in range(STEPS_PER_TURN):
            began = time.thread_time()
            self._forward_backward(self._number)
            between = time.thread_time()
            self._step()
            computing += between - began
            stepping += time.thread_time() - between
            self._number += 1
        self.computing.append(computing / STEPS_PER_TURN)
        self.stepping.append(stepping / STEPS_PER_TURN)
        self.others.append((time.process_time() - time.thread_time() - others) / STEPS_PER_TURN)


def turns_of(run: Joined | None, texts: Corpus, **options: Any) -> Turn:
    """Plain accumulation without a run."""
    model = make_model(WIDTH, NUM_LAYERS, LENGTH)

    def forward_backward(number: int) -> None:
        loss_of(model, texts.batch(number, BATCH_SIZE)).backward()

    inner = torch.optim.AdamW(model.parameters())
    if run is None:
        return Turn(forward_backward, lambda: None)
    optimizer = Optimizer(run, inner, target_batch_size=NEVER, source=None, num_threads=1, **options)

    def step() -> None:
        optimizer.step(batch_size=BATCH_SIZE)
        if not optimizer.config.reuse_grad_buffers:
            optimizer.zero_grad()

    return Turn(forward_backward, step)


def measure(repeats: int) -> dict[str, Any]:
    """Plain, wrapped, and wrapped with gradients left where they are."""
    texts = Corpus(corpus(500_000), LENGTH)
    with LoopThread() as loop:

        async def open_run() -> MemoryRun:
            memory = MemoryRun(clock=SystemClock())
            await memory.open()
            return memory

        memory = loop.call(open_run())

        async def join(name: str) -> MemoryPeer:
            return await memory.join(name, identity=Identity.temporary(), coordinates=True)

        runs = [Joined(lambda name=name: join(name), loop).open() for name in ("usual", "reusing")]  # type: ignore[misc]
        plain = turns_of(None, texts)
        ways = {
            "default": turns_of(runs[0], texts),
            "reuse_grad_buffers": turns_of(runs[1], texts, reuse_grad_buffers=True),
        }
        for number in range(repeats + 1):
            for turn in (plain, *ways.values()):
                turn.take()
            say(f"turn {number}: " + ", ".join(f"{name} {_share(turn):.2f}%" for name, turn in ways.items()))
        for run in reversed(runs):
            run.close()
        loop.call(memory.close())
    figures: dict[str, Any] = {
        "plain_step_ms": 1e3 * statistics.median(plain.computing[1:]),
        "plain_other_threads_ms": 1e3 * statistics.median(plain.others[1:]),
    }
    for name, turn in ways.items():
        figures[f"{name}_ms"] = 1e3 * statistics.median(turn.stepping[1:])
        figures[f"{name}_percent"] = statistics.median(
            100 * stepping / computing
            for stepping, computing in zip(turn.stepping[1:], turn.computing[1:], strict=True)
        )
        figures[f"{name}_other_threads_ms"] = 1e3 * statistics.median(turn.others[1:])
    return figures


def _share(turn: Turn) -> float:
    return 100 * turn.stepping[-1] / turn.computing[-1]


def main() -> None:
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    report(measure(arguments.repeats), as_json=arguments.json, title="Optimizer.step between rounds")


if __name__ == "__main__":
    main()
