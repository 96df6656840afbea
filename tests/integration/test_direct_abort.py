"""What other peers do must not abort the process, as some states of libzmq do."""

from __future__ import annotations

import sys

from potluck.testing.processes import Children

# A peer fills our queue, which nobody reads for a moment, and hangs up. With ZeroMQ's own heartbeats, the next of them
# ends the process: "Assertion failed: !_io_error".
PROGRAM = """
import threading, time, zmq
from potluck.link.direct.admission import ZAP_ADDRESS
from potluck.link.direct.greeting import Caller, LinkKeys
from potluck.link.direct.sockets import SocketSettings, bind, connect, make_context, make_dialler, make_listener

settings = SocketSettings(heartbeat_seconds=0.1, trusted_lan=True)
caller = Caller(LinkKeys.generate(), LinkKeys.generate().link_key, plain=True)
here, there = make_context(settings), make_context(settings)
desk = here.socket(zmq.REP)  # lets everybody in
desk.bind(ZAP_ADDRESS)
threading.Thread(target=lambda: desk.send_multipart(
    [b"1.0", desk.recv_multipart()[1], b"200", b"", b"somebody", b""]), daemon=True).start()
listener = make_listener(here, settings)
[endpoint] = bind(listener, ["tcp://127.0.0.1:0"])
dialler = make_dialler(there, settings, caller, 5.0)
dialler.sndtimeo = 1000
connect(dialler, endpoint)
num_sent = 0
try:
    while True:
        dialler.send(bytes(100_000))
        num_sent += 1
except zmq.Again:
    print("full after", num_sent, flush=True)
dialler.close(0)
there.destroy(0)
time.sleep(2.0)
print("alive", flush=True)
listener.close(0)
here.destroy(0)
"""


def test_a_peer_that_fills_the_queue_and_hangs_up_does_not_abort_us(children: Children) -> None:
    process = children.spawn([sys.executable, "-c", PROGRAM])
    output = process.check(60)
    assert "full after" in output
    assert "alive" in output
