"""Text recovery from keyless reading: each place of a text has a column of candidate letters, one of which is right.

The letters of any text, without spaces, are hidden among others: a column holds the right letter and `noise` more. The
model reads all columns at once and says for each place which of its candidates it is. It can only go by the language.

The text is `text` under [model], or the docstrings of Python's standard library. The organiser's machine writes its
letters to letters.txt once; the host serves that file to volunteers.
"""

from functools import cached_property

import torch
from torch import nn
from torch.nn import functional

from potluck.errors import ConfigurationError
from potluck.recipes import Recipe, RecipeConfig
from potluck.recipes.docstrings import docstrings

LETTERS = 26
LETTERS_FILE = "letters.txt"
EVALUATION_SAMPLES = 128
PREVIEW_COLUMNS = 72
NEARBY = 7  # columns that the first layer sees together


class Config(RecipeConfig, frozen=True, kw_only=True):
    """The model and its text, under [model]."""

    text: str = ""  # a file beside run.toml, or a pattern; empty: the standard library's docstrings
    layers: int = 10
    width: int = 768
    heads: int = 16
    feed_forward: int = 3072
    length: int = 256  # letters of a sample
    shards: int = 64
    held_out: float = 0.05  # the end of the text
    evaluation_noise: int = 4  # wrong letters in each column of the held-out text: always the same, to compare

    def __post_init__(self):
        if self.width % self.heads or min(self.layers, self.length, self.shards, self.evaluation_noise) < 1:
            raise ConfigurationError(
                f"width={self.width}, heads={self.heads}, layers={self.layers}, length={self.length}: the width must "
                "be a multiple of the heads, the rest 1 or more"
            )


class Data(RecipeConfig, frozen=True, kw_only=True):
    """How many wrong letters a column has: from min_noise to max_noise. A curriculum raises both."""

    min_noise: int = 0
    max_noise: int = 4


