"""Under which name people install Potluck: on PyPI the plain name is an unrelated project's."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import potluck
from potluck.hub.wheelpin import DISTRIBUTION

ROOT = Path(__file__).resolve().parents[2]
# `pip install …` with the plain name among what is to be installed, as an option's or a path's part it does no harm.
STRANGERS = re.compile(r"pip3? install\b[^\n`;|&]*?(?<![\w./@-])potluck(?![\w./-]|://)|(?<![\w.-])potluck\[[a-z,{$]")


def texts() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    binary = {".png", ".jpg", ".gif", ".ico"}
    return [ROOT / name for name in listed.split("\0") if name and Path(name).suffix not in binary]


def test_no_text_tells_anybody_to_install_a_stranger_s_package() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in texts()
        if path.is_file() and path != Path(__file__)
        for match in STRANGERS.finditer(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "pip install potluck",
        "%pip install --quiet potluck\n",
        "(pip install --upgrade potluck)",
        "pip install 'potluck[dashboard]'",
        'say "installing potluck[$extras]"',
        "`pip3 install -U potluck`",
        "pip install torch potluck",
        "pip install potluck==0.1.0",
    ],
)
def test_such_a_text_would_be_found(text: str) -> None:
    assert STRANGERS.search(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install 'potluck-train[dashboard]'",
        "pip install 'potluck-train @ http://hub:8000/potluck_train-0.1.0-py3-none-any.whl'",
        "pip install -c constraints.txt .",
        "pip install wandb; potluck monitor 'potluck://…'",
        "pip uninstall --yes potluck",
    ],
)
def test_and_no_other(text: str) -> None:
    assert not STRANGERS.search(text)


def test_the_package_has_the_name_and_the_version_that_a_host_serves() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["version"]) == (DISTRIBUTION, potluck.__version__)
    assert list(project["scripts"]) == ["potluck"]
