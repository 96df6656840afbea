"""One process in a run, and what it knows of the others.

identity.py     the Ed25519 key that a peer is known by, in a file of its own
admission.py    getting in: the lobby, waiting for approval, each refusal as its own error
session.py      the connection to the hub: card, beacons, roster, the way back after a failure
roster.py       who is there (pure): the guard's word in, joined / changed / suspect / dead / left out
hubtime.py      how far this machine's clock is off (pure)
organisers.py   whose word counts for a run: the key in the join link, or the one that was seen first
lease.py        holding the coordinator's lease, with a fencing token
grouplease.py   the same for a named group: who comes first, and how groups are spread
heartbeat.py    one record that keeps all of a peer's leases of named groups alive
groupsession.py the session as one group sees it: members, subjects, stores, beacon
machinecheck.py what could keep this machine from helping, in plain words
environment.py  all that is read from the environment
"""
