"""The server that everybody can reach: NATS, who may do what, who is there, join links.

What others use:
    connection.py    what a process can do with a hub: publish, request, subscribe, stores (the seam)
    address.py, joinlink.py, handshake.py   where a hub is, the link that a person pastes, a first look before trusting
    wheelpin.py      which wheel a host serves, as its link says it
    access/          records of members and invites, and what members ask of the guard
    subjects.py, patterns.py, stores.py     the subjects and tables of a run
    queues.py        queues and topics of a fleet: what they are, and who may use them
    groupstore.py    what one group keeps in the store of all groups
    ratelimit.py     how often somebody may try
    presence.py, leaserecord.py             card, beacon, the guard's word on a peer; who coordinates
    keys.py, privatefiles.py                keys and signatures; files that nobody else may read

And what is behind it:
    server/          the nats-server that `potluck host` starts
    guard/           decides who may do what, and says who is there
    nats/            a process's connection for control: messages, requests, stores
    bulk/            its connection for packets that find no direct way
"""
