"""What organisers have done by way of the dashboard, and who: a line each, in a file in the run's folder."""

from __future__ import annotations

import logging
import os
from collections import deque
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)

LOG_FILE = "organisers.log"
SHOWN = 200


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was done, or tried."""

    at: float  # seconds since 1970
    who: str
    address: str
    what: str
    outcome: str  # done, or why not


class ActionLog:
    """Append only."""

    def __init__(self, path: Path | None) -> None:
        """None: nowhere but in memory."""
        self._path = path
        self._recent: deque[Action] = deque(maxlen=SHOWN)
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN:]:
                try:
                    self._recent.append(msgspec.json.decode(line, type=Action))
                except msgspec.MsgspecError:
                    logger.warning("a line of %s cannot be read and is passed over", path)

    def append(self, action: Action) -> None:
        """Write it down."""
        self._recent.append(action)
        logger.info("%s (%s): %s: %s", action.who, action.address, action.what, action.outcome)
        if self._path is None:
            return
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, msgspec.json.encode(action) + b"\n")
        finally:
            os.close(descriptor)

    def recent(self) -> list[Action]:
        """The newest, the last one first."""
        return list(reversed(self._recent))
