"""A process's connection to the hub for control: messages, requests and stores, on nats-py's protocol engine.

connection.py    the whole, which outlives the links under it
linkkeeper.py, reconnect.py        keeps one link open: which server next, and when
link.py, wire.py, websocket.py     one link to one server: TCP, TLS or WebSocket
interests.py, subscription.py, dispatch.py   what is listened to, what arrives, and calling its handler
requests.py                        questions that wait for their answers
store.py, watch.py, watchledger.py, jetstream.py   tables in the hub, and following their changes
"""
