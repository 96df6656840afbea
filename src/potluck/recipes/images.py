"""image-classifier: tells pictures apart, by the folders they lie in or by a column of a parquet file.

A folder with one subfolder for each class is packed once, by the organiser, into one parquet file of small pictures:
the host serves that, and every peer reads its rows by ranges. A parquet file of one's own has a column with the bytes
of each picture (or what the datasets library writes) and one with its label.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional

from potluck.errors import ConfigurationError
from potluck.recipes.recipe import Batch, Recipe, RecipeConfig, Sample

PACKED_FILE = "images.parquet"
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
MOST_EVALUATED = 512


class Config(RecipeConfig, frozen=True, kw_only=True):
    """The model and its pictures, under [model]."""

    folder: str = ""  # beside run.toml, with a subfolder for each class
    parquet: str = ""  # or a parquet file beside run.toml
    image_column: str = "image"
    label_column: str = "label"
    size: int = 32  # pixels of a side, to which all pictures are scaled
    width: int = 32  # channels of the first layer; each of the next has twice as many
    stages: int = 3
    shards: int = 64
    held_out: float = 0.1
    flip: bool = True  # pictures are turned left to right at random

    def __post_init__(self) -> None:
        if bool(self.folder) == bool(self.parquet):
            raise ConfigurationError(
                'which pictures? Name folder = "images" or parquet = "images.parquet", one of the two'
            )
        if self.size < 2**self.stages or min(self.width, self.stages, self.shards) < 1:
            raise ConfigurationError(
                f"size={self.size}, width={self.width}, stages={self.stages}: each stage halves the picture, so it "
                "needs 2 to the power of stages pixels"
            )
        if not 0.0 < self.held_out < 1.0:
            raise ConfigurationError(f"held_out={self.held_out}: take a share above 0 and below 1, as 0.1")


class ImageClassifier(Recipe[Config]):
    """Tells which class a picture is of."""

    Config = Config
    requirements = ("pyarrow>=17", "pillow>=10")

    def __init__(self, config: Any) -> None:
        self.num_shards = config.shards
        super().__init__(config)

    def prepare(self, folder: Path) -> Sequence[str]:
        """The parquet file, packed from the folder unless it is there."""
        if self.config.parquet:
            self._check_columns()
            return [self.config.parquet]
        if not (folder / PACKED_FILE).exists():
            pack_folder(folder / self.config.folder, folder / PACKED_FILE, self.config.size)
        return [PACKED_FILE]

    def _check_columns(self) -> None:
        """ConfigurationError where a parquet file of one's own has not what it takes."""
        from pyarrow import ArrowInvalid, parquet

        try:
            names = parquet.read_schema(self._path).names
        except ArrowInvalid as error:
            raise ConfigurationError(f"parquet={self.config.parquet!r} is no parquet file: {error}") from error
        for option in ("image_column", "label_column"):
            if (name := getattr(self.config, option)) not in names:
                raise ConfigurationError(f"{option}={name!r}: {self.config.parquet} has the columns {', '.join(names)}")
        if len(self.classes) < 2:
            raise ConfigurationError(
                f"label_column={self.config.label_column!r}: all pictures of {self.config.parquet} have one label, "
                f"{', '.join(self.classes)}. There is nothing to tell apart"
            )

    def model(self) -> nn.Module:
        """Stages of two convolutions with a shortcut, each at half the size of the one before."""
        width, layers = self.config.width, [nn.Conv2d(3, self.config.width, 3, padding=1, bias=False)]
        blocks: list[nn.Module] = [*layers]
        for _ in range(self.config.stages):
            blocks += [_Block(width, 2 * width), nn.AvgPool2d(2)]
            width *= 2
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, len(self.classes)))

    @cached_property
    def _path(self) -> Path:
        return self.file(self.config.parquet or PACKED_FILE)

    @cached_property
    def classes(self) -> list[str]:
        """Their names, in order."""
        from pyarrow import compute, parquet

        found = compute.unique(parquet.read_table(self._path, columns=[self.config.label_column]).column(0)).to_pylist()
        return [str(each) for each in sorted(each for each in found if each is not None)]

    def _rows(self, shard: int, *, held_out: bool) -> Iterator[Sample]:
        from pyarrow import parquet

        config = self.config
        names = {name: number for number, name in enumerate(self.classes)}
        with parquet.ParquetFile(self._path) as file:
            total = file.metadata.num_rows
            start, end, first = total * shard // self.num_shards, total * (shard + 1) // self.num_shards, 0
            for group in range(file.num_row_groups):
                last = first + file.metadata.row_group(group).num_rows
                if first < end and last > start:
                    table = file.read_row_group(group, columns=[config.image_column, config.label_column])
                    for row in table.slice(max(start - first, 0), end - max(start, first)).to_pylist():
                        data = row[config.image_column]
                        data = data["bytes"] if isinstance(data, dict) else data
                        if data is None or row[config.label_column] is None:
                            continue  # nothing to learn from
                        if (xxhash.xxh3_64_intdigest(data) < config.held_out * 2**64) == held_out:
                            yield picture_of(data, config.size), torch.tensor(names[str(row[config.label_column])])
                first = last

    def samples(self, shard: int, generator: torch.Generator) -> Iterator[Sample]:
        """Pictures and labels, in another order, some of them mirrored."""
        rows = list(self._rows(shard, held_out=False))
        for place in torch.randperm(len(rows), generator=generator).tolist():
            picture, label = rows[place]
            is_mirrored = self.config.flip and bool(torch.rand(1, generator=generator) < 0.5)
            yield (picture.flip(-1) if is_mirrored else picture), label

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy, in nats."""
        return functional.cross_entropy(model(normalised(batch[0])), batch[1])

    @cached_property
    def _held_out(self) -> tuple[Tensor, Tensor]:
        found: list[Sample] = []
        for shard in range(self.num_shards):
            found += self._rows(shard, held_out=True)
            if len(found) >= MOST_EVALUATED:
                break
        if not found:
            raise ConfigurationError(f"held_out={self.config.held_out}: no picture is held out. Take a larger share")
        pictures, labels = self.collate(found[:MOST_EVALUATED])
        return pictures, labels

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Loss and accuracy on pictures that nobody trains on."""
        return self.evaluate_part(model, 0, 1)[0]

    def evaluate_part(self, model: nn.Module, part: int, num_parts: int) -> tuple[Mapping[str, float], int]:
        """The same, on every so many-th picture."""
        device = next(model.parameters()).device
        pictures, labels = (each[part::num_parts].to(device) for each in self._held_out)
        if not len(labels):
            return {}, 0
        logits = model(normalised(pictures))
        figures = {
            "evaluation_loss": functional.cross_entropy(logits, labels).item(),
            "accuracy": (logits.argmax(1) == labels).float().mean().item(),
        }
        return figures, len(labels)

    def preview(self, model: nn.Module) -> str:
        """The first pictures that nobody trains on: what they show, and what the model sees."""
        device = next(model.parameters()).device
        pictures, labels = (part[:8] for part in self._held_out)
        seen = model(normalised(pictures.to(device))).argmax(1).tolist()
        pairs = zip(labels.tolist(), seen, strict=True)
        return "\n".join(f"shown {self.classes[a]}, seen {self.classes[b]}" for a, b in pairs)


