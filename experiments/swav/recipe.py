"""SwAV: features of pictures without labels. Crops of one picture should be assigned to the same prototypes.

Each picture gives two large crops and some small ones. A large crop's assignment to prototypes is computed by Sinkhorn,
so that all prototypes are used equally, and every other crop of the picture has to predict it. Where batches are small,
a queue of earlier features helps Sinkhorn. It counts from an epoch of the run (`data.queue`, set by [[curriculum]]), so
a newcomer fills its queue at once if the run is past that epoch, and never before.

Pictures come from a parquet file with a column of encoded pictures, or are made on the spot:
eight bright shapes of any size, place and turn.
"""

import io
import math
from functools import cached_property

import torch
from torch import nn
from torch.nn import functional

from potluck.errors import ConfigurationError
from potluck.recipes import Recipe, RecipeConfig

SHAPES = ("disc", "ring", "square", "frame", "triangle", "cross", "bars", "dots")
MADE_PER_SHARD = 256
MADE_SEED = 1_000_003
BANK, ASKED = 384, 192  # made pictures with labels that probes learn from, and are asked about
NEIGHBOURS = 10
LARGE_SHARE, SMALL_SHARE = (0.4, 1.0), (0.2, 0.5)  # of the picture's area


class Config(RecipeConfig, frozen=True, kw_only=True):
    """The model and its crops, under [model]."""

    parquet: str = ""  # a file beside run.toml with a column `image`; empty: pictures are made
    depths: tuple[int, ...] = (3, 4, 6, 3)  # blocks of each stage: ResNet-50
    is_bottleneck: bool = True
    width: int = 64
    norm: str = "batch"  # or group: statistics of batches differ by peer
    hidden: int = 2048
    features: int = 128
    prototypes: int = 3000
    temperature: float = 0.1
    epsilon: float = 0.03  # of Sinkhorn
    iterations: int = 3
    queue: int = 3840
    large: int = 224  # pixels of a side
    small: int = 96
    num_small: int = 6
    size: int = 256  # of a picture before it is cropped
    shards: int = 1024

    def __post_init__(self):
        if self.norm not in ("batch", "group"):
            raise ConfigurationError(f"norm={self.norm!r}: choose batch or group")
        if min(self.large, self.small) < 8 or self.size < self.large or not self.depths:
            raise ConfigurationError(
                f"size={self.size}, large={self.large}, small={self.small}: 8 pixels at least, in order"
            )


class Data(RecipeConfig, frozen=True, kw_only=True):
    """What changes while the run trains."""

    queue: bool = False  # whether earlier features help Sinkhorn; a stage of [[curriculum]] turns it on


