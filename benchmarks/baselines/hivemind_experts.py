"""hivemind's expert server for bench_pipeline.py: a stage of the toy model each, chained by a client.

    python hivemind_experts.py server SIZE STAGE [ADDRESS …]      prints its addresses; ends with its input
    python hivemind_experts.py client SIZE STEPS IN_FLIGHT ADDRESS …

The client sends so many micro-batches at a time through all stages and back, and prints how many there were in a second
after two steps of warm-up. A server computes forward again in backward, and takes a step of its optimizer each time.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from hivemind import DHT
from hivemind.moe.server import ModuleBackend, Server, get_experts
from hivemind.utils.tensor_descr import BatchTensorDescriptor

sys.path.insert(0, str(Path(__file__).parent.parent))
from pipelinetoy import SEED, SIZES, Toy

WARM_UP = 2
FOUND_SECONDS = 60


def serve(toy: Toy, stage: int, addresses: list[str]) -> None:
    torch.set_num_threads(1)
    dht = DHT(initial_peers=addresses, start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    torch.manual_seed(SEED)
    blocks = list(toy.blocks())[stage * toy.layers_per_stage : (stage + 1) * toy.layers_per_stage]
    for block in blocks:
        block.is_last = False  # the client has the loss
    module = torch.nn.Sequential(*blocks)
    shape = BatchTensorDescriptor(toy.length, toy.width)
    backend = ModuleBackend(
        f"stage.{stage}",
        module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1e-3),
        args_schema=(shape,),
        outputs_schema=shape,
        max_batch_size=4096,
    )
    server = Server(dht, {backend.name: backend}, num_connection_handlers=1, start=True, device=torch.device("cpu"))
    print(json.dumps({"addresses": [str(address) for address in dht.get_visible_maddrs()]}), flush=True)
    sys.stdin.read()
    server.shutdown()
    dht.shutdown()


def drive(toy: Toy, steps: int, in_flight: int, addresses: list[str]) -> None:
    torch.set_num_threads(1)
    dht = DHT(initial_peers=addresses, start=True, client_mode=True)
    names = [f"stage.{stage}" for stage in range(toy.num_stages)]
    end = time.monotonic() + FOUND_SECONDS
    while None in (stages := get_experts(dht, names)):
        if time.monotonic() > end:
            raise SystemExit("not all experts are in the DHT")
        time.sleep(0.5)
    (batch,) = toy.batch(toy.micro_batch)

    def one(_number: int) -> None:
        hidden = batch.clone().requires_grad_()
        for stage in stages:
            hidden = stage(hidden)
        hidden.square().mean().backward()

    with ThreadPoolExecutor(in_flight) as pool:
        list(pool.map(one, range(WARM_UP * toy.num_micro_batches)))
        count = steps * toy.num_micro_batches
        began = time.perf_counter()
        list(pool.map(one, range(count)))
        print(json.dumps({"micro_batches_per_second": count / (time.perf_counter() - began)}), flush=True)
    dht.shutdown()


def main() -> None:
    kind, toy = sys.argv[1], SIZES[sys.argv[2]]
    if kind == "server":
        serve(toy, int(sys.argv[3]), sys.argv[4:])
    else:
        drive(toy, int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])


if __name__ == "__main__":
    main()
