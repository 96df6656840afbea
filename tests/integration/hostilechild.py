"""A member that turns hostile, in a process of its own: real keys, a real greeting, and then the worst it can do.

Arguments: ROLE ATTACK KEY SECRET THEIR_KEY ADDRESS. The dialler connects to ADDRESS; the listener listens at ADDRESS
(port 0), writes the port, and greets whoever dials. Attacks:

    stranger   bytes without end instead of a greeting
    tiny       packets of nothing, without end
    asks       questions without end, whose answers are never read
    large      the largest packets, without end
    unfinished the largest packet but for its last byte, and then nothing more
    deaf       reads nothing and says nothing
"""

from __future__ import annotations

import socket
import sys
import time

from potluck.link.direct.addresses import Endpoint
from potluck.link.direct.greeting import KNOCK_BYTES, READY, READY_BYTES, Answerer, Caller, Knock, LinkKeys
from potluck.link.direct.noise import MESSAGE_BYTES, Cipher
from potluck.link.direct.pulse import ASK_MARK, DATA_MARK
from potluck.link.direct.sealing import Sealed, Slabs

LARGEST = memoryview(bytes(1024 * 1024))
SLABS = Slabs(slab_bytes=len(LARGEST), most_kept=0)


def exactly(line: socket.socket, num_bytes: int) -> bytes:
    data = line.recv(num_bytes, socket.MSG_WAITALL)
    assert len(data) == num_bytes, f"hung up after {len(data)} bytes"
    return data


def dial(keys: LinkKeys, their_key: str, endpoint: Endpoint, *, greets: bool) -> tuple[socket.socket, Cipher, Cipher]:
    caller = Caller(keys, their_key, plain=False)
    line = socket.create_connection((str(endpoint.ip), endpoint.port))
    if not greets:
        return line, Cipher(bytes(32)), Cipher(bytes(32))
    line.sendall(caller.knock.pack())
    outgoing, incoming = caller.answer(exactly(line, 1 + MESSAGE_BYTES)[1:])
    line.sendall(outgoing.seal(READY))
    return line, outgoing, incoming


def listen(keys: LinkKeys, their_key: str, endpoint: Endpoint) -> tuple[socket.socket, Cipher, Cipher]:
    with socket.create_server((str(endpoint.ip), endpoint.port)) as server:
        print("listening", f"tcp://127.0.0.1:{server.getsockname()[1]}", flush=True)
        line, _ = server.accept()
    knock = Knock.parse(exactly(line, KNOCK_BYTES))
    assert knock.key == their_key
    welcome, outgoing, incoming = Answerer(keys, knock.key, knock.handshake, plain=False).welcome()
    line.sendall(welcome)
    assert incoming.open(exactly(line, READY_BYTES)) == READY
    return line, outgoing, incoming


def attack(line: socket.socket, how: str, wrapping: Sealed) -> None:
    """Until the connection is cut, or for ever."""
    small = {"tiny": DATA_MARK, "asks": ASK_MARK}
    while True:
        if how in small:
            line.sendall(b"".join(bytes(part) for _ in range(1000) for part in wrapping.wrap(small[how], None)))
        elif how == "stranger":
            line.sendall(LARGEST)
        elif how == "large":
            for part in wrapping.wrap(DATA_MARK, LARGEST):
                line.sendall(part)
        elif how == "unfinished":
            head, body = wrapping.wrap(DATA_MARK, LARGEST)
            line.sendall(head)
            line.sendall(memoryview(body)[:-1])
            time.sleep(3600)
        else:
            time.sleep(3600)


def main() -> None:
    role, how, key, secret, their_key, address = sys.argv[1:]
    keys = LinkKeys.parse(key, secret)
    endpoint = Endpoint.parse(address, lowest_port=0)
    if role == "listener":
        line, outgoing, incoming = listen(keys, their_key, endpoint)
    else:
        line, outgoing, incoming = dial(keys, their_key, endpoint, greets=how != "stranger")
    print("greeted", flush=True)
    try:
        attack(line, how, Sealed(outgoing, incoming, SLABS))
    except OSError as error:
        print("cut", error, flush=True)


if __name__ == "__main__":
    main()
