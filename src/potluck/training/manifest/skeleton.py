"""What `potluck init` writes: a run.toml that explains itself, and a recipe to start from."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from potluck.errors import ConfigurationError

RUN_FILE = "run.toml"
RECIPE_FILE = "recipe.py"
OWN = "own"

_RUN = """\
# A run of Potluck. Start it with `potluck host` in this folder. Settings that you leave out have defaults.
name = "{name}"

# What to train. Built in: stdlib-lm, digits, hf-causal-lm, hf-masked-lm, image-classifier. Or a file beside this one:
# the host serves it to all members.
recipe = "{recipe}"

seed = 0           # of the model's first values
end_epoch = 0      # the run ends after so many updates; 0: it trains until you stop it

[model]            # options of the recipe; see its Config
{model}

[data]             # options of the recipe that may change while the run trains; see its Data
{data}

[training]         # how peers work together
{training}

[optimizer]        # the learning rate, weight decay and betas may change while the run trains
name = "adamw"               # or adam, sgd, lamb, larc, muon
learning_rate = 1e-3
weight_decay = 0.01
max_grad_norm = 1.0

[schedule]         # may change while the run trains
kind = "constant"            # or inverse_sqrt; linear, cosine and warmup_stable_decay, which need total_epochs
warmup_epochs = 10

[exchange]
codec = "float16"            # how values are sent: float32, float16, bfloat16, uniform8, blockwise8, e3m0 …
aggregator = "mean"          # with strangers: median, trimmed_mean, centered_clipping …
reducers = "everybody"       # or trusted: only peers with a trusted invite average for others
weight_cap = 16              # a peer counts for at most so many times what others give, unless it is trusted; 0: no cap

[evaluation]       # on held-out data
every_epochs = {evaluation}
gate = false                 # true: an epoch is rolled back if its held-out loss leaves the band of earlier ones

# [patience]       # how long peers wait when no bytes move; slow lines get the time that they need
# round_seconds = 120          # after this a round has failed, and is tried again
# load_seconds = 600           # after this a load of the run's state has failed
# slowest_line = 32768         # bytes per second: a round's deadline has room for lines as slow as this …
# most_round_minutes = 60      # … up to here

# [groups]         # for programs: groups beside main. With this table, other names are refused
# critic = "all"               # any member may join; "invited": members whose invite names it (invite --group critic)

# A curriculum: planned stages. Each changes the settings that it names, from its epoch on, for all peers: data,
# learning rate, schedule, target_batch_size. `potluck run show` lists the names. There may be any number of stages.
# [[curriculum]]
# from_epoch = 1000
# learning_rate = 3e-4
# {stage}
"""

_RECIPE = '''\
"""What this run trains: a model, its data, its loss. Change all three; it runs as it is."""

import torch
from torch import nn
from torch.nn import functional

from potluck.recipes import Recipe, RecipeConfig


class Config(RecipeConfig, frozen=True, kw_only=True):
    """What [model] in run.toml may set."""

    width: int = 64


class Data(RecipeConfig, frozen=True, kw_only=True):
    """What [data] in run.toml may set, and change while the run trains."""

    noise: float = 0.05


class Waves(Recipe[Config]):
    """Learns a sum of waves from noisy samples of it."""

    Config = Config
    Data = Data
    num_shards = 64  # more than there will be peers: each trains on whole shards

    def model(self):
        width = self.config.width
        return nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def samples(self, shard, generator):
        """One pass over a shard, in random order: tuples of tensors, one for each sample."""
        for _ in range(1000):
            x = torch.rand(1, generator=generator) * 6 - 3
            noise = torch.randn(1, generator=generator) * self.data.noise
            yield x, self.truth(x) + noise

    def loss(self, model, batch):
        """The mean loss of a batch; what `samples` yields comes stacked."""
        x, y = batch
        return functional.mse_loss(model(x), y)

    def evaluate(self, model):
        """Figures on data that nobody trains on."""
        x = torch.linspace(-3, 3, 200).unsqueeze(1)
        return {"evaluation_loss": functional.mse_loss(model(x), self.truth(x)).item()}

    def preview(self, model):
        """What the model does now, for people to read."""
        x = torch.linspace(-3, 3, 7).unsqueeze(1)
        pairs = zip(x.flatten().tolist(), model(x).flatten().tolist(), self.truth(x).flatten().tolist(), strict=True)
        return "\\n".join(f"x={a:+.0f}  model {b:+.2f}  truth {c:+.2f}" for a, b, c in pairs)

    @staticmethod
    def truth(x):
        return torch.sin(2 * x) + 0.5 * torch.cos(5 * x)
'''

_SYNC = """\
algorithm = "sync"           # sync: one large batch of all peers' samples per update
target_batch_size = 256      # … of so many samples. It may change while the run trains.
# algorithm = "diloco"       # many local steps, then one exchange: for slow lines
# inner_steps = 100
# steps_by_speed = true      # slow peers take fewer steps, so that all are ready at the same time"""
_DILOCO = """\
algorithm = "diloco"         # many local steps, then one exchange: for lines at home
inner_steps = 50
outer_momentum = 0.5         # 0.9 for runs of hundreds of exchanges
# algorithm = "sync"         # one large batch of all peers' samples per update: for fast lines
# target_batch_size = 256"""
_TEXTS = """\
files = "{files}"    # beside this file: .txt, .jsonl or .parquet, by name or pattern; the host serves them
column = "text"              # of JSONL and parquet
# dataset = "USER/NAME"      # instead of files: a data set that volunteers stream
context = 0                  # tokens of a sample, up to the model's; 0: all of it"""

