"""What a recipe needs: fetched from a real server on this machine, resumed, and checked."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from potluck.errors import ConfigurationError, RetryableError
from potluck.recipes import downloads
from potluck.recipes.catalogue import recipe_class
from potluck.recipes.downloads import Download, fetch, is_whole, path_of

CONTENT = bytes(range(256)) * 4096  # 1 MiB


class Server(ThreadingHTTPServer):
    """Serves CONTENT; breaks off after so many bytes, as often as the test wishes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.break_offs: list[int] = []
        self.ranges: list[str] = []
        self.knows_ranges = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path != "/data.bin":
            self.send_error(404)
            return
        asked = self.headers.get("Range", "")
        self.server.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.knows_ranges else 0
        if start >= len(CONTENT):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        most = self.server.break_offs.pop(0) if self.server.break_offs else len(CONTENT)
        self.wfile.write(CONTENT[start : start + most])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield serving
        finally:
            serving.shutdown()
            thread.join()


def wanted(server: Server, **changes: object) -> Download:
    values = {"name": "data.bin", "url": server.url, "sha256": hashlib.sha256(CONTENT).hexdigest(), **changes}
    return Download(**values)  # type: ignore[arg-type]


def test_a_file_is_fetched_once_and_told_along_the_way(server: Server, tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    path = fetch(wanted(server), tmp_path, lambda there, total: told.append((there, total)))
    assert path.read_bytes() == CONTENT
    assert path == path_of(wanted(server), tmp_path)
    assert told[0] == (0, len(CONTENT))
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert fetch(wanted(server), tmp_path) == path
    assert server.ranges == [""]
    assert is_whole(wanted(server), tmp_path)
    path.write_bytes(CONTENT[:-1])
    assert not is_whole(wanted(server), tmp_path)


def test_what_broke_off_goes_on(server: Server, tmp_path: Path) -> None:
    server.break_offs = [300_000, 300_000]
    for _ in range(2):
        with pytest.raises(RetryableError, match="goes on with it"):
            fetch(wanted(server), tmp_path)
    assert fetch(wanted(server), tmp_path).read_bytes() == CONTENT
    assert server.ranges == ["", "bytes=300000-", "bytes=600000-"]
    assert [path.name for path in tmp_path.iterdir()] == [path_of(wanted(server), tmp_path).name]


def test_a_server_that_knows_no_ranges_begins_anew(server: Server, tmp_path: Path) -> None:
    server.break_offs, server.knows_ranges = [300_000], False
    with pytest.raises(RetryableError):
        fetch(wanted(server), tmp_path)
    assert fetch(wanted(server), tmp_path).read_bytes() == CONTENT


def test_all_of_it_was_there_before_the_name_was_given(server: Server, tmp_path: Path) -> None:
    path = path_of(wanted(server), tmp_path)
    path.with_name(f"{path.name}.part").write_bytes(CONTENT)
    assert fetch(wanted(server), tmp_path).read_bytes() == CONTENT


def test_something_else_is_never_used(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not data"):
        fetch(wanted(server, sha256="0" * 64), tmp_path)
    with pytest.raises(ConfigurationError, match="gives more"):
        fetch(wanted(server, num_bytes=1000), tmp_path)
    with pytest.raises(ConfigurationError, match="answers 404 Not Found"):
        fetch(wanted(server, url=server.url + "x"), tmp_path)
    with pytest.raises(ConfigurationError, match="MB free"):
        fetch(wanted(server, num_bytes=1 << 60), tmp_path)


@pytest.mark.parametrize(
    "changes", [{"name": "../up"}, {"name": ""}, {"sha256": "abc"}, {"url": "ftp://x/y"}, {"name": ".hidden"}]
)
def test_downloads_that_cannot_be(server: Server, changes: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        wanted(server, **changes)


RECIPE = """
from potluck.recipes import Download, Recipe
from torch import nn

class Mine(Recipe):
    downloads = (Download(name="data.bin", url="{url}", sha256="{sha256}"),)
    def model(self): return nn.Linear(1, 1)
    def samples(self, shard, generator): return [self.file("data.bin")]
    def loss(self, model, batch): ...
"""


def test_a_recipe_finds_its_files(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = wanted(server)
    monkeypatch.setenv("POTLUCK_DATA", str(tmp_path / "data"))
    (tmp_path / "mine.py").write_text(RECIPE.format(url=download.url, sha256=download.sha256))
    kind = recipe_class("mine.py", tmp_path)
    recipe = kind(kind.Config())
    with pytest.raises(ConfigurationError, match="potluck download data"):
        recipe.samples(0, None)  # type: ignore[arg-type]
    for each in kind.downloads:
        fetch(each)
    [path] = recipe.samples(0, None)  # type: ignore[arg-type]
    assert path.read_bytes() == CONTENT
    with pytest.raises(ConfigurationError, match="no file"):
        recipe.file("other.bin")
    assert recipe_class("digits", tmp_path).downloads == ()
    assert downloads.data_folder() == tmp_path / "data"


def test_what_is_no_address_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError, match="is no address"):
        Download(name="data.bin", url="http://host:port/data.bin", sha256="0" * 64)
