"""Loss that each way of training together reaches with the same samples: a small language model, four peers.

    scripts/bench quality [--json] [--only sync,diloco_20] [--seeds 3]

The numbers alone: the methods, codecs and aggregators of a run, without hub, links and time. Peers stand still while
values are averaged, or go on where a method overlaps. Each loss is that of what the peers share, on text that nobody
trained on; the mean over the seeds, which change the batches. Spreads are from the lowest to the highest of the seeds.
Each way is held against sync with the same seed.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness import parser, report, say
from potluck.optim.localupdates import LocalUpdates
from potluck.optim.method import Method, Offer
from potluck.optim.methods.decoupled import Demo
from potluck.optim.methods.delayed import DelayedNesterov
from potluck.optim.methods.dylu import inner_steps
from potluck.optim.methods.outer import Nesterov, OuterSGD
from potluck.optim.methods.powersgd import PowerSGD
from potluck.optim.methods.quantised import Quantised
from potluck.optim.methods.sparseloco import SparseLoCo
from potluck.optim.methods.streaming import FragmentSchedule
from potluck.optim.methods.transform import Transform
from potluck.optim.modelstate import ModelState
from potluck.optim.outerloop import OuterLoop, Weighting
from potluck.optim.parameters import RolesByPrefix
from potluck.optim.targetbatch import TargetBatch
from potluck.round.aggregators import AggregatorSpec, aggregator_for
from potluck.round.codecs import CodecChoice, EncodedChunk
from potluck.round.member.reduction import encode_values, reduce_chunk
from potluck.round.plan.chunks import ChunkGrid
from potluck.round.plan.layout import Layout
from potluck.training.manifest.method import OptimizerSpec
from potluck.training.trainer.inner import parameter_groups
from potluck.training.trainer.muon import Muon
from toylm import Corpus, corpus, loss_of, make_model

NUM_PEERS = 4
WIDTH, NUM_LAYERS, LENGTH = 64, 2, 32
BATCH_SIZE = 4
NUM_STEPS = 300  # of each peer; where some are slower, of all together four times as many
WARM_UP_STEPS = 30
EVALUATED = 256
MEAN = aggregator_for(AggregatorSpec())
EXACT = CodecChoice.everything("float32")
FOUR_BITS = CodecChoice.everything("e3m0")
UNEVEN = (2, 2, 6, 6)  # samples of a batch, as many in all
SLOW = (1.0, 1.0, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of training together."""

    method: Callable[[ModelState], Method]
    lr: float
    inner: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    steps_per_round: int = 1
    overlap_steps: int = 0
    codecs: CodecChoice = EXACT
    dropped: float = 0.0
    """The share of contributions that are lost at random."""
    one_by_one: bool = False
    """Peers come to their rounds in turn, each alone."""
    batch_sizes: tuple[int, ...] = (BATCH_SIZE,) * NUM_PEERS
    speeds: tuple[float, ...] = (1.0,) * NUM_PEERS
    """Slower peers take fewer of a round's local steps (DyLU)."""


def large_batch(transform: Transform | None = None) -> Callable[[ModelState], Method]:
    return lambda state: TargetBatch(state, transform=transform)


def sharing(
    inner_steps: int,
    outer: Any = Nesterov,
    transform: Callable[[], Transform] | None = None,
    weighting: Weighting = "samples",
    **schedule: Any,
) -> Callable[[ModelState], Method]:
    def make(state: ModelState) -> Method:
        plan = FragmentSchedule(inner_steps=inner_steps, **schedule)
        made = transform() if transform is not None else None
        return OuterLoop(state, outer(), plan, transform=made, weighting=weighting)

    return make


