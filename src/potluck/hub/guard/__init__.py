"""The guard: decides who may do what, and tells everyone who is there.

    guard.py         the driver, of which door.py (connections), lobbydesk.py (newcomers), organiserdesk.py (orders),
                     storedesk.py (stores), presencekeeper.py (the roster) and floodwatch.py do their parts
    (the records and messages that members share with it are in access/)

Decisions (pure):
    lobby.py, permissions.py                         who gets in, with which rights
    lobbycrowd.py                                    which strangers have to leave the lobby
    presencecore.py, connections.py                  who is there
    floodcore.py                                     who publishes too much

How they are carried out:
    callout.py, jwt.py                 the server's question about a connection, and the answer
    hubsystem.py                       who is connected; cutting a connection
    acknowledgements.py                whose machine still answers, though its process does not
    leaders.py                         which servers of a cluster lead the stores
    huggingface.py                     whose token it is
    registry.py, rosterwriter.py       the records, in the hub's stores
    backgroundwork.py                  work on the side
"""
