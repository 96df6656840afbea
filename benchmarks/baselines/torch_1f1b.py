"""One rank of torch.distributed.pipelining's 1F1B over gloo: python torch_1f1b.py RANK PORT SIZE STEPS

The last rank prints the micro-batches per second after two steps of warm-up, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

sys.path.insert(0, str(Path(__file__).parent.parent))
from pipelinetoy import SEED, SIZES

WARM_UP = 2


def main() -> None:
    warnings.filterwarnings("ignore")
    rank, port, size, steps = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    toy = SIZES[size]
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=toy.num_stages)
    torch.manual_seed(SEED)
    blocks = list(toy.blocks())
    blocks[-1].is_last = False  # the schedule has its own loss
    own = torch.nn.Sequential(*blocks[rank * toy.layers_per_stage : (rank + 1) * toy.layers_per_stage])
    stage = PipelineStage(own, rank, toy.num_stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, toy.num_micro_batches, loss_fn=lambda output, _target: output.square().mean())
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-3)
    total = toy.micro_batch * toy.num_micro_batches
    (batch,) = toy.batch(total)
    started = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            dist.barrier()
            started = time.perf_counter()
        if rank == 0:
            schedule.step(batch)
        elif rank == toy.num_stages - 1:
            schedule.step(target=batch, losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    seconds = time.perf_counter() - started
    if rank == toy.num_stages - 1:
        print(json.dumps({"micro_batches_per_second": steps * toy.num_micro_batches / seconds}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
