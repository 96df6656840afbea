from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from potluck.errors import ConfigurationError
from potluck.hub.server.configuration import ClusterConfig, HubConfig, HubPorts
from potluck.hub.server.ports import PortBusyError, load_ports, pick_ports, save_ports


def config(folder: Path, **changes) -> HubConfig:
    return HubConfig(**{"folder": folder, "run": "run", "host": "127.0.0.1", **changes})


@contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_free_ports_are_all_different(tmp_path: Path) -> None:
    ports = pick_ports(config(tmp_path, cluster=ClusterConfig(name="c", server_name="s", routes=("a:1",))), None)
    assert len({ports.client, ports.websocket, ports.cluster, ports.monitoring}) == 4


def test_what_is_off_gets_no_port(tmp_path: Path) -> None:
    ports = pick_ports(config(tmp_path, websocket_port=None), None)
    assert ports.websocket is None
    assert ports.cluster is None


def test_ports_are_remembered(tmp_path: Path) -> None:
    assert load_ports(tmp_path) is None
    ports = pick_ports(config(tmp_path), None)
    save_ports(tmp_path, ports)
    assert pick_ports(config(tmp_path), load_ports(tmp_path)) == ports


def test_a_remembered_port_in_use_gives_way_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with listening() as taken:
        ports = pick_ports(config(tmp_path), HubPorts(client=taken, monitoring=taken))
    assert taken not in (ports.client, ports.monitoring)
    assert str(taken) in caplog.text


@pytest.mark.parametrize("name", ["port", "websocket_port"])
def test_a_port_that_was_asked_for_and_is_busy_is_an_error(tmp_path: Path, name: str) -> None:
    with listening() as taken, pytest.raises(PortBusyError, match=rf"{name} {taken} .*choose another"):
        pick_ports(config(tmp_path, **{name: taken}), None)


def test_a_host_of_another_machine_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not an address of this machine"):
        pick_ports(config(tmp_path, host="192.0.2.1"), None)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"client": "x", "monitoring": 1}', '{"client": 70000, "monitoring": 1}']
)
def test_damaged_memory_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "ports.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"ports\.json.*delete"):
        load_ports(tmp_path)
