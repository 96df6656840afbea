"""The relayed way between two peers: packets through the hub, where no direct path can be had.

carrier.py       the whole: all relayed paths of this process, on one bulk wire (hub/bulk/wire.py)
path.py          the path to one peer
greeting.py      how both ends prove who they are
sealing.py       how packets are kept from the hub
credit.py        who may have how much on its way
penalties.py       who is not listened to any more, since it floods us
packet.py        what relays say to each other, as bytes
"""
