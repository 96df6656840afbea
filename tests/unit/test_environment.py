from __future__ import annotations

from pathlib import Path

import pytest

from potluck.hub.access.member import SERVICES
from potluck.peer import environment


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *("POTLUCK_LINK", "POTLUCK_NAME", "POTLUCK_IDENTITY", "POTLUCK_HF_ENDPOINT", "HF_TOKEN"),
        *("KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG", "COLAB_GPU"),
    ):
        monkeypatch.delenv(name, raising=False)


def test_nothing_is_set() -> None:
    assert environment.link() == ""
    assert environment.person_name() == ""
    assert environment.identity_path() is None
    assert environment.huggingface_endpoint() == "https://huggingface.co"
    assert environment.huggingface_token() == ""
    assert environment.service() == "local"


@pytest.mark.parametrize(
    ("name", "service"),
    [("KAGGLE_KERNEL_RUN_TYPE", "kaggle"), ("COLAB_RELEASE_TAG", "colab"), ("COLAB_GPU", "colab")],
)
def test_notebook_services_are_known_by_their_marks(monkeypatch: pytest.MonkeyPatch, name: str, service: str) -> None:
    monkeypatch.setenv(name, "")  # Colab without a GPU sets it to nothing
    assert environment.service() == service
    assert service in SERVICES  # those that the guard counts seats by


def test_everything_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTLUCK_LINK", "potluck://…")
    monkeypatch.setenv("POTLUCK_NAME", "Ada")
    monkeypatch.setenv("POTLUCK_IDENTITY", "~/keys/ada.nkey")
    monkeypatch.setenv("POTLUCK_HF_ENDPOINT", "http://127.0.0.1:8080/")
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert environment.link() == "potluck://…"
    assert environment.person_name() == "Ada"
    assert environment.identity_path() == Path.home() / "keys" / "ada.nkey"
    assert environment.huggingface_endpoint() == "http://127.0.0.1:8080"
    assert environment.huggingface_token() == "hf_x"


def test_the_environment_is_read_in_one_module_only() -> None:
    source = Path(environment.__file__).parents[1]
    readers = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if "testing" not in path.parts and "os.environ" in path.read_text()
    }
    assert readers == {"peer/environment.py", "hub/server/process.py"}  # the latter passes it on to the server
