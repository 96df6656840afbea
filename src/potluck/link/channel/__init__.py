"""Each message once and in order, over paths that lose, repeat and reorder packets; or its sender is told (pure).

channel.py       both directions of one link
outbox.py        what was sent and is not confirmed        inbox.py    what arrived and is not whole
congestion.py    how much may be on its way                sendreceipt.py  what a sender learns of a message
packet.py        the bytes                                 budget.py   who may fill how much of our memory
"""
