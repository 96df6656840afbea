"""A member that turns hostile, in a process of its own: real keys, real greeting, then a flood.

It speaks raw ZeroMQ. Arguments: ROLE PEER SESSION KEY SECRET THEIR_KEY ADDRESS, where ROLE is

    dialler    connects to ADDRESS, greets, then sends one message of ten gigabytes
    ungreeted  connects to ADDRESS and sends such a message without greeting
    listener   listens at ADDRESS (port 0), writes the port, greets whoever dials, then floods it likewise
"""

from __future__ import annotations

import sys

import zmq

from potluck.link.direct.greeting import Hello, LinkKeys, Welcome, answer_to, new_nonce, pack, unpack, welcome_to

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


def dial(keys: LinkKeys, their_key: str, address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.reconnect_ivl = -1
    socket.curve_serverkey = their_key.encode()
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.connect(address)
    return socket


def main() -> None:
    role, peer, session, key, secret, their_key, address = sys.argv[1:]
    keys = LinkKeys(key.encode(), secret.encode())
    if role == "listener":
        socket = zmq.Context.instance().socket(zmq.ROUTER)
        socket.linger = 0
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        socket.bind(address)
        print("listening", socket.last_endpoint.decode())
        routing_id, frame = socket.recv_multipart()
        hello = unpack(memoryview(frame))
        assert isinstance(hello, Hello)
        socket.send_multipart([routing_id, pack(welcome_to(hello, keys))])
        socket.recv_multipart()
        print("greeted")
        flood(socket, routing_id)
        return
    socket = dial(keys, their_key, address)
    if role == "dialler":
        hello = Hello(peer=peer, session=session, key=key, to=their_key, nonce=new_nonce())
        socket.send(pack(hello))
        welcome = unpack(memoryview(socket.recv()))
        assert isinstance(welcome, Welcome)
        socket.send(pack(answer_to(hello, welcome, keys)))
        print("greeted")
    flood(socket)


if __name__ == "__main__":
    main()
