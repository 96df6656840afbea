"""A verifier: computes again what a server did in one step, out of what the server's neighbours say went in.

A server may serve several consecutive stages, and hand on to itself in between. What counts is what others saw: the
input of its first stage and the output of its last. In between, everything is computed as the server would, also the
codec. The recomputation uses `StageCompute`, the same code, on the weights that this peer holds.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from potluck.errors import PotluckError, ProtocolError
from potluck.link.carrier import Buffer
from potluck.link.dispatch import Incoming
from potluck.link.links import Links
from potluck.pipeline.averaging import LinkedGroup
from potluck.pipeline.blocks import State, run_blocks
from potluck.pipeline.compute import StageCompute
from potluck.pipeline.following import Following
from potluck.pipeline.holding import Holding
from potluck.pipeline.layout import Layout
from potluck.pipeline.messages import AskStatement, Begin, Checked, CheckOrder, Passing, Statement, Testimony
from potluck.pipeline.wire import TensorSpec, decode_tensors, encode_gradients, encode_tensors
from potluck.pipeline.witnessing import digest_of_frames

logger = logging.getLogger(__name__)

MAX_KEPT_BYTES = 1 << 30
PATIENCE_SECONDS = 10.0  # for what the neighbours have sent and is still on its way
ASK_SECONDS = 30.0


@dataclass
class _Seen:
    """One thing that passed, as a neighbour tells it."""

    teller: str
    tensors: tuple[TensorSpec, ...]
    frames: list[bytes]
    samples: int
    loss: float


_Told = dict[tuple[int, int], dict[tuple[Passing, int], _Seen]]
"""By attempt and micro-batch; by kind and stage."""


@dataclass(frozen=True)
class _Segment:
    """A micro-batch from where it came to a server to where it left it."""

    attempt: int
    micro: int
    first: int
    last: int


@dataclass
class _Case:
    """What is known about one server in this step."""

    seen: _Told = field(default_factory=dict)
    num_bytes: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def forget(self, before: int) -> None:
        """Attempts before this one do not count."""
        self.seen = {key: seen for key, seen in self.seen.items() if key[0] >= before}


@dataclass
class _Errors:
    output: float = 0.0
    gradient: float = 0.0
    sum: float | None = None


class Verifier:
    """Lives on the event loop; computes in the peer's one compute thread."""

    def __init__(
        self,
        links: Links,
        conductor: Following,
        holding: Holding,
        group: LinkedGroup,
        *,
        self_id: str,
        codec: str,
        averaged: Callable[[], Awaitable[None]],
    ) -> None:
        """`averaged` returns when this peer has all contributions of the attempt, or the attempt is over."""
        self._links = links
        self._conductor = conductor
        self._holding = holding
        self._group = group
        self._self_id = self_id
        self._codec = codec
        self._averaged = averaged
        self._begun: Begin | None = None
        self._cases: dict[str, _Case] = {}
        self._early: list[tuple[str, Testimony, list[bytes]]] = []  # of a step that we have not heard of yet
        self.num_checked = 0
        links.handle(Testimony, self._told)
        links.handle(CheckOrder, self._check)

    def close(self) -> None:
        """Idempotent."""
        self._links.unhandle(Testimony)
        self._links.unhandle(CheckOrder)

    def begin(self, begin: Begin) -> None:
        """A step's attempt begins."""
        mine = {check.server for check in begin.checks if check.verifier == self._self_id}
        is_new = self._begun is None or (self._begun.life, self._begun.step) != (begin.life, begin.step)
        self._begun = begin
        self._cases = {server: _Case() if is_new else self._cases.get(server, _Case()) for server in mine}
        for case in self._cases.values():
            case.forget(begin.valid_from)
        early, self._early = self._early, []
        for teller, testimony, frames in early:
            self._take(teller, testimony, frames)

    # What neighbours say

    def _told(self, incoming: Incoming[Testimony]) -> None:
        self._take(incoming.sender, incoming.message, [bytes(frame) for frame in incoming.frames])

    def _take(self, teller: str, told: Testimony, frames: list[bytes]) -> None:
        step = self._begun.step if self._begun is not None else -1
        if told.step > step:  # a neighbour heard of the step before us
            kept = sum(len(frame) for _, _, each in self._early for frame in each)
            if kept < MAX_KEPT_BYTES and len(self._early) < 1 << 12:
                self._early.append((teller, told, frames))
            return
        case = self._cases.get(told.server)
        if case is None or told.step != step or case.num_bytes > MAX_KEPT_BYTES or teller == told.server:
            return
        case.num_bytes += sum(map(len, frames))
        seen = case.seen.setdefault((told.attempt, told.id), {})
        seen.setdefault((told.kind, told.stage), _Seen(teller, told.tensors, frames, told.samples, told.loss))
        case.changed.set()

    # A check

    async def _check(self, incoming: Incoming[CheckOrder]) -> Checked:
        order = incoming.message
        begun, case = self._begun, self._cases.get(order.server)
        if not await self._conductor.accepts(incoming.sender):
            raise ProtocolError("only the conductor orders checks")
        if begun is None or case is None:
            raise ProtocolError(f"{order.server[:8]} is not checked here in attempt {order.attempt}")
        self._must_be_current(order)
        layout = Layout(self._holding.blueprint.num_blocks, begun.starts)
        if not self._holding.stands([b for stage in order.stages for b in layout.blocks_of(stage)]):
            return Checked(compared=0, note="its blocks do not stand here")
        await self._averaged()
        self._must_be_current(order)
        claims = self._group.claims(begun.step, begun.attempt, order.server)
        wanted = {(stage, micro) for (_, stage), (ids, _) in claims.items() for micro in ids}
        segments = await self._until_told(case, wanted, order.stages, layout.num_stages)
        told = dict(case.seen)  # the next attempt may begin meanwhile
        if contradicted := await self._contradictions(told, order):
            return Checked(compared=0, contradicted_by=contradicted)
        missing = len(wanted - set(_covered(segments)))
        computes = self._computes(begun, layout, order.stages)

        def work() -> tuple[str, _Errors]:
            if note := self._incomparable(order, told, segments, layout, begun):
                return note, _Errors()
            errors = _Errors()
            for segment in segments:
                self._recompute(segment, told, computes, begun, wanted, errors)
            if not missing:
                errors.sum = max((_sum_error(computes, key, claim) for key, claim in claims.items()), default=None)
            return "", errors

        note, errors = await self._holding.thread.run(work)
        self._must_be_current(order)
        self.num_checked += not note
        return Checked(
            compared=0 if note else len(segments),
            missing=missing,
            output_error=errors.output,
            gradient_error=errors.gradient,
            sum_error=errors.sum,
            note=note,
        )

    def _must_be_current(self, order: CheckOrder) -> None:
        if self._begun is None or (self._begun.step, self._begun.attempt) != (order.step, order.attempt):
            raise ProtocolError(f"attempt {order.attempt} of step {order.step} is over")

    async def _until_told(
        self, case: _Case, wanted: set[tuple[int, int]], stages: Sequence[int], num_stages: int
    ) -> list[_Segment]:
        """The segments whose ends are known; waits a little until that is all of them."""
        found: list[_Segment] = []
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    case.changed.clear()
                    found = list(_segments(case, stages, num_stages))
                    if wanted <= set(_covered(found)):
                        break
                    await case.changed.wait()
        except TimeoutError:
            logger.info("the neighbours have not told of all that passed")
        return found

    async def _contradictions(self, told: _Told, order: CheckOrder) -> tuple[str, ...]:
        """Neighbours who say something else than the server does itself."""
        try:
            answer = await self._links.request(
                order.server, AskStatement(step=order.step), reply=Statement, timeout_seconds=ASK_SECONDS
            )
        except PotluckError as error:
            logger.info("%s says nothing about what passed: %s", order.server[:8], error)
            return ()
        said = {(p.attempt, p.id, p.stage, p.kind): p.digest for p in answer.message.passed}
        found = set()
        for (attempt, micro), seen in told.items():
            for (kind, stage), each in seen.items():
                has_frames = kind != "input gradient" or stage > 0
                if has_frames and said.get((attempt, micro, stage, kind)) != digest_of_frames(each.frames):
                    found.add(each.teller)
        return tuple(sorted(found))

    def _computes(self, begun: Begin, layout: Layout, stages: Sequence[int]) -> dict[int, StageCompute]:
        blueprint, blocks = self._holding.blueprint, self._holding.blocks
        found = {}
        for stage in stages:
            found[stage] = StageCompute(
                stage=stage,
                stages=layout.stages,
                blocks={number: blocks[number] for number in layout.blocks_of(stage)},
                ties=blueprint.ties,
                num_blocks=blueprint.num_blocks,
                run_seed=blueprint.seed,
                recompute="never",
            )
            found[stage].fence(begun.step, 0)
        return found

    def _incomparable(
        self, order: CheckOrder, told: _Told, segments: Sequence[_Segment], layout: Layout, begun: Begin
    ) -> str:
        """Devices of two types draw other random numbers from the same seed: dropout cannot be compared then."""
        device = self._holding.device
        if not segments or order.arithmetic.partition("-")[0] == device.type:
            return ""
        segment = segments[0]
        given = told[segment.attempt, segment.micro]["input", segment.first]
        numbers = layout.blocks_of(segment.first)
        inputs = tuple(decode_tensors(given.tensors, _views(given.frames), device))
        with torch.no_grad():
            one, other = (
                run_blocks(self._holding.blocks, numbers, inputs, (self._holding.blueprint.seed, begun.step, micro))
                for micro in (segment.micro, segment.micro + 1)
            )
        is_same = all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        return "" if is_same else "its blocks draw random numbers, and another type of device draws others"

    def _recompute(
        self,
        segment: _Segment,
        told: _Told,
        computes: Mapping[int, StageCompute],
        begun: Begin,
        added: set[tuple[int, int]],
        errors: _Errors,
    ) -> None:
        """In the compute thread: one micro-batch through the server's stages, and back.

        `added`: the (stage, micro-batch) that the server says are in its sums; others only passed through.
        """
        seen, step, key = told[segment.attempt, segment.micro], begun.step, (0, segment.micro)
        given = seen["input", segment.first]
        state = self._as_input(given.tensors, given.frames)
        outputs: State = ()
        for stage in range(segment.first, segment.last + 1):
            outputs = computes[stage].forward(step, key, state) or ()
            if stage < segment.last:
                state = self._as_input(*encode_tensors(outputs, self._codec))
        loss = 0.0
        if computes[segment.last].is_last:
            loss = outputs[0].item()
            gradients: tuple[Tensor, ...] = (torch.full_like(outputs[0], begun.loss_scale),)
        else:
            errors.output = max(
                errors.output, self._error(encode_tensors(outputs, self._codec), seen["output", segment.last])
            )
            back = seen["output gradient", segment.last]
            gradients = tuple(decode_tensors(back.tensors, _views(back.frames), self._holding.device))
            loss = back.loss
        for stage in range(segment.last, segment.first - 1, -1):
            adds = (stage, segment.micro) in added
            found = computes[stage].backward(step, key, gradients, weight=float(given.samples), adds=adds) or ()
            if stage > segment.first:
                gradients = tuple(decode_tensors(*encode_gradients(found, self._codec), self._holding.device))
            else:
                gradients = found
        claimed = seen.get(("input gradient", segment.first))
        if claimed is not None and segment.first > 0:
            errors.gradient = max(errors.gradient, self._error(encode_gradients(gradients, self._codec), claimed))
        if claimed is not None:  # the loss travels with the gradient: from the last stage on nobody changes it
            errors.output = max(errors.output, relative_error([torch.tensor(claimed.loss)], [torch.tensor(loss)]))

    def _as_input(self, tensors: Sequence[TensorSpec], frames: Sequence[Buffer]) -> State:
        decoded = decode_tensors(tensors, _views(frames), self._holding.device)
        return tuple(
            tensor.requires_grad_(spec.needs_grad) if tensor.is_floating_point() else tensor
            for tensor, spec in zip(decoded, tensors, strict=True)
        )

    @staticmethod
    def _error(own: tuple[Sequence[TensorSpec], list[memoryview]], told: _Seen) -> float:
        """Of what a neighbour got, against ours as it would have travelled."""
        specs, frames = own
        if [spec.shape for spec in specs] != [spec.shape for spec in told.tensors]:
            return math.inf
        return relative_error(
            decode_tensors(told.tensors, _views(told.frames), torch.device("cpu")),
            decode_tensors(specs, frames, torch.device("cpu")),
        )


