"""One Potluck peer for bench_train.py: the loop of trainloop.py with one of our optimizers."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

import potluck
from potluck.optim.methods.outer import Nesterov, OuterSGD
from potluck.optim.methods.sparseloco import SparseLoCo
from potluck.peer.identity import Identity
from potluck.round.codecs import CodecChoice
from potluck.testing.polling import poll_until_sync
from toylm import ToyLM
from trainloop import Steps, Task, train

PORT = 4700
PATIENCE_SECONDS = 120.0


def make_optimizer(run: Any, task: Task, model: ToyLM) -> Any:
    """By the name of the contender."""

    def shared(parameters: Any) -> torch.optim.Optimizer:
        return Steps(parameters, lr=task.lr)

    local = Steps(model.named_parameters(), lr=task.local_lr)
    lazy = {"inner_steps": task.options.get("inner_steps", 20), "overlap_steps": task.options.get("overlap_steps", 0)}
    lazy["keep_overlap_work"] = bool(lazy["overlap_steps"])
    large = {
        "target_batch_size": task.target_batch_size,
        "params": list(model.named_parameters()),
        "scheduler": task.scheduler,
        "num_threads": 1,
    }
    match task.kind:
        case "sync":
            return potluck.Optimizer(run, shared, **large)
        case "sync8":
            return potluck.Optimizer(run, shared, codecs=CodecChoice.by_role({"gradient": "blockwise8"}), **large)
        case "delays":
            return potluck.Optimizer(
                run, shared, delay_grad_averaging=True, delay_optimizer_step=True, offload_optimizer=True, **large
            )
        case "diloco":
            outer = Nesterov(task.options["outer_lr"], task.options["outer_momentum"])
            return potluck.DiLoCo(run, local, outer=outer, num_threads=1, **lazy)
        case "sparseloco":
            outer, transform = OuterSGD(task.options["outer_lr"]), SparseLoCo(k=task.options["k"])
            return potluck.DiLoCo(run, local, outer=outer, transform=transform, num_threads=1, **lazy)
        case other:
            raise SystemExit(f"no contender is called {other}")


def main() -> None:
    task, link, address = Task.read(), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    model = task.model()
    where = (f"tcp://{address}:{PORT}",)
    with potluck.join(link, identity=Identity.temporary(), name="bench", listen=where, announce=where) as run:
        poll_until_sync(lambda: all_linked(run, task.num_peers), PATIENCE_SECONDS, "links to all other peers")
        optimizer = make_optimizer(run, task, model)

        def step() -> None:
            optimizer.step(batch_size=task.batch_size)
            optimizer.zero_grad()

        def round_seconds() -> dict[str, Any]:
            return {**optimizer.statistics(), "last": _last_round(optimizer)}

        train(task, model, step, finish=optimizer.driver.land, epoch=lambda: optimizer.epoch, statistics=round_seconds)
        optimizer.shutdown()


def all_linked(run: Any, num_peers: int) -> bool:
    """Whether all trainers are known and linked to us."""
    trainers = {p.peer for p in run.peer.session.roster if p.state == "alive" and p.card.role == "trainer"}
    links = run.peer.links.statistics().peers
    direct = [peer for peer, link in links.items() if peer in trainers and link.path == "direct"]
    return len(trainers) == num_peers and len(direct) == num_peers - 1


def _last_round(optimizer: Any) -> dict[str, Any]:
    result = optimizer.driver.last_result
    if result is None:
        return {}
    return {
        "seconds": result.commit.seconds,
        "sent_bytes": result.sent_bytes,
        "received_bytes": result.received_bytes,
        "codecs": sorted({run.codec.name for run in result.commit.runs}),
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    main()