class Swav(Recipe[Config]):
    """Learns features by swapped assignments."""

    Config = Config
    Data = Data

    def __init__(self, config):
        self.num_shards = config.shards
        self.is_light = not config.parquet
        self.requirements = ("pyarrow>=17",) if config.parquet else ()
        super().__init__(config)
        self.queue = Queue(config.queue, config.features)

    def prepare(self, folder):
        return [self.config.parquet] if self.config.parquet else []

    def model(self):
        return Network(self.config)

    # Data

    def _pictures(self, shard, generator):
        if not self.config.parquet:
            made = torch.Generator().manual_seed(MADE_SEED + shard)  # the same pictures on every machine
            for _ in range(MADE_PER_SHARD):
                yield make_picture(int(torch.randint(len(SHAPES), (), generator=made)), self.config.size, made)
            return
        from PIL import Image

        from potluck.recipes.huggingface.rows import parquet_range

        size = self.config.size
        for row in parquet_range(self.file(self.config.parquet), ["image"], shard, self.num_shards):
            data = row["image"]
            with Image.open(io.BytesIO(data["bytes"] if isinstance(data, dict) else data)) as found:
                scaled = found.convert("RGB").resize((size, size))
            yield (
                torch.frombuffer(bytearray(scaled.tobytes()), dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1)
                / 255
            )

    def samples(self, shard, generator):
        """The crops of each picture: large ones, small ones."""
        config = self.config
        pictures = list(self._pictures(shard, generator))
        for place in torch.randperm(len(pictures), generator=generator).tolist():
            large = [crop(pictures[place], config.large, LARGE_SHARE, generator) for _ in range(2)]
            small = [crop(pictures[place], config.small, SMALL_SHARE, generator) for _ in range(config.num_small)]
            yield tuple(torch.stack(each) if each else torch.empty(0) for each in (large, small))

    # Learning

    def loss(self, model, batch):
        large, small = batch
        count = large.shape[0]
        features = [model(large.transpose(0, 1).flatten(0, 1))]
        if self.config.num_small:
            features.append(model(small.transpose(0, 1).flatten(0, 1)))
        features = torch.cat(features)
        prototypes = functional.normalize(prototypes_of(model), dim=1)
        scores = (features @ prototypes.T).float()
        log_odds = functional.log_softmax(scores / self.config.temperature, dim=1).view(-1, count, scores.shape[1])
        total = 0.0
        for view in (0, 1):
            with torch.no_grad():
                own = scores[view * count : (view + 1) * count]
                queued = self._queued(view, features[view * count : (view + 1) * count], prototypes)
                wanted = sinkhorn(torch.cat([queued, own]), self.config.epsilon, self.config.iterations)[-count:]
            others = [log_odds[other] for other in range(len(log_odds)) if other != view]
            total = total - torch.stack(others).mul(wanted).sum(-1).mean()
        return total / 2

    def _queued(self, view, features, prototypes):
        """Scores of earlier features, once the run has come to that and the queue is full."""
        earlier = self.queue.exchange(view, features.float(), is_on=self.data.queue)
        return earlier.to(prototypes) @ prototypes.T

    # What it is worth

    @cached_property
    def _labelled(self):
        generator = torch.Generator().manual_seed(7)
        labels = torch.arange(BANK + ASKED) % len(SHAPES)
        size = self.config.size
        pictures = torch.stack([make_picture(int(label), size, generator) for label in labels])
        return functional.interpolate(pictures, self.config.large, mode="bilinear", antialias=True), labels

    def evaluate(self, model):
        """Two probes of the features, on pictures that nobody trains on: nearest neighbours, and a linear one."""
        _, _, right, linear = self._probed(model)
        return {"knn_right": right, "linear_right": linear, "evaluation_loss": 1.0 - right}

    def _probed(self, model):
        device = next(model.parameters()).device
        pictures, labels = self._labelled
        trunk = torch.cat([trunk_of(model)(part.to(device)).float().cpu() for part in pictures.split(64)])
        features = functional.normalize(trunk, dim=1)
        nearest = (features[BANK:] @ features[:BANK].T).topk(NEIGHBOURS).indices
        votes = functional.one_hot(labels[nearest], len(SHAPES)).sum(1).argmax(1)
        right = (votes == labels[BANK:]).float().mean().item()
        return votes, labels[BANK:], right, linear_probe(trunk, labels)

    def preview(self, model):
        """What pictures show, and what their nearest neighbours do."""
        votes, labels, _, _ = self._probed(model)
        rows = []
        for shape, name in enumerate(SHAPES):
            seen = votes[labels == shape]
            rows.append(f"{name:9}" + " ".join(f"{int((seen == other).sum()):4d}" for other in range(len(SHAPES))))
        return "\n".join(
            ["rows: shown, columns: seen by nearest neighbours", " " * 9 + " ".join(s[:4] for s in SHAPES), *rows]
        )


def linear_probe(features, labels, decay=1.0):
    """A linear classifier by ridge regression on standardised features: exact, and the same every time."""
    bank, asked = features[:BANK].double(), features[BANK:].double()
    mean, deviation = bank.mean(0), bank.std(0).clamp(min=1e-6)
    bank, asked = ((part - mean) / deviation for part in (bank, asked))
    targets = functional.one_hot(labels[:BANK], len(SHAPES)).double() - 1 / len(SHAPES)
    weights = torch.linalg.solve(
        bank.T @ bank + decay * len(bank) ** 0.5 * torch.eye(bank.shape[1]).double(), bank.T @ targets
    )
    return ((asked @ weights).argmax(1) == labels[BANK:]).float().mean().item()


def sinkhorn(scores, epsilon, iterations):
    """Assignments of samples (rows) to prototypes (columns): each sample's add up to 1, all prototypes get as much."""
    weights = torch.exp((scores - scores.max()) / epsilon).T
    weights /= weights.sum()
    num_prototypes, num_samples = weights.shape
    for _ in range(iterations):
        weights /= weights.sum(1, keepdim=True).clamp(min=1e-30) * num_prototypes
        weights /= weights.sum(0, keepdim=True).clamp(min=1e-30) * num_samples
    return (weights * num_samples).T


class Queue:
    """Features of the last samples of this peer, for each of the two large crops. It is no part of the run's state."""

    def __init__(self, length, width):
        self._length, self._width = length, width
        self._kept = [torch.empty(0, width), torch.empty(0, width)]

    def exchange(self, view, features, *, is_on):
        """Add these features, and return those before them if there are enough; nothing while it is off."""
        if not is_on or not self._length:
            self._kept[view] = torch.empty(0, self._width)
            return torch.empty(0, self._width)
        before = self._kept[view]
        self._kept[view] = torch.cat([features.detach().cpu(), before])[: self._length]
        return before if len(before) == self._length else torch.empty(0, self._width)


def prototypes_of(model):
    return getattr(model, "module", model).prototypes


def trunk_of(model):
    return getattr(model, "module", model).trunk


# The network: a ResNet, and two layers on top of it


class Network(nn.Module):
    """Pictures in, features of length 1 out."""

    def __init__(self, config):
        super().__init__()
        self.trunk = ResNet(config)
        inputs = self.trunk.outputs
        self.projection = nn.Sequential(
            nn.Linear(inputs, config.hidden),
            nn.BatchNorm1d(config.hidden) if config.norm == "batch" else nn.LayerNorm(config.hidden),
            nn.ReLU(),
            nn.Linear(config.hidden, config.features),
        )
        self.prototypes = nn.Parameter(functional.normalize(torch.randn(config.prototypes, config.features), dim=1))

    def forward(self, pictures):
        return functional.normalize(self.projection(self.trunk(pictures)), dim=1)


