"""A process's second connection to the hub, for link packets: made for bytes, not for messages.

wire.py          the wire, which reconnects
connection.py    one connection to one server
protocol.py, websocket.py          the bytes (pure)
"""