class _Block(nn.Module):
    """Two convolutions, and a shortcut around them. Normalised by groups: statistics of batches differ by peer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        groups = max(1, outputs // 16)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(groups, outputs), nn.GroupNorm(groups, outputs)])

    def forward(self, x: Tensor) -> Tensor:
        """One stage."""
        deeper = functional.relu(self.norms[0](self.first(x)))
        out: Tensor = functional.relu(self.norms[1](self.second(deeper)) + self.shortcut(x))
        return out


def normalised(pictures: Tensor) -> Tensor:
    """Bytes as numbers around 0."""
    return pictures.float() / 127.5 - 1.0


def picture_of(data: bytes, size: int) -> Tensor:
    """A picture in any format as bytes of three colours, scaled to a square."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as found:
            scaled = found.convert("RGB").resize((size, size))
    except (UnidentifiedImageError, OSError) as error:
        raise ConfigurationError(f"one of the pictures cannot be read ({error}): leave it out of the data") from error
    return torch.from_numpy(np.asarray(scaled).copy()).permute(2, 0, 1)


def pack_folder(folder: Path, path: Path, size: int) -> None:
    """Write all pictures of a folder, scaled, into one file; ConfigurationError where there are none."""
    import pyarrow
    from PIL import Image, UnidentifiedImageError
    from pyarrow import parquet

    found = sorted(each for each in folder.glob("*/*") if each.suffix.lower() in SUFFIXES)
    if len({each.parent for each in found}) < 2:
        raise ConfigurationError(
            f"folder={folder.name!r}: {folder} needs two or more subfolders with pictures, one a class"
        )
    images = []
    for each in found:
        into = io.BytesIO()
        try:
            with Image.open(each) as opened:
                opened.convert("RGB").resize((size, size)).save(into, "PNG")
        except (UnidentifiedImageError, OSError) as error:
            raise ConfigurationError(
                f"folder={folder.name!r}: {each} is no picture that can be read ({error})"
            ) from error
        images.append(into.getvalue())
    order = sorted(range(len(found)), key=lambda n: xxhash.xxh3_64_intdigest(images[n]))  # classes mixed over shards
    columns = {"image": [images[n] for n in order], "label": [found[n].parent.name for n in order]}
    part = path.with_name(f"{path.name}.part")
    parquet.write_table(pyarrow.table(columns), part, row_group_size=256)
    part.replace(path)
