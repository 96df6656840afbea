"""The direct way between two peers: ZeroMQ over TCP, sealed with AES-GCM.

carrier.py       the whole: all direct paths of this process
path.py          the path to one peer, whoever dialled
dialling.py      one outgoing connection                   listening.py   the incoming ones
greeting.py      who are you, and can you hear me          admission.py   which keys get in
noise.py         the handshake that proves keys            sealing.py     what becomes of a packet on the way
pulse.py         whether a silent one still lives          flood.py       who sends more than it may
sockets.py       the sockets and their limits              loopsocket.py  ZeroMQ on the asyncio loop
addresses.py     which addresses are worth dialling        reachability.py  can others dial this peer?
"""
