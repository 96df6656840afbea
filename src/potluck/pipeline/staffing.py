"""Who does what in a pipeline: the layout for the machines that are there, and each machine's stages. Pure.

    staff.offer("a", Offer(serves=True))         # peers come, and go
    plan = staff.plan(now)                       # after each change: what everybody should do, and why
    servers_now(layout, plan, standing)          # who can do it already, at a step's boundary

A plan says where the run should get to. Peers load what they lack while it trains on. At each boundary those serve who
can; a new layout counts once each of its stages has a server that is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from potluck.pipeline.layout import Layout
from potluck.pipeline.rebalancing import Balancer, Move, RebalancingConfig

SERVED_COPIES = 4  # of a parameter where it is trained: value, gradient, two moments
NEW_MOVES_KEPT = 50


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a peer would do."""

    serves: bool = False
    stages: tuple[int, ...] = ()
    """It insists on these."""
    feeds: bool = False
    listens: bool = False
    room_bytes: int = 0
    """0: as much as it takes."""
    rate: float = 0.0
    """How fast it computes; 0: not measured, so it counts as most of the others do."""
    is_leaving: bool = False
    standing: frozenset[int] = frozenset()
    """Blocks that it has."""


@dataclass(frozen=True)
class Plan:
    """What everybody should do."""

    layout: Layout
    serves: Mapping[str, tuple[int, ...]]
    listens: Mapping[str, tuple[int, ...]]
    """Stages that peers hold without computing: each stage has two holders."""
    why: Mapping[str, str]
    moves: tuple[Move, ...] = ()

    def blocks_of(self, peer: str) -> frozenset[int]:
        """What it is to hold."""
        stages = (*self.serves.get(peer, ()), *self.listens.get(peer, ()))
        return frozenset(block for stage in stages for block in self.layout.blocks_of(stage))


