"""What language models read: mixtures of sources, sentence order, tokens made once, normalisers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.errors import ConfigurationError
from potluck.recipes.catalogue import open_recipe, refer_to
from potluck.recipes.huggingface import tokenfiles
from potluck.recipes.huggingface.mixture import Source, mixed, parse_sources
from potluck.recipes.huggingface.normalising import normaliser
from potluck.recipes.huggingface.sentenceorder import pairs, split_sentences
from potluck.recipes.recipe import data_of
from potluck.recipes.shipped import folder_files

START, BETWEEN, PAD = 1, 2, 0


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_sources_are_read_with_their_weights() -> None:
    assert parse_sources(" 0.7 wiki/*.txt; .3 hf://user/name@bn ") == [
        Source(weight=0.7, files="wiki/*.txt"),
        Source(weight=0.3, dataset="user/name", subset="bn"),
    ]
    for wrong in ("wiki.txt", "0 wiki.txt", "0.7wiki.txt", "-1 wiki.txt"):
        with pytest.raises(ConfigurationError, match="write a weight above 0"):
            parse_sources(wrong)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_every_item_of_every_source_comes_at_least_once(sizes: list[int], seed: int) -> None:
    sources = [
        (0.5 + number, lambda number=number, size=size: iter([(number, item) for item in range(size)]))
        for number, size in enumerate(sizes)
    ]
    found = set(mixed(sources, seeded(seed)))
    assert found == {(number, item) for number, size in enumerate(sizes) for item in range(size)}


def test_weights_hold_although_one_source_is_small() -> None:
    sources = [(0.25, lambda: iter(["small"] * 10)), (0.75, lambda: iter(["large"] * 3000))]
    found = Counter(mixed(sources, seeded()))
    assert found["large"] >= 3000
    assert 0.22 < found["small"] / found.total() < 0.28


def test_sentences_end_at_full_stops_and_dandas() -> None:
    assert split_sentences("One. Two? “Three!” Four") == ["One.", "Two?", "“Three!", "Four"]
    assert split_sentences("নদী বয়ে যায়। পাখি ওড়ে।") == ["নদী বয়ে যায়।", "পাখি ওড়ে।"]
    assert split_sentences(" \n\n ") == []


@given(
    st.lists(st.lists(st.lists(st.integers(10, 99), min_size=1, max_size=30), max_size=6), max_size=5),
    st.integers(16, 64),
    st.integers(0, 1000),
)
@settings(deadline=None, max_examples=60)
def test_a_pair_is_two_segments_that_follow_each_other(documents: list, length: int, seed: int) -> None:
    """Put in order again, a pair is a stretch of its text; marks say what is text, what is second, what is there."""
    flat = [[token for sentence in document for token in sentence] for document in documents]
    made = pairs(documents, start=START, between=BETWEEN, pad=PAD, length=length, generator=seeded(seed))
    for tokens, is_text, is_second, is_there, order in made:
        row = tokens[is_there].tolist()
        assert len(tokens) == length
        assert row[0] == START
        assert row[-1] == BETWEEN
        assert (tokens[~is_there] == PAD).all()
        second = tokens[is_second.bool() & is_text].tolist()
        first = tokens[is_text & ~is_second.bool()].tolist()
        stretch = second + first if order else first + second
        assert any(stretch == text[at : at + len(stretch)] for text in flat for at in range(len(text)))
        assert int(is_text.sum()) == len(row) - 3


def test_swapped_and_unswapped_pairs_are_as_many() -> None:
    documents = [[[number] * 5, [number + 1] * 5] for number in range(10, 410)]
    made = list(pairs(documents, start=START, between=BETWEEN, pad=PAD, length=16, generator=seeded()))
    assert len(made) == 400
    assert 150 < sum(int(sample[-1]) for sample in made) < 250


def test_the_bengali_normaliser_has_one_form_for_each_letter() -> None:
    made = normaliser("bengali")
    assert made.normalize_str("\u09a1\u09bc") == made.normalize_str("\u09dc")  # ড়
    assert made.normalize_str("\u0995\u09c7\u09be") == "\u0995\u09cb"  # কো
    assert made.normalize_str("যায় | \u200bকি  না") == made.normalize_str("যায়। কি না")
    assert "\u09be" in made.normalize_str("আকা"), "vowel signs are no accents to strip"
    assert "\u200d" in made.normalize_str("র\u200d্যাব"), "joiners change how a conjunct is read"
    with pytest.raises(ConfigurationError, match="choose one of"):
        normaliser("latin")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, word in (("wiki", "নদী"), ("news", "খবর")):
        lines = [json.dumps({"text": f"{word} {n} আসে যায় বহুদূর। আজ {word} {n} ভালো আছে।"}) for n in range(200)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def albert(folder: Path, *, tokenized: bool = False):
    options = {"architecture": "albert", "pieces": "unigram", "normaliser": "bengali", "vocabulary": 300, "context": 24}
    sizes = {"embedding_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    options |= {"shards": 4, "held_out": 0.1, "config": {**sizes, "intermediate_size": 16}}
    recipe = open_recipe(refer_to("hf-albert", folder), options, None, folder_files(folder))
    data = {"sources": "0.2 wiki.jsonl; 0.8 news.jsonl", "shuffle_buffer": 8, "tokenized": tokenized}
    recipe.data = data_of(recipe, data)
    return recipe


def documents(recipe, *, held_out: bool) -> list:
    found = [open_() for shard in range(4) for _weight, open_ in recipe._openers(shard, held_out=held_out)]
    return sorted(document for stream in found for document in stream)


def test_albert_learns_both_tasks_from_a_mixture_and_from_tokens_made_once(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="potluck tokenize"):
        albert(folder, tokenized=True).prepare(folder)
    told: list[tuple[int, int, int]] = []
    num_tokens = albert(folder).tokenize(folder, lambda *each: told.append(each))
    assert told[-1] == (8, 8, num_tokens)
    assert [done for done, _, _ in told] == list(range(1, 9))
    read = albert(folder, tokenized=True)
    shipped = {tokenfiles.name_of(0), tokenfiles.name_of(1), "tokenizer.json"}
    assert set(read.prepare(folder)) == shipped, "texts themselves stay with the organiser"
    streamed = albert(folder)
    assert set(streamed.prepare(folder)) == {"wiki.jsonl", "news.jsonl", "tokenizer.json"}
    assert streamed.tokenizer.unk_token_id not in streamed.tokenizer("নদী আসে যায়")["input_ids"]
    for held_out in (False, True):
        assert documents(streamed, held_out=held_out) == documents(read, held_out=held_out) != []
    model = read.model()
    batch = read.collate(list(read.samples(0, seeded()))[:16])
    before = read.evaluate(model.eval())
    assert set(before) == {"evaluation_loss", "masked_loss", "order_right"}
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        loss = read.loss(model, batch)
        loss.backward()
        optimizer.step()
    assert loss.item() < before["evaluation_loss"] * 0.8
    with torch.no_grad():
        assert "guessed" in read.preview(model.eval())
