"""A TCP port that nobody uses right now.

Prefer port 0 and asking the server which port it got: between this answer and its use another process may take it.
"""

from __future__ import annotations

import socket

_given: set[int] = set()


def unused_tcp_port(host: str = "127.0.0.1") -> int:
    """Return a port that was free a moment ago, and that this process has not been given before."""
    held: list[socket.socket] = []  # kept open meanwhile, so that the kernel names another one each time
    try:
        while True:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            held.append(listener)
            listener.bind((host, 0))
            port: int = listener.getsockname()[1]
            if port not in _given:
                _given.add(port)
                return port
    finally:
        for listener in held:
            listener.close()
