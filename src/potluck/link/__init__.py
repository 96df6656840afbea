"""Links between peers: reliable messages, requests and streams over whatever way there is.

What others use:
    links.py         Links: send, request, open_stream, handle; the one interface
    grouplinks.py    GroupLinks: the same for the messages of one group
    limits.py        LinkConfig, and what both ends count on without being told
    line.py          whose packet is next on the line that all links share; throttle.py: a cap on bandwidth
    counters.py      what `statistics()` returns

From a message down to packets:
    dispatch.py, requests.py, stream.py, streams.py, sendqueue.py, selflink.py   handlers, answers, streams, waiting
    envelope.py      what goes around a message
    table.py         all peers: whose packet is this, of which life?  waitingroom.py: who came before the roster
    peerlink.py      one peer: its life, its channel, its paths (paths.py), its speed (speed.py)
    channel/         each message once and in order, or its sender is told (pure)

How packets travel:
    carrier.py       the seam
    direct/          TCP between the peers themselves
    relay/           through the hub
"""
