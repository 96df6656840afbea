"""The run's keepers as the source of states: what an optimizer uses unless it is given another."""

from __future__ import annotations

import concurrent.futures
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from potluck.errors import StateUnavailableError
from potluck.optim.collaboration import Collaboration
from potluck.optim.method import Published, RunState, StateSource
from potluck.run.joined import Joined
from potluck.state.config import StateConfig
from potluck.state.fetched import FetchedState
from potluck.state.keeper import StateKeeper
from potluck.state.returning import Returning

logger = logging.getLogger(__name__)

HAND_OVER_SECONDS = 10.0  # for an aux peer to begin to fetch what only a leaving trainer has
MOST_HAND_OVER_SECONDS = 30.0  # while it fetches it; for a peer that was told to leave, what is left of its time

Source = StateSource | Literal["keepers"] | None
"""Where states come from: the run's keepers, somewhere else, or nowhere (then who falls behind has to stop)."""


class KeptStates:
    """Publishes this peer's states to the run's keepers, of which it may be one, and fetches from them."""

    def __init__(self, keeper: StateKeeper) -> None:
        self.counts: Counter[str] = Counter()
        self._keeper = keeper

    def publish(self, snapshot: RunState) -> Published:
        """Copy what is not steady; copying the rest, hashing and keeping it happen elsewhere."""
        published = self._keeper.publish(
            snapshot.tensors,
            snapshot.metadata,
            snapshot.epoch,
            own=snapshot.own,
            steady=snapshot.steady,
            is_held=snapshot.is_held,
        )
        published.add_done_callback(self._published)
        return published

    async def resume(self, *, base: Mapping[str, Tensor], timeout_seconds: float) -> RunState | None:
        """What the run goes on from, be it in somebody's memory or on somebody's disk."""
        fetched = await self._keeper.resume(base=base, timeout_seconds=timeout_seconds)
        return await self._taken(fetched) if fetched is not None else None

    async def fetch(self, *, at_least_epoch: int, base: Mapping[str, Tensor], timeout_seconds: float) -> RunState:
        """The newest state that can be believed."""
        return await self._taken(
            await self._keeper.fetch(at_least_epoch=at_least_epoch, base=base, timeout_seconds=timeout_seconds)
        )

    def deviates(self) -> bool:
        """Whether the keepers hold other bits than this peer."""
        return self._keeper.deviation is not None

    async def repair(self, *, epoch: int, base: Mapping[str, Tensor], timeout_seconds: float) -> RunState | None:
        """What most of the keepers hold."""
        fetched = await self._keeper.repair(base, epoch=epoch, timeout_seconds=timeout_seconds)
        if fetched is None:
            return None
        self.counts["repair_bytes"] += fetched.report.fetched_bytes
        if fetched.report.fetched_bytes and await self._keeper.is_rounding(fetched, base):
            self.counts["rounding_bytes"] += fetched.report.fetched_bytes
        return await self._taken(fetched, base)

    def statistics(self) -> dict[str, int]:
        """Counters."""
        backups = self._keeper.backups
        saved = {f"backups_{name}": count for name, count in backups.counts.items()} if backups is not None else {}
        uploaded = {f"uploads_{name}": count for name, count in self._keeper.archive.upload_counts.items()}
        return {**{f"states_{name}": count for name, count in self.counts.items()}, **saved, **uploaded}

    async def _taken(self, fetched: FetchedState, base: Mapping[str, Tensor] | None = None) -> RunState:
        with fetched:
            tensors = await self._keeper.work(fetched.tensors)  # a large copy: the event loop goes on meanwhile
            own = fetched.snapshot.inventory.own_names
            num_moved_chunks = sum(fetched.report.given.values())
            self.counts["fetched"] += 1
            self.counts["fetched_chunks"] += num_moved_chunks
            return RunState(
                epoch=fetched.epoch,
                tensors=tensors,
                metadata=fetched.metadata,
                own=own,
                num_chunks=fetched.snapshot.inventory.num_chunks,
                num_moved_chunks=num_moved_chunks,
                is_as_base=fetched.changed == frozenset() or (base is not None and _are_same(tensors, base, aside=own)),
            )

    def _published(self, published: concurrent.futures.Future[str]) -> None:
        if published.cancelled():
            self.counts["cancelled"] += 1
        elif (error := published.exception()) is not None:
            self.counts["not_kept"] += 1
            log = logger.debug if isinstance(error, StateUnavailableError) else logger.error
            log("a state of this peer was not kept: %s", error)
        else:
            self.counts["kept"] += 1


def _are_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor], *, aside: frozenset[str]) -> bool:
    names = one.keys() - aside
    return names == other.keys() - aside and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name].cpu()) for name in names
    )


def source_of_states(
    run: Joined, collaboration: Collaboration, source: Source, config: StateConfig
) -> StateSource | None:
    """The source that was asked for; a keeper that it needs is started on the run's loop, and ends with the run."""
    if source != "keepers":
        return source

    async def start() -> StateKeeper:
        keeper = collaboration.keeper = StateKeeper(collaboration.peer, collaboration.averager, config)
        await keeper.start()
        return keeper

    keeper = run.call(start())

    async def go_back() -> Returning:
        return keeper.go_back_with(collaboration.averager)

    returning = run.call(go_back())

    async def leave() -> None:
        session = run.peer.session
        await returning.close()
        if not (run.is_interrupted or session.ended.done()) and session.hub.is_connected:
            await keeper.hand_over(
                timeout_seconds=run.seconds_to_leave(HAND_OVER_SECONDS),
                most_seconds=run.seconds_to_leave(MOST_HAND_OVER_SECONDS),
            )
        await keeper.close()

    run.attach(leave)
    return KeptStates(keeper)
