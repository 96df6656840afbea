"""The coordinator of rounds: one peer, by the lease that it holds.

coordinator.py    the driver: convenes rounds, publishes plans, watches over a round, commits
convening.py      whether a round is due, with which members     trigger.py: when to start one (pure)
gathering.py      from the peers that are ready to a plan (pure)
director.py       one round (pure): watch the members, repair what breaks, end in a commit or an abort
attendance.py     what members have said of themselves           reach.py: which members reach each other
reassignment.py   which reducer does lost chunks again           commitment.py: from the end of a round to its record
adoption.py       rounds that an earlier coordinator left complete but uncommitted
announcing.py     what a coordinator publishes: signed plans and aborts, commits to the lineage
"""
