from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from potluck.testing import namespaces

why_not = namespaces.lab_available.__wrapped__  # the answer is kept; these tests ask afresh


@pytest.fixture(autouse=True)
def _no_network_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(namespaces, "TUN_DEVICE", tmp_path)
    monkeypatch.setattr(namespaces, "_try_namespaces", lambda: None)


def test_a_machine_that_has_everything_has_no_excuse() -> None:
    assert why_not() is None


def test_the_reason_says_what_is_missing_and_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(namespaces, "_try_namespaces", lambda: "this machine does not let us build networks")
    assert why_not() == "this machine does not let us build networks"
    monkeypatch.setattr(namespaces, "TUN_DEVICE", tmp_path / "tun")
    assert "load the kernel module tun" in why_not()
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "iptables" else tool)
    assert why_not() == "there is no `iptables` command; install iptables"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "run this as root" in why_not()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "need Linux" in why_not()


def test_names_say_whose_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours, ours_too = namespaces.NamespaceNames(), namespaces.NamespaceNames()
    assert ours.prefix != ours_too.prefix
    own_pid, own_start = os.getpid(), namespaces.start_time(os.getpid())
    assert ours.prefix.startswith(f"potluck-lab-{own_pid}-{own_start}-")
    of_the_dead = f"potluck-lab-{own_pid}-{own_start - 1}-1-hub"  # the id is in use again, by another process
    for name in (ours.of("hub"), of_the_dead, "potluck-lab-by-hand", "somebody-else"):
        (tmp_path / name).touch()
    monkeypatch.setattr(namespaces, "FOLDER", tmp_path)
    removed: list[str] = []
    monkeypatch.setattr(namespaces, "_remove_one", removed.append)
    assert namespaces.remove_leftovers() == removed == [of_the_dead]


def test_a_tool_that_fails_is_quoted() -> None:
    with pytest.raises(namespaces.LabError, match=r"(?s)`/bin/sh -e` failed with exit code 3: no such device.*echo no"):
        namespaces.run_tool(["/bin/sh", "-e"], "echo no such device >&2; exit 3")


def test_without_any_namespace_there_is_nothing_to_remove(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(namespaces, "FOLDER", tmp_path / "absent")
    assert namespaces.existing() == []
    assert namespaces.remove_leftovers() == []
