"""Which connections of this machine are no longer acknowledged by their other end, as the operating system sees it.

Whether a process answers depends on the process. Whether its machine is there, its kernel tells: it acknowledges what
arrives, be the process busy or stopped. So a connection on which the same bytes were sent again and again leads
nowhere. Linux shows that of every connection of a network namespace; of other systems, and of a hub on another machine,
nothing is known.
"""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
ESTABLISHED = "01"
LEAST_REPEATS = 2  # one may be lost on the way

Endpoint = tuple[str, int]


def unacknowledged() -> set[Endpoint]:
    """The other ends, address and port, that do not acknowledge what was sent to them."""
    found: set[Endpoint] = set()
    for table in TABLES:
        if table.exists():
            found |= read_table(table.read_text())
    return found


def read_table(text: str) -> set[Endpoint]:
    """The same, of one table as the kernel writes it."""
    found: set[Endpoint] = set()
    for line in text.splitlines()[1:]:
        _, _, remote, state, queues, _, repeats, *_ = line.split()
        num_unacknowledged = int(queues.partition(":")[0], 16)
        if state == ESTABLISHED and num_unacknowledged and int(repeats, 16) >= LEAST_REPEATS:
            found.add(_endpoint(remote))
    return found


def _endpoint(text: str) -> Endpoint:
    """Of `0100007F:1F90`: the address in words of the machine's byte order, the port as it is read."""
    words, _, port = text.partition(":")
    step = 1 if sys.byteorder == "big" else -1
    data = b"".join(bytes.fromhex(words[i : i + 8])[::step] for i in range(0, len(words), 8))
    address = ipaddress.ip_address(data)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), int(port, 16)
