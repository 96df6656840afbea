"""A tokenizer by its name, by a file, or trained from the data once.

bpe: byte-level pairs, so that no text is unknown. unigram: pieces of words by their odds, as in ALBERT.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from potluck.errors import ConfigurationError
from potluck.recipes.huggingface.normalising import normaliser

TRAINED_FILE = "tokenizer.json"
END, MASK, PAD = "<|endoftext|>", "<|mask|>", "<|pad|>"
ENDS = (END, "</s>", "<eos>", "[SEP]", "<|end_of_text|>")
MASKS = (MASK, "[MASK]", "<mask>")
UNKNOWN = "<unk>"
ALBERT_TOKENS = ["<pad>", UNKNOWN, "[CLS]", "[SEP]", "[MASK]"]
PADS = (PAD, "<pad>", "[PAD]")


def train(texts: Iterator[str], vocabulary: int, path: Path, pieces: str = "bpe", normalised: str = "") -> None:
    """Learn a vocabulary from these texts, and write it down."""
    tokenizer = _unigram(texts, vocabulary, normalised) if pieces == "unigram" else _bpe(texts, vocabulary, normalised)
    part = path.with_name(f"{path.name}.part")
    tokenizer.save(str(part))
    part.replace(path)


def _bpe(texts: Iterator[str], vocabulary: int, normalised: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    _normalise(tokenizer, normalised)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END, MASK, PAD], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _unigram(texts: Iterator[str], vocabulary: int, normalised: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    _normalise(tokenizer, normalised)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocabulary, special_tokens=ALBERT_TOKENS, unk_token=UNKNOWN, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _normalise(tokenizer: Any, name: str) -> None:
    if (found := normaliser(name)) is not None:
        tokenizer.normalizer = found


def load(named: str, file: Path | None) -> Any:
    """The tokenizer, as transformers has it; ConfigurationError where there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if file is None:
            found = AutoTokenizer.from_pretrained(named)
        else:
            found = PreTrainedTokenizerFast(tokenizer_file=str(file))  # type: ignore[no-untyped-call]
            known = found.get_vocab()
            found.eos_token = next((token for token in ENDS if token in known), None)
            found.mask_token = next((token for token in MASKS if token in known), None)
            found.pad_token = next((token for token in PADS if token in known), found.eos_token)
            found.unk_token = UNKNOWN if UNKNOWN in known else None
            found.cls_token = "[CLS]" if "[CLS]" in known else None
            found.sep_token = "[SEP]" if "[SEP]" in known else None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"tokenizer={named!r} cannot be loaded: {error}") from error
    if found.eos_token_id is None and found.sep_token_id is None:
        raise ConfigurationError(f"tokenizer={named!r} has no token for the end of a text (one of {', '.join(ENDS)})")
    return found


def end_of(tokenizer: Any) -> int:
    """The token that ends a text."""
    return int(tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id)


def start_of(tokenizer: Any) -> int:
    """The token that a pair of segments begins with."""
    return int(tokenizer.cls_token_id if tokenizer.cls_token_id is not None else end_of(tokenizer))
