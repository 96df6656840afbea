"""Averaging among the peers of a run: the interface of this package.

    averager = Averager(peer, AveragerConfig())
    await averager.start()
    result = await averager.average({"weight": tensor}, weight=32, timeout_seconds=60)

Everybody calls `average` once per epoch: trainers with tensors and the weight of their contribution, aux peers with
None (they reduce for others) or with tensors and no weight (they want the averages too). It returns when the epoch is
committed. Until then the tensors must not be changed; they hold the averages afterwards, if `result.holds`.

A lone trainer has nothing to average: its tensors are left as they are, to the last bit, whatever codec
its values would have travelled in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from potluck import tasks
from potluck.errors import ConfigurationError
from potluck.peer.lease import Lease
from potluck.peer.roster import RosterEvent
from potluck.round.codecs import CodecChoice, TensorRole
from potluck.round.coordinator.coordinator import Coordinator, CoordinatorConfig
from potluck.round.lineage import Lineage
from potluck.round.member.intent import StandBy
from potluck.round.member.participation import Participation
from potluck.round.member.workers import Workers, workers_for
from potluck.round.outcome import FailedRound, RoundResult
from potluck.round.plan.layout import FlatTensors, Layout
from potluck.round.plan.messages import Commit, Restoration
from potluck.run.group import Group, LinkedPeer, group_of

logger = logging.getLogger(__name__)

T = TypeVar("T")


RoundPeer = Group | LinkedPeer
"""The group that the rounds belong to; a peer stands for its place in `main`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragerConfig:
    """How this peer averages. Codecs must be the same for all peers of a run."""

    codecs: CodecChoice = field(default_factory=CodecChoice)
    """Which tensor takes which codec."""

    roles: TensorRole | Mapping[str, TensorRole] = "gradient"
    """What the tensors are, one for all or one for each name."""

    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    """How rounds are planned, where this peer is the one to do it."""

    num_threads: int | None = None
    """For tensor work; None: one for each core, up to 4."""


