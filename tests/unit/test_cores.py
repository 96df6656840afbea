"""How many threads a peer computes with, where others are on the same machine."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainlab import PATIENCE_SECONDS, TrainLab, make_model, train_lab

from potluck.optim import cores
from potluck.optim.diloco import DiLoCo
from potluck.optim.optimizer import Optimizer
from potluck.testing.processes import Children

EIGHT = 8


@pytest.fixture(autouse=True)
def nobody_has_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a fresh process, on a machine of eight cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "available_cores", lambda: EIGHT)
    monkeypatch.setattr(cores, "_is_chosen", False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def join_by_hand(lab: TrainLab, kind: type[Optimizer] | type[DiLoCo] = Optimizer) -> None:
    """As a program of somebody's own does."""
    options = {"target_batch_size": 8} if kind is Optimizer else {"inner_steps": 2}
    kind(lab.join("a program"), torch.optim.SGD(make_model().parameters(), lr=0.1), num_threads=1, **options)


def test_cores_are_shared_by_the_peers_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "available_cores", lambda: 8)
    try:
        for peers, threads in ((1, 8), (3, 2), (20, 1)):
            monkeypatch.setattr(cores, "num_peers_here", lambda peers=peers: peers)
            assert cores.share_cores() == threads == torch.get_num_threads()
        assert cores.share_cores(5) == 5 == torch.get_num_threads()
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert cores.share_cores() == 5, "what somebody has said stays"
    finally:
        torch.set_num_threads(before)


def test_peers_of_this_machine_are_known_by_their_commands(tmp_path: Path, children: Children) -> None:
    fake = tmp_path / "potluck"
    fake.write_text("import time; print('here', flush=True); time.sleep(300)")
    a_peer = children.spawn(["python3", fake, "join", "potluck://nowhere"], name="a peer")
    no_peer = children.spawn(["python3", fake, "monitor", "potluck://nowhere"], name="no peer")
    for process in (a_peer, no_peer):
        process.wait_for_line("here", PATIENCE_SECONDS)
    assert cores.num_peers_here() >= 2  # others on this machine come and go
    assert a_peer.pid in cores.trainers_by_command()
    assert no_peer.pid not in cores.trainers_by_command()


@pytest.mark.parametrize("kind", [Optimizer, DiLoCo])
def test_a_program_of_somebodys_own_takes_its_share_and_says_so_once(
    kind: type[Optimizer] | type[DiLoCo], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cores, "num_peers_here", lambda: 2)
    with train_lab() as lab, caplog.at_level(logging.WARNING, cores.__name__):
        torch.set_num_threads(EIGHT)
        join_by_hand(lab, kind)
        assert torch.get_num_threads() == EIGHT // 2
        join_by_hand(lab, kind)
        assert torch.get_num_threads() == EIGHT // 2
    assert caplog.text.count("torch computes with 4 of 8 threads") == 1


def test_what_a_program_has_said_of_its_threads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "num_peers_here", lambda: 2)
    with train_lab() as lab:
        torch.set_num_threads(3)
        join_by_hand(lab)
        assert torch.get_num_threads() == 3
        torch.set_num_threads(EIGHT)
        monkeypatch.setenv("OMP_NUM_THREADS", "8")
        join_by_hand(lab)
        assert torch.get_num_threads() == EIGHT
        monkeypatch.delenv("OMP_NUM_THREADS")
        cores.share_cores(EIGHT)  # `potluck join --threads 8`
        join_by_hand(lab)
        assert torch.get_num_threads() == EIGHT


def test_a_program_alone_on_its_machine_keeps_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "num_peers_here", lambda: 1)
    with train_lab() as lab:
        torch.set_num_threads(EIGHT)
        join_by_hand(lab)
        assert torch.get_num_threads() == EIGHT


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="marks are sockets in Linux's abstract namespace")
def test_a_program_of_somebodys_own_is_seen_by_others_while_it_trains() -> None:
    with train_lab() as lab:
        assert os.getpid() not in cores.marked_trainers()
        join_by_hand(lab)
        assert os.getpid() in cores.marked_trainers()
        program = "from potluck.optim import cores; print(cores.num_peers_here())"
        counted = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        assert int(counted) >= 2
    assert os.getpid() not in cores.marked_trainers()
