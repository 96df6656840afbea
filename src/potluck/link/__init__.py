"""Links between peers: reliable messages, requests and streams over whatever way there is.

What others use:
    links.py         Links: send, request, open_stream, handle; the one interface
    limits.py        LinkConfig, and what both ends count on without being told
    counters.py      what `statistics()` returns

From a message down to packets (pure, but for the first line):
    dispatch.py, requests.py, stream.py, streams.py, sendqueue.py, selflink.py   handlers, answers, streams, waiting
    envelope.py      what goes around a message
    table.py         all peers: whose packet is this, and is it of this life?
    peerlink.py      one peer: its life, its channel, its paths (paths.py), its speed (speed.py)
    channel.py       each message once and in order, or its sender is told: outbox.py, inbox.py, pace.py, receipt.py
    budget.py        who may fill how much of this process's memory;  waitingroom.py: who came before the roster
    packet.py        the bytes

How packets travel:
    carrier.py       the seam
    direct.py        ZeroMQ and CURVE between the peers themselves; its docstring maps its files
    relay.py         through the hub; its docstring maps its files
    reachability.py  can others dial this peer?
"""