class Averager:
    """One peer's averaging. Lives on one event loop."""

    def __init__(
        self, peer: RoundPeer, config: AveragerConfig | None = None, *, workers: Workers | None = None
    ) -> None:
        """The peer must have joined; `workers` do the tensor work, in threads of their own unless given."""
        self.config = config or AveragerConfig()
        group = group_of(peer)
        self._links = group.links
        self._session = session = group.session
        self.lease: Lease = session.lease(
            is_gone=self._is_gone,
            on_change=self._lease_changed,
            may_hand_over=lambda: not self._coordinator.is_in_round,
        )
        self.lineage = Lineage(session.store("lineage"), session.subjects.scope, self._committed, lease=self.lease)
        self._workers = workers or workers_for(session.whole, group.name, "rounds", self.config.num_threads)
        self._has_workers = False
        start = self.config.coordinator.trigger.start
        self._participation = Participation(self._links, session, self.lease.view, self.lineage, self._workers, start)
        self._coordinator = Coordinator(
            self._links, session, self.lease, self.lineage, self._workers, self.config.coordinator
        )
        self._standing: asyncio.Task[None] | None = None
        self._layout: Layout | None = None
        self._stop_listening: Callable[[], None] = lambda: None
        self._listeners: list[Callable[[Commit], None]] = []

    async def start(self) -> None:
        """Follow the run's lineage and lease, and be a candidate where this peer may coordinate."""
        try:
            self._workers.start()
            self._has_workers = True
            await self.lease.start()  # first: who holds it says which commits count
            await self.lineage.start()
            await self._participation.start()
            self._stop_listening = self._session.roster.listen(self._roster_changed)
            self._stand_if_allowed()
            if self._standing is not None:
                await self._standing
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Leave the round that is under way, hand the lease back, end all threads. Idempotent."""
        self._stop_listening()
        await tasks.end(self._standing)
        await self._participation.close()
        await self._coordinator.close()
        await self.lease.close()
        await self.lineage.close()
        if self._has_workers:
            self._has_workers = False
            await self._workers.close()

    @property
    def epoch(self) -> int:
        """How many epochs are committed, as far as this peer knows."""
        return self.lineage.epoch

    @property
    def num_restored(self) -> int:
        """How often the run went back to an earlier state on purpose, as far as this peer knows. Any thread."""
        head = self.lineage.head
        return head.num_restored + head.num_returned if head is not None else 0

    async def average(
        self,
        tensors: Mapping[str, Tensor] | None,
        *,
        weight: float = 0.0,
        epoch: int | None = None,
        reduces: bool = True,
        timeout_seconds: float,
        phases: float = 0.0,
    ) -> RoundResult:
        """Take part in making an epoch, the next one unless named, and return when it is committed.

        The tensors are changed in place, after the commit, if this peer holds the averages then; else the result says
        who does. Without `reduces`, others average for this peer as long as there are any that can. `phases` is how
        many phases of paths the contribution stands for (paths/). RoundFailedError when nothing is committed in time:
        it names the step and the peers.
        """
        wanted = epoch if epoch is not None else self.epoch + 1
        result = await self._enter(tensors, weight, wanted, reduces, None, timeout_seconds, phases)
        assert result is not None, "who does not only stand by gets a result, or an error"
        return result

    async def stand_by(
        self, stand_by: StandBy, tensors: Mapping[str, Tensor], *, weight: float, epoch: int, timeout_seconds: float
    ) -> RoundResult | None:
        """As `average`, ahead of the time at which the epoch is due.

        None when no round began while this peer stood by: then the tensors are as they were.
        """
        return await self._enter(tensors, weight, epoch, True, stand_by, timeout_seconds)

    async def _enter(
        self,
        tensors: Mapping[str, Tensor] | None,
        weight: float,
        epoch: int,
        reduces: bool,
        stand_by: StandBy | None,
        timeout_seconds: float,
        phases: float = 0.0,
    ) -> RoundResult | None:
        if not 0.0 <= weight <= 1e12:
            raise ConfigurationError(f"a weight of {weight}: take the number of samples, from 0 to 1e12")
        if timeout_seconds <= 0:
            raise ConfigurationError(f"timeout_seconds={timeout_seconds}: a round needs some time")
        result = await self._participation.enter(
            self._bind(tensors) if tensors is not None else None,
            weight=weight,
            epoch=epoch,
            reduces=reduces,
            stand_by=stand_by,
            timeout_seconds=timeout_seconds,
            phases=phases,
        )
        if result is not None:
            logger.info("%s", result.describe())
        return result

    def confirm(self) -> None:
        """The epoch that this peer stands by for is due."""
        self._participation.confirm()

    async def hear_late(self, tensors: Mapping[str, Tensor], *, epoch: int) -> None:
        """Write the averages of an epoch that is committed into these tensors, from a peer that holds them.

        StateUnavailableError when nobody gives them; then the tensors are as they were.
        """
        await self._participation.hear_late(self._bind(tensors), epoch)

    def can_hear_late(self, epoch: int) -> bool:
        """Whether somebody who is there should have the averages of an epoch that is committed."""
        return self._participation.can_hear_late(epoch)

    async def tell_late(self, epoch: int, weight: float) -> None:
        """Say that this peer would be ready now for an epoch that was made without it."""
        await self._participation.tell_late(epoch, weight)

    def coordinate_by(self, config: CoordinatorConfig) -> None:
        """Where this peer coordinates, start and plan the next rounds by this."""
        self._coordinator.configure(config)

    def measured(self, allowances: Mapping[str, float]) -> None:
        """Where this peer coordinates: how many medians each peer may give to an epoch over time (weights.py)."""
        self._coordinator.measured(allowances)

    async def restore(self, restored: Restoration) -> Commit:
        """Make an earlier state that of the next epoch. RetryableError unless this peer coordinates, and is first."""
        return await self._coordinator.restore(restored)

    @property
    def is_in_round(self) -> bool:
        """Whether others count on this peer now. Any thread may read it."""
        return self._participation.is_in_round

    async def work(self, on_tensors: Callable[[], T]) -> T:
        """Have work on tensors done by one of the workers, between rounds."""
        return await self._workers.run(on_tensors)

    def listen(self, listener: Callable[[Commit], None]) -> None:
        """Call `listener` for each committed epoch, also of rounds without this peer."""
        self._listeners.append(listener)

    def listen_to_failures(self, listener: Callable[[FailedRound], None]) -> None:
        """Call `listener` for each round that this peer gives up as coordinator; there is one listener."""
        self._coordinator.on_failure = listener

    def statistics(self) -> dict[str, int | float]:
        """Totals of this peer's rounds and of its work as coordinator, and how many members the newest epoch had."""
        head = self.lineage.head
        return {
            "epoch": self.epoch,
            "members": len(head.members) if head is not None else 0,
            "bad_heads": self.lineage.bad_heads,
            "worker_errors": self._workers.num_errors,
            **self._participation.statistics(),
            **{f"coordinator_{name}": count for name, count in self._coordinator.counts.items()},
        }

    def _bind(self, tensors: Mapping[str, Tensor]) -> FlatTensors:
        if self._layout is not None:
            with contextlib.suppress(ConfigurationError):  # other tensors than last time
                return self._layout.bind(tensors)
        self._layout = Layout.of(tensors, self.config.codecs, self.config.roles)
        return self._layout.bind(tensors)

    def _committed(self, commit: Commit) -> None:
        self._coordinator.committed(commit)
        self._participation.committed(commit)
        for listener in self._listeners:
            listener(commit)

    def _lease_changed(self) -> None:
        self.lineage.lease_changed()
        self._coordinator.lease_changed()
        self._participation.lease_changed()

    def _is_gone(self, holder: str, session: str) -> bool:
        presence = self._session.roster.get(holder)
        return presence is None or presence.card.session != session

    def _roster_changed(self, event: RosterEvent) -> None:
        if event.peer == self._session.peer_id:
            self._stand_if_allowed()
        elif event.change in ("dead", "left"):
            self.lease.reconsider()

    def _stand_if_allowed(self) -> None:
        own = self._session.roster.get(self._session.peer_id)
        if own is not None and own.coordinates and self._standing is None:
            self._standing = asyncio.create_task(self._stand(), name="coordinator: start")

    async def _stand(self) -> None:
        await self._coordinator.start()
        self.lease.stand()