_PICTURES = 'folder = "{files}"         # with a subfolder for each class; or parquet = "pictures.parquet"'
_PICTURES_IN_PARQUET = 'parquet = "{files}"        # a picture and its label in each row; or folder = "pictures"'


def _language_model(architecture: str) -> str:
    return f"""\
architecture = "{architecture}"       # any of transformers; or base = "NAME" for a checkpoint's config
tokenizer = "train"          # trained once by this host, and served; or a name on the Hugging Face hub, or a .json file
vocabulary = 8192
context = 256                # tokens of a sample
held_out = 0.01              # the share of texts for evaluation

[model.config]               # fields of that architecture's config
hidden_size = 256
intermediate_size = 704
num_hidden_layers = 8
num_attention_heads = 8"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """What stands in the run.toml of one recipe."""

    model: str
    data: str = "# this recipe has none"
    stage: str = "target_batch_size = 1024"
    training: str = _SYNC
    evaluation: int = 0
    files: str = ""
    """The organiser's own data, as the recipe finds them unless told otherwise; empty: it needs none."""


_STARTS = {
    OWN: _Start(model="width = 64", data="noise = 0.05", stage="data.noise = 0.01"),
    "digits": _Start(model="width = 64"),
    "stdlib-lm": _Start(
        model="layers = 4\nwidth = 128\nheads = 4\ncontext = 128",
        data="context = 0        # bytes of a sample, up to the model's context; 0: all of it",
        stage="data.context = 128",
    ),
    "hf-causal-lm": _Start(
        model=_language_model("llama") + "\ntie_word_embeddings = true",
        data=_TEXTS,
        stage="data.context = 256",
        training=_DILOCO,
        evaluation=5,
        files="texts.jsonl",
    ),
    "hf-masked-lm": _Start(
        model=_language_model("bert"),
        data=_TEXTS,
        stage="data.context = 256",
        training=_DILOCO,
        evaluation=5,
        files="texts.jsonl",
    ),
    "image-classifier": _Start(
        model=f"{_PICTURES}\nsize = 32                    # pixels of a side\nwidth = 32\nstages = 3",
        evaluation=10,
        files="pictures",
    ),
}


def _pattern_of(folder: Path) -> str:
    """What names the texts in a folder: by the ending that most of its files have."""
    endings = Counter(path.suffix for path in folder.iterdir() if path.is_file() and path.suffix)
    if not endings:
        raise ConfigurationError(f"--data {folder}: there are no files in it, as texts.jsonl or *.txt")
    [(ending, _)] = endings.most_common(1)
    return f"{folder.name}/*{ending}"


def data_of_recipe(recipe: str) -> str:
    """What the organiser has to bring, by its usual name; empty where the recipe needs nothing."""
    return _start_of(recipe).files


def files_of_a_run(name: str, recipe: str, data: Path | None = None) -> dict[str, str]:
    """The files by name, for a recipe that is built in, or one's own. `data` are the organiser's own."""
    start, own = _start_of(recipe), recipe == OWN
    if data is not None and not start.files:
        raise ConfigurationError(f"the recipe {recipe} takes no data from you: leave out --data")
    words = {part: getattr(start, part) for part in ("model", "data", "stage", "training", "evaluation")}
    if data is not None and data.is_file():
        words["model"] = words["model"].replace(_PICTURES, _PICTURES_IN_PARQUET)
    takes_a_folder = _PICTURES in start.model
    place = start.files if data is None else data.name if takes_a_folder or data.is_file() else _pattern_of(data)
    words = {
        part: value.replace("{files}", place) if isinstance(value, str) else value for part, value in words.items()
    }
    files = {RUN_FILE: _RUN.format(name=name, recipe=RECIPE_FILE if own else recipe, **words)}
    if own:
        files[RECIPE_FILE] = _RECIPE
    return files


def copied(name: str, folder: Path) -> dict[str, str]:
    """The files of another run's folder, with another name: its run.toml and what lies beside it as text."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in (".toml", ".py", ".md") and path.is_file():
            files[path.name] = path.read_text(encoding="utf-8")
    files[RUN_FILE] = re.sub(r'(?m)^name = ".*"', f'name = "{name}"', files[RUN_FILE], count=1)
    return files


def _start_of(recipe: str) -> _Start:
    if recipe not in _STARTS:
        raise ConfigurationError(f"there is no recipe {recipe!r} to start from: choose one of {', '.join(_STARTS)}")
    return _STARTS[recipe]
