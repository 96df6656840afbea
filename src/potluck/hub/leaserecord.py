"""What stands in the `lease` store: written by who coordinates (peer/lease.py), read by everybody."""

from __future__ import annotations

from potluck.messages import Message

KEY = "coordinator"


class LeaseRecord(Message, frozen=True, kw_only=True):
    """One term of one holder."""

    holder: str
    session: str = ""  # of the holder
    token: int = 0  # 0 in the first write of a term, whose own revision is the token
