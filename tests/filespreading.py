"""Which worker runs which file of tests next, when several share a machine.

Tests of commands and processes (`e2e`, `integration`) wait for much of their time, and those of `unit` compute. So all
workers but one take the first kind, as long as there are such files, and the last one takes the second: it computes
while the others wait.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

COMPUTING = "tests/unit/"
FEWEST_WORKERS = 4  # with fewer, each takes whatever is next: one of three would be missed by the others


class SpreadFiles(LoadFileScheduling):
    """Files stay whole, as what they set up is shared by their tests."""

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """Put what suits this worker to the front before it is given more."""
        computes = len(self.nodes) >= FEWEST_WORKERS and node is self.nodes[-1]
        fitting = next((scope for scope in self.workqueue if scope.startswith(COMPUTING) == computes), None)
        if fitting is not None:
            self.workqueue.move_to_end(fitting, last=False)
        super().mark_test_complete(node, item_index, duration)