def _views(frames: Sequence[Buffer]) -> list[memoryview]:
    return [memoryview(frame) for frame in frames]


def _segments(case: _Case, stages: Sequence[int], num_stages: int) -> Iterator[_Segment]:
    """What can be computed again: both ends are known. Of several attempts the first counts: it was added."""
    done: set[tuple[int, int]] = set()
    for (attempt, micro), seen in sorted(case.seen.items()):
        for kind, first in sorted(seen):
            if kind != "input" or (first, micro) in done:
                continue
            last = first
            while ("output", last) not in seen and last + 1 in stages:
                last += 1
            is_end = last == num_stages - 1
            knows_end = is_end or (("output", last) in seen and ("output gradient", last) in seen)
            if last in stages and knows_end and ("input gradient", first) in seen:
                done.update((stage, micro) for stage in range(first, last + 1))
                yield _Segment(attempt, micro, first, last)


def _covered(segments: Iterable[_Segment]) -> Iterator[tuple[int, int]]:
    for segment in segments:
        for stage in range(segment.first, segment.last + 1):
            yield stage, segment.micro


def _sum_error(
    computes: Mapping[int, StageCompute], key: tuple[int, int], claim: tuple[tuple[int, ...], Tensor]
) -> float:
    unit, stage = key
    own, ids = computes[stage].contribution(unit)
    told_ids, told = claim
    return relative_error([told], [own]) if set(told_ids) == set(ids) else math.inf


def relative_error(told: Sequence[Tensor], own: Sequence[Tensor]) -> float:
    """The largest over these tensors: the difference's norm by our own's. Integers must be equal."""
    worst = 0.0
    for one, other in zip(told, own, strict=True):
        if one.shape != other.shape:
            return math.inf
        if not other.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(one, other) else math.inf)
            continue
        size = torch.linalg.vector_norm(other.double()).item()
        if not math.isfinite(size):
            continue  # the step is skipped on every server
        difference = torch.linalg.vector_norm(one.double() - other.double()).item()
        if difference:
            worst = max(worst, difference / size if size and math.isfinite(difference) else math.inf)
    return worst
