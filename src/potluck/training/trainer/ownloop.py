"""`potluck.Optimizer` and `potluck.DiLoCo`: those of `optim/`, in a run that may have an organiser.

In a hosted run the manifest says what everybody trains with, and a program with a loop of its own takes part like any
other trainer: learning rate, betas, clipping, target batch and so on are the run's, at each epoch; what the program
chose otherwise is named in a warning. It waits while the run is paused. In a run without a manifest the program's own
settings count.

`is_over` says that the run has reached its end: steps do nothing then. Receipts are kept, as by `potluck join`.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields, replace
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from potluck.errors import ConfigurationError
from potluck.hub.subjects import MAIN
from potluck.optim import diloco as outer_loops
from potluck.optim import optimizer as target_batches
from potluck.optim.diloco import DiLoCoConfig
from potluck.optim.options import OptimizerConfig
from potluck.recipes.catalogue import open_recipe
from potluck.round.lineage import Lineage
from potluck.run.joined import Joined
from potluck.training.books.receipts import receipts_folder, receipts_path
from potluck.training.manifest import manifest as manifests
from potluck.training.manifest.manifest import Manifest, OptimizerSpec, Settings
from potluck.training.manifest.noticeboard import NoticeBoard
from potluck.training.trainer.auxiliarywork import keep_receipts, open_desks
from potluck.training.trainer.inneroptimizer import KINDS, parameter_groups
from potluck.training.trainer.optimizers import follow, options_of, parts_of

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.5

C = TypeVar("C", OptimizerConfig, DiLoCoConfig)
Inner = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


class Optimizer(target_batches.Optimizer):
    """`potluck.optim.optimizer.Optimizer`, with the settings of the run where an organiser has said them."""

    def __init__(
        self,
        run: Joined,
        optimizer: Inner | None,
        *,
        params: Iterable[Any] | None = None,
        scheduler: Any = None,
        transform: Any = None,
        config: OptimizerConfig | None = None,
        **options: Any,
    ) -> None:
        """As `potluck.optim.optimizer.Optimizer`; in a hosted run `target_batch_size` may be left out."""
        parts = _parts(options, scheduler=scheduler, transform=transform)
        self.hosted = hosted = HostedRun.of(run, manifests.SyncSettings, _group(config, options))
        if hosted is not None:
            options = {"target_batch_size": hosted.options["target_batch_size"], **options}
            own = config or OptimizerConfig(**options)
            optimizer, config, parts = hosted.steer(optimizer, params, own, parts)
            options = {}
        elif config is None and "target_batch_size" not in options:
            raise ConfigurationError(
                "how many samples of all peers together make a step? Give target_batch_size=…: this run has no "
                "organiser who says so"
            )
        super().__init__(run, optimizer, params=params, config=config, **parts, **options)
        if hosted is not None:
            hosted.serve(self)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        grad_scaler: GradScaler | None = None,
    ) -> Any:
        """As of the class above; in a hosted run by the settings of its epoch, and not while it is paused."""
        if self.hosted is not None and not self.hosted.keep_up(self):
            return None
        return super().step(closure, batch_size, grad_scaler)

    @property
    def is_over(self) -> bool:
        """Whether the run has reached the end that its organiser set. Steps do nothing then: leave."""
        return self.hosted is not None and self.hosted.is_over(self.epoch)


class DiLoCo(outer_loops.DiLoCo):
    """`potluck.optim.diloco.DiLoCo`, with the settings of the run where an organiser has said them."""

    def __init__(
        self,
        run: Joined,
        optimizer: Inner,
        *,
        params: Iterable[Any] | None = None,
        outer: Any = None,
        scheduler: Any = None,
        transform: Any = None,
        config: DiLoCoConfig | None = None,
        **options: Any,
    ) -> None:
        """As `potluck.optim.diloco.DiLoCo`."""
        parts = _parts(options, scheduler=scheduler, transform=transform, outer=outer)
        self.hosted = hosted = HostedRun.of(run, manifests.DiLoCoSettings, _group(config, options))
        if hosted is not None:
            own = config or DiLoCoConfig(**options)
            optimizer, config, parts = hosted.steer(optimizer, params, own, parts)
            options = {}
        super().__init__(run, optimizer, params=params, config=config, **parts, **options)
        if hosted is not None:
            hosted.serve(self)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        batch_size: int = 1,
        grad_scaler: GradScaler | None = None,
    ) -> Any:
        """As of the class above; in a hosted run by the settings of its epoch, and not while it is paused."""
        if self.hosted is not None and not self.hosted.keep_up(self):
            return None
        return super().step(closure, batch_size, grad_scaler)

    @property
    def is_over(self) -> bool:
        """Whether the run has reached the end that its organiser set. Steps do nothing then: leave."""
        return self.hosted is not None and self.hosted.is_over(self.epoch)

    @torch.no_grad()
    def take_shared(self) -> None:
        """Have the model hold the weights that all peers share at this epoch.

        Unless told so it holds this peer's own: the shared ones, and the local steps since. An exchange in the
        background is landed first.
        """
        if self.driver.is_busy:  # its outer step changes the shared weights in another thread
            self.driver.land()
        for name, parameter in self.method.state.model.items():
            parameter.copy_(self.method.shared[name])


def _group(config: OptimizerConfig | DiLoCoConfig | None, options: dict[str, Any]) -> str:
    """Whose rounds these are."""
    return config.group if config is not None else str(options.get("group", MAIN))


def _parts(options: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """What an optimizer takes beside its config: these, and those that are among the options, which leave there."""
    names = ("extra_tensors", "source", "hyperparameters")
    return parts | {name: options.pop(name) for name in names if name in options}


ProgramOptimizer = Optimizer | DiLoCo


class HostedRun:
    """A run whose organiser has said what it trains, as a program with a loop of its own follows it."""

    def __init__(self, run: Joined, board: NoticeBoard) -> None:
        self._run = run
        self._board = board
        self.options = options_of(self.manifest)
        self._overruled: list[str] = []
        self._is_over_told = False

    @classmethod
    def of(
        cls, run: Joined, wanted: type[manifests.SyncSettings | manifests.DiLoCoSettings], group: str
    ) -> Self | None:
        """The run's manifest, from now on; None where it has none. ConfigurationError where it trains otherwise.

        A manifest says how the group `main` trains, and nothing about other groups.
        """
        if group != MAIN:
            return None
        board = NoticeBoard.of(run.peer.session)
        run.attach(board.close)
        run.call_unless_leaving(board.start())
        board.check()
        if board.manifest is None:
            board.listen(lambda _manifest: logger.warning("%s", TOO_LATE))
            return None
        if not isinstance(board.manifest.newest.training, wanted):
            fitting = "potluck.Optimizer" if wanted is manifests.DiLoCoSettings else "potluck.DiLoCo"
            raise ConfigurationError(
                f"the run {board.manifest.run} trains by another algorithm: use {fitting}(run, …) for it"
            )
        return cls(run, board)

    @property
    def manifest(self) -> Manifest:
        """The newest one."""
        assert self._board.manifest is not None, "there was one at the start"
        return self._board.manifest

    def steer(
        self, optimizer: Inner | None, params: Iterable[Any] | None, config: C, parts: dict[str, Any]
    ) -> tuple[torch.optim.Optimizer, C, dict[str, Any]]:
        """The program's optimizer, config and parts, with the run's settings in the place of its own."""
        inner = self._prepared(optimizer, params)
        config = self._settled(config, scheduler=parts["scheduler"], transform=parts["transform"])
        return inner, config, {**parts, "scheduler": None, **parts_of(lambda: self.manifest, inner)}

    def _prepared(self, optimizer: Inner | None, params: Iterable[Any] | None) -> torch.optim.Optimizer:
        """The program's optimizer with the names of the run's model; ConfigurationError where it is of no use."""
        inner = optimizer if isinstance(optimizer, torch.optim.Optimizer) else _made(optimizer, params)
        spec = self.manifest.newest.optimizer
        if spec.name == "muon" and type(inner) is KINDS["muon"]:
            return inner  # which of its parameters are matrices, the program says by its groups
        if type(inner) is not KINDS[spec.name] or len(inner.param_groups) != 1:
            groups = len(inner.param_groups)
            raise ConfigurationError(
                f"the run {self.manifest.run} steps with {KINDS[spec.name].__name__} and one group of parameters, and "
                f"this is {type(inner).__name__} with {groups}: give it a torch.optim.{KINDS[spec.name].__name__}"
                "(model.parameters())"
            )
        if "param_names" not in inner.param_groups[0]:
            self._name(inner.param_groups[0])
        self._compare(inner, self.manifest.newest)
        self._regroup(inner, spec)
        return inner

    def _regroup(self, inner: torch.optim.Optimizer, spec: OptimizerSpec) -> None:
        """Groups as the recipe's trainers have them: those that do not decay apart."""
        [only] = inner.param_groups
        names = only.get("param_names") or [str(number) for number in range(len(only["params"]))]
        groups = parameter_groups(spec, dict(zip(names, only["params"], strict=True)))
        rest = {key: value for key, value in only.items() if key not in ("params", "param_names")}
        inner.param_groups[:] = [{**rest, **group} for group in groups]
        if "param_names" not in only:
            for group in inner.param_groups:
                del group["param_names"]

    def _name(self, group: dict[str, Any]) -> None:
        """Name parameters as the recipe's model does. A recipe of the organiser's own is not here: a state tells."""
        manifest = self.manifest
        if manifest.recipe.digest:
            if self._run.call(self._epoch()) == 0:
                raise ConfigurationError(
                    f"nobody has trained in the run {manifest.run} yet, so this peer does not know the names of "
                    f"its parameters: give them, with {KINDS[manifest.newest.optimizer.name].__name__}"
                    "(model.named_parameters())"
                )
            return
        with torch.device("meta"):
            model: nn.Module = open_recipe(manifest.recipe, manifest.model, files=manifest.files).model()
        known = list(model.named_parameters())
        if [parameter.shape for parameter in group["params"]] != [parameter.shape for _, parameter in known]:
            raise ConfigurationError(
                f"this program's model is not that of the run {manifest.run}, which trains the recipe "
                f"{manifest.recipe.name} with {dict(manifest.model)}: its {len(known)} parameters have other shapes or "
                f"another order than the {len(group['params'])} here. Parameters with names may come in any order: "
                f"{KINDS[manifest.newest.optimizer.name].__name__}(model.named_parameters())"
            )
        group["param_names"] = [name for name, _ in known]

    async def _epoch(self) -> int:
        lineage = Lineage(self._run.peer.session.hub.store("lineage"), self._run.peer.session.subjects.run)
        await lineage.start()
        try:
            return lineage.epoch
        finally:
            await lineage.close()

    def _compare(self, inner: torch.optim.Optimizer, settings: Settings) -> None:
        """Note what the program chose, and the run does not."""
        spec, group = settings.optimizer, inner.param_groups[0]
        usual = inspect.signature(type(inner).__init__).parameters
        ours: dict[str, Any] = {"lr": spec.learning_rate, "weight_decay": spec.weight_decay}
        ours |= {"momentum": spec.beta1} if "momentum" in group else {}
        ours |= {"betas": (spec.beta1, spec.beta2)} if "betas" in group else {}
        for name, value in ours.items():
            if group[name] != value and group[name] != usual[name].default:
                self._overruled.append(f"{name}={value} (here {group[name]})")

    def _settled(self, config: C, *, scheduler: object, transform: object) -> C:
        """The program's options, with those of the run in their place; says which differ."""
        if transform is not None:
            raise ConfigurationError(
                f"the run {self.manifest.run} averages what its manifest says, as it is: leave out transform="
            )
        if scheduler is not None:
            self._overruled.append("the schedule of the learning rate (here scheduler=…, which is left out)")
        taken = self.options
        usual = {entry.name: entry.default for entry in fields(config) if entry.default is not MISSING}
        for name in (entry.name for entry in fields(config) if entry.name in taken):
            given = getattr(config, name)
            if name not in ("codecs", "gather") and given != taken[name] and given != usual.get(name, MISSING):
                self._overruled.append(f"{name}={taken[name]} (here {given})")
        if self._overruled:
            logger.warning(
                "the settings of the run %s count, and not this program's: %s",
                self.manifest.run,
                ", ".join(self._overruled),
            )
        return replace(config, **taken)

    def serve(self, optimizer: ProgramOptimizer) -> None:
        """Do what `potluck join` does beside training: what coordinators do, if this peer is one, and keep receipts."""
        open_desks(self._run, optimizer.collaboration, lambda: self.manifest)
        keep_receipts(self._run, optimizer.collaboration, receipts_path(receipts_folder(), self.manifest.run))

    def is_over(self, epoch: int) -> bool:
        """Whether the run has reached its end."""
        return self.manifest.is_over(epoch)

    def keep_up(self, optimizer: ProgramOptimizer) -> bool:
        """Before each step: wait while the run is paused, then set what counts at this epoch; False: it is over."""
        is_told = False
        while self.manifest.at(max(optimizer.epoch, optimizer.collaboration.averager.epoch)).paused:
            if not is_told:
                logger.warning("the run %s is paused by its organiser: waiting", self.manifest.run)
                is_told = True
            self._run.check()
            time.sleep(PAUSE_SECONDS)
        if is_told:
            logger.warning("the run %s goes on", self.manifest.run)
        if self.is_over(optimizer.epoch):
            if not self._is_over_told:
                self._is_over_told = True
                logger.warning(
                    "the run %s is over, at epoch %d: steps count no more", self.manifest.run, optimizer.epoch
                )
            return False
        follow(optimizer, self.manifest.at(optimizer.epoch))
        return True


TOO_LATE = (
    "the organiser has said only now what this run trains, and this program trains with its own settings: start it "
    "again"
)


def _made(optimizer: Any, params: Iterable[Any] | None) -> torch.optim.Optimizer:
    if optimizer is None or params is None:
        raise ConfigurationError(
            "an optimizer is missing, or the params that a function makes one of: give AdamW(model.parameters())"
        )
    made: torch.optim.Optimizer = optimizer(params)
    return made
