"""What the documents show can be typed: commands and options exist, Python and TOML can be read."""

from __future__ import annotations

import functools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from potluck.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for found in BLOCK.finditer(page.read_text()):
        if found[2] in languages:
            yield re.sub(rf"^{found[1]}", "", found[3], flags=re.MULTILINE)


def commands(page: Path) -> Iterator[list[str]]:
    """Each `potluck …` of the page's shell blocks, and of its text where it names an option."""
    shown = [line for block in blocks(page, "bash", "") for line in block.replace("\\\n", " ").splitlines()]
    shown += re.findall(r"`(potluck [a-z][^`]*)`", BLOCK.sub("", page.read_text()))
    for line in shown:
        command = line.strip().removeprefix("sudo ")
        if command.startswith("potluck "):
            yield shlex.split(command.replace("…", "etc"), comments=True)[1:]


@functools.cache
def whole_command() -> Any:
    """Built once: it takes seconds."""
    return typer.main.get_command(app)


def check(words: list[str]) -> None:
    command: Any = whole_command()
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name, *words = words
        if name in ("etc", "LINK") or name.startswith("potluck:"):
            return  # not a command's name but what it is about, as in `potluck paths LINK`
        found = command.commands.get(name)
        assert found is not None, f"there is no potluck {name}"
        command = found
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {"--help", "-h"}
    for word in words:
        if word == "--":
            return
        if word.startswith("--"):
            assert word.split("=")[0].rstrip(",.;:") in known, f"{command.name} has no {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_shows_what_there_is(page: Path) -> None:
    for words in commands(page):
        check(words)
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")
    for block in blocks(page, "toml"):
        tomllib.loads(block)


LAYER = re.compile(r"^.* (\d+)  (\w+) +([\w/]+\.py) ", re.MULTILINE)


def test_the_gradient_walks_through_ten_layers_that_there_are() -> None:
    layers = LAYER.findall((ROOT / "docs/design/walk-gradient.md").read_text())
    assert [int(number) for number, _, _ in layers] == list(range(11))
    for _, name, path in layers:
        assert re.search(rf"^class {name}\b", (ROOT / "src/potluck" / path).read_text(), re.MULTILINE), (name, path)


@pytest.mark.parametrize("page", [*(ROOT / "docs/design").glob("*.md")], ids=lambda page: page.stem)
def test_design_pages_name_files_that_there_are(page: Path) -> None:
    named = set(re.findall(r"`((?:[a-z]+/)*\w+\.py)`", page.read_text()))
    known = {
        str(path.relative_to(ROOT))
        for folder in ("src", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {path for path in named if not any(f"/{each}".endswith(f"/{path}") for each in known)} == set()
