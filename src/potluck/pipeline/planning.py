"""The shape of a pipeline for each number of machines: by profile and simulation, in advance. Pure.

    table = plan(profile, machine, batch_size=256, max_machines=8)
    table[7].chosen            # a Shape: 3 stages × 2 replicas, micro-batches of 8, predicted seconds, bubble, memory
    table[7].reason            # why it is that one

For each depth from one stage to one stage per block: cut the blocks so that the slowest stage is fastest, have as many
replicas as help, try every micro-batch that is worth it and fits into memory, simulate the step, take the fastest.
The global batch is exact whatever the shape: the last micro-batch is smaller.

The simulation runs one replica event by event. Each stage does one thing at a time, a backward before a forward; what
it sends arrives later. At most as many micro-batches are under way as the pipeline is deep, and one more for each
hand-over, so that sending is hidden. Replicas of a stage then average.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import msgspec

from potluck.errors import ConfigurationError
from potluck.pipeline.layout import Layout

STATE_COPIES = 4  # of a parameter in training: value, gradient, and two moments of the optimizer
MAX_DEPTH = 64
MAX_EVEN_PARTS = 8
SAME_MOMENT = 1e-9  # rounding must not decide which of two events was first
MIN_GAIN = 0.03  # among shapes this close the one with fewer stages is taken: fewer hand-overs that can go wrong


class BlockProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What one block costs on one kind of machine."""

    forward_seconds: float
    """Per sample."""
    backward_seconds: float
    """Per sample, without recomputation."""
    fixed_seconds: float = 0.0
    """Per micro-batch and direction, whatever its size."""
    parameter_bytes: int = 0
    output_bytes: int = 0
    """Per sample: what goes to the next block."""
    saved_bytes: int = 0
    """Per sample: what backward needs."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A model on one kind of machine, measured once."""

    blocks: tuple[BlockProfile, ...]
    input_bytes: int = 0
    """Per sample, into the first block."""
    machine: str = ""
    """The kind of machine it was measured on."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What each machine has."""

    memory_bytes: float = math.inf
    bytes_per_second: float = math.inf
    latency_seconds: float = 0.0
    hand_over_seconds: float = 0.0
    """Of the sending machine's time, per hand-over: encoding and the like."""

    def send_seconds(self, num_bytes: float) -> float:
        """Until so many bytes are at another machine."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Simulated:
    """A step of one replica."""

    seconds: float
    bubble: float
    """The share of the stages' time in which they wait."""
    most_in_flight: int


def simulate(
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    send_seconds: Sequence[float],
    sizes: Sequence[float],
    *,
    in_flight: int,
) -> Simulated:
    """One replica: seconds per unit of size of each stage, per hand-over, and the sizes of the micro-batches."""
    num_stages = len(forward_seconds)
    last = num_stages - 1
    waiting_forward: list[list[int]] = [[] for _ in range(num_stages)]
    waiting_backward: list[list[int]] = [[] for _ in range(num_stages)]
    is_busy = [False] * num_stages
    busy_seconds = 0.0
    order = count()
    events: list[tuple[float, int, str, int, int]] = []  # (when, order, what, stage, micro-batch)
    started = finished = under_way = most = 0
    now = 0.0

    def enter() -> None:
        nonlocal started, under_way, most
        while started < len(sizes) and under_way < in_flight:
            heapq.heappush(waiting_forward[0], started)
            started, under_way = started + 1, under_way + 1
            most = max(most, under_way)

    def work(stage: int) -> None:
        nonlocal busy_seconds
        if is_busy[stage]:
            return
        if waiting_backward[stage]:
            what, micro = "backward", heapq.heappop(waiting_backward[stage])
            seconds = backward_seconds[stage] * sizes[micro]
        elif waiting_forward[stage]:
            what, micro = "forward", heapq.heappop(waiting_forward[stage])
            seconds = forward_seconds[stage] * sizes[micro]
        else:
            return
        is_busy[stage] = True
        busy_seconds += seconds
        heapq.heappush(events, (now + seconds, next(order), what, stage, micro))

    enter()
    work(0)
    while events:
        now = events[0][0]
        touched = set()
        while events and events[0][0] <= now * (1 + SAME_MOMENT):  # all that is there counts before anybody chooses
            _, _, what, stage, micro = heapq.heappop(events)
            touched.add(stage)
            if what in ("forward", "backward"):
                is_busy[stage] = False
            if what == "forward" and stage < last:
                heapq.heappush(
                    events, (now + send_seconds[stage] * sizes[micro], next(order), "arrived", stage + 1, micro)
                )
            elif what == "backward" and stage > 0:
                arrives = now + send_seconds[stage - 1] * sizes[micro]
                heapq.heappush(events, (arrives, next(order), "returned", stage - 1, micro))
            elif what == "backward":
                finished, under_way = finished + 1, under_way - 1
                enter()
            elif what == "arrived":
                heapq.heappush(waiting_forward[stage], micro)
            else:  # returned, or through the last stage
                heapq.heappush(waiting_backward[stage], micro)
        for stage in sorted(touched):
            work(stage)
    assert finished == len(sizes)
    return Simulated(now, 1 - busy_seconds / (now * num_stages) if now else 0.0, most)


