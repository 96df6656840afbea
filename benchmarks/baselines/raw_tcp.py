"""MB/s of a plain TCP connection between two processes on loopback: what the kernel gives at most.

python raw_tcp.py MEGABYTES MESSAGE_BYTES REPEATS
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import statistics
import sys
import time


def sink(listener: socket.socket, message_bytes: int) -> None:
    connection, _ = listener.accept()
    buffer = bytearray(message_bytes)
    with connection:
        while True:
            wanted = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
            if not wanted:
                return
            while wanted:
                wanted -= connection.recv_into(buffer, min(wanted, message_bytes))
            connection.sendall(b"k")


def main() -> None:
    megabytes, message_bytes, repeats = map(int, sys.argv[1:4])
    listener = socket.create_server(("127.0.0.1", 0))
    process = multiprocessing.get_context("fork").Process(target=sink, args=(listener, message_bytes), daemon=True)
    process.start()
    total = megabytes * 1_000_000 // message_bytes * message_bytes
    payload = bytes(message_bytes)
    speeds = []
    with socket.create_connection(listener.getsockname()) as connection:
        for _ in range(repeats + 1):
            start = time.perf_counter()
            connection.sendall(total.to_bytes(8, "big"))
            for _ in range(total // message_bytes):
                connection.sendall(payload)
            connection.recv(1, socket.MSG_WAITALL)
            speeds.append(total / (time.perf_counter() - start) / 1e6)
        connection.sendall(bytes(8))
    process.join(10)
    print(json.dumps({"mb_per_second": statistics.median(speeds[1:])}))


if __name__ == "__main__":
    main()
