"""A whole run in memory, on virtual time.

virtualclock.py  time that moves only when told to
virtualloop.py   an event loop on which waiting takes no time
memoryrun.py     a whole run in memory: hub, guard, peers with sessions and links
memoryhub.py     a hub in memory (memoryconnection.py, memorystore.py): with faults on purpose
memorycarrier.py carriers of packets in memory: rate, delay, loss, cuts; on the event loop or on virtual time
linknode.py      a peer's links on virtual time, without an event loop
inlinerun.py     a joined run whose loop runs in the caller's thread while it waits
inlineworkers.py tensor work without threads
"""
