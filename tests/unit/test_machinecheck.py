from __future__ import annotations

import resource
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
import torch

import potluck
from potluck.peer import machinecheck
from potluck.peer.machinecheck import GIB, Check, check_clock, check_machine, check_round_trip, worst

Memory = namedtuple("Memory", "available")
Disk = namedtuple("Disk", "total used free")


def by_name(folder: Path) -> dict[str, Check]:
    return {check.name: check for check in check_machine(folder)}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with plenty of everything, for a test to take something away from."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(available=64 * GIB))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 8)
    monkeypatch.setattr(machinecheck.shutil, "disk_usage", lambda _: Disk(100 * GIB, 0, 100 * GIB))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    monkeypatch.setattr(machinecheck, "NVIDIA_DRIVER", Path("/nowhere"))
    return monkeypatch


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    checks = check_machine(tmp_path)
    names = ["potluck", "torch", "processors", "device", "memory", "disk", "open files"]
    assert [check.name for check in checks] == names
    assert all(check.found for check in checks)
    assert potluck.__version__ in by_name(tmp_path)["potluck"].found
    assert by_name(tmp_path)["torch"].found == torch.__version__


def test_a_good_machine_is_green(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checks = check_machine(tmp_path)
    assert worst(checks) == "green"
    assert not any(check.remedy for check in checks)
    assert by_name(tmp_path)["processors"].found == "8 cores"


def test_the_number_of_cores_may_be_unknown(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setattr(psutil, "cpu_count", lambda: None)
    assert by_name(tmp_path)["processors"].found == "1 core"


def test_little_memory_is_yellow(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setattr(psutil, "virtual_memory", lambda: Memory(available=GIB // 2))
    memory = by_name(tmp_path)["memory"]
    assert (memory.level, memory.found) == ("yellow", "0.5 GiB free")
    assert memory.remedy


@pytest.mark.parametrize(("free", "level"), [(4 * GIB, "yellow"), (GIB // 8, "red")])
def test_a_full_disk(machine: pytest.MonkeyPatch, tmp_path: Path, free: int, level: str) -> None:
    machine.setattr(machinecheck.shutil, "disk_usage", lambda _: Disk(100 * GIB, 0, free))
    disk = by_name(tmp_path)["disk"]
    assert disk.level == level
    assert str(tmp_path) in disk.remedy


def test_the_disk_of_each_folder_counts(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    states = tmp_path / "states"
    states.mkdir()
    free = {tmp_path: 100 * GIB, states: 0}
    machine.setattr(machinecheck.shutil, "disk_usage", lambda place: Disk(100 * GIB, 0, free[place]))
    disks = [check for check in check_machine(tmp_path, states) if check.name == "disk"]
    assert [disk.level for disk in disks] == ["green", "red"]


@pytest.mark.parametrize(
    ("has_gpu", "version", "level"),
    [(False, "2.13.0+cpu", "green"), (True, "2.13.0", "green"), (True, "2.13.0+cpu", "yellow")],
)
def test_a_gpu_that_torch_cannot_use(
    machine: pytest.MonkeyPatch, tmp_path: Path, has_gpu: bool, version: str, level: str
) -> None:
    driver = tmp_path / "version"
    if has_gpu:
        driver.touch()
    machine.setattr(machinecheck, "NVIDIA_DRIVER", driver)
    machine.setattr(machinecheck, "_torch_version", lambda: version)
    assert by_name(tmp_path)["device"].level == level


def test_a_machine_without_torch(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setattr(machinecheck, "_torch_version", lambda: "")
    assert by_name(tmp_path)["torch"].level == "yellow"


def test_the_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert by_name(tmp_path / "a" / "b")["disk"].found.endswith(f"in {tmp_path}")
    assert "GiB free" in by_name(Path("no-such-folder"))["disk"].found


def test_few_open_files_are_yellow(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setattr(resource, "getrlimit", lambda _: (256, 4096))
    files = by_name(tmp_path)["open files"]
    assert (files.level, files.found) == ("yellow", "only 256")
    assert "ulimit" in files.remedy


def test_any_number_of_open_files_is_green(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    files = by_name(tmp_path)["open files"]
    assert (files.level, files.found) == ("green", "any number")


@pytest.mark.parametrize(
    ("error_seconds", "level", "words"),
    [
        (0.02, "green", "0.0 s off"),
        (4.0, "green", "4.0 s ahead of the hub"),
        (-4.0, "green", "4.0 s behind the hub"),
        (3600.0, "yellow", "3600.0 s ahead of the hub"),
        (-86400.0, "yellow", "86400.0 s behind the hub"),
    ],
)
def test_the_clock(error_seconds: float, level: str, words: str) -> None:
    check = check_clock(error_seconds)
    assert check.level == level
    assert words in check.found
    assert bool(check.remedy) == (level != "green")


def test_the_way_to_the_hub() -> None:
    assert check_round_trip(0.0123).found == "answers in 12.3 ms"
    assert check_round_trip(0.0123).level == "green"
    slow = check_round_trip(2.0)
    assert slow.level == "yellow"
    assert slow.remedy


def test_the_worst_counts() -> None:
    green, yellow, red = (Check(name="x", level=level, found="") for level in ("green", "yellow", "red"))
    assert worst([]) == "green"
    assert worst([green, yellow, green]) == "yellow"
    assert worst([red, yellow, green]) == "red"
