"""What `potluck init` writes: a run.toml that explains itself, and a recipe to start from."""

from __future__ import annotations

import re
from pathlib import Path

from potluck.errors import ConfigurationError

RUN_FILE = "run.toml"
RECIPE_FILE = "recipe.py"
OWN = "own"

_RUN = """\
# A run of Potluck. Start it with `potluck host` in this folder; everything else has a default.
name = "{name}"

# What to train: stdlib-lm or digits, which are built in, or a file beside this one. Whoever joins needs the same file.
recipe = "{recipe}"

seed = 0           # of the model's first values
end_epoch = 0      # the run is done after so many updates; 0: it goes on until you stop it

[model]            # options of the recipe; see its Config
{model}

[data]             # options of the recipe that may change while the run trains; see its Data
{data}

[training]         # how peers work together
algorithm = "sync"           # sync: one large batch of all peers' samples per update
target_batch_size = 256      # … of so many samples. May change while the run trains.
# algorithm = "diloco"       # many local steps, then one exchange: for slow lines
# inner_steps = 100
# steps_by_speed = true      # slow peers take fewer of them, so that all are ready at the same time

[optimizer]        # the learning rate, weight decay and betas may change while the run trains
name = "adamw"               # or adam, sgd
learning_rate = 1e-3
weight_decay = 0.01
max_grad_norm = 1.0

[schedule]         # may change while the run trains
kind = "constant"            # or linear, cosine, which need total_epochs
warmup_epochs = 10

[exchange]
codec = "float16"            # how values travel: float32, float16, bfloat16, uniform8, blockwise8, e3m0 …
aggregator = "mean"          # with strangers: median, trimmed_mean, centered_clipping …
reducers = "everybody"       # or trusted: only peers whose invite says so add up what others send
weight_cap = 16              # nobody but trusted peers counts for more than so many times what others give; 0: no cap

# [patience]       # how long is waited where nothing moves; a line that is only slow gets its time
# round_seconds = 120          # then a round has failed, and is tried again
# load_seconds = 600           # then loading the run's state has failed
# slowest_line = 32768         # bytes per second: a round's deadline has room for lines as slow as this …
# most_round_minutes = 60      # … up to here

# A curriculum: stages that are planned beforehand. Each changes what it names, from its epoch on, for all peers alike:
# data, learning rate, schedule, target_batch_size; names as `potluck run show` lists them. As many stages as you like.
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

_MODELS = {
    OWN: "width = 64",
    "digits": "width = 64",
    "stdlib-lm": "layers = 4\nwidth = 128\nheads = 4\ncontext = 128",
}
_DATA = {
    OWN: "noise = 0.05",
    "digits": "# this recipe has none",
    "stdlib-lm": "context = 0        # bytes of a sample, up to the model's context; 0: all of it",
}
_STAGES = {OWN: "data.noise = 0.01", "digits": "target_batch_size = 1024", "stdlib-lm": "data.context = 128"}


def files_of_a_run(name: str, recipe: str) -> dict[str, str]:
    """The files by name, for a recipe that is built in, or one's own."""
    if recipe not in _MODELS:
        raise ConfigurationError(f"there is no recipe {recipe!r} to start from: choose one of {', '.join(_MODELS)}")
    own = recipe == OWN
    words = {"model": _MODELS[recipe], "data": _DATA[recipe], "stage": _STAGES[recipe]}
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
