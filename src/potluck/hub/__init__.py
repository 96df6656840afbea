"""The server that everybody can reach: NATS, who may do what, who is there, join links.

What others use:
    connection.py    what a process can do with a hub: publish, request, subscribe, stores (the seam)
    address.py, joinlink.py, handshake.py   where a hub is, the link that a person pastes, a first look before trusting
    subjects.py, patterns.py, stores.py     the subjects and tables of a run
    presence.py      card, beacon, and the guard's word on a peer
    keys.py, privatefiles.py                keys and signatures; files that nobody else may read

The server that `potluck host` starts:
    configuration.py, certificate.py, ports.py, folderlock.py   what it is made of, and that there is one per folder
    server.py, serverprocess.py, launcher.py                    the process

The guard, who decides:
    guard.py         the driver; door.py, lobbydesk.py, organiserdesk.py, presencekeeper.py do its parts
    lobby.py, invite.py, member.py, huggingface.py, permissions.py, presencecore.py, connections.py   decisions (pure)
    callout.py, jwt.py, hubsystem.py, registry.py, rosterwriter.py, ratelimit.py, errands.py          how they are made
    organise.py      what organisers ask for

The two connections of a peer:
    natsconnection.py   control, on nats-py; below it natslink.py, natswire.py, natswebsocket.py, linkkeeper.py,
                        reconnect.py, and above it natsrequests.py, natssubscription.py, dispatch.py, natsstore.py,
                        natswatch.py, watchledger.py, jetstream.py
    bulkwire.py         packets that find no direct way; bulkconnection.py, bulkprotocol.py, websocketframes.py
"""