def ways() -> dict[str, Way]:
    """All that are compared. Learning rates are the best of a few tried for each kind, not for each way."""
    shared, local = 1e-2, 5e-3  # large batches; steps on a peer's own batch
    muon_shared, muon_local = 1e-2, 5e-3

    def calm() -> Nesterov:  # of few outer steps, momentum makes swings
        return Nesterov(0.7, 0.5)

    def uneven(weighting: Weighting) -> Way:
        method = sharing(20, outer=calm, weighting=weighting)
        return Way(method=method, lr=local, steps_per_round=20, batch_sizes=UNEVEN)

    sparse = {"outer": lambda: OuterSGD(0.7), "transform": SparseLoCo}

    def sparseloco(inner_steps: int, rate: float, keep: int = 64, decay: float = 0.95, outer: Any = OuterSGD) -> Way:
        method = sharing(inner_steps, outer=lambda: outer(rate), transform=lambda: SparseLoCo(k=keep, decay=decay))
        return Way(method=method, lr=local, steps_per_round=inner_steps)

    def muloco(inner_steps: int, lr: float, outer: Any = calm, transform: Any = None) -> Way:
        method = sharing(inner_steps, outer=outer, transform=transform)
        return Way(method=method, lr=lr, inner=muon, steps_per_round=inner_steps)

    return {
        "sync": Way(method=large_batch(), lr=shared),
        "sync_float16": Way(method=large_batch(), lr=shared, codecs=CodecChoice()),
        "sync_8_bits": Way(method=large_batch(), lr=shared, codecs=CodecChoice.everything("blockwise8")),
        "powersgd": Way(method=lambda state: TargetBatch(state, transform=PowerSGD(4)), lr=shared),
        "demo": Way(
            method=lambda state: TargetBatch(state, transform=Demo(lr=1.0)),
            lr=2e-3,
            inner=torch.optim.SGD,
        ),
        "local_updates": Way(method=LocalUpdates, lr=local, steps_per_round=10),
        "diloco_20_momentum_0.9": Way(method=sharing(20), lr=local, steps_per_round=20),
        "diloco_50_momentum_0.9": Way(method=sharing(50), lr=local, steps_per_round=50),
        "diloco_20": Way(method=sharing(20, outer=calm), lr=local, steps_per_round=20),
        "diloco_50": Way(method=sharing(50, outer=calm), lr=local, steps_per_round=50),
        "diloco_20_float16": Way(method=sharing(20, outer=calm), lr=local, steps_per_round=20, codecs=CodecChoice()),
        "diloco_20_half_dropped": Way(method=sharing(20, outer=calm), lr=local, steps_per_round=20, dropped=0.5),
        "diloco_20_4_bits": Way(
            method=sharing(20, outer=calm, transform=lambda: Quantised(FOUR_BITS)),
            lr=local,
            steps_per_round=20,
            codecs=FOUR_BITS,
        ),
        "streaming_20": Way(
            method=sharing(20, num_fragments=2, overlap_steps=3, mixing=0.5, outer=lambda: Nesterov(0.4, 0.5)),
            lr=local,
            steps_per_round=10,
            overlap_steps=3,
        ),
        "streaming_20_overlap_kept": Way(
            method=sharing(20, num_fragments=2, overlap_steps=3, keeps_overlap=True, outer=lambda: Nesterov(0.4, 0.5)),
            lr=local,
            steps_per_round=10,
            overlap_steps=3,
        ),
        "diloco_20_slow_peers": Way(method=sharing(20, outer=calm), lr=local, steps_per_round=20, speeds=SLOW),
        "diloco_20_uneven_by_samples": uneven("samples"),
        "diloco_20_uneven_by_tokens": uneven("tokens"),
        "diloco_20_uneven_equal": uneven("equal"),
        "asynchronous_20": Way(
            method=sharing(20, outer=lambda: DelayedNesterov(delay=NUM_PEERS)),
            lr=local,
            steps_per_round=20,
            one_by_one=True,
        ),
        "sparseloco_30_its_defaults": Way(
            method=sharing(30, outer=lambda: OuterSGD(0.4), transform=SparseLoCo), lr=local, steps_per_round=30
        ),
        "sparseloco_20": Way(method=sharing(20, **sparse), lr=local, steps_per_round=20),
        "sparseloco_20_wider": Way(
            method=sharing(20, outer=lambda: OuterSGD(0.7), transform=lambda: SparseLoCo(k=512)),
            lr=local,
            steps_per_round=20,
        ),
        "sparseloco_5": Way(method=sharing(5, **sparse), lr=local, steps_per_round=5),
        # Tuned anew, one setting at a time: the outer rate, what is kept, what is forgotten.
        "sparseloco_30_rate_1": sparseloco(30, 1.0),
        "sparseloco_20_rate_1": sparseloco(20, 1.0),
        "sparseloco_20_rate_1_remembers_all": sparseloco(20, 1.0, decay=1.0),
        "sparseloco_20_rate_1_256": sparseloco(20, 1.0, 256),
        "sparseloco_10_rate_1": sparseloco(10, 1.0),
        "sparseloco_10_rate_1_256": sparseloco(10, 1.0, 256),
        # Muon as inner optimizer of DiLoCo (MuLoCo).
        "sync_muon": Way(method=large_batch(), lr=muon_shared, inner=muon),
        "muloco_20": muloco(20, muon_local),
        "muloco_50": muloco(50, muon_local),
        "muloco_20_momentum_0.9": muloco(20, muon_local, outer=Nesterov),
        "muloco_20_sparseloco_rate_1": muloco(20, muon_local, outer=lambda: OuterSGD(1.0), transform=SparseLoCo),
    }


