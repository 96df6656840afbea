"""A tokenizer by its name, by a file, or trained from the data once: byte-level BPE, so that no text is unknown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from potluck.errors import ConfigurationError

TRAINED_FILE = "tokenizer.json"
END, MASK, PAD = "<|endoftext|>", "<|mask|>", "<|pad|>"
ENDS = (END, "</s>", "<eos>", "[SEP]", "<|end_of_text|>")
MASKS = (MASK, "[MASK]", "<mask>")


def train(texts: Iterator[str], vocabulary: int, path: Path) -> None:
    """Learn a vocabulary from these texts, and write it down."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END, MASK, PAD], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    part = path.with_name(f"{path.name}.part")
    tokenizer.save(str(part))
    part.replace(path)


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
            found.pad_token = PAD if PAD in known else found.eos_token
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"tokenizer={named!r} cannot be loaded: {error}") from error
    if found.eos_token_id is None and found.sep_token_id is None:
        raise ConfigurationError(f"tokenizer={named!r} has no token for the end of a text (one of {', '.join(ENDS)})")
    return found


def end_of(tokenizer: Any) -> int:
    """The token that ends a text."""
    return int(tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id)
