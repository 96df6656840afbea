"""A member that turns hostile, in a process of its own: real keys, real greeting, then a flood.

It speaks raw ZeroMQ. Arguments: ROLE KEY SECRET THEIR_KEY ADDRESS, where ROLE is

    dialler    connects to ADDRESS, greets, then sends one message of ten gigabytes
    ungreeted  connects to ADDRESS and sends such a message without greeting
    listener   listens at ADDRESS (port 0), writes the port, greets whoever dials, then floods it likewise
"""

from __future__ import annotations

import sys

import zmq

from potluck.link.direct.admission import ZAP_ADDRESS
from potluck.link.direct.greeting import KNOCK, READY, Answerer, Caller, LinkKeys

FRAME = zmq.Frame(bytes(256 * 1024), copy=False)
NUM_PARTS = 40_000  # ten gigabytes in one message; here they are the same bytes each time


def flood(socket: zmq.Socket[bytes], to: bytes | None = None) -> None:
    """Send one message of very many parts, until the connection is cut."""
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    if to is not None:
        socket.send(to, zmq.SNDMORE)
    for _ in range(NUM_PARTS):
        socket.send(FRAME, zmq.SNDMORE, copy=False)
    socket.send(b"the end")  # ZeroMQ begins to transmit a message only when it is complete
    print("flooding")
    monitor.recv_multipart()
    print("flood ended")


def listen(keys: LinkKeys, their_key: str, address: str) -> None:
    """Let one connection in, greet it, and flood it."""
    context = zmq.Context.instance()
    desk = context.socket(zmq.REP)
    desk.bind(ZAP_ADDRESS)
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.plain_server = True
    socket.bind(address)
    print("listening", socket.last_endpoint.decode())
    _, request_id, *_, password = desk.recv_multipart()
    desk.send_multipart([b"1.0", request_id, b"200", b"", b"victim", b""])
    answerer = Answerer(keys, their_key, password, plain=False)
    routing_id, knock = socket.recv_multipart()
    assert knock == KNOCK
    welcome, _, incoming = answerer.welcome()
    socket.send_multipart([routing_id, welcome])
    assert incoming.open(socket.recv_multipart()[1]) == READY
    print("greeted")
    flood(socket, routing_id)


def dial(keys: LinkKeys, their_key: str, address: str, *, greets: bool) -> None:
    """Connect, greet or not, and flood."""
    caller = Caller(keys, their_key, plain=False)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.reconnect_ivl = -1
    socket.plain_username, socket.plain_password = caller.username, caller.password
    socket.connect(address)
    if greets:
        socket.send(KNOCK)
        outgoing, _ = caller.answer(socket.recv())
        socket.send(outgoing.seal(READY))
        print("greeted")
    flood(socket)


def main() -> None:
    role, key, secret, their_key, address = sys.argv[1:]
    keys = LinkKeys(key.encode(), secret.encode())
    if role == "listener":
        listen(keys, their_key, address)
    else:
        dial(keys, their_key, address, greets=role == "dialler")


if __name__ == "__main__":
    main()
