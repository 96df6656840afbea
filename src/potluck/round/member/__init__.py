"""One peer as a member of rounds.

participation.py  says that the peer is ready, follows the plan, reports, learns of the commit
intent.py         what the peer wants of the next round
exchange.py       one member's book-keeping in a round (pure): which chunk is where, and what comes next
roundwork.py      carries out what the exchange decides      lane.py: what goes to one other member, in which order
incoming.py       hands arriving frames to the round that they belong to
heldaverages.py   the averages of a round as this member holds them
lateaverages.py   those of the last epochs, kept for peers that missed one
reduction.py, tensorwork.py, workers.py    the tensor work, plain or sealed, in worker threads
messenger.py      readiness to all each second; reports to the coordinator
milestones.py     where a member is, for tests that make it fail right there
"""
