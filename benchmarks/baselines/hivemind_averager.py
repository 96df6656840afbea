"""One hivemind peer for bench_averaging.py: averages once for each line on standard input.

    python hivemind_averager.py INDEX MEMBERS ELEMENTS [ADDRESS …]

Prints its DHT addresses as JSON first. float16 on the wire, as Potluck; encrypted, as always with hivemind.
"""

from __future__ import annotations

import json
import sys

import torch
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import Float16Compression


def main() -> None:
    index, members, elements = map(int, sys.argv[1:4])
    dht = DHT(initial_peers=sys.argv[4:], start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    values = torch.randn(elements, generator=torch.Generator().manual_seed(index))
    averager = DecentralizedAverager(
        [values],
        dht,
        start=True,
        prefix="bench",
        target_group_size=members,
        min_group_size=members,
        # It starts as soon as the group is complete; this is only how long it would wait for that.
        min_matchmaking_time=5.0,
        request_timeout=2.0,
        compression=Float16Compression(),
        bandwidth=1e9,
    )
    print(json.dumps({"addresses": [str(address) for address in dht.get_visible_maddrs()]}), flush=True)
    for _line in sys.stdin:
        gathered = averager.step(weight=1.0, timeout=120.0, allow_retries=True)
        with averager.get_tensors() as tensors:
            checksum = tensors[0][::1000].double().sum().item()
        print(json.dumps({"members": len(gathered or {}), "checksum": checksum}), flush=True)
        with averager.get_tensors() as tensors:
            tensors[0].add_(index)  # so that the next round has something to average
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
