"""The recipes for transformers' language models and for pictures, on small data made on the spot."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from potluck.errors import ConfigurationError
from potluck.recipes.catalogue import open_recipe, reopen
from potluck.recipes.huggingface.packing import IGNORED, one_by_one, packed
from potluck.recipes.huggingface.rows import is_held_out, local_rows, shuffled
from potluck.recipes.recipe import Recipe
from potluck.recipes.shipped import fetched_files, folder_files, keep_copies
from potluck.training.manifest.manifest import Manifest
from potluck.training.manifest.runfile import manifest_of, read_run_file
from potluck.training.manifest.skeleton import files_of_a_run
from potluck.training.trainer.trial import try_out

WORDS = ["flour", "water", "salt", "yeast", "oven", "bread", "dough", "knead", "rise", "bake", "butter", "crust"]


def sentences(count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return [f"{number}: " + " ".join(chance.choices(WORDS, k=20)) + "." for number in range(count)]


def write_texts(folder: Path, kind: str, count: int = 400) -> str:
    """Texts as a file of a kind; the name to call it by."""
    texts = sentences(count)
    if kind == "txt":
        for number in range(2):
            (folder / f"part{number}.txt").write_text("\n".join(texts[number::2]) + "\n")
        return "part*.txt"
    if kind == "jsonl":
        (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return "texts.jsonl"
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": texts}), folder / "texts.parquet", row_group_size=64)
    return "texts.parquet"


RUN = """
name = "bakery"
recipe = "{recipe}"
[model]
architecture = "{architecture}"
vocabulary = 400
context = 16
shards = 8
held_out = 0.1
[model.config]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
{more}
[data]
{data}
"""


def manifest_in(
    folder: Path, data: str, recipe: str = "hf-causal-lm", architecture: str = "llama", more: str = ""
) -> Manifest:
    (folder / "run.toml").write_text(RUN.format(recipe=recipe, architecture=architecture, data=data, more=more))
    return manifest_of(read_run_file(folder), folder)


def recipe_of(manifest: Manifest, folder: Path) -> Recipe[Any]:
    from potluck.recipes.recipe import data_of

    recipe = open_recipe(manifest.recipe, manifest.model, None, folder_files(folder))
    recipe.data = data_of(recipe, manifest.newest.data)
    return recipe


# Rows


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
@pytest.mark.parametrize("num_shards", [1, 7, 64])
def test_shards_of_local_files_have_every_text_once(tmp_path: Path, kind: str, num_shards: int) -> None:
    files = sorted(tmp_path.glob(write_texts(tmp_path, kind)))
    found = [text for shard in range(num_shards) for text in local_rows(files, "text", shard, num_shards)]
    lines = [line for text in found for line in text.splitlines()]
    assert sorted(lines) == sorted(sentences(400))


def test_a_text_is_held_out_by_its_content() -> None:
    texts = sentences(2000)
    held_out = {text for text in texts if is_held_out(text, 0.1)}
    assert 120 < len(held_out) < 280
    assert held_out == {text for text in reversed(texts) if is_held_out(text, 0.1)}


def test_texts_come_in_another_order_and_none_is_lost() -> None:
    texts = sentences(100)
    found = list(shuffled(texts, 30, torch.Generator().manual_seed(1)))
    assert found != texts
    assert sorted(found) == sorted(texts)
    assert found == list(shuffled(texts, 30, torch.Generator().manual_seed(1)))


def test_a_column_that_is_not_there_is_told(tmp_path: Path) -> None:
    for kind in ("jsonl", "parquet"):
        files = [tmp_path / write_texts(tmp_path, kind)]
        with pytest.raises(ConfigurationError, match="column='body'"):
            list(local_rows(files, "body", 0, 1))


# Packing


def test_texts_are_packed_without_a_gap() -> None:
    blocks = list(packed([[*b"ab"], [*b"c"], [*b"defg"]], 0, 4))
    assert torch.cat(blocks).tolist() == [97, 98, 0, 99, 0, 100, 101, 102]


def test_a_sample_for_each_text_is_filled_up() -> None:
    [(tokens, counts), *_] = list(one_by_one([[*b"ab"], [*b"defghi"]], 0, 4))
    assert (tokens.tolist(), counts.tolist()) == ([97, 98, 0, 0], [True, True, True, False])


# The recipes


@pytest.mark.parametrize(
    ("recipe", "architecture", "kind"),
    [
        ("hf-causal-lm", "llama", "txt"),
        ("hf-causal-lm", "gpt_neox", "parquet"),
        ("hf-masked-lm", "bert", "jsonl"),
    ],
)
def test_a_language_model_learns(tmp_path: Path, recipe: str, architecture: str, kind: str) -> None:
    manifest = manifest_in(tmp_path, f'files = "{write_texts(tmp_path, kind)}"', recipe, architecture)
    assert {file.name for file in manifest.files} >= {"tokenizer.json"}
    assert "transformers>=5" in manifest.requirements
    made = recipe_of(manifest, tmp_path)
    assert try_out(made, manifest)
    torch.manual_seed(0)
    model = made.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before = made.evaluate(model.eval())["evaluation_loss"]
    model.train()
    for number in range(2 * made.num_shards):
        samples = list(made.samples(number % made.num_shards, torch.Generator().manual_seed(number)))
        for start in range(0, len(samples), 32):
            optimizer.zero_grad()
            made.loss(model, made.collate(samples[start : start + 32])).backward()
            optimizer.step()
    with torch.no_grad():
        after = made.evaluate(model.eval())["evaluation_loss"]
        assert after < before - 0.3
        assert made.preview(model)


def test_a_volunteer_has_the_same_from_what_the_host_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTLUCK_DATA", str(tmp_path / "data"))
    organiser = tmp_path / "organiser"
    organiser.mkdir()
    manifest = manifest_in(organiser, f'files = "{write_texts(organiser, "jsonl")}"')
    keep_copies(organiser, manifest.files)  # where a volunteer's copies come to lie too
    here = recipe_of(manifest, organiser)
    there = open_recipe(manifest.recipe, manifest.model, None, manifest.files)
    there.data = here.data
    ours, theirs = (list(each.samples(3, torch.Generator().manual_seed(7))) for each in (here, there))
    assert len(ours) > 5
    assert all(torch.equal(a[0], b[0]) for a, b in zip(ours, theirs, strict=True))
    assert there.origin is not None
    assert reopen(there.origin).file("tokenizer.json") == fetched_files(manifest.files).path("tokenizer.json")


def test_nobody_trains_on_what_is_held_out(tmp_path: Path) -> None:
    made: Any = recipe_of(manifest_in(tmp_path, f'files = "{write_texts(tmp_path, "jsonl")}"'), tmp_path)
    trained = {
        text for shard in range(made.num_shards) for text in made._texts(made.data.parsed()[0], shard, held_out=False)
    }
    held_out = {
        text for shard in range(made.num_shards) for text in made._texts(made.data.parsed()[0], shard, held_out=True)
    }
    assert trained.isdisjoint(held_out)
    assert sorted(trained | held_out) == sorted(sentences(400))


def test_a_data_set_is_streamed_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for number in range(3):
        lines = [json.dumps({"text": text}) + "\n" for text in sentences(100, number)]
        (tmp_path / "set" / f"train-{number}.jsonl").write_text("".join(lines))
    elsewhere("check_streaming", tmp_path)


def elsewhere(check: str, folder: Path) -> None:
    """Check in a process of its own: the library leaves threads behind."""
    program = f"import test_huggingface_recipes as t, pathlib; t.{check}(pathlib.Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, check=True, timeout=100)


def check_streaming(folder: Path) -> None:
    """Every text is in one shard, whether a data set is streamed or loaded whole."""
    for streaming in ("true", "false"):
        manifest = manifest_in(folder, f'dataset = "{folder / "set"}"\nstreaming = {streaming}')
        assert "datasets>=3.2" in manifest.requirements
        made: Any = recipe_of(manifest, folder)
        found = [
            text
            for shard in range(made.num_shards)
            for out in (True, False)
            for text in made._texts(made.data.parsed()[0], shard, held_out=out)
        ]
        assert sorted(found) == sorted(text for number in range(3) for text in sentences(100, number))
    (folder / "pairs").mkdir()
    (folder / "pairs" / "train.jsonl").write_text(json.dumps({"text": {"en": "bread"}}) + "\n")
    made = recipe_of(manifest_in(folder, f'dataset = "{folder / "pairs"}"\nstreaming = true'), folder)
    with pytest.raises(ConfigurationError, match=r"column='text': in .*pairs it is a dict, not a text"):
        list(made._texts(made.data.parsed()[0], 0, held_out=None))


def test_masked_tokens_are_what_is_guessed(tmp_path: Path) -> None:
    made: Any = recipe_of(
        manifest_in(tmp_path, f'files = "{write_texts(tmp_path, "jsonl")}"', "hf-masked-lm", "bert"), tmp_path
    )
    shown, was = made.collate(list(made.samples(0, torch.Generator().manual_seed(0))))
    guessed = was != IGNORED
    assert 0.1 < guessed.float().mean() < 0.2
    assert (shown[guessed] == made.tokenizer.mask_token_id).float().mean() > 0.6


@pytest.mark.parametrize(
    ("data", "more", "words"),
    [
        ("", "", "which texts"),
        ('files = "no.txt"', "", "no such file"),
        ('files = "texts.doc"', "", "line .*must end in"),
        ('files = "../texts.txt"', "", "not in the run's folder"),
        ('files = "texts.jsonl"\ncontext = 99', "", "line .*context=99"),
        ('files = "texts.jsonl"\ncolum = "x"', "", "line .*colum"),
    ],
)
def test_what_cannot_be_is_told(tmp_path: Path, data: str, more: str, words: str) -> None:
    write_texts(tmp_path, "jsonl")
    with pytest.raises(ConfigurationError, match=words):
        manifest_in(tmp_path, data, more=more)


def write_lines(folder: Path, *lines: str) -> str:
    (folder / "texts.jsonl").write_text("".join(line + "\n" for line in lines))
    return 'files = "texts.jsonl"'


GOOD = [json.dumps({"text": text}) for text in sentences(60)]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "no text in it"),
        (['{"text": ""}', '{"text": null}', ""], "no text in it"),
        ([*GOOD[:40], '{"text": "bre'], "line 41 of texts.jsonl"),
        ([*GOOD[:3], '{"body": "bread"}', *GOOD[3:]], "line 4 of texts.jsonl.*'text'"),
        ([*GOOD[:2], '["bread"]'], "line 3 of texts.jsonl"),
        ([*GOOD, '{"text": ["bread", "butter"]}'], "line 61 of texts.jsonl.*a list"),
        ([json.dumps({"text": "bread " * 500})], "line 9.*of 1 texts, . are held out"),
    ],
    ids=["empty", "nothing in it", "cut off", "no such field", "no object", "no text", "one document"],
)
def test_texts_that_cannot_be_used_are_told_with_their_line(tmp_path: Path, lines: list[str], words: str) -> None:
    data = write_lines(tmp_path, *lines)
    with pytest.raises(ConfigurationError, match=words):
        manifest_in(tmp_path, data)


def test_a_tokenizer_is_not_made_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        manifest_in(tmp_path, write_lines(tmp_path, ""))
    assert not (tmp_path / "tokenizer.json").exists(), "it would stay when there are texts"
    assert manifest_in(tmp_path, write_lines(tmp_path, *(json.dumps({"text": text}) for text in sentences(400))))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("vocab_size = 300", "tokens, and the model knows 300"),
        ("max_position_embeddings = 8", "context=16: the model has places for 8"),
    ],
)
def test_a_tokenizer_or_a_context_that_does_not_fit_the_model(tmp_path: Path, more: str, words: str) -> None:
    data = f'files = "{write_texts(tmp_path, "jsonl")}"'
    manifest = manifest_in(tmp_path, data, more=more)
    with pytest.raises(ConfigurationError, match=words):
        try_out(recipe_of(manifest, tmp_path), manifest)


def test_a_context_longer_than_is_usual_gets_its_places(tmp_path: Path) -> None:
    manifest = manifest_in(
        tmp_path, f'files = "{write_texts(tmp_path, "jsonl")}"', architecture="bert", recipe="hf-masked-lm"
    )
    longer = {**manifest.model, "context": 600}
    made: Any = open_recipe(manifest.recipe, longer, None, folder_files(tmp_path))
    assert made._model_config().max_position_embeddings == 600


def test_a_checkpoint_keeps_its_own_tokens(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'name = "x"\nrecipe = "hf-causal-lm"\n[model]\nbase = "gpt2"\npretrained = true\n[data]\nfiles = "a.txt"\n'
    )
    with pytest.raises(ConfigurationError, match="tokens that the weights of 'gpt2' do not know"):
        manifest_of(read_run_file(tmp_path), tmp_path)


@pytest.mark.parametrize(("recipe", "data"), [("hf-causal-lm", "texts"), ("hf-masked-lm", "bread.jsonl")])
def test_what_init_writes_trains_as_it_is(tmp_path: Path, recipe: str, data: str) -> None:
    place = tmp_path / data / "bread.jsonl" if data == "texts" else tmp_path / data
    place.parent.mkdir(exist_ok=True)
    place.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences(400)))
    for name, text in files_of_a_run("bakery", recipe, tmp_path / data).items():
        (tmp_path / name).write_text(text.replace("= 256 ", "= 16 ").replace("= 8\n", "= 2\n").replace("704", "64"))
    manifest = manifest_of(read_run_file(tmp_path), tmp_path)
    assert manifest.evaluation.every_epochs
    assert try_out(recipe_of(manifest, tmp_path), manifest)


def test_init_names_pictures_in_parquet_as_such_and_refuses_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "cats.parquet").write_bytes(b"")
    assert (
        'parquet = "cats.parquet"' in files_of_a_run("zoo", "image-classifier", tmp_path / "cats.parquet")["run.toml"]
    )
    assert f'folder = "{tmp_path.name}"' in files_of_a_run("zoo", "image-classifier", tmp_path)["run.toml"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="no files in it"):
        files_of_a_run("zoo", "hf-causal-lm", tmp_path / "empty")


def test_a_parquet_column_without_texts_is_named(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": [{"en": "bread"}]}), tmp_path / "t.parquet")
    with pytest.raises(ConfigurationError, match=r"column='text': in t.parquet it is a dict, not a text"):
        list(local_rows([tmp_path / "t.parquet"], "text", 0, 1))


def test_an_export_is_loaded_strictly_with_tied_weights(tmp_path: Path) -> None:
    elsewhere("check_export", tmp_path)


def check_export(folder: Path) -> None:
    """What is exported is what from_pretrained loads, to the last bit."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = f'files = "{write_texts(folder, "txt")}"'
    made = recipe_of(manifest_in(folder, data, more="tie_word_embeddings = true"), folder)
    model: Any = made.model()
    made.export(model, folder / "out")
    loaded, info = AutoModelForCausalLM.from_pretrained(folder / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    tokens = tokenizer("bread and butter", return_tensors="pt")["input_ids"]
    assert torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)


