"""What a recipe is: one class that says what to train, on what, and how well it does.

    class Config(RecipeConfig, frozen=True, kw_only=True):
        width: int = 64

    class MyRecipe(Recipe[Config]):
        Config = Config
        def model(self): ...
        def samples(self, shard, generator): ...
        def loss(self, model, batch): ...

What may change while a run trains, as in a curriculum from short texts to long ones, stands in a `Data` beside the
`Config`; the trainers set `self.data` to what counts at the run's epoch.

A recipe is data and mathematics only. It knows nothing of peers: who trains on which shard, with which batch size, on
which device and with which optimizer is decided by the trainer (training/).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from potluck.errors import ConfigurationError
from potluck.recipes.downloads import Download, path_of
from potluck.recipes.reference import RecipeRef
from potluck.recipes.shipped import RunFiles

MAX_SHARDS = 1 << 16  # the book of who trains on which is looked through in milliseconds, and fits into a message

Sample = tuple[Tensor, ...]
Batch = tuple[Tensor, ...]


class RecipeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what an organiser can choose about a recipe; every field has a default."""


C = TypeVar("C", bound=RecipeConfig)


class Recipe(ABC, Generic[C]):
    """A model with its data and its loss."""

    Config: ClassVar[type[RecipeConfig]] = RecipeConfig
    """What an organiser can choose, under [model] in run.toml."""

    Data: ClassVar[type[RecipeConfig]] = RecipeConfig
    """What an organiser can choose, and change while the run trains, under [data] in run.toml; `samples` goes by it."""

    num_shards: int = 1
    """Into how many pieces the data are cut. Peers take whole shards, so have many more than there will be peers."""

    downloads: ClassVar[tuple[Download, ...]] = ()
    """Files that the recipe needs; `potluck download data` fetches them, and `file` says where they are."""

    requirements: tuple[str, ...] = ()
    """What it imports beside Potluck and torch, as pip names it: checked on a volunteer's machine before it runs."""

    is_light: ClassVar[bool] = False
    """Whether reading costs so little that it needs no process of its own (training/trainer/feed.py)."""

    def __init__(self, config: C) -> None:
        """Check the configuration; read no data yet."""
        self.config = config
        self.files = RunFiles()
        """The run's own files; `file` finds them by name."""
        self.origin: Origin | None = None
        """How another process makes the same recipe; None where only this one can."""
        self.data: Any = self.Data()
        """What counts now, a `Data`; it does not change while samples are read."""

    def check_data(self, data: Any) -> None:
        """ValueError where this `Data` does not fit the configuration; unless a recipe knows better, all do."""

    def file(self, name: str) -> Path:
        """Where one of the downloads or of the run's files is; ConfigurationError says how to get it."""
        download = next((each for each in self.downloads if each.name == name), None)
        if download is None:
            if (found := self.files.path(name)) is not None:
                return found
            raise ConfigurationError(
                f"there is no file {name!r}: the organiser adds it to files in run.toml, or to the recipe's downloads"
            )
        path = path_of(download)
        if not path.exists():
            raise ConfigurationError(
                f"the recipe needs {name}, which is not here yet: fetch it with `potluck download data RECIPE`"
            )
        return path

    def prepare(self, folder: Path) -> Sequence[str]:
        """What the organiser makes once, before the run opens: files of its folder that all need, by name or pattern.

        Called on the organiser's machine alone. What is made there already is not made again.
        """
        return ()

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the model as its own library reads it; ConfigurationError unless the recipe can."""
        raise ConfigurationError(
            f"{type(self).__name__} does not say how its model is written for other programs: leave out --format, for "
            "a file of weights"
        )

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model. Its values come from torch's generator, which is seeded as the manifest says."""

    @abstractmethod
    def samples(self, shard: int, generator: torch.Generator) -> Iterable[Sample]:
        """One pass over a shard, shuffled by the generator. May be a stream: a shard need not fit in memory."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a batch."""

    def blocks(self) -> Iterable[nn.Module]:
        """The model as modules for a pipeline: the first takes the batch, the last returns the mean loss.

        What a block returns is what the next one takes; labels travel along. An `nn.Sequential` is cut by itself. Where
        this is a generator, a machine makes only the blocks that it serves.
        """
        from potluck.pipeline.blocks import cut

        return cut(self.model(), self.loss)

    # For runs with paths ([paths] in run.toml)

    document_window: int = 128
    """How many tokens of a document the model learns at once."""

    def documents(self) -> Sequence[Tensor]:
        """The data as documents of token ids, in an order that is the same on all machines."""
        raise ConfigurationError(
            f"{type(self).__name__} does not say what a document is: paths need documents() and token_losses()"
        )

    def token_losses(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """What each token but the first costs: (rows, length) → (rows, length − 1)."""
        raise ConfigurationError(
            f"{type(self).__name__} does not say what a token costs: paths need documents() and token_losses()"
        )

    def modules(self, level: int) -> Sequence[str]:
        """Names of the model's submodules that make a level of its paths; none: its list of layers is cut evenly."""
        return ()

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Samples as one batch: stacked, unless a recipe knows better."""
        return tuple(torch.stack(column) for column in zip(*samples, strict=True))

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Figures on data that is never trained on; the model is in evaluation mode, without gradients."""
        return {}

    def evaluate_part(self, model: nn.Module, part: int, num_parts: int) -> tuple[Mapping[str, float], int]:
        """Figures as `evaluate` has them, on one part of the same data, and of how many samples they are the mean.

        So that several peers share an evaluation; unless a recipe can cut its data, the first of them does all of it.
        """
        return (self.evaluate(model), 1) if part == 0 else ({}, 0)

    def preview(self, model: nn.Module) -> str:
        """What the model does now, for people to read; the model is in evaluation mode, without gradients."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What it takes to make a recipe again."""

    ref: RecipeRef
    options: Mapping[str, Any]
    file: Path | None
    files: RunFiles


def configured(kind: type[Recipe[Any]], options: Mapping[str, Any]) -> Recipe[Any]:
    """The recipe with these options; ConfigurationError when it does not know one, or cannot use its value."""
    recipe = kind(_read(kind.Config, options, "model"))
    if not 1 <= recipe.num_shards <= MAX_SHARDS:
        raise ConfigurationError(f"the recipe has num_shards={recipe.num_shards}: it needs 1 to {MAX_SHARDS}")
    return recipe


def data_of(recipe: Recipe[Any], options: Mapping[str, Any]) -> RecipeConfig:
    """What these options say of the recipe's data; ConfigurationError as above. They do not count yet."""
    data = _read(recipe.Data, options, "data")
    try:
        recipe.check_data(data)
    except ValueError as error:
        raise ConfigurationError(f"[data] does not fit the recipe: {error}") from error
    return data


def require_downloads(recipe: Recipe[Any]) -> None:
    """ConfigurationError unless all files that the recipe needs are here."""
    for download in recipe.downloads:
        recipe.file(download.name)


def _read(kind: type[RecipeConfig], options: Mapping[str, Any], section: str) -> RecipeConfig:
    try:
        return msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind)) or "none"
        raise ConfigurationError(f"[{section}] does not fit the recipe: {error}. Its options are: {known}") from error
