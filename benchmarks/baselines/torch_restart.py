"""A rank of torch's 1F1B over gloo under torchrun, with a checkpoint every ten steps: torch_restart.py FOLDER SIZE

Each rank writes its process id, the last one a line for each step. A restarted rank goes on from the checkpoint.
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
from pipelinetoy import SEED, TOYS

EVERY = 10


def main() -> None:
    warnings.filterwarnings("ignore")
    folder, toy = Path(sys.argv[1]), TOYS[sys.argv[2]]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"rank{rank}.json").write_text(json.dumps({"pid": os.getpid()}))
    torch.manual_seed(SEED)
    blocks = list(toy.blocks())
    blocks[-1].is_last = False  # the schedule has its own loss
    own = torch.nn.Sequential(*blocks[rank * toy.layers_per_stage : (rank + 1) * toy.layers_per_stage])
    stage = PipelineStage(own, rank, toy.num_stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, toy.num_micro_batches, loss_fn=lambda output, _target: output.square().mean())
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-3)
    kept = folder / f"rank{rank}.pt"
    step = 0
    if kept.exists():
        saved = torch.load(kept)
        step = saved["step"]
        own.load_state_dict(saved["model"])
    (batch,) = toy.batch(toy.micro_batch * toy.num_micro_batches)
    while True:
        if rank == 0:
            schedule.step(batch)
        elif rank == toy.num_stages - 1:
            schedule.step(target=batch, losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % EVERY == 0:
            dist.barrier()
            torch.save({"step": step, "model": own.state_dict()}, kept.with_suffix(".new"))
            kept.with_suffix(".new").replace(kept)
            dist.barrier()
        if rank == toy.num_stages - 1:
            with (folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "at": time.time()}) + "\n")


if __name__ == "__main__":
    main()