class ResNet(nn.Module):
    """Stages of blocks with shortcuts, each at half the size and twice the width of the one before."""

    def __init__(self, config):
        super().__init__()
        width, expansion = config.width, 4 if config.is_bottleneck else 1
        is_big = config.large >= 96
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7 if is_big else 3, stride=2 if is_big else 1, padding=3 if is_big else 1, bias=False),
            norm(config, width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1) if is_big else nn.Identity(),
        )
        blocks, inputs = [], width
        for stage, depth in enumerate(config.depths):
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(Block(config, inputs, width * 2**stage, expansion, stride))
                inputs = width * 2**stage * expansion
        self.blocks = nn.Sequential(*blocks)
        self.outputs = inputs

    def forward(self, pictures):
        return self.blocks(self.stem(pictures * 2 - 1)).mean((2, 3))


class Block(nn.Module):
    """Two convolutions, or three of which the outer ones are narrow, and a shortcut around them."""

    def __init__(self, config, inputs, width, expansion, stride):
        super().__init__()
        outputs = width * expansion
        if expansion > 1:
            plan = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        else:
            plan = [(inputs, width, 3, stride), (width, outputs, 3, 1)]
        layers = []
        for number, (from_, to, kernel, step) in enumerate(plan):
            layers += [nn.Conv2d(from_, to, kernel, step, kernel // 2, bias=False), norm(config, to)]
            layers += [nn.ReLU()] if number < len(plan) - 1 else []
        self.layers = nn.Sequential(*layers)
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(config, outputs))

    def forward(self, x):
        return functional.relu(self.layers(x) + self.shortcut(x))


def norm(config, width):
    return nn.BatchNorm2d(width) if config.norm == "batch" else nn.GroupNorm(max(1, width // 16), width)


# Pictures


def crop(picture, size, share, generator):
    """A part of the picture with such a share of its area, scaled, perhaps mirrored, in other colours."""
    draw = torch.rand(9, generator=generator).tolist()
    side = math.sqrt(share[0] + (share[1] - share[0]) * draw[0])
    ratio = math.exp((draw[1] - 0.5) * 2 * math.log(4 / 3) / 2)
    wide, high = min(1.0, side * ratio), min(1.0, side / ratio)
    left, top = draw[2] * (1 - wide), draw[3] * (1 - high)
    height, width = picture.shape[1:]
    y, x = int(top * height), int(left * width)
    part = picture[:, y : y + max(4, int(high * height)), x : x + max(4, int(wide * width))]
    out = functional.interpolate(part[None], (size, size), mode="bilinear", antialias=True)[0]
    out = out.flip(-1) if draw[4] < 0.5 else out
    if draw[5] < 0.2:
        out = out.mean(0, keepdim=True).expand(3, -1, -1)
    elif draw[5] < 0.9:
        out = out[torch.randperm(3, generator=generator)] if draw[6] < 0.5 else out
        out = (out - 0.5) * (0.6 + 0.8 * draw[7]) + 0.5 + (draw[8] - 0.5) * 0.4
    return out.clamp(0, 1)


def make_picture(shape, size, generator):
    """One of the shapes, of any size, place and turn, on a darker background with a slope and noise."""
    draw = torch.rand(6, generator=generator).tolist()
    colours = torch.rand(3, 3, 1, 1, generator=generator)
    line = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(line, line, indexing="ij")
    ground = colours[0] * 0.3 + (colours[1] - 0.5) * 0.2 * (x * math.cos(6.3 * draw[0]) + y * math.sin(6.3 * draw[0]))
    angle, scale = (draw[1] - 0.5) * 0.8, 0.45 + 0.3 * draw[2]
    x, y = (x - 0.4 * (draw[3] - 0.5)) / scale, (y - 0.4 * (draw[4] - 0.5)) / scale
    x, y = x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)
    far, box = (x * x + y * y).sqrt(), torch.maximum(x.abs(), y.abs())
    inside = {
        "disc": far < 0.9,
        "ring": (far < 1.0) & (far > 0.6),
        "square": box < 0.8,
        "frame": (box < 0.9) & (box > 0.55),
        "triangle": (y < 0.8) & (y > 2 * x.abs() - 0.9),
        "cross": (torch.minimum(x.abs(), y.abs()) < 0.25) & (box < 1.0),
        "bars": (torch.sin(x * 9) > 0) & (box < 0.95),
        "dots": (torch.sin(x * 8) * torch.sin(y * 8) > 0.3) & (box < 0.95),
    }[SHAPES[shape]]
    front = 0.65 + 0.35 * colours[2]
    picture = torch.where(inside, front, ground) + 0.05 * torch.randn(3, size, size, generator=generator)
    return picture.clamp(0, 1)