def muon(named: Iterable[tuple[str, torch.Tensor]], lr: float) -> torch.optim.Optimizer:
    """As a run.toml with `name = "muon"` has it: matrices by Muon, the rest by AdamW."""
    spec = OptimizerSpec(name="muon", learning_rate=lr)
    parameters = dict(named)
    embeddings = frozenset(
        tuple(p.shape) for name, p in parameters.items() if name in ("bytes.weight", "places.weight")
    )
    return Muon(parameter_groups(spec, parameters, embeddings), lr=lr, momentum=0.95)


class Peers:
    """Four peers, trained in turn."""

    def __init__(self, way: Way, seed: int) -> None:
        self.way = way
        self.models = [make_model(WIDTH, NUM_LAYERS, LENGTH) for _ in range(NUM_PEERS)]
        warm_up = lambda done: min(1.0, (done + 1) / max(1, WARM_UP_STEPS))  # noqa: E731
        self.methods: list[Method] = []
        for model in self.models:
            optimizer = way.inner(model.named_parameters(), lr=way.lr)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
            self.methods.append(way.method(ModelState(optimizer, scheduler=scheduler)))
        self.epoch = 0
        # The steps of each peer in a round, and of the fastest in all: so that all together have the same samples.
        self._steps = [inner_steps(way.steps_per_round, speed, max(way.speeds)) for speed in way.speeds]
        self.num_steps = NUM_STEPS * NUM_PEERS * way.steps_per_round // sum(self._steps)
        self.sent_bytes = self.received_bytes = 0
        self._seed = seed
        self._random = random.Random(seed)
        self._under_way: list[Offer] = []

    def train(self, texts: Corpus) -> None:
        """All steps, with the rounds between them."""
        for step in range(1, self.num_steps + 1):
            for number in range(NUM_PEERS):
                if self._steps_by(number, step) > self._steps_by(number, step - 1):
                    self._step(number, step, texts)
            since_round = step % self.way.steps_per_round
            if self._under_way and since_round == self.way.overlap_steps:
                self._end_round()
            if since_round == 0:
                self._begin_round()
                if self._under_way and not self.way.overlap_steps:
                    self._end_round()
        if self._under_way:
            self._end_round()

    def _steps_by(self, number: int, step: int) -> int:
        """How many a peer has taken when the fastest has taken `step`."""
        return step * self._steps[number] // self.way.steps_per_round

    def _step(self, number: int, step: int, texts: Corpus) -> None:
        method, size = self.methods[number], self.way.batch_sizes[number]
        text = texts.batch(((self._seed * NUM_PEERS + number) << 32) + step, size)
        loss_of(self.models[number], text).backward()
        if isinstance(method, TargetBatch):
            assert method.gradients.add(size)
        elif isinstance(method, LocalUpdates):
            method.local_step(size, True)
        elif isinstance(method, OuterLoop):
            assert method.local_step(size)

    def _begin_round(self) -> None:
        self.epoch += 1
        if self.way.one_by_one:
            self._each_alone()
            return
        offers = [method.offer(self.epoch) for method in self.methods]
        present = [offer for offer in offers if self._random.random() >= self.way.dropped] or offers[:1]
        self._average(offers, present)
        self._under_way = offers

    def _end_round(self) -> None:
        for method, offer in zip(self.methods, self._under_way, strict=True):
            method.accept(offer, epoch=self.epoch, alone=False)
            method.land()
        self._under_way = []

    def _each_alone(self) -> None:
        """Every peer's change is an epoch of its own; the others take over the new state, and keep their own work."""
        for number, method in enumerate(self.methods):
            offer = method.offer(self.epoch)
            method.accept(offer, epoch=self.epoch, alone=True)
            method.land()
            for other in self.methods[:number] + self.methods[number + 1 :]:
                other.load({name: tensor.clone() for name, tensor in method.tensors().items()}, method.metadata())
            self.epoch += 1

    def _average(self, offers: list[Offer], present: list[Offer]) -> None:
        """As a round does it, chunk by chunk."""
        transform = getattr(self.methods[0], "transform", None)
        codec = transform.codec if transform is not None else None
        codecs = self.way.codecs if codec is None else self.way.codecs.with_gradients_in(codec)
        layout = Layout.of(offers[0].tensors, codecs, RolesByPrefix())
        givers = {f"peer {number}": layout.bind(offer.tensors) for number, offer in enumerate(present)}
        takers = [layout.bind(offer.tensors) for offer in offers]
        weights = {name: offer.weight for name, offer in zip(givers, present, strict=True)}
        for chunk in ChunkGrid(runs=layout.runs).chunks:
            frames = {name: encode_values(chunk, tensors) for name, tensors in givers.items()}
            average = reduce_chunk(chunk, MEAN, frames, weights, None).frame
            assert average is not None
            self.sent_bytes += sum(map(len, frames.values())) // len(frames)
            self.received_bytes += len(average)
            for tensors in takers:
                tensors.write_encoded(chunk.start, chunk.stop, EncodedChunk(chunk.reply, average))

    @torch.no_grad()
    def loss(self, texts: Corpus) -> float:
        """Of what the peers share."""
        shared = self.methods[0].tensors()
        model = make_model(WIDTH, NUM_LAYERS, LENGTH)
        for name, parameter in model.named_parameters():
            parameter.copy_(shared[f"parameter/{name}"])
        return float(loss_of(model, texts.held_out(EVALUATED)))


