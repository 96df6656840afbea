"""A peer's loop: take a phase, train it, hand its change to the modules of its path.

    lease ─▶ modules at the epochs that it needs ─▶ H inner steps ─▶ finish ─▶ a change for each module
      ▲                                                                            │ rounds, in the background
      └────────────────────────────────────────────────────────────────────────────┘

Rounds of modules go on while the next phase trains. A module whose next phase is this peer's own, and can begin at
once, or of which a phase is still free, is not offered yet: all changes that this peer carries travel as one. While a
peer waits for a module it asks again: a path that has come back from a dead peer is better than waiting.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from potluck.errors import PotluckError, StoppedError
from potluck.faultpoints import reach
from potluck.optim.keptstates import HAND_OVER_SECONDS, MOST_HAND_OVER_SECONDS
from potluck.optim.methods.outer import OuterOptimizer
from potluck.optim.methods.transform import Transform
from potluck.optim.modelstate import ModelState
from potluck.optim.parameters import are_finite
from potluck.paths.grid import Grid, Path
from potluck.paths.moduleloop import Change, ModuleLoop
from potluck.paths.modulepart import ModuleConfig, ModulePart
from potluck.paths.pathfeed import PathFeed, TokenLosses, document_losses, mean_loss
from potluck.paths.pathkeeping import PathKeeper
from potluck.paths.pathstate import PathState, capture, restore
from potluck.paths.phasebook import Lease, Report
from potluck.paths.phasedesk import PhaseLeases, PhaseTaken
from potluck.paths.sharding import Shards
from potluck.paths.weighing import phase_weight
from potluck.run.joined import Joined

logger = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 0.02
ASK_AGAIN_SECONDS = 1.0  # while a module is waited for
PATIENCE_SECONDS = 20.0  # beyond the grace of a round, for an epoch that may never come
TELL_EVERY_SECONDS = 0.5
FLUSH_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PathConfig:
    """How paths are trained: the same for all peers of a run, but for the batch size of a machine."""

    inner_steps: int = 150
    batch_size: int = 16
    window: int = 128
    prefix: int = 32
    max_grad_norm: float | None = 1.0
    patience_phases: int = 0
    """A path stops when its validation loss has not fallen for so many phases; 0: never."""

    grace_seconds: float = 30.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PathProgress:
    """How far this peer is."""

    path: Path | None
    """Which path it trains; None: none at the moment."""

    phase: int
    step: int
    inner_steps: int
    phases: int
    """That this peer has finished."""

    steps: int
    tokens: int
    loss: float
    validation: float
    holders: int = 1
    """Who are at work on the path, this peer included."""

    is_waiting: bool = False
    seconds_inner: float = 0.0
    seconds_outside: float = 0.0


@dataclass(slots=True)
class _Figures:
    phases: int = 0
    steps: int = 0
    tokens: int = 0
    loss: float = math.nan
    validation: float = math.nan
    refused: int = 0
    shares: float = 0.0
    inner_seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)


class PathTrainer:
    """Trains paths until the run is over, or somebody says stop. For one thread."""

    def __init__(
        self,
        run: Joined,
        grid: Grid,
        *,
        model: nn.Module,
        parts: dict[str, tuple[str, ...]],
        inner: torch.optim.Optimizer,
        set_rates: Callable[[int], None] = lambda _phase: None,
        outer: Callable[[], OuterOptimizer],
        transform: Callable[[], Transform | None] = lambda: None,
        module_config: Callable[[str], ModuleConfig],
        leases: PhaseLeases,
        keeper: PathKeeper,
        documents: Sequence[Tensor],
        shards: Callable[[int], Shards],
        token_losses: TokenLosses,
        config: PathConfig,
        on_progress: Callable[[PathProgress], None] = lambda _progress: None,
    ) -> None:
        """`parts` says which parameters belong to which part of the model (cutting.py).

        `shards` returns the documents that count in a phase, `set_rates` sets the inner optimizer's numbers for one.
        """
        self.grid = grid
        self.config = config
        self.modules: dict[str, ModulePart] = {}
        self.counts = _Figures()
        self._run = run
        self.model = model
        self._initial = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        self._parts = parts
        self._inner = ModelState(inner, named=[(n, p) for n, p in model.named_parameters() if p.requires_grad])
        self._set_rates = set_rates
        self._outer = outer
        self._transform = transform
        self._module_config = module_config
        self._leases = leases
        self._keeper = keeper
        self._documents = documents
        self._shards = shards
        self._token_losses = token_losses
        self._on_progress = on_progress
        self._states: dict[int, PathState] = {}
        self._told_at = 0.0
        self._holders = 1
        self._now: tuple[Path | None, int, int] = (None, 0, 0)

    # The loop

    def train(self, stop: threading.Event) -> PathProgress:
        """Go on until `stop` is set, or nothing is left to train; then bring in what was done."""
        self.counts.began = time.monotonic()
        try:
            while not stop.is_set():
                taken = self._leases.take()
                if taken.lease is None:
                    if taken.is_over:
                        break
                    self._wait_idle(stop)
                    continue
                self._offer_all_but(taken)
                ready = self._await_modules(taken, stop)
                if ready is None:
                    break
                if ready.lease is None:
                    continue
                self._train_phase(ready, stop)
        except StoppedError:
            pass
        self._flush()
        self._hand_over()
        return self._progress()

    def _train_phase(self, taken: PhaseTaken, stop: threading.Event) -> None:
        lease = taken.lease
        assert lease is not None, "it was looked at"
        path = self.grid.paths[lease.path]
        state, began = self._begin(taken, path)
        shards, config = self._shards(lease.phase), self.config
        feed = PathFeed(self._documents, shards, config.window, config.seed)
        self._validate(lease, path, feed)
        self._set_rates(lease.phase)
        batches = feed.batches(lease.path, lease.phase, config.batch_size, lease.token if taken.holders > 1 else 0)
        device = next(self.model.parameters()).device
        tokens, total = 0, torch.zeros((), device=device)
        for step in range(config.inner_steps):
            if stop.is_set():
                return  # the lease goes back, and its phase to another
            started = time.perf_counter()
            batch = next(batches).to(device)
            loss = self._token_losses(self.model, batch).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            self._step()
            total += loss.detach()
            tokens += batch[:, 1:].numel()
            self.counts.inner_seconds += time.perf_counter() - started
            self.counts.steps += 1
            self._now = (path, lease.phase, step + 1)
            self._look_after_rounds()
            reach("paths.step")
            if step % 16 == 15:
                self.counts.loss = float(total) / (step + 1)
            self._tell()
        self.counts.loss = float(total) / config.inner_steps
        self.counts.tokens += tokens
        self._finish(lease, path, state, began, shards, tokens)

    def _finish(
        self, lease: Lease, path: Path, state: PathState, began: dict[str, Tensor], shards: Shards, tokens: int
    ) -> None:
        """Have the phase counted, and give its change to the modules."""
        now = {name: p.detach() for name, p in self._inner.parameters.items()}
        if not are_finite(now.values()):
            logger.error(
                "path %s is not finite after this phase: it is left out, and begins anew. If this comes again, "
                "take a smaller learning rate",
                path,
            )
            self._states[lease.path] = PathState(phase=lease.phase)
            return
        state = capture(self._states.get(lease.path, state), self._inner, lease.phase + 1)
        patience = self.config.patience_phases
        names = self.grid.modules_of(path)
        report = Report(
            token=lease.token,
            needs={name: self.modules[name].next_epoch for name in names},
            loss=self.counts.loss,
            validation=self.counts.validation if math.isfinite(self.counts.validation) else None,
            best=state.best if math.isfinite(state.best) else None,
            tokens=tokens,
            is_over=bool(patience and state.num_worse >= patience),
        )
        share = self._leases.finish(report)
        if not share:
            self.counts.refused += 1
            logger.warning("this phase of path %s does not count: another peer has it", path)
            self._states.pop(lease.path, None)
            return
        self._states[lease.path] = state
        weight = phase_weight(shards.tokens(lease.path), shards.all_tokens) * share
        for name in names:
            delta = {p: began[p] - now[p].float() for p in self._names_of(name)}
            self.modules[name].loop.add(Change(delta, weight, share))
        self.counts.phases += 1
        self.counts.shares += share
        data = state.to_bytes()
        keeper = self._keeper
        self._run.soon(partial(keeper.put, lease.path, state.phase, data))
        self._run.submit(keeper.tell(lease.path, state.phase))
        reach("paths.finished")

    def _step(self) -> None:
        gradients = {name: p.grad for name, p in self._inner.model.items() if p.grad is not None}
        if are_finite(gradients.values()):
            missing = self._inner.parameters.keys() - gradients.keys()
            self._inner.step(gradients, missing=missing, max_grad_norm=self.config.max_grad_norm)
        for parameter in self._inner.model.values():
            parameter.grad = None

    # Modules

    def _names_of(self, module: str) -> tuple[str, ...]:
        """The parameters of a path's model that a module holds."""
        return tuple(name for part in self.grid.parts_of(module) for name in self._parts[part])

    def _part(self, module: str) -> ModulePart:
        if module not in self.modules:
            initial = {name: self._initial[name] for name in self._names_of(module)}
            loop = ModuleLoop(initial, self._outer(), transform=self._transform())
            self.modules[module] = ModulePart(self._run, loop, self._module_config(module))
        return self.modules[module]

    @torch.no_grad()
    def _begin(self, taken: PhaseTaken, path: Path) -> tuple[PathState, dict[str, Tensor]]:
        """Put the path together out of its modules and its inner optimizer; the values that it begins with."""
        lease = taken.lease
        assert lease is not None, "it was looked at"
        began: dict[str, Tensor] = {}
        for module in self.grid.modules_of(path):
            for name, value in self._part(module).loop.shared.items():
                self._inner.parameters[name].copy_(value)
                began[name] = value.clone()
        state = self._states.get(lease.path)
        if state is None or state.phase < lease.phase:
            found = self._run.call_unless_leaving(self._keeper.find(lease.path, taken.last, lease.phase))
            if found is not None and (state is None or found.phase > state.phase):
                state = found
            if state is None and lease.phase:
                logger.warning("nobody has the inner optimizer of path %s: it begins anew", path)
        state = self._states[lease.path] = state or PathState()
        restore(state, self._inner)
        self._holders = taken.holders
        self._now = (path, lease.phase, 0)
        self._tell(now=True)
        return state, began

    def _validate(self, lease: Lease, path: Path, feed: PathFeed) -> None:
        documents = feed.held_out(lease.path)
        if not documents:
            return
        config = self.config
        sums, counts = document_losses(
            self.model, documents, self._token_losses, window=config.window, prefix=config.prefix
        )
        loss = self.counts.validation = mean_loss(sums, counts)
        if lease.phase or math.isinf(self._states[lease.path].best):
            modules = self._inner.parameters
            self._states[lease.path] = self._states[lease.path].judged(
                loss, modules, keeps=bool(config.patience_phases)
            )

    def _offer_all_but(self, taken: PhaseTaken) -> None:
        """Begin rounds of the modules that have changes, but of those where more of this peer's come soon."""
        lease = taken.lease
        assert lease is not None, "it was looked at"
        mine = set(self.grid.modules_of(self.grid.paths[lease.path]))
        for name, part in self.modules.items():
            need = taken.needs.get(name, 0) if name in mine else 0
            has_it = need <= part.epoch or (need > part.run_epoch and self._is_lost(part, taken))
            can_begin = name in mine and has_it and not part.driver.is_busy
            # What this very phase waits for is not held back for others.
            holds_back = name in taken.open and need <= part.run_epoch
            part.wants_round = part.loop.phases > 0 and not can_begin and not holds_back
            part.poll()

    def _await_modules(self, taken: PhaseTaken, stop: threading.Event) -> PhaseTaken | None:
        """Wait until the modules hold what the phase begins with; the lease, or a better one; None: stopped."""
        deadline = time.monotonic() + self.config.grace_seconds + PATIENCE_SECONDS
        ask_at = time.monotonic() + ASK_AGAIN_SECONDS
        while not stop.is_set():
            lease = taken.lease
            assert lease is not None, "it was looked at"
            names = self.grid.modules_of(self.grid.paths[lease.path])
            for part in map(self._part, names):
                if part.is_awaited:
                    part.hear_missed()
            self._look_after_rounds()
            if time.monotonic() > deadline or all(self._is_there(name, taken) for name in names):
                for name in names:
                    self.modules[name].catch_up()
                return taken
            self._tell(waiting=True)
            time.sleep(LOOK_EVERY_SECONDS)
            if time.monotonic() >= ask_at:
                ask_at = time.monotonic() + ASK_AGAIN_SECONDS
                again = self._leases.take()
                if again.lease is None:
                    return again
                taken = again
                self._offer_all_but(taken)
        return None

    def _wait_idle(self, stop: threading.Event) -> None:
        """Nothing is free: bring in what was done, and ask again in a moment."""
        until = time.monotonic() + ASK_AGAIN_SECONDS
        for part in self.modules.values():
            part.wants_round = part.loop.phases > 0
        while time.monotonic() < until and not stop.is_set():
            self._look_after_rounds()
            self._tell(waiting=True)
            time.sleep(LOOK_EVERY_SECONDS)

    def _is_there(self, name: str, taken: PhaseTaken) -> bool:
        part = self.modules[name]
        if part.run_epoch >= taken.needs.get(name, 0):
            return (not part.driver.is_busy or part.epoch >= taken.needs.get(name, 0)) and not part.is_awaited
        return not part.driver.is_busy and self._is_lost(part, taken)

    def _is_lost(self, part: ModulePart, taken: PhaseTaken) -> bool:
        """Whether nobody has the path's last change to a module any more: the epoch with it may never come.

        The peer that made it is gone, or it was this peer, before it was started anew.
        """
        if taken.last == self._run.peer_id:
            return not part.loop.phases
        return taken.last not in self._run.peer.session.roster

    def _look_after_rounds(self) -> None:
        for part in self.modules.values():
            part.poll()

    def _flush(self) -> None:
        """Bring what waits into the modules' next rounds, if those come in time."""
        until = time.monotonic() + self._run.seconds_to_leave(FLUSH_SECONDS)
        for part in self.modules.values():
            part.wants_round = part.loop.phases > 0
        try:
            while time.monotonic() < until:
                self._look_after_rounds()
                if not any(part.driver.is_busy or part.wants_round for part in self.modules.values()):
                    break
                time.sleep(LOOK_EVERY_SECONDS)
        except PotluckError as error:
            logger.warning("what was trained last could not be handed in: %s", error)
        lost = [name for name, part in self.modules.items() if part.driver.is_busy or part.loop.phases]
        if lost:
            logger.warning(
                "the last phase of this peer is not in %s: no round came in time. (To wait longer for it: "
                "--hand-in-seconds)",
                ", ".join(lost),
            )

    def _hand_over(self) -> None:
        """See to it that somebody who stays has the newest state of each module: of all at once, since each waits."""
        session = self._run.peer.session
        if self._run.is_interrupted or session.ended.done() or not session.hub.is_connected:
            return
        seconds = self._run.seconds_to_leave(HAND_OVER_SECONDS)
        most = self._run.seconds_to_leave(MOST_HAND_OVER_SECONDS)
        keepers = [part.collaboration.keeper for part in self.modules.values() if part.epoch]

        async def all_at_once() -> None:
            leaving = (k.hand_over(timeout_seconds=seconds, most_seconds=most) for k in keepers if k)
            await asyncio.gather(*leaving)

        self._run.call(all_at_once())

    # Told to others

    def _tell(self, *, now: bool = False, waiting: bool = False) -> None:
        if now or time.monotonic() - self._told_at >= TELL_EVERY_SECONDS:
            self._told_at = time.monotonic()
            loss, session = self.counts.loss, self._run.peer.session
            if math.isfinite(loss):
                self._run.soon(lambda: session.update_beacon(loss=loss))
            self._on_progress(self._progress(waiting=waiting))

    def _progress(self, *, waiting: bool = False) -> PathProgress:
        path, phase, step = self._now
        elapsed = time.monotonic() - self.counts.began
        return PathProgress(
            path=path,
            phase=phase,
            step=step,
            inner_steps=self.config.inner_steps,
            phases=self.counts.phases,
            steps=self.counts.steps,
            tokens=self.counts.tokens,
            loss=self.counts.loss,
            validation=self.counts.validation,
            holders=self._holders,
            is_waiting=waiting,
            seconds_inner=self.counts.inner_seconds,
            seconds_outside=max(0.0, elapsed - self.counts.inner_seconds),
        )
