"""One gloo rank for bench_averaging.py: float16 all-reduce once for each line on standard input.

    python gloo_allreduce.py RANK MEMBERS ELEMENTS PORT

The tensors are float32, as everywhere; converting them to float16 and back is part of the round, as for the others.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist


def main() -> None:
    rank, members, elements, port = map(int, sys.argv[1:5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=members)
    values = torch.randn(elements, generator=torch.Generator().manual_seed(rank))
    print(json.dumps({"rank": rank}), flush=True)
    for _line in sys.stdin:
        half = values.to(torch.float16)
        dist.all_reduce(half)
        values.copy_(half).div_(members)
        print(json.dumps({"checksum": values[::1000].double().sum().item()}), flush=True)
        values += rank  # so that the next round has something to average
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