def figures_of(name: str, runs: Sequence[Peers], losses: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Of one way, one run for each seed; `base` are sync's losses."""
    worse = [100 * (loss / sync - 1) for loss, sync in zip(losses, base, strict=False)] or [math.nan]
    return {
        f"{name}_loss": statistics.mean(losses),
        f"{name}_loss_spread": max(losses) - min(losses),
        f"{name}_worse_percent": statistics.mean(worse),
        f"{name}_worse_percent_spread": max(worse) - min(worse),
        f"{name}_bytes_per_step": statistics.mean((p.sent_bytes + p.received_bytes) / p.num_steps for p in runs),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", default="", help="some ways, with commas; sync first, to hold the others against")
    options.add_argument("--seeds", type=int, default=3, help="how often each way is taken, with other batches")
    options.add_argument("--lr", type=float, help="another learning rate, for all")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    texts = Corpus(corpus(2_000_000), LENGTH)
    chosen = set(arguments.only.split(",")) if arguments.only else ways().keys()
    figures: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in make_model(WIDTH, NUM_LAYERS, LENGTH).parameters()),
        "samples": NUM_STEPS * NUM_PEERS * BATCH_SIZE,
        "seeds": arguments.seeds,
    }
    base: list[float] = []
    for name, way in ways().items():
        if name not in chosen:
            continue
        if arguments.lr is not None:
            way = replace(way, lr=arguments.lr)
        runs = [Peers(way, seed) for seed in range(arguments.seeds)]
        for peers in runs:
            peers.train(texts)
        losses = [peers.loss(texts) for peers in runs]
        if name == "sync":
            base = losses
        found = figures_of(name, runs, losses, base)
        figures |= found
        say(
            f"{name:28} {found[f'{name}_loss']:.3f} (seeds differ by {found[f'{name}_loss_spread']:.3f}) "
            f"{found[f'{name}_worse_percent']:+.1f}% (by {found[f'{name}_worse_percent_spread']:.1f}) "
            f"{found[f'{name}_bytes_per_step']:10.0f} bytes a step"
        )
    report(figures, as_json=arguments.json, title="loss with the same samples, nats per byte")


if __name__ == "__main__":
    main()