@dataclass(frozen=True)
class Shape:
    """Stages × replicas, and what is predicted of them."""

    layout: Layout
    replicas: int
    micro_batch: int
    num_micro_batches: int
    """Of the whole step, over all replicas."""
    seconds: float
    bubble: float
    memory_bytes: float
    """Of the machine that needs most."""
    in_flight: int

    @property
    def stages(self) -> int:
        """How deep it is."""
        return self.layout.num_stages

    @property
    def machines(self) -> int:
        """How many machines it needs."""
        return self.stages * self.replicas


@dataclass(frozen=True)
class PlanForMachines:
    """What to do with so many machines."""

    machines: int
    shapes: tuple[Shape, ...]
    """The best of each depth that fits, the shallowest first."""
    does_not_fit: tuple[int, ...]
    """Depths at which some stage is too large for a machine."""

    @cached_property
    def chosen(self) -> Shape:
        """The fastest; of those within 3% of it, the one with the fewest stages."""
        fastest = min(shape.seconds for shape in self.shapes)
        return next(shape for shape in self.shapes if shape.seconds <= fastest * (1 + MIN_GAIN))

    @cached_property
    def reason(self) -> str:
        """Why this shape."""
        chosen = self.chosen
        fastest = min(self.shapes, key=lambda shape: shape.seconds)
        words = [f"{chosen.stages}×{chosen.replicas} takes {chosen.seconds:.3g} s a step"]
        if fastest is not chosen:
            words.append(
                f"{fastest.stages}×{fastest.replicas} is faster by less than {MIN_GAIN:.0%} and has more stages"
            )
        elif len(self.shapes) > 1:
            second = min((s for s in self.shapes if s is not chosen), key=lambda shape: shape.seconds)
            words.append(f"the next best, {second.stages}×{second.replicas}, {second.seconds:.3g} s")
        if self.does_not_fit:
            words.append(f"{_depths(self.does_not_fit)} does not fit into a machine's memory")
        if spare := self.machines - chosen.machines:
            words.append(f"{spare} more strengthen the slowest stages")
        return "; ".join(words)


