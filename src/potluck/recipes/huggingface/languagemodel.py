"""What language models share: their options, their model, how they are evaluated, and how they are exported."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from potluck.errors import ConfigurationError
from potluck.recipes.huggingface import rows, tokenfiles, tokenizing
from potluck.recipes.huggingface.mixture import Source, mixed, parse_sources
from potluck.recipes.huggingface.packing import one_by_one, packed
from potluck.recipes.recipe import Batch, Recipe, RecipeConfig, Sample

TRAIN = "train"
EVALUATION_BATCH = 8
PREVIEW_TOKENS = 48
MOST_TRAINING_TEXTS = 200_000  # that a tokenizer is trained on
ENCODED_AT_ONCE = 64  # texts
TRAINING_SHARDS = 16  # … and which are looked at for that


class Config(RecipeConfig, frozen=True, kw_only=True):
    """The model and its tokenizer, under [model]."""

    base: str = ""  # a checkpoint's name on the Hugging Face hub, for its config; with `pretrained`, for its weights
    pretrained: bool = False
    architecture: str = "llama"  # as transformers names it, where there is no base
    config: dict[str, Any] = {}  # what that architecture's config has: hidden_size and so on, as [model.config]
    tokenizer: str = TRAIN  # a name on the hub, a .json file beside run.toml, or train: made once by the organiser
    vocabulary: int = 8192  # of a tokenizer that is trained,
    pieces: Literal["bpe", "unigram"] = "bpe"  # how its pieces are found,
    normaliser: str = ""  # and what makes texts alike before: nfc, bengali
    context: int = 256  # tokens of a sample
    packing: bool = True  # texts one after the other, no place wasted; false: a sample for each text
    shards: int = 256  # more than there will be peers
    held_out: float = 0.01  # the share of all texts that nobody trains on
    evaluation_samples: int = 64

    def __post_init__(self) -> None:
        if self.context < 2 or self.shards < 1 or self.evaluation_samples < 1 or self.vocabulary < 300:
            raise ConfigurationError(
                f"context={self.context}, shards={self.shards}, evaluation_samples={self.evaluation_samples}, "
                f"vocabulary={self.vocabulary}: at least 2, 1, 1 and 300"
            )
        if not 0.0 < self.held_out < 1.0:
            raise ConfigurationError(f"held_out={self.held_out}: take a share above 0 and below 1, as 0.01")
        if self.pretrained and not self.base:
            raise ConfigurationError("pretrained=true needs a base: the name of a checkpoint")
        if self.pretrained and self.tokenizer == TRAIN:
            raise ConfigurationError(
                f"tokenizer={TRAIN!r} makes tokens that the weights of {self.base!r} do not know: with pretrained=true "
                f"take tokenizer = {self.base!r}"
            )


class Data(RecipeConfig, frozen=True, kw_only=True):
    """Where texts come from, under [data]; all of it may change while the run trains."""

    files: str = ""  # beside run.toml: .txt, .jsonl or .parquet, by name or pattern; the host serves them
    dataset: str = ""  # or a data set that the datasets library loads
    sources: str = ""  # or several of both, with weights, as in "0.7 wiki/*.txt; 0.3 hf://USER/NAME@SUBSET"
    subset: str = ""
    split: str = "train"
    revision: str = ""  # a commit: names may come to mean something else
    streaming: bool = True  # false: downloaded whole, first
    column: str = "text"  # of JSONL, parquet and data sets
    context: int = 0  # tokens of a sample, up to the model's; 0: all of it
    shuffle_buffer: int = 1000  # texts
    tokenized: bool = False  # texts were made into tokens, by `potluck tokenize`: the host serves those

    def __post_init__(self) -> None:
        if self.files and not self.files.endswith(rows.SUFFIXES):
            raise ConfigurationError(f"files={self.files!r} must end in one of {', '.join(rows.SUFFIXES)}")
        for source in parse_sources(self.sources):
            if source.files and not source.files.endswith(rows.SUFFIXES):
                raise ConfigurationError(f"sources: {source.files!r} must end in one of {', '.join(rows.SUFFIXES)}")
        if self.shuffle_buffer < 1 or self.context < 0:
            raise ConfigurationError(f"shuffle_buffer={self.shuffle_buffer}, context={self.context}: 1 and 0 at least")

    def parsed(self) -> list[Source]:
        """Where texts come from, one or several."""
        return parse_sources(self.sources) or [Source(files=self.files, dataset=self.dataset, subset=self.subset)]


Options = Config  # within the recipe the name is taken


class LanguageModel(Recipe[Config]):
    """A model of transformers that guesses tokens."""

    Config = Config
    Data = Data
    requirements: tuple[str, ...] = ("transformers>=5",)  # and more, by the data
    auto_class = ""

    def __init__(self, config: Options) -> None:
        self.num_shards = config.shards
        super().__init__(config)

    def check_data(self, data: Any) -> None:
        """There are texts, and the model has places for as much of them."""
        if sum(map(bool, (data.files, data.dataset, data.sources))) != 1:
            raise ValueError(
                'which texts? Name files = "data/*.jsonl", dataset = "USER/NAME" or sources = "0.7 wiki/*.txt; …" '
                "under [data], one of them"
            )
        if data.context > self.config.context:
            raise ValueError(f"context={data.context}: at most {self.config.context}, the model's own")

    # Made once

    def prepare(self, folder: Path) -> Sequence[str]:
        """The tokenizer, trained unless it is there; and the files with the texts, or with their tokens."""
        sources = self.data.parsed()
        num_texts = 0 if self.data.tokenized else self._check_files(sources)
        self._prepare_tokenizer(folder, sources)
        needed = [source.files for source in sources if source.files]
        if self.data.tokenized:
            needed = [tokenfiles.name_of(number) for number in range(len(sources))]
            if missing := [name for name in needed if not (folder / name).exists()]:
                raise ConfigurationError(
                    f"tokenized=true, and {folder} has no {missing[0]}: `potluck tokenize {folder}` makes it"
                )
        if self._tokenizer_file_name:
            needed.append(self._tokenizer_file_name)
        if num_texts and all(source.files for source in sources):
            self._check_split(sources, num_texts)
        streams = any(source.dataset for source in sources) and not self.data.tokenized
        needs_datasets = streams or any(name.endswith(".parquet") for name in needed)
        self.requirements = ("transformers>=5", *(["datasets>=3.2"] if needs_datasets else []))
        return needed

    def _check_files(self, sources: Sequence[Source]) -> int:
        """How many texts local files have."""
        return sum(rows.check_files(self._local_files(each), self.data.column) for each in sources if each.files)

    def _check_split(self, sources: Sequence[Source], num_texts: int) -> None:
        """ConfigurationError where local texts make no sample to train on, or none to evaluate by."""
        held_out = sum(
            1
            for source in sources
            for shard in range(self.num_shards)
            for _ in self._texts(source, shard, held_out=True)
        )
        about = (
            f"held_out={self.config.held_out}: of {num_texts} texts, {held_out} are held out, and the others make no "
            if held_out == num_texts
            else f"held_out={self.config.held_out}: of {num_texts} texts, {held_out} are held out, which make no "
        )
        advice = (
            f"sample of {self.length} tokens. Take another share, a shorter context, more data, or cut long texts into "
            "several"
        )
        generator = torch.Generator().manual_seed(0)
        trained = (sample for shard in range(self.num_shards) for sample in self.samples(shard, generator))
        if held_out == num_texts or next(trained, None) is None or not self._evaluated():
            raise ConfigurationError(about + advice)

    def _prepare_tokenizer(self, folder: Path, sources: Sequence[Source]) -> None:
        if self.config.tokenizer != TRAIN:
            return
        path = folder / tokenizing.TRAINED_FILE
        if path.exists():
            if len(self.tokenizer) > self.config.vocabulary:
                raise ConfigurationError(
                    f"vocabulary={self.config.vocabulary}, and {path} has {len(self.tokenizer)} tokens: remove that "
                    "file, and it is made anew"
                )
            return
        each = MOST_TRAINING_TEXTS // len(sources)
        texts = chain.from_iterable(islice(self._training_texts(source), each) for source in sources)
        tokenizing.train(texts, self.config.vocabulary, path, self.config.pieces, self.config.normaliser)

    def _training_texts(self, source: Source) -> Iterator[str]:
        shards = range(min(TRAINING_SHARDS, self.num_shards)) if source.dataset else range(self.num_shards)
        return (text for shard in shards for text in self._texts(source, shard, held_out=False))

    def tokenize(self, folder: Path, progress: tokenfiles.Progress) -> int:
        """Write the tokens of all texts into the run's folder, a file for each source; how many they are."""
        sources, total = self.data.parsed(), 0
        self._prepare_tokenizer(folder, sources)
        for number, source in enumerate(sources):

            def tell(done: int, shards: int, tokens: int, before: int = total, number: int = number) -> None:
                progress(number * shards + done, len(sources) * shards, before + tokens)

            total += tokenfiles.write(
                folder / tokenfiles.name_of(number),
                partial(self._texts, source, held_out=None),
                self._encode_all,
                num_shards=self.num_shards,
                held_out=self.config.held_out,
                progress=tell,
            )
        return total

    # The model

    @cached_property
    def tokenizer(self) -> Any:
        """As transformers has it."""
        name = self._tokenizer_file_name
        return tokenizing.load(self.config.tokenizer, self.file(name) if name else None)

    @property
    def _tokenizer_file_name(self) -> str:
        named = self.config.tokenizer
        return tokenizing.TRAINED_FILE if named == TRAIN else named if named.endswith(".json") else ""

    def model(self) -> nn.Module:
        """As its config says, or with the weights of a checkpoint."""
        import transformers

        auto = getattr(transformers, self.auto_class)
        if self.config.pretrained:
            made = auto.from_pretrained(self.config.base, dtype=torch.float32, **self.config.config)
        else:
            made = auto.from_config(self._model_config())
        rows_of = made.get_input_embeddings().num_embeddings
        if len(self.tokenizer) > rows_of:
            raise ConfigurationError(
                f"tokenizer={self.config.tokenizer!r} has {len(self.tokenizer)} tokens, and the model knows {rows_of}: "
                "take the model's own tokenizer, or leave vocab_size out of [model.config]"
            )
        made.train()
        found: nn.Module = made
        return found

    def _model_config(self) -> Any:
        from transformers import AutoConfig

        tokenizer, options = self.tokenizer, dict(self.config.config)
        ids = {"eos_token_id": tokenizing.end_of(tokenizer), "bos_token_id": tokenizing.end_of(tokenizer)}
        ids["pad_token_id"] = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ids["eos_token_id"]
        options = {"vocab_size": len(tokenizer), **ids, **options}
        try:
            if self.config.base:
                made = AutoConfig.from_pretrained(self.config.base, **options)
            else:
                made = AutoConfig.for_model(self.config.architecture, **options)
        except (OSError, ValueError, TypeError) as error:
            what = self.config.base or self.config.architecture
            raise ConfigurationError(f"[model] transformers makes no config of {what!r}: {error}") from error
        places = getattr(made, "max_position_embeddings", None)
        if isinstance(places, int) and 0 < places < self.config.context:
            if "max_position_embeddings" in options or "n_positions" in options:
                raise ConfigurationError(
                    f"context={self.config.context}: the model has places for {places} tokens. Take a shorter context, "
                    "or set max_position_embeddings under [model.config]"
                )
            made.max_position_embeddings = self.config.context
        return made

    # Data

    @property
    def length(self) -> int:
        """Tokens of a sample now."""
        return self.data.context or self.config.context

    def _texts(self, source: Source, shard: int, *, held_out: bool | None) -> Iterator[str]:
        """Texts of a shard of one source: those held out, the others, or (None) all."""
        data, share = self.data, self.config.held_out
        if source.dataset:
            found = rows.dataset_rows(
                source.dataset,
                data.column,
                shard,
                self.num_shards,
                subset=source.subset,
                split=data.split,
                revision=data.revision,
                streaming=data.streaming,
            )
        else:
            found = rows.local_rows(self._local_files(source), data.column, shard, self.num_shards)
        return (text for text in found if text.strip() and held_out in (None, rows.is_held_out(text, share)))

    def _local_files(self, source: Source) -> list[Path]:
        files = self.files.matching(source.files)
        if not files:
            raise ConfigurationError(f"files={source.files!r}: the run has no such file")
        return files

    def sentences_of(self, text: str) -> list[str]:
        """The parts of a text that become tokens one by one: the whole, unless a model is to tell sentences apart."""
        return [text]

    def _encode_all(self, texts: Sequence[str]) -> list[tokenfiles.Document]:
        parts = [self.sentences_of(text) for text in texts]
        flat = [part for each in parts for part in each]
        encoded = iter(self.tokenizer(flat, add_special_tokens=False, verbose=False)["input_ids"] if flat else [])
        return [[next(encoded) for _ in each] for each in parts]

    def _documents(self, number: int, source: Source, shard: int, *, held_out: bool) -> Iterator[tokenfiles.Document]:
        """The same as tokens, read or made."""
        if self.data.tokenized:
            yield from tokenfiles.read(self.file(tokenfiles.name_of(number)), shard, self.num_shards, held_out=held_out)
            return
        texts = self._texts(source, shard, held_out=held_out)
        while some := list(islice(texts, ENCODED_AT_ONCE)):
            yield from self._encode_all(some)

    def _openers(
        self, shard: int, *, held_out: bool
    ) -> list[tuple[float, Callable[[], Iterator[tokenfiles.Document]]]]:
        return [
            (source.weight, partial(self._documents, number, source, shard, held_out=held_out))
            for number, source in enumerate(self.data.parsed())
        ]

    def blocks_of(self, documents: Iterator[tokenfiles.Document], generator: torch.Generator) -> Iterator[Sample]:
        """Samples before anything is masked."""
        end = tokenizing.end_of(self.tokenizer)
        whole = ([token for sentence in document for token in sentence] for document in documents)
        if self.config.packing:
            return ((block,) for block in packed(whole, end, self.length))
        return one_by_one(whole, end, self.length)

    def samples(self, shard: int, generator: torch.Generator) -> Iterator[Sample]:
        """Blocks of tokens of texts in another order; sources mixed by their weights."""
        documents = mixed(self._openers(shard, held_out=False), generator)
        for block in self.blocks_of(rows.shuffled(documents, self.data.shuffle_buffer, generator), generator):
            yield self.masked(block, generator)

    @abstractmethod
    def masked(self, block: Sample, generator: torch.Generator) -> Sample:
        """A block as the model learns from it: tokens, and where they differ, what it should guess."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy, in nats per token."""
        tokens = batch[0].long()
        targets = batch[1].long() if len(batch) > 1 else tokens
        loss: Tensor = model(input_ids=tokens, labels=targets).loss
        return loss

    # Evaluation

    def _evaluated(self) -> list[Sample]:
        generator = torch.Generator().manual_seed(0)
        documents = chain.from_iterable(
            mixed(self._openers(shard, held_out=True), generator) for shard in range(self.num_shards)
        )
        blocks = islice(self.blocks_of(documents, generator), self.config.evaluation_samples)
        return [self.masked(block, generator) for block in blocks]

    @cached_property
    def _held_out(self) -> list[Sample]:
        found = self._evaluated()
        if not found:
            raise ConfigurationError(
                f"held_out={self.config.held_out}: the texts held out make no sample of {self.length} tokens. Take a "
                "larger share, a shorter context, or more data"
            )
        return found

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """The loss on texts that nobody trains on."""
        return self.evaluate_part(model, 0, 1)[0]

    def evaluate_part(self, model: nn.Module, part: int, num_parts: int) -> tuple[Mapping[str, float], int]:
        """The same, on every so many-th of the samples."""
        device, samples = next(model.parameters()).device, self._held_out[part::num_parts]
        total = 0.0
        for start in range(0, len(samples), EVALUATION_BATCH):
            some = samples[start : start + EVALUATION_BATCH]
            batch = tuple(tensor.to(device) for tensor in self.collate(some))
            total += self.loss(model, batch).item() * len(some)
        return ({"evaluation_loss": total / len(samples)} if samples else {}), len(samples)

    def export(self, model: nn.Module, folder: Path) -> None:
        """Config, weights and tokenizer, as `from_pretrained` loads them."""
        model.save_pretrained(folder)  # type: ignore[operator]
        self.tokenizer.save_pretrained(folder)
