"""The training loop of bench_train.py, the same for every contender: an optimizer is all that they differ in.

Needs torch and nothing else. A peer is told what to do in lines: it says {"event": "ready"} when its optimizer is made,
trains on "go", says "trained", and says "finished" on "stop", with the losses of what it had on the way.

*A device of one's own.* Four peers share the cores of one machine here, where each would have its own. So a step has a
fixed time: the gradients are computed, as fast as that goes, and the peer sleeps for what is left of it.

*Computing* is what plain PyTorch would do too: gradients, in that fixed time, and the torch optimizer's own step (as
`Steps` sees it) where the training loop waits for it. All else that a step takes is the contender's: its work in the
training thread, and what it waits for. Of the two, work is known by the thread's processor time.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toylm import Corpus, ToyLM, loss_of, make_model

EVALUATED = 128


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every contender gets, as JSON in its first argument."""

    kind: str
    number: int
    num_peers: int
    text: str
    """A file."""
    width: int
    num_layers: int
    length: int
    batch_size: int
    """Of one peer's step."""
    steps_per_epoch: int
    """Of one peer, where batches are shared."""
    num_steps: int
    """Of one peer in all."""
    step_seconds: float
    lr: float
    """Where batches are shared."""
    local_lr: float
    """Where each peer takes its own steps."""
    kept_every: int
    """After so many steps the first peer keeps its parameters, to be looked at in the end."""
    warm_up_epochs: int
    """Where batches are shared, the learning rate grows to its full size in so many."""
    options: dict[str, Any]
    """Of the contender's own."""
    seconds: float = math.inf
    """After which training ends, whatever the steps."""
    shared_batch_size: int = 0
    """Where batches are shared and peers are not alike; 0: as many steps of each peer as `steps_per_epoch`."""

    @classmethod
    def read(cls) -> Task:
        return cls(**json.loads(sys.argv[1]))

    @property
    def target_batch_size(self) -> int:
        return self.shared_batch_size or self.batch_size * self.steps_per_epoch * self.num_peers

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """For shared batches; it counts epochs."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, (epoch + 1) / self.warm_up_epochs))

    def model(self) -> ToyLM:
        return make_model(self.width, self.num_layers, self.length)


def say(event: str, **told: Any) -> None:
    print(json.dumps({"event": event, **told}), flush=True)


class Steps(torch.optim.AdamW):
    """The torch optimizer of every contender; knows how long its steps have kept the training thread."""

    seconds = 0.0
    cpu_seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        began, cpu_began = time.perf_counter(), time.thread_time()
        try:
            return super().step(closure)
        finally:
            if threading.current_thread() is threading.main_thread():
                Steps.seconds += time.perf_counter() - began
                Steps.cpu_seconds += time.thread_time() - cpu_began


def train(
    task: Task,
    model: ToyLM,
    step: Callable[[], None],
    *,
    finish: Callable[[], object],
    epoch: Callable[[], int],
    statistics: Callable[[], Any],
) -> None:
    """Train, and tell how it went; `step` hands in the gradients of one batch, `finish` ends what is under way."""
    texts = Corpus(Path(task.text).read_bytes(), task.length)
    say("ready")
    sys.stdin.readline()
    kept: list[tuple[float, int, list[torch.Tensor]]] = []
    gradients = slowest = ours = ours_cpu = aside = 0.0
    Steps.seconds = Steps.cpu_seconds = 0.0
    started = time.perf_counter()
    for number in range(1, task.num_steps + 1):
        began = time.perf_counter()
        if began - started >= task.seconds:
            break
        loss_of(model, texts.batch((task.number << 32) + number, task.batch_size)).backward()
        slowest = max(slowest, time.perf_counter() - began)
        time.sleep(max(0.0, began + task.step_seconds - time.perf_counter()))
        stepping, cpu_began = time.perf_counter(), time.thread_time()
        gradients += stepping - began
        step()
        ours += time.perf_counter() - stepping
        ours_cpu += time.thread_time() - cpu_began
        if task.number == 0 and number % task.kept_every == 0:
            keeping = time.perf_counter()
            parameters = [parameter.detach().to(torch.float16) for parameter in model.parameters()]
            kept.append((keeping - started - aside, number, parameters))
            aside += time.perf_counter() - keeping
    seconds = time.perf_counter() - started - aside
    finish()
    say("trained", seconds=seconds)
    sys.stdin.readline()
    say(
        "finished",
        seconds=seconds,
        computing=(gradients + Steps.seconds) / seconds,
        gradients=gradients / seconds,
        working=(ours_cpu - Steps.cpu_seconds) / seconds,
        waiting=(ours - Steps.seconds - ours_cpu + Steps.cpu_seconds) / seconds,
        slowest_batch_seconds=slowest,
        epoch=epoch(),
        losses=[(at, number, evaluate(model, texts, parameters)) for at, number, parameters in kept],
        statistics=statistics(),
    )
    sys.stdin.readline()


@torch.no_grad()
def evaluate(model: ToyLM, texts: Corpus, parameters: list[torch.Tensor]) -> float:
    """The loss with these parameters, on text that nobody trained on."""
    for parameter, kept in zip(model.parameters(), parameters, strict=True):
        parameter.copy_(kept)
    return float(loss_of(model, texts.held_out(EVALUATED)))
