"""Named points at which a test can make a process fail.

Product code says where it is: `reach("exchange.sent", peer=…, epoch=…)`. That is one comparison and nothing else,
unless a test has installed a hook (see `potluck.testing.faults`). No setting, file or message from the network
installs one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

Hook = Callable[[str, Mapping[str, object]], None]

_hook: Hook | None = None


def reach(point: str, **labels: object) -> None:
    """Say that this thread is at the named point. What the hook raises, if there is one, is raised here."""
    if _hook is not None:
        _hook(point, labels)


def install(hook: Hook | None) -> Hook | None:
    """Call the hook at every point from now on (None: at none any more), and return the one before."""
    global _hook
    before, _hook = _hook, hook
    return before