class KeylessReading(Recipe[Config]):
    """Recovers a text from columns of letters."""

    Config = Config
    Data = Data
    is_light = True

    def __init__(self, config):
        self.num_shards = config.shards
        super().__init__(config)

    def check_data(self, data):
        if not 0 <= data.min_noise <= data.max_noise < LETTERS:
            raise ValueError(f"min_noise={data.min_noise}, max_noise={data.max_noise}: 0 to {LETTERS - 1}, in order")

    def prepare(self, folder):
        path = folder / LETTERS_FILE
        if not path.exists():
            files = sorted(folder.glob(self.config.text)) if self.config.text else []
            if self.config.text and not files:
                raise ConfigurationError(f"text={self.config.text!r}: {folder} has no such file")
            text = "".join(each.read_text(encoding="utf-8", errors="replace") for each in files) or "\n".join(
                docstrings()
            )
            path.write_text("".join(letter for letter in text.lower() if "a" <= letter <= "z"), encoding="ascii")
        return [LETTERS_FILE]

    @cached_property
    def _letters(self):
        text = torch.frombuffer(bytearray(self.file(LETTERS_FILE).read_bytes()), dtype=torch.uint8) - ord("a")
        least = self.config.length * (self.num_shards + 1)
        if len(text) * self.config.held_out < self.config.length * 2 or len(text) < least:
            raise ConfigurationError(f"text={self.config.text!r} has {len(text)} letters: take {4 * least} or more")
        return text

    @property
    def _num_trained(self):
        return int(len(self._letters) * (1 - self.config.held_out))

    def model(self):
        return Reader(self.config)

    def samples(self, shard, generator):
        """Windows of the shard's part of the text, in random order, each time among other letters."""
        length, total = self.config.length, self._num_trained
        first, last = total * shard // self.num_shards, total * (shard + 1) // self.num_shards
        offset = int(torch.randint(length, (1,), generator=generator))
        starts = torch.arange(first + offset, last - length, length)
        for start in starts[torch.randperm(len(starts), generator=generator)].tolist():
            letters = self._letters[start : start + length]
            noise = torch.randint(self.data.min_noise, self.data.max_noise + 1, (length,), generator=generator)
            yield letters, columns_around(letters, noise, generator)

    def loss(self, model, batch):
        letters, columns = batch
        return functional.cross_entropy(model(columns).reshape(-1, LETTERS), letters.long().reshape(-1))

    @cached_property
    def _held_out(self):
        length, generator = self.config.length, torch.Generator().manual_seed(0)
        starts = torch.linspace(self._num_trained, len(self._letters) - length, EVALUATION_SAMPLES).long().tolist()
        letters = torch.stack([self._letters[start : start + length] for start in starts])
        noise = torch.full(letters.shape, self.config.evaluation_noise)
        return letters, columns_around(letters, noise, generator)

    def evaluate(self, model):
        """The loss, and the share of letters that are right, on text that nobody trains on."""
        device = next(model.parameters()).device
        letters, columns = (part.to(device) for part in self._held_out)
        logits = model(columns)
        return {
            "evaluation_loss": functional.cross_entropy(logits.reshape(-1, LETTERS), letters.long().reshape(-1)).item(),
            "letters_right": (logits.argmax(-1) == letters).float().mean().item(),
        }

    def preview(self, model):
        """Columns of a text that nobody trains on, what is read from them, and the text."""
        device = next(model.parameters()).device
        letters, columns = (part[0].to(device) for part in self._held_out)
        read = model(columns.unsqueeze(0))[0].argmax(-1)
        shown = slice(0, min(PREVIEW_COLUMNS, self.config.length))
        candidates = [[chr(65 + n) for n in range(LETTERS) if int(column) >> n & 1] for column in columns[shown]]
        depth = max(map(len, candidates))
        rows = ["".join(column[row] if row < len(column) else " " for column in candidates) for row in range(depth)]
        was, now = ("".join(chr(65 + int(n)) for n in text[shown]) for text in (letters, read))
        wrong = "".join(" " if a == b else "^" for a, b in zip(was, now, strict=True))
        return "\n".join(["columns:", *rows, "", "read:", now, wrong, "text:", was])


def columns_around(letters, noise, generator):
    """Columns as sets of letters, one bit for each: the right one, and so many others drawn at random."""
    draws = torch.rand(*letters.shape, LETTERS, generator=generator)
    draws.scatter_(-1, letters.long().unsqueeze(-1), 2.0)  # the right letter is always among the highest
    least = draws.sort(-1, descending=True).values.gather(-1, noise.unsqueeze(-1))
    bits = 1 << torch.arange(LETTERS)
    return ((draws >= least) * bits).sum(-1).int()


class Reader(nn.Module):
    """Columns in, the odds of each letter out; letters that are no candidates have none."""

    def __init__(self, config):
        super().__init__()
        self.columns = nn.Linear(LETTERS, config.width)
        self.nearby = nn.Conv1d(config.width, config.width, NEARBY, padding=NEARBY // 2)  # pairs and triples come first
        self.places = nn.Parameter(torch.randn(config.length, config.width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            config.width, config.heads, config.feed_forward, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        for parameter in self.layers.parameters():  # all layers are copies of one: each gets values of its own
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        self.head = nn.Sequential(nn.LayerNorm(config.width), nn.Linear(config.width, LETTERS))

    def forward(self, columns):
        is_candidate = columns.unsqueeze(-1) >> torch.arange(LETTERS, device=columns.device) & 1
        inputs = is_candidate / is_candidate.sum(-1, keepdim=True)
        hidden = functional.gelu(self.columns(inputs.to(self.places.dtype) * LETTERS**0.5))
        hidden = hidden + functional.gelu(self.nearby(hidden.transpose(1, 2))).transpose(1, 2)
        hidden = self.layers(hidden + self.places[: columns.shape[1]])
        return self.head(hidden).masked_fill(is_candidate == 0, -1e4)
