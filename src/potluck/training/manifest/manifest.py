"""What a run trains and how. Every joiner takes its arguments from here.

Recipe, model, algorithm and codecs are fixed for the life of a run. What may change while it trains stands in
`Settings`, each entry with the epoch from which on it counts: so all peers change at the same one, a newcomer knows
what counted when, and a curriculum (curriculum.py) is nothing but entries that were written beforehand. An organiser
signs each revision (noticeboard.py); nobody else can change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import msgspec

from potluck.errors import ConfigurationError
from potluck.messages import PROTOCOL_VERSION, Message
from potluck.recipes.reference import MAX_FILES, MAX_REQUIREMENTS, DownloadRef, FileRef, RecipeRef, Requirement
from potluck.training.manifest.method import (
    AtLeastOne,
    Count,
    DiLoCoSettings,
    Evaluation,
    ExchangeSettings,
    OptimizerSpec,
    Patience,
    PipelineSpec,
    ScheduleSpec,
    SyncSettings,
    check_staged,
    check_together,
)
from potluck.training.manifest.pathspec import PathSpec, Route

__all__ = [
    "Count",
    "DiLoCoSettings",
    "Evaluation",
    "ExchangeSettings",
    "Manifest",
    "OptimizerSpec",
    "PathSpec",
    "Patience",
    "PipelineSpec",
    "Route",
    "ScheduleSpec",
    "Settings",
    "SyncSettings",
]

Value = bool | int | float | str
Options = dict[str, Value]
ModelOptions = dict[str, Value | dict[str, Value | list[Value]] | list[Value]]  # a model library's own config, say
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # of torch.manual_seed

NOTICE_EPOCHS = 2  # settings count from so many epochs later: by then everybody has heard of them
MAX_OPTIONS = 256  # of a model, of its data
MAX_SETTINGS = 256
MAX_HISTORY = 64  # changes that are told; the oldest go first
MAX_WORDS = 300  # characters of what somebody writes down


class Settings(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may change while a run trains."""

    from_epoch: Count = 0  # it counts for the steps that make later epochs
    training: SyncSettings | DiLoCoSettings = SyncSettings()
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    data: Options = {}  # all that the recipe's `Data` has
    paused: bool = False
    end_epoch: Count = 0  # the run is done then; 0: it goes on for ever


class Change(Message, frozen=True, kw_only=True):
    """What an organiser did, for everybody to read."""

    revision: AtLeastOne  # of the manifest that it made
    at: float  # seconds since 1970, by the organiser's clock
    by: Annotated[str, msgspec.Meta(max_length=MAX_WORDS)]  # as the person calls itself; the key signs the manifest
    what: Annotated[str, msgspec.Meta(max_length=MAX_WORDS)]
    from_epoch: Count = 0  # it counts from here on
    reason: Annotated[str, msgspec.Meta(max_length=MAX_WORDS)] = ""


class Rollback(Message, frozen=True, kw_only=True):
    """An organiser's order to go back to the state of an earlier epoch; the coordinator carries it out."""

    number: AtLeastOne  # the lineage counts those that were carried out
    to_epoch: Count
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]  # of that state
    given_at_epoch: Count  # a lineage that is not as far is another one, and the order not for it
    cut: Count = 0  # whose part that state is: all other groups go back to theirs


