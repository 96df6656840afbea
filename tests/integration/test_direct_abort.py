"""What other peers do must not abort the process, as some states of libzmq do."""

from __future__ import annotations

import sys

import pytest

from potluck.link.direct.sockets import SocketSettings
from potluck.link.limits import LinkConfig
from potluck.testing.processes import Children

# A peer sends more than we read for a moment, ZMTP pings among it, and hangs up. Where ZeroMQ's queue has a limit, or
# its own heartbeats are on, this ends the process: "Assertion failed: !_io_error".
PROGRAM = """
import socket, struct, sys, threading, time, zmq
from potluck.link.direct.admission import ZAP_ADDRESS
from potluck.link.direct.greeting import Caller, LinkKeys
from potluck.link.direct.sockets import SocketSettings, bind, make_context, make_listener

settings = SocketSettings(heartbeat_seconds=0.1)
context = make_context(settings)
desk = context.socket(zmq.REP)  # lets everybody in
desk.bind(ZAP_ADDRESS)

def let_in():
    desk.send_multipart([b"1.0", desk.recv_multipart()[1], b"200", b"", b"somebody", b""])

threading.Thread(target=let_in, daemon=True).start()
listener = make_listener(context, settings)
[endpoint] = bind(listener, ["tcp://127.0.0.1:0"])

def command(body):
    return b"\\x04" + bytes([len(body)]) + body

def expect(word):
    text = b""
    while word not in text:
        text += line.recv(1000)

caller = Caller(LinkKeys.generate(), LinkKeys.generate().link_key, plain=False)
line = socket.create_connection(("127.0.0.1", endpoint.port), timeout=30)
line.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03\\x01" + b"PLAIN".ljust(20, b"\\0") + bytes(32))
line.sendall(command(b"\\x05HELLO" + bytes([40]) + caller.username + bytes([48]) + caller.password))
expect(b"WELCOME")
line.sendall(command(b"\\x08INITIATE\\x0bSocket-Type\\0\\0\\0\\x06DEALER\\x08Identity\\0\\0\\0\\0"))
expect(b"READY")
message, ping = b"\\x00\\x04abcd", command(b"\\x04PING\\0\\0")
line.sendall(message * 1000 + (message + ping) * 200)
time.sleep(0.5)
if sys.argv[1] == "resets":
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
line.close()
time.sleep(0.5)
num_received = 0
while listener.poll(500):
    listener.recv_multipart()
    num_received += 1
print("received", num_received, flush=True)
time.sleep(0.5)
print("alive", flush=True)
listener.close(0)
context.destroy(0)
"""


@pytest.mark.parametrize("ending", ["closes", "resets"])
def test_a_peer_that_sends_more_than_we_read_and_hangs_up_does_not_abort_us(ending: str, children: Children) -> None:
    process = children.spawn([sys.executable, "-c", PROGRAM, ending])
    output = process.check(60)
    assert "received" in output
    assert "alive" in output


def test_links_have_less_on_its_way_than_the_guard_takes_for_a_flood() -> None:
    assert LinkConfig().max_in_flight_bytes * 5 // 4 <= SocketSettings().held_bytes
