"""Potluck from a host: a wheel that pip installs, and that is refused if it is not what the link names."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.metadata
import io
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

import potluck
from potluck.errors import ConfigurationError
from potluck.hub.guard.guard import GuardConfig
from potluck.hub.joinlink import JoinLink
from potluck.hub.server.configuration import HubConfig
from potluck.hub.wheelpin import WheelPin
from potluck.run import wheel
from potluck.run.fileserver import MAX_CONNECTIONS, MAX_REQUEST_BYTES
from potluck.run.host import Host, HostConfig
from potluck.run.wheel import pack_wheel

PIP_SECONDS = 100.0
PACKAGE = Path(potluck.__file__).parent


def a_host(folder: Path) -> Host:
    hub = HubConfig(folder=folder, run="bakery", host="127.0.0.1", tls=False)
    return Host(HostConfig(hub=hub, guard=GuardConfig(run="bakery"), peer=None, wheel_port=0))


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    host = a_host(tmp_path / "hub")
    await host.start()
    yield host
    await host.stop()


async def pip_install(link: JoinLink, target: Path) -> tuple[int, str]:
    """What the line that people are given does, without dependencies and into a folder of its own."""
    line = link.pip_line
    assert line.startswith("pip install 'potluck-train @ http://127.0.0.1:")
    wanted = line.removeprefix("pip install '").removesuffix("'")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), wanted]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    async with asyncio.timeout(PIP_SECONDS):
        said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


def package_files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


async def test_pip_installs_the_host_s_own_potluck_by_its_link(host: Host, tmp_path: Path) -> None:
    link = JoinLink.parse(str(host.link))
    code, said = await pip_install(link, tmp_path / "site")
    assert code == 0, said
    assert package_files(tmp_path / "site" / "potluck") == package_files(PACKAGE)
    [installed] = importlib.metadata.distributions(path=[str(tmp_path / "site")])
    assert installed.metadata["Name"] == "potluck-train"
    assert installed.version == potluck.__version__
    assert any(each.startswith("torch") for each in installed.requires or [])
    assert [each.name for each in installed.entry_points.select(group="console_scripts")] == ["potluck"]
    assert installed.read_text("licenses/LICENSE")
    # The installed one is a whole program, and knows the version that the link names.
    command = [sys.executable, "-c", "import potluck; print(potluck.__file__, potluck.__version__)"]
    environment = {"PYTHONPATH": str(tmp_path / "site")}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=subprocess.PIPE)
    async with asyncio.timeout(PIP_SECONDS):
        told, _ = await process.communicate()
    assert link.wheel is not None
    assert told.decode().split() == [str(tmp_path / "site" / "potluck" / "__init__.py"), link.wheel.version]


async def test_pip_refuses_what_has_another_hash_than_the_link_names(host: Host, tmp_path: Path) -> None:
    assert host.link.wheel is not None
    other = replace(host.link, wheel=replace(host.link.wheel, sha256="0" * 64))
    code, said = await pip_install(other, tmp_path / "site")
    assert code != 0
    assert "sha256" in said
    assert "0" * 64 in said
    assert host.link.wheel.sha256 in said
    assert not list((tmp_path / "site").glob("potluck*"))


async def test_a_host_that_starts_again_serves_the_same_wheel_at_the_same_place(host: Host) -> None:
    before = host.link
    await host.stop()
    again = a_host(host.config.hub.folder)
    await again.start()
    try:
        assert again.link == before
        assert again.link.wheel == WheelPin.parse(str(before.wheel))
    finally:
        await again.stop()


def test_the_same_files_make_the_same_bytes() -> None:
    first, second = pack_wheel(), pack_wheel()
    assert first == second
    with zipfile.ZipFile(io.BytesIO(first.data)) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert names == sorted(names)
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        [record] = [name for name in names if name.endswith("/RECORD")]
        rows = dict(line.split(",", 1) for line in archive.read(record).decode().splitlines())
        assert set(rows) == set(names)
        for name in set(names) - {record}:
            digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).decode().rstrip("=")
            assert rows[name].startswith(f"sha256={digest},")


async def test_strangers_get_one_file_and_nothing_else(host: Host) -> None:
    pin = host.link.wheel
    assert pin is not None
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{pin.port}", trust_env=False, verify=False) as client:
        head = await client.head(f"/{pin.file_name}")
        assert (head.status_code, head.content) == (200, b"")
        got = await client.get(f"/{pin.file_name}")
        assert hashlib.sha256(got.content).hexdigest() == pin.sha256
        assert int(head.headers["content-length"]) == len(got.content)
        for path in ("/", "/../../etc/passwd", f"//{pin.file_name}", "/potluck_train-0.0.1-py3-none-any.whl"):
            refused = await client.get(path)
            assert refused.status_code == 404
            assert "ask the organiser for a new link" in refused.text
        assert (await client.post(f"/{pin.file_name}", content=b"x")).status_code == 405


async def test_strangers_who_only_hold_on_do_not_take_all_memory(host: Host) -> None:
    pin = host.link.wheel
    assert pin is not None
    idle = [await asyncio.open_connection("127.0.0.1", pin.port) for _ in range(MAX_CONNECTIONS)]
    _, writer = idle[0]
    writer.write(b"GET /" + b"x" * 4 * MAX_REQUEST_BYTES)
    reader, writer = await asyncio.open_connection("127.0.0.1", pin.port)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        async with asyncio.timeout(PIP_SECONDS):
            await reader.readexactly(1)
    for _, each in (*idle, (reader, writer)):
        each.transport.abort()


async def test_a_potluck_that_is_not_installed_is_not_served_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wheel, "DISTRIBUTION", "potluck-nowhere")
    with pytest.raises(ConfigurationError, match="runs here without being installed"):
        pack_wheel()
    host = a_host(tmp_path / "hub")
    await host.start()
    try:
        assert host.link.wheel is None
        assert "newcomers cannot get Potluck from this host" in caplog.text
    finally:
        await host.stop()
