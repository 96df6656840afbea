"""A member that ignores credit, in a process of its own: python floodchild.py URL SEED VICTIM.

It has a real key, and says what the hub permits it to say: the largest messages, to one victim, for ever. If the hub
hangs up, it comes back. It says how often it was let in.
"""

from __future__ import annotations

import socket
import sys
import threading
from urllib.parse import urlsplit

from relaynodes import SUBJECTS

from potluck.hub.bulk.protocol import greeting
from potluck.hub.keys import Signer

LARGEST_BYTES = 1024 * 1024


def flood(url: str, signer: Signer, victim: str) -> None:
    """One connection, until the hub hangs up."""
    address = urlsplit(url)
    with socket.create_connection((str(address.hostname), int(address.port or 0))) as line:
        info = line.recv(64 * 1024, socket.MSG_PEEK)
        nonce = info.partition(b'"nonce":"')[2].partition(b'"')[0].decode()
        line.sendall(greeting(signer, nonce, name="bulk", token="", subscriptions=b""))
        print("let in", flush=True)
        threading.Thread(target=lambda: [None for _ in iter(lambda: line.recv(4096), b"")], daemon=True).start()
        subject = SUBJECTS.relay(victim, signer.public_key)
        message = b"PUB %b %d\r\n" % (subject.encode(), LARGEST_BYTES) + bytes(LARGEST_BYTES) + b"\r\n"
        while True:
            line.sendall(message)


def main() -> None:
    url, seed, victim = sys.argv[1:]
    signer = Signer(seed.encode())
    while True:
        try:
            flood(url, signer, victim)
        except OSError as error:
            print("hung up on", error, flush=True)


if __name__ == "__main__":
    main()
