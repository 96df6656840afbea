"""One peer's part in a hosted pipeline.

    part = await PipelinePart.start(peer, board, Role(serves=True), …)

The conductor is the coordinator of `main`: every peer that may coordinate stands for its lease, and conducts while it
has it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from potluck import tasks
from potluck.errors import ConfigurationError, RetryableError
from potluck.messages import encode
from potluck.peer.lease import Lease
from potluck.peer.roster import RosterEvent
from potluck.pipeline import planning
from potluck.pipeline.blueprint import Blueprint
from potluck.pipeline.book import ConductorReplacedError, HubBook
from potluck.pipeline.conducting import Conductor, ConductorConfig
from potluck.pipeline.cuts import CutShelf
from potluck.pipeline.evaluating import Evaluation
from potluck.pipeline.feeding import FeederConfig
from potluck.pipeline.following import Following
from potluck.pipeline.holding import Holding
from potluck.pipeline.judging import Judge, Tolerances
from potluck.pipeline.layout import Layout
from potluck.pipeline.member import MemberConfig, Part, PipelineMember
from potluck.pipeline.profiling import measure
from potluck.pipeline.rebalancing import RebalancingConfig
from potluck.pipeline.serving import ServerConfig
from potluck.pipeline.staffing import Staff
from potluck.recipes.recipe import Recipe, data_of
from potluck.run.peer import Peer
from potluck.training.manifest.manifest import Manifest
from potluck.training.manifest.method import PipelineSpec
from potluck.training.staged.course import ManifestCourse, fixed_layout, optimizing
from potluck.training.staged.data import RecipeSource
from potluck.training.staged.overview import OVERVIEW_TOPIC, Overview

logger = logging.getLogger(__name__)

MIN_GAIN = 0.1  # of a move: measured rates are not exact
MAX_PLANNED = 64
TELL_OVERVIEW_SECONDS = 2.0
RETRY_SECONDS = 0.5


Tell = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Role:
    """What this peer's person wants it to do."""

    part: Part = field(default_factory=Part)
    has_data: bool = True
    """It can feed where nobody else does."""
    device: torch.device | None = None
    cuts: Path | None = None
    keep_last: int = 3
    evaluation: Evaluation | None = None
    """Of held-out data, through the pipeline."""


