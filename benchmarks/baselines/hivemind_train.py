"""One hivemind peer for bench_train.py: the loop of trainloop.py with hivemind.Optimizer.

    python hivemind_train.py TASK ADDRESS [INITIAL_PEER …]

With TASK "bootstrap" it is the DHT's first node and trains nothing. Settings are those that serve hivemind best here:
float16 for gradients and state, a known group size, so that a group starts as soon as it is complete, and the state
averaged rarely, since nobody drifts.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import torch
from hivemind import DHT, Optimizer
from hivemind.compression import Float16Compression
from hivemind.optim.grad_averager import GradientAverager

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from trainloop import Steps, Task, train

PORT = 4800


def main() -> None:
    address, initial_peers = sys.argv[2], sys.argv[3:]
    dht = DHT(
        initial_peers=initial_peers,
        start=True,
        host_maddrs=[f"/ip4/{address}/tcp/{PORT}"],
        announce_maddrs=[f"/ip4/{address}/tcp/{PORT}"],
        await_ready=True,
    )
    if sys.argv[1] == "bootstrap":
        print(json.dumps({"event": "ready", "addresses": [str(each) for each in dht.get_visible_maddrs()]}), flush=True)
        sys.stdin.readline()
        dht.shutdown()
        return
    task = Task.read()
    torch.set_num_threads(1)
    model = task.model()
    group = {"target_group_size": task.num_peers, "request_timeout": 1.0}
    optimizer = Optimizer(
        dht=dht,
        run_id="bench",
        target_batch_size=task.target_batch_size,
        batch_size_per_step=task.batch_size,
        params=list(model.parameters()),
        optimizer=lambda parameters: Steps(parameters, lr=task.lr),
        scheduler=task.scheduler,
        offload_optimizer=False,
        grad_compression=Float16Compression(),
        state_averaging_compression=Float16Compression(),
        grad_averager_factory=functools.partial(GradientAverager, **group),
        averager_opts=group,
        average_state_every=task.options["average_state_every"],
        matchmaking_time=task.options["matchmaking_seconds"],
        averaging_timeout=task.options["averaging_timeout_seconds"],
        verbose=True,
    )

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    train(task, model, step, finish=lambda: None, epoch=lambda: optimizer.local_epoch, statistics=dict)
    optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
