"""The run's keepers as the source of states: what an optimizer uses unless it is given another."""

from __future__ import annotations

import concurrent.futures
import logging
from collections import Counter
from typing import Literal

from potluck.errors import StateUnavailableError
from potluck.optim.collaboration import Collaboration
from potluck.optim.method import Snapshot, StateSource
from potluck.run.joined import Joined
from potluck.state.keeper import StateConfig, StateKeeper

logger = logging.getLogger(__name__)

Source = StateSource | Literal["keepers"] | None
"""Where states come from: the run's keepers, somewhere else, or nowhere (then who falls behind has to stop)."""


class KeptStates:
    """Publishes this peer's states to the run's keepers, of which it may be one, and fetches from them."""

    def __init__(self, keeper: StateKeeper) -> None:
        self.counts: Counter[str] = Counter()
        self._keeper = keeper

    def publish(self, snapshot: Snapshot) -> None:
        """Copy the state; hashing and keeping it happen elsewhere."""
        published = self._keeper.publish(snapshot.tensors, snapshot.metadata, snapshot.epoch)
        published.add_done_callback(self._published)

    async def fetch(self, *, at_least_epoch: int, timeout_seconds: float) -> Snapshot:
        """The newest state that can be believed."""
        with await self._keeper.fetch(timeout_seconds=timeout_seconds) as fetched:
            if fetched.epoch < at_least_epoch:
                raise StateUnavailableError(
                    f"the newest state that the keepers have is that of epoch {fetched.epoch}, and {at_least_epoch} is "
                    "wanted: it is tried again"
                )
            return Snapshot(epoch=fetched.epoch, tensors=fetched.tensors(), metadata=dict(fetched.metadata))

    def _published(self, published: concurrent.futures.Future[str]) -> None:
        if published.cancelled():
            self.counts["cancelled"] += 1
        elif (error := published.exception()) is not None:
            self.counts["not_kept"] += 1
            log = logger.debug if isinstance(error, StateUnavailableError) else logger.error
            log("a state of this peer was not kept: %s", error)
        else:
            self.counts["kept"] += 1


def source_of_states(
    run: Joined, collaboration: Collaboration, source: Source, config: StateConfig | None = None
) -> StateSource | None:
    """The source that was asked for; a keeper that it needs is started on the run's loop, and ends with the run."""
    if source != "keepers":
        return source

    async def start() -> StateKeeper:
        keeper = StateKeeper(run.peer, collaboration.averager, config)
        await keeper.start()
        return keeper

    keeper = run.call(start())
    run.attach(keeper.close)
    return KeptStates(keeper)
