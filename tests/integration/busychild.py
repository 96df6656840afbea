"""A peer in a process of its own that can be kept from running any Python, as a long call of an extension does.

    python busychild.py LINK NAME

The first byte of its input makes it hold the interpreter lock, the next lets it go, and so on; it leaves at the end of
its input.
"""

from __future__ import annotations

import ctypes
import os
import sys

import potluck


def main(link: str, name: str) -> None:
    read_holding_the_lock = ctypes.PyDLL(None).read  # CDLL would let go of it
    byte = ctypes.create_string_buffer(1)
    with potluck.join(link, name=name) as run:
        print(f"joined {run.peer.session.peer_id}", flush=True)
        while os.read(0, 1):
            print("holds", flush=True)
            read_holding_the_lock(0, byte, 1)
            print("free", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