class PipelinePart:
    """Lives on the event loop."""

    def __init__(
        self, peer: Peer, newest: Callable[[], Manifest], recipe: Recipe[Any], role: Role, tell: Tell | None = None
    ) -> None:
        manifest = newest()
        spec = manifest.pipeline
        if spec is None:
            raise ConfigurationError("this run has no [pipeline]")
        self._peer = peer
        self._newest = newest
        self._recipe = recipe
        self._spec: PipelineSpec = spec
        self._tell = tell or (lambda event, about: None)
        self.blueprint = Blueprint.of(recipe.blocks, manifest.seed)
        self._following = Following()
        self._course = ManifestCourse(newest, spec)
        source = RecipeSource(recipe, newest) if role.has_data else None
        config = MemberConfig(
            server=ServerConfig(codec=spec.codec, recompute=spec.recompute), feeder=FeederConfig(in_flight=16)
        )
        cuts = CutShelf(role.cuts, keep_last=role.keep_last) if role.cuts is not None else None
        holding = Holding(self.blueprint, optimizing(newest), role.device)
        self.member = PipelineMember(
            peer.links,
            peer.clock,
            peer.peer_id,
            self._following,
            holding,
            role.part,
            source=source,
            cuts=cuts,
            evaluation=role.evaluation,
            config=config,
        )
        self._lease: Lease | None = None
        self._conducting: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._unlisten: Callable[[], None] = lambda: None
        self.conductor: Conductor | None = None

    async def start(self) -> Self:
        """Take part from now on."""
        session = self._peer.session
        lease = self._lease = Lease(
            session.hub.store("lease"),
            session.peer_id,
            self._peer.clock,
            session=session.card.session,
            is_gone=self._is_gone,
            on_change=self._lease_changed,
        )
        while True:
            try:
                await lease.start()
                break
            except RetryableError as error:
                logger.info("the hub does not answer yet: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
        self._unlisten = session.roster.listen(self._roster_changed)
        await self.member.start()
        self._watching = asyncio.create_task(self._watch_lease(), name="pipeline-lease")
        self._stand_if_allowed()
        self._lease_changed()
        return self

    async def close(self) -> None:
        """Leave. Idempotent."""
        self._unlisten()
        await tasks.end(self._watching)
        await self._stop_conducting()
        await self.member.close()
        if self._lease is not None:
            await self._lease.close()
            self._lease = None

    # Who conducts

    def _is_gone(self, holder: str, session: str) -> bool:
        presence = self._peer.session.roster.get(holder)
        return presence is None or presence.card.session != session

    def _roster_changed(self, event: RosterEvent) -> None:
        if event.peer == self._peer.peer_id:
            self._stand_if_allowed()
        elif event.change in ("dead", "left") and self._lease is not None:
            self._lease.reconsider()

    def _stand_if_allowed(self) -> None:
        own = self._peer.session.roster.get(self._peer.peer_id)
        if own is not None and own.coordinates and self._lease is not None:
            self._lease.stand()

    def _lease_changed(self) -> None:
        if self._lease is not None:
            self._following.set(self._lease.view.holder)
        self._wake.set()

    async def _watch_lease(self) -> None:
        """Conduct while the lease is ours."""
        while True:
            self._wake.clear()
            lease = self._lease
            is_held = lease is not None and lease.is_held
            if is_held and (self._conducting is None or self._conducting.done()):
                assert lease is not None
                await self._stop_conducting()
                self._conducting = asyncio.create_task(self._conduct(lease.token), name="pipeline-conduct")
            elif not is_held:
                await self._stop_conducting()
            try:
                async with asyncio.timeout(0.5):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _stop_conducting(self) -> None:
        await tasks.end(self._conducting)
        self._conducting = None
        if self.conductor is not None:
            await self.conductor.close()
            self.conductor = None

    async def _conduct(self, token: int) -> None:
        costs, table = await asyncio.to_thread(self._costs)
        sizes = [4 * self.blueprint.num_values[block] for block in range(self.blueprint.num_blocks)]
        book = HubBook(self._peer.session.hub.store("groups"))

        def layout_for(num_servers: int) -> Layout:
            wanted = fixed_layout(costs, self._spec.stages) if self._spec.stages != "auto" else table(num_servers)
            counting = self.conductor.layout if self.conductor is not None else None
            return counting if counting is not None and counting.num_stages == wanted.num_stages else wanted

        fixed = None if self._spec.stages == "auto" else self._spec.stages
        staff = Staff(costs, sizes, layout_for, RebalancingConfig(min_gain=MIN_GAIN), fixed)
        self.conductor = conductor = Conductor(
            self._peer.links,
            self._peer.session.roster,
            self._peer.clock,
            blueprint=self.blueprint,
            staff=staff,
            course=self._course,
            book=book,
            term=token,
            judge=Judge(
                rate=self._spec.check_rate,
                tolerances=Tolerances(self._spec.codec),
                trusted=frozenset({self._peer.peer_id}),
            ),
            config=ConductorConfig(),
        )
        conductor.on_event = self._tell
        self._tell("conducting", {"token": token})
        telling = asyncio.create_task(self._tell_overview(conductor), name="pipeline-overview")
        try:
            await conductor.run()
        except ConductorReplacedError as error:
            logger.warning("%s", error)
        finally:
            await tasks.end(telling)

    async def _tell_overview(self, conductor: Conductor) -> None:
        """Who does what, for all observers."""
        session = self._peer.session
        while True:
            try:
                news = Overview.of(conductor.overview())
                await session.hub.publish(session.subjects.news(session.peer_id, OVERVIEW_TOPIC), encode(news))
            except RetryableError as error:
                logger.debug("the overview was not told: %s", error)
            await asyncio.sleep(TELL_OVERVIEW_SECONDS)

    def _costs(self) -> tuple[list[float], Callable[[int], Layout]]:
        """What each block costs: measured on this machine where it has the data, else by its parameters."""
        manifest = self._newest()
        profile = None
        try:
            self._recipe.data = data_of(self._recipe, manifest.newest.data)
            samples = []
            for sample in self._recipe.samples(0, torch.Generator().manual_seed(manifest.seed)):
                samples.append(sample)
                if len(samples) == 8:
                    break
            blocks = self.blueprint.make(range(self.blueprint.num_blocks))
            profile = measure(
                list(blocks.values()),
                lambda size: self._recipe.collate([samples[place % len(samples)] for place in range(size)]),
                sizes=(1, 4),
            )
        except Exception as error:  # noqa: BLE001 - a recipe may do anything; without a profile the run goes on
            logger.info("the blocks are not measured here (%s): their parameters count", error)
        if profile is None:
            costs = [float(1 + self.blueprint.num_values[b]) for b in range(self.blueprint.num_blocks)]
            blocks_ = tuple(
                planning.BlockProfile(forward_seconds=cost * 1e-9, backward_seconds=2e-9 * cost) for cost in costs
            )
            profile = planning.Profile(blocks=blocks_)
        costs = [each.forward_seconds + each.backward_seconds for each in profile.blocks]
        machine = planning.Machine(bytes_per_second=12.5e6, latency_seconds=0.02)
        planned: dict[int, Layout] = {}

        def table(num_servers: int) -> Layout:
            number = min(num_servers, MAX_PLANNED)
            if number not in planned:
                found = planning.plan(
                    profile,
                    machine,
                    batch_size=self._course.batch_size(0),
                    max_machines=number,
                    recompute=self._spec.recompute != "never",
                    stages=None,
                    micro_batch=None if self._spec.micro_batch == "auto" else self._spec.micro_batch,
                )
                planned.update({count: each.chosen.layout for count, each in found.items()})
            return planned[number]

        return costs, table