class Manifest(Message, frozen=True, kw_only=True):
    """One revision of a run's description."""

    run: str
    recipe: RecipeRef
    settings: Annotated[tuple[Settings, ...], msgspec.Meta(min_length=1, max_length=MAX_SETTINGS)] = (Settings(),)
    revision: AtLeastOne = 1
    protocol: int = PROTOCOL_VERSION
    model: ModelOptions = {}
    exchange: ExchangeSettings = ExchangeSettings()
    patience: Patience = Patience()
    evaluation: Evaluation = Evaluation()
    pipeline: PipelineSpec | None = None  # the model is cut into stages
    files: Annotated[tuple[FileRef, ...], msgspec.Meta(max_length=MAX_FILES)] = ()  # that the host serves
    downloads: Annotated[tuple[DownloadRef, ...], msgspec.Meta(max_length=MAX_FILES)] = ()  # from elsewhere
    requirements: Annotated[tuple[Requirement, ...], msgspec.Meta(max_length=MAX_REQUIREMENTS)] = ()  # as pip has them
    paths: PathSpec | None = None
    routes: Annotated[tuple[Route, ...], msgspec.Meta(max_length=64)] = ()  # of its documents, the first phase first
    seed: Seed = 0
    written: tuple[Settings, ...] = ()  # what run.toml said last: what was changed by command since then stays
    rollback: Rollback | None = None  # the newest order
    history: Annotated[tuple[Change, ...], msgspec.Meta(max_length=MAX_HISTORY)] = ()  # the newest last

    def __post_init__(self) -> None:
        num_options = max(len(self.model), *(len(entry.data) for entry in self.settings))
        if num_options > MAX_OPTIONS:
            raise ConfigurationError(f"{num_options} options of a model or its data: at most {MAX_OPTIONS}")
        epochs = [entry.from_epoch for entry in self.settings]
        if epochs != sorted(set(epochs)):
            raise ConfigurationError(f"settings from the epochs {epochs}: they must be in order, one for an epoch")
        if len({_fixed(entry) for entry in self.settings}) > 1:
            raise ConfigurationError(
                "the algorithm, the kind of optimizer and max_grad_norm cannot change while a run trains: start "
                "another run for that"
            )
        check_together(self.newest.training, self.newest.optimizer, self.exchange)
        if self.paths is not None and not isinstance(self.newest.training, DiLoCoSettings):
            raise ConfigurationError('[paths] trains by phases: say algorithm = "diloco" under [training]')
        if self.paths is not None and isinstance(self.newest.training, DiLoCoSettings):
            training = self.newest.training
            if training.asynchronous or training.num_fragments > 1 or training.overlap_steps:
                raise ConfigurationError("[paths] has no asynchronous, num_fragments or overlap_steps: leave them out")
        if self.pipeline is not None:
            check_staged(self.newest.training, self.exchange, self.evaluation)

    @property
    def newest(self) -> Settings:
        """What counts in the end."""
        return self.settings[-1]

    def at(self, epoch: int) -> Settings:
        """What counts for the step that makes the epoch after `epoch`."""
        return counting_at(self.settings, epoch)

    def is_over(self, epoch: int) -> bool:
        """Whether a run at this epoch has come to its end."""
        return 0 < self.at(epoch).end_epoch <= epoch

    def soonest_change(self, epoch: int) -> int:
        """From which epoch on settings may change in a run at this one; one that is over gets to no later epoch."""
        return epoch if self.is_over(epoch) else epoch + NOTICE_EPOCHS

    def amended(
        self, change: Callable[[Settings], Settings], *, from_epoch: int, epoch: int, turns: Iterable[int] = ()
    ) -> Manifest:
        """With what counts from `from_epoch` on changed, entries for later epochs included, and such from `turns` on.

        The run is at `epoch`: entries that ended before it are forgotten. The revision is the caller's to count.
        """
        from_epoch = max(from_epoch, epoch)
        current = self.at(epoch)
        first = msgspec.structs.replace(current, from_epoch=min(current.from_epoch, epoch))
        entries = [first, *(entry for entry in self.settings if entry.from_epoch > epoch)]
        for turn in (from_epoch, *(turn for turn in turns if turn > from_epoch)):
            counting = [entry for entry in entries if entry.from_epoch <= turn]
            if counting[-1].from_epoch != turn:
                entries.insert(len(counting), msgspec.structs.replace(counting[-1], from_epoch=turn))
        amended = [change(entry) if entry.from_epoch >= from_epoch else entry for entry in entries]
        return msgspec.structs.replace(self, settings=_without_repeats(amended))

    def newest_change(self, what: str) -> Change | None:
        """What an organiser did last of that kind, if it is among the last changes."""
        return next((change for change in reversed(self.history) if change.what == what), None)

    def recorded(self, what: str, *, by: str, at: float, from_epoch: int, reason: str = "") -> Manifest:
        """The next revision, with what was done written down."""
        words = {"by": by[:MAX_WORDS], "what": what[:MAX_WORDS], "reason": reason[:MAX_WORDS]}
        change = Change(revision=self.revision + 1, at=at, from_epoch=from_epoch, **words)
        history = (*self.history, change)[-MAX_HISTORY:]
        return msgspec.structs.replace(self, revision=self.revision + 1, history=history)


def counting_at(settings: Sequence[Settings], epoch: int) -> Settings:
    """What of these counts for the step that makes the epoch after `epoch`."""
    return next((entry for entry in reversed(settings) if entry.from_epoch <= epoch), settings[0])


def _without_repeats(entries: list[Settings]) -> tuple[Settings, ...]:
    """Without those that say the same as the one before."""
    kept: list[Settings] = []
    for entry in entries:
        if not kept or msgspec.structs.replace(entry, from_epoch=kept[-1].from_epoch) != kept[-1]:
            kept.append(entry)
    return tuple(kept)


def _fixed(settings: Settings) -> tuple[SyncSettings | DiLoCoSettings, tuple[str, bool], float]:
    """What of the settings stays for the life of a run."""
    training, optimizer = settings.training, settings.optimizer
    if isinstance(training, SyncSettings):
        training = msgspec.structs.replace(training, target_batch_size=1)
    return training, (optimizer.name, optimizer.decay_vectors), optimizer.max_grad_norm
