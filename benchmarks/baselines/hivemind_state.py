"""One hivemind peer for bench_join.py: gives its state to others, or loads theirs once for each line on standard input.

    python hivemind_state.py donor|joiner TENSORS ELEMENTS [ADDRESS …]

Prints its DHT addresses as JSON first. States travel uncompressed, as Potluck's; encrypted, as always with hivemind.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager


def main() -> None:
    kind = sys.argv[1]
    num_tensors, elements = map(int, sys.argv[2:4])
    dht = DHT(initial_peers=sys.argv[4:], start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    generator = torch.Generator().manual_seed(1 if kind == "donor" else 2)
    values = [torch.randn(elements, generator=generator) for _ in range(num_tensors)]
    averager = DecentralizedAverager(
        values, dht, start=True, prefix="bench", target_group_size=4, allow_state_sharing=kind == "donor"
    )
    print(json.dumps({"addresses": [str(address) for address in dht.get_visible_maddrs()]}), flush=True)
    for _line in sys.stdin:
        started = time.perf_counter()
        loaded = averager.load_state_from_peers(timeout=120.0)
        seconds = time.perf_counter() - started
        tensors = loaded[1] if loaded is not None else []
        answer = {"seconds": seconds, "num_tensors": len(tensors), "checksum": checksum(tensors)}
        print(json.dumps(answer), flush=True)
    averager.shutdown()
    dht.shutdown()


def checksum(tensors: list[torch.Tensor]) -> float:
    """The same for the same state."""
    return sum(tensor[::1000].double().sum().item() for tensor in tensors)


if __name__ == "__main__":
    main()
