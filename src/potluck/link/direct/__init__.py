"""The direct way between two peers: TCP, sealed with AES-GCM.

carrier.py       the whole: all direct paths of this process
path.py          the path to one peer, dialled by either side
dialling.py      an outgoing connection until it is open   listening.py   the incoming ones
greeting.py      who are you, and can you hear me          admission.py   which keys get in
noise.py         the handshake that proves keys            pulse.py       whether a silent one still lives
connection.py    one TCP connection on the event loop      sockets.py     the sockets and their limits
pacing.py        one pace for all that send at once
records.py       packets out of a stream of bytes          sealing.py     what becomes of a packet on the way
addresses.py     which addresses are worth dialling        reachability.py  can others dial this peer?
"""
