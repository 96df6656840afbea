"""Two segments of a text, in their order or swapped (pure): what a model tells apart beside guessing masked tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

from potluck.recipes.huggingface.tokenfiles import Document
from potluck.recipes.recipe import Sample

SPECIAL = 3  # tokens of a pair: at its start, between, and at its end
LEAST_TOKENS = 4  # of a segment
_END = re.compile(r"(?<=[.!?।॥…])[\"'”’)\]]*\s+|\n\s*\n")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text: a full stop, a danda or an empty line ends one. Simple, and the same everywhere."""
    return [part for part in (part.strip() for part in _END.split(text)) if part]


def pairs(
    documents: Iterable[Document], *, start: int, between: int, pad: int, length: int, generator: torch.Generator
) -> Iterator[Sample]:
    """Tokens, which of them are of the text, which of the second segment, which are there at all; 1 where swapped."""
    room = length - SPECIAL
    for document in documents:
        for sentences in _chunks(document, room):
            cut = _cut(sentences, generator)
            if cut is None:
                continue
            first, second = cut
            is_swapped = bool(torch.rand((), generator=generator) < 0.5)
            if is_swapped:
                first, second = second, first
            tokens = torch.full((length,), pad, dtype=torch.int32)
            used = [start, *first, between, *second, between]
            tokens[: len(used)] = torch.tensor(used, dtype=torch.int32)
            places = torch.arange(length)
            is_there = places < len(used)
            is_second = (places > len(first) + 1) & is_there
            is_text = is_there & (places > 0) & (places != len(first) + 1) & (places != len(used) - 1)
            yield tokens, is_text, is_second.to(torch.uint8), is_there, torch.tensor(int(is_swapped))


def _chunks(document: Document, room: int) -> Iterator[Document]:
    """Sentences that follow each other, as many as there is room for; a long one is cut."""
    chunk: Document = []
    used = 0
    for sentence in document:
        for begin in range(0, len(sentence), room):
            part = sentence[begin : begin + room]
            if used + len(part) > room:
                yield chunk
                chunk, used = [], 0
            chunk.append(part)
            used += len(part)
    if chunk:
        yield chunk


def _cut(sentences: Document, generator: torch.Generator) -> tuple[list[int], list[int]] | None:
    """Two segments, cut between sentences, or within where there is only one; None where that leaves too little."""
    if len(sentences) == 1:
        half = len(sentences[0]) // 2
        sentences = [sentences[0][:half], sentences[0][half:]]
    at = 1 + int(torch.randint(len(sentences) - 1, (), generator=generator))
    first, second = ([token for each in part for token in each] for part in (sentences[:at], sentences[at:]))
    return (first, second) if min(len(first), len(second)) >= LEAST_TOKENS else None