def plan(
    profile: Profile,
    machine: Machine,
    *,
    batch_size: int,
    max_machines: int,
    recompute: bool = True,
    stages: int | None = None,
    micro_batch: int | None = None,
) -> dict[int, PlanForMachines]:
    """The plan for each number of machines up to `max_machines`; numbers at which nothing fits are left out."""
    if batch_size < 1 or max_machines < 1:
        raise ConfigurationError(f"batch_size={batch_size}, machines={max_machines}: both must be 1 or more")
    depths = range(1, min(len(profile.blocks), max_machines, MAX_DEPTH) + 1)
    if stages is not None:
        if not 1 <= stages <= len(profile.blocks):
            raise ConfigurationError(
                f"{stages} stages for a model of {len(profile.blocks)} blocks: have at most so many"
            )
        depths = range(stages, min(stages, max_machines) + 1)
    costs = [block.forward_seconds + block.backward_seconds for block in profile.blocks]
    found: dict[tuple[int, int], Shape | None] = {}
    table = {}
    for machines in range(1, max_machines + 1):
        shapes, too_large = [], []
        for depth in depths:
            if depth > machines:
                break
            fitting = []
            for replicas in range(1, min(machines // depth, batch_size) + 1):  # more of them are not always faster
                key = (depth, replicas)
                if key not in found:
                    layout = Layout.balanced(costs, depth)
                    found[key] = best_of_depth(profile, machine, layout, replicas, batch_size, recompute, micro_batch)
                if (shape := found[key]) is not None:
                    fitting.append(shape)
            if fitting:
                shapes.append(min(fitting, key=lambda shape: (shape.seconds, shape.replicas)))
            else:
                too_large.append(depth)
        if shapes:
            table[machines] = PlanForMachines(machines, tuple(shapes), tuple(too_large))
    if not table:
        raise ConfigurationError(
            f"{max_machines} machines of {machine.memory_bytes / 1e9:.3g} GB cannot hold this model: bring more of "
            "them, larger ones, or cut the model into smaller blocks"
        )
    return table


def best_of_depth(
    profile: Profile,
    machine: Machine,
    layout: Layout,
    replicas: int,
    batch_size: int,
    recompute: bool,
    micro_batch: int | None = None,
) -> Shape | None:
    """The fastest shape of this layout, over micro-batches; None where none fits."""
    sizes = [micro_batch] if micro_batch else micro_batch_candidates(batch_size, replicas)
    shapes = (shape_of(profile, machine, layout, replicas, batch_size, size, recompute) for size in sizes)
    fitting = [shape for shape in shapes if shape.memory_bytes <= machine.memory_bytes]
    return min(fitting, key=lambda shape: (shape.seconds, shape.micro_batch), default=None)


def micro_batch_candidates(batch_size: int, replicas: int) -> list[int]:
    """Sizes worth a try: powers of two, and those that give every replica the same few micro-batches."""
    largest = math.ceil(batch_size / replicas)
    powers = {1 << power for power in range(largest.bit_length())}
    return sorted(powers | {math.ceil(largest / number) for number in range(1, MAX_EVEN_PARTS + 1)})


def micro_batch_sizes(batch_size: int, micro_batch: int) -> list[int]:
    """The sizes of a step's micro-batches: the last one is smaller, so that their sum is the global batch."""
    whole, rest = divmod(batch_size, micro_batch)
    return [micro_batch] * whole + ([rest] if rest else [])


def shape_of(
    profile: Profile,
    machine: Machine,
    layout: Layout,
    replicas: int,
    batch_size: int,
    micro_batch: int,
    recompute: bool,
) -> Shape:
    """What is predicted of one shape."""
    sizes = micro_batch_sizes(batch_size, micro_batch)
    per_replica = math.ceil(len(sizes) / replicas)
    blocks = [[profile.blocks[block] for block in stage] for stage in layout.stages]
    last = layout.num_stages - 1
    fixed = [sum(block.fixed_seconds for block in stage) + machine.hand_over_seconds for stage in blocks]
    forward = [sum(b.forward_seconds for b in stage) * micro_batch + f for stage, f in zip(blocks, fixed, strict=True)]
    backward = [
        sum(b.backward_seconds for b in stage) * micro_batch + f + (ahead if recompute and place != last else 0.0)
        for place, (stage, f, ahead) in enumerate(zip(blocks, fixed, forward, strict=True))
    ]
    handed = [stage[-1].output_bytes * micro_batch for stage in blocks]
    sends = [machine.send_seconds(num_bytes) for num_bytes in handed[:-1]]
    in_flight = in_flight_for(forward, backward, sends)
    shares = [size / micro_batch for size in sizes[:per_replica]]
    simulated = simulate(forward, backward, sends, shares, in_flight=in_flight)
    parameters = [sum(block.parameter_bytes for block in stage) for stage in blocks]
    average = 0.0
    if replicas > 1:  # each sends and receives every chunk once, less its own
        average = max(machine.send_seconds(2 * (replicas - 1) / replicas * size) for size in parameters)
    inputs = [profile.input_bytes * micro_batch, *handed[:-1]]
    saved = [sum(block.saved_bytes for block in stage) * micro_batch for stage in blocks]
    kept = min(in_flight, per_replica)
    memory = [
        STATE_COPIES * size + (kept * into + graph if recompute else kept * (into + graph))
        for size, into, graph in zip(parameters, inputs, saved, strict=True)
    ]
    return Shape(
        layout,
        replicas,
        micro_batch,
        len(sizes),
        simulated.seconds + average,
        simulated.bubble,
        max(memory),
        in_flight,
    )


def in_flight_for(forward: Sequence[float], backward: Sequence[float], sends: Sequence[float]) -> int:
    """Micro-batches under way that keep the slowest stage at work: its share of one micro-batch's whole way."""
    slowest = max(ahead + back for ahead, back in zip(forward, backward, strict=True))
    whole = sum(forward) + sum(backward) + 2 * sum(sends)
    return max(len(forward), math.ceil(whole / slowest) + 1) if slowest > 0 else len(forward) + 1


def _depths(depths: Sequence[int]) -> str:
    return f"a depth of {depths[0]}" if len(depths) == 1 else f"a depth of {depths[0]} to {depths[-1]}"
