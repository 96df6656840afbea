"""Which server serves which stage: where newcomers go, and who moves to the bottleneck. Pure.

    balancer.join("a", rate=2.0, now=now)     # returns the stage that needs it most
    balancer.leave("b", now)
    for move in balancer.rebalance(now): ...  # called after each change, not by a period

The rate of a stage is the sum of its servers' rates over its cost, and the run is as fast as its slowest stage. One
move may gain nothing where two stages share the last place, so the gain of a whole series of moves is simulated: again
and again the server whose move lifts the slowest stages most. Only as many moves as it takes to reach the best rate are
made, and only if that is better than now by `min_gain` (hysteresis). A move never empties a stage. A server moves at
most once in `rest_seconds`, unless a stage is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from potluck.errors import ConfigurationError

REST_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class RebalancingConfig:
    """When a move is worth it."""

    min_gain: float = 0.01
    """The run must become faster by this share."""

    rest_seconds: float = REST_SECONDS
    """Between two moves of a server."""

    def __post_init__(self) -> None:
        if self.min_gain <= 0 or self.rest_seconds < 0:
            raise ConfigurationError(
                f"min_gain={self.min_gain}, rest_seconds={self.rest_seconds}: the gain must be positive, the rest 0 or "
                "more, or servers would move to and fro"
            )


@dataclass(frozen=True)
class Move:
    """A server changes its stage."""

    server: str
    source: int
    target: int
    reason: str


@dataclass(slots=True)
class _Server:
    rate: float
    stage: int
    rests_until: float = 0.0


@dataclass
class Balancer:
    """The assignment of servers to stages."""

    costs: Sequence[float]
    """Of each stage: work per sample, in the unit that rates are measured in."""
    config: RebalancingConfig = field(default_factory=RebalancingConfig)
    _servers: dict[str, _Server] = field(default_factory=dict)

    @property
    def stages(self) -> dict[str, int]:
        """Every server's stage."""
        return {name: server.stage for name, server in self._servers.items()}

    @property
    def stage_rates(self) -> list[float]:
        """Samples per second that each stage can do."""
        return self._rates({name: server.stage for name, server in self._servers.items()})

    @property
    def rate(self) -> float:
        """Samples per second of the run: those of its slowest stage."""
        return min(self.stage_rates)

    def join(self, server: str, *, rate: float) -> tuple[int, str]:
        """A newcomer's stage, and why it is that one."""
        rates = self.stage_rates
        stage = min(range(len(self.costs)), key=lambda s: (rates[s], s))
        self._servers[server] = _Server(rate, stage)
        if rates[stage] == 0:
            return stage, f"stage {stage} has no server"
        return stage, f"stage {stage} is the slowest, with {rates[stage]:.3g} samples/s"

    def place(self, server: str, *, rate: float, stage: int) -> None:
        """A server that insists on a stage."""
        if not 0 <= stage < len(self.costs):
            raise ConfigurationError(f"stage {stage}: there are stages 0 to {len(self.costs) - 1}")
        self._servers[server] = _Server(rate, stage)

    def leave(self, server: str) -> None:
        """A server is gone."""
        self._servers.pop(server, None)

    def measured(self, server: str, rate: float) -> None:
        """Its rate is another one than was thought."""
        self._servers[server].rate = rate

    def rebalance(self, now: float, *, fixed: AbstractSet[str] = frozenset()) -> tuple[Move, ...]:
        """The moves to make now; they are made when this returns. Those that are `fixed` stay where they are."""
        before = self.rate
        planned = {name: server.stage for name, server in self._servers.items()}
        moves: list[tuple[str, int, int]] = []
        best_rate, best_length = before, 0
        for _ in range(len(self._servers)):
            step = self._best_move(planned, fixed | {server for server, _, _ in moves}, now)
            if step is None:
                break
            server, target = step
            moves.append((server, planned[server], target))
            planned[server] = target
            rate = min(self._rates(planned))
            if rate > best_rate:
                best_rate, best_length = rate, len(moves)
        empty = {stage for stage, rate in enumerate(self.stage_rates) if rate == 0}
        if before > 0 and best_rate < before * (1 + self.config.min_gain):
            return ()
        if before == 0 and best_rate == 0:  # not enough for all stages: at least fill what can be filled
            best_length = len(moves)
        made = []
        for server, source, target in moves[:best_length]:
            reason = (
                f"stage {target} had no server"
                if target in empty
                else f"the run goes from {before:.3g} to {best_rate:.3g} samples/s"
            )
            self._servers[server].stage = target
            self._servers[server].rests_until = now + self.config.rest_seconds
            made.append(Move(server, source, target, reason))
        return tuple(made)

    def _best_move(self, planned: Mapping[str, int], moved: AbstractSet[str], now: float) -> tuple[str, int] | None:
        """The move to the slowest stage after which the slower of the two stages is fastest; None where none helps."""
        rates = self._rates(planned)
        target = min(range(len(rates)), key=lambda stage: (rates[stage], stage))
        sizes = [0] * len(rates)
        for stage in planned.values():
            sizes[stage] += 1
        best: tuple[float, str] | None = None
        for name, server in self._servers.items():
            source = planned[name]
            if source == target or sizes[source] == 1 or name in moved:
                continue
            if rates[target] > 0 and server.rests_until > now:
                continue
            left = rates[source] - server.rate / self.costs[source]
            gained = rates[target] + server.rate / self.costs[target]
            worst = min(left, gained)
            if worst > rates[target] * (1 + 1e-9) and (best is None or (-worst, name) < best):
                best = (-worst, name)
        return (best[1], target) if best is not None else None

    def _rates(self, stages: Mapping[str, int]) -> list[float]:
        rates = [0.0] * len(self.costs)
        for name, stage in stages.items():
            rates[stage] += self._servers[name].rate / self.costs[stage]
        return rates


def best_rate_of_equals(num_servers: int, rate: float, costs: Sequence[float]) -> float:
    """The best rate that so many equal servers can have, however they are assigned: what we measure ourselves against.

    A run at rate t needs ⌈t · cost / rate⌉ servers in each stage. The candidates for t are the values at which one of
    these numbers changes; servers are given out one by one to the slowest stage, which is optimal for equal servers.
    """
    if num_servers < len(costs):
        return 0.0
    counts = [1] * len(costs)
    for _ in range(num_servers - len(costs)):
        slowest = min(range(len(costs)), key=lambda stage: counts[stage] / costs[stage])
        counts[slowest] += 1
    return min(count * rate / cost for count, cost in zip(counts, costs, strict=True))
