"""A member without measure, in a process of its own: python floodchild.py URL SEED LANE SUBJECT.

It has a real key, and says what the hub permits it to say: the largest messages, on one subject, for ever. If the hub
hangs up, it comes back. It says how often it was let in.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from urllib.parse import urlsplit

from potluck.hub.bulk.protocol import greeting
from potluck.hub.keys import Signer

LARGEST_BYTES = 1024 * 1024
PAUSE_SECONDS = 0.1  # before it comes back


def wait_for_pong(line: socket.socket) -> None:
    """The answer to the greeting, if we are let in."""
    said = b""
    while b"PONG\r\n" not in said:
        more = line.recv(4096)
        if not more:
            raise ConnectionRefusedError("not let in")
        said = said[-16:] + more


def flood(url: str, signer: Signer, lane: str, subject: str) -> None:
    """One connection, until the hub hangs up."""
    address = urlsplit(url)
    with socket.create_connection((str(address.hostname), int(address.port or 0))) as line:
        info = line.recv(64 * 1024, socket.MSG_PEEK)
        nonce = info.partition(b'"nonce":"')[2].partition(b'"')[0].decode()
        line.sendall(greeting(signer, nonce, name=lane, token="", subscriptions=b""))
        wait_for_pong(line)
        print("let in", flush=True)
        threading.Thread(target=lambda: [None for _ in iter(lambda: line.recv(4096), b"")], daemon=True).start()
        message = b"PUB %b %d\r\n" % (subject.encode(), LARGEST_BYTES) + bytes(LARGEST_BYTES) + b"\r\n"
        while True:
            line.sendall(message)


def main() -> None:
    url, seed, lane, subject = sys.argv[1:]
    signer = Signer(seed.encode())
    while True:
        try:
            flood(url, signer, lane, subject)
        except OSError as error:
            print("hung up on", error, flush=True)
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main()