# Pictures


def test_a_folder_of_pictures_is_packed_and_learned(tmp_path: Path) -> None:
    from PIL import Image

    chance = random.Random(0)
    for name, shade in (("dark", 40), ("light", 200)):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(40):
            colour = tuple(shade + chance.randint(-30, 30) for _ in range(3))
            Image.new("RGB", (20, 12), colour).save(tmp_path / "pictures" / name / f"{number}.png")
    (tmp_path / "run.toml").write_text(
        'name = "x"\nrecipe = "image-classifier"\n[model]\nfolder = "pictures"\n'
        "size = 8\nwidth = 4\nstages = 1\nshards = 4\n"
    )
    manifest = manifest_of(read_run_file(tmp_path), tmp_path)
    assert [file.name for file in manifest.files] == ["images.parquet"]
    made = recipe_of(manifest, tmp_path)
    assert try_out(made, manifest)
    torch.manual_seed(0)
    model = made.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(12):
        samples = list(made.samples(number % 4, torch.Generator().manual_seed(number)))
        optimizer.zero_grad()
        made.loss(model, made.collate(samples)).backward()
        optimizer.step()
    with torch.no_grad():
        assert made.evaluate(model)["accuracy"] > 0.9
        assert "shown" in made.preview(model)


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        (
            {"image": [b"x"] * 4, "label": ["a", "b", "a", "b"]},
            'label_column = "kind"',
            "label_column='kind'.*image, label",
        ),
        ({"image": [b"x"] * 2, "label": ["a", "a"]}, "", "one label, a"),
        ({"image": [b"x"] * 4, "label": ["a", "b", "a", "b"]}, "", "pictures cannot be read"),
    ],
)
def test_pictures_that_cannot_be_used_are_told(
    tmp_path: Path, columns: dict[str, list[Any]], options: str, words: str
) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), tmp_path / "p.parquet")
    (tmp_path / "run.toml").write_text(
        f'name = "x"\nrecipe = "image-classifier"\n[model]\nparquet = "p.parquet"\nsize = 8\nstages = 1\n{options}\n'
    )

    def host() -> None:
        manifest = manifest_of(read_run_file(tmp_path), tmp_path)
        try_out(recipe_of(manifest, tmp_path), manifest)

    with pytest.raises(ConfigurationError, match=words):
        host()