@dataclass
class Staff:
    """The peers of a pipeline."""

    costs: Sequence[float]
    """Of each block: seconds per sample, or anything in proportion."""
    block_bytes: Sequence[int]
    """Of each block's parameters."""
    layout_for: Callable[[int], Layout]
    """The layout for so many servers: fixed, or by the planner."""
    config: RebalancingConfig = field(default_factory=RebalancingConfig)
    num_stages: int | None = None
    """Where the run fixes it."""
    disputed: frozenset[str] = frozenset()
    """Servers that a spot check failed on: their stages get one more holder, who can judge."""
    arbiters: frozenset[str] = frozenset()
    """The preferred peers for that."""
    offers: dict[str, Offer] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    """The latest, for people to read."""
    _balancer: Balancer | None = None
    _layout: Layout | None = None
    _serves: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _listens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _why: dict[str, str] = field(default_factory=dict)

    def offer(self, peer: str, offer: Offer) -> None:
        """A peer is there, or offers something else than before."""
        self.offers[peer] = offer

    def gone(self, peer: str) -> None:
        """A peer is gone."""
        self.offers.pop(peer, None)

    @property
    def servers(self) -> list[str]:
        """Who would compute, in the order of coming."""
        return [peer for peer, offer in self.offers.items() if offer.serves and not offer.is_leaving]

    def plan(self, now: float) -> Plan | None:
        """What everybody should do; None while nobody serves."""
        servers = self.servers
        if not servers:
            return None
        wanted = self.layout_for(len(servers))
        if self._layout != wanted:
            self._begin(wanted)
        moves: tuple[Move, ...] = ()
        if len(servers) < wanted.num_stages:
            self._spread(wanted, servers)
        else:
            moves = self._balance(wanted, servers, now)
        self._choose_listeners(wanted)
        self.moves = [*self.moves, *moves][-NEW_MOVES_KEPT:]
        return Plan(wanted, dict(self._serves), dict(self._listens), dict(self._why), moves)

    def _begin(self, layout: Layout) -> None:
        self._layout = layout
        self._balancer = None
        self._serves, self._why = {}, {}

    # Fewer machines than stages: each has several consecutive ones

    def _spread(self, layout: Layout, servers: list[str]) -> None:
        self._balancer = None
        costs = self._stage_costs(layout)
        spans = Layout.balanced(costs, len(servers)).stages
        free = list(range(len(spans)))
        self._serves = {}
        for peer in sorted(servers, key=lambda name: -len(self.offers[name].standing)):
            insisted = self.offers[peer].stages
            best = max(free, key=lambda place: (self._overlap(peer, layout, spans[place]), -place))
            if insisted:
                best = next((place for place in free if insisted[0] in spans[place]), best)
            free.remove(best)
            self._serves[peer] = tuple(spans[best])
            self._why[peer] = (
                f"there are {len(servers)} machines for {layout.num_stages} stages, so each serves several"
                if len(spans[best]) > 1
                else f"stage {spans[best].start} has no server"
            )

    def _overlap(self, peer: str, layout: Layout, stages: range) -> int:
        standing = self.offers[peer].standing
        return sum(self.block_bytes[b] + 1 for stage in stages for b in layout.blocks_of(stage) if b in standing)

    # At least one machine for each stage

    def _balance(self, layout: Layout, servers: list[str], now: float) -> tuple[Move, ...]:
        balancer = self._balancer
        if balancer is None:
            balancer = self._balancer = Balancer(self._stage_costs(layout), self.config)
            self._place_holders(balancer, layout, servers)
        for peer in list(balancer.stages):
            if peer not in servers:
                balancer.leave(peer)
        for peer in servers:
            offer = self.offers[peer]
            if peer in balancer.stages:
                balancer.measured(peer, self._rate(peer))
            elif offer.stages and offer.stages[0] < layout.num_stages:
                balancer.place(peer, rate=self._rate(peer), stage=offer.stages[0])
                self._why[peer] = f"it was started with --stage {offer.stages[0]}"
            else:
                _, self._why[peer] = balancer.join(peer, rate=self._rate(peer))
        insisting = {peer for peer in servers if self.offers[peer].stages}
        moves = balancer.rebalance(now, fixed=insisting)
        for move in moves:
            self._why[move.server] = move.reason
        self._serves = {peer: (stage,) for peer, stage in balancer.stages.items()}
        for peer in servers:  # one may insist on several
            stages = tuple(stage for stage in self.offers[peer].stages if stage < layout.num_stages)
            if len(stages) > 1:
                self._serves[peer] = stages
        return moves

    def _place_holders(self, balancer: Balancer, layout: Layout, servers: list[str]) -> None:
        """Each stage first gets the server that has most of it already: a new layout moves as little as can be."""
        pairs = sorted(
            (-self._overlap(peer, layout, range(stage, stage + 1)), stage, peer)
            for peer in servers
            if not self.offers[peer].stages
            for stage in range(layout.num_stages)
        )
        taken: set[int] = {stage for peer in servers for stage in self.offers[peer].stages[:1]}
        placed: set[str] = set()
        for overlap, stage, peer in pairs:
            if overlap < 0 and stage not in taken and peer not in placed:
                balancer.place(peer, rate=self._rate(peer), stage=stage)
                self._why[peer] = f"it has most of stage {stage} already"
                taken.add(stage)
                placed.add(peer)

    def _rate(self, peer: str) -> float:
        known = sorted(offer.rate for offer in self.offers.values() if offer.serves and offer.rate > 0)
        return self.offers[peer].rate or (known[len(known) // 2] if known else 1.0)

    def _stage_costs(self, layout: Layout) -> list[float]:
        return [max(sum(self.costs[block] for block in blocks), 1e-12) for blocks in layout.stages]

    # Two holders of every stage

    def _choose_listeners(self, layout: Layout) -> None:
        before, self._listens = self._listens, {}
        counts = [0] * layout.num_stages
        for stages in self._serves.values():
            for stage in stages:
                counts[stage] += 1
        rooms = {
            peer: offer.room_bytes or float("inf")
            for peer, offer in self.offers.items()
            if offer.listens and not offer.is_leaving
        }
        for peer in rooms:
            rooms[peer] -= self._bytes_of(layout, self._serves.get(peer, ()))
        disputed = {stage for peer in self.disputed for stage in self._serves.get(peer, ())}
        for stage, count in enumerate(counts):
            if count > 1 and stage not in disputed:
                continue
            needed = self._bytes_of(layout, (stage,))
            fitting = [p for p, room in rooms.items() if room >= needed and stage not in self._serves.get(p, ())]
            if not fitting:
                continue
            chosen = min(
                fitting,
                key=lambda p: (
                    stage in disputed and p not in self.arbiters,
                    stage not in before.get(p, ()),
                    self.offers[p].serves,
                    len(self._listens.get(p, ())),
                    p,
                ),
            )
            rooms[chosen] -= needed
            self._listens[chosen] = (*self._listens.get(chosen, ()), stage)

    def _bytes_of(self, layout: Layout, stages: Sequence[int]) -> int:
        return SERVED_COPIES * sum(self.block_bytes[b] for stage in stages for b in layout.blocks_of(stage))


def servers_now(
    layout: Layout, plan: Plan, standing: Mapping[str, frozenset[int]], servers: frozenset[str]
) -> list[list[str]] | None:
    """Who serves each stage of a layout now: the planned servers, else any holder; None if a stage has none.

    `standing`: the blocks that each peer has; `servers`: those that compute when they can choose.
    """
    found = []
    for stage, blocks in enumerate(layout.stages):
        able = [peer for peer, held in sorted(standing.items()) if held.issuperset(blocks)]
        planned = [peer for peer in able if plan.layout == layout and stage in plan.serves.get(peer, ())]
        chosen = planned or [peer for peer in able if peer in servers] or able[:1]
        if not chosen:
            return None
        found.append(chosen)
    return found


def is_ready(plan: Plan, standing: Mapping[str, frozenset[int]]) -> bool:
    """Whether each stage of the plan has one of its servers ready."""
    return all(
        any(
            stage in stages and standing.get(peer, frozenset()).issuperset(blocks)
            for peer, stages in plan.serves.items()
        )
        for stage, blocks in enumerate(plan.layout.stages)
    )
