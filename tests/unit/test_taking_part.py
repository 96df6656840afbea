"""What a volunteer's machine gives: amounts as people write them, cores and memory, and work handed in on leaving."""

from __future__ import annotations

import concurrent.futures
import logging
from functools import partial

import pytest
import torch
from keptlab import Trainer, assert_alike
from trainlab import PATIENCE_SECONDS, make_model, together, train_lab

from potluck.cli.options import bandwidth_of, bytes_of
from potluck.errors import ConfigurationError, HubUnavailableError
from potluck.optim import collaboration
from potluck.optim.diloco import DiLoCo
from potluck.optim.optimizer import Optimizer
from potluck.testing.polling import poll_until_sync
from potluck.training.trainer.machine import MemoryLimit

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("4GB", 4e9),
        ("512MiB", 512 * 1024**2),
        ("20Mbit", 2.5e6),
        ("20 Mbit/s", 2.5e6),
        ("1.5mb/s", 1.5e6),
        ("800kbps", 800e3),
        ("65536", 65536.0),
    ],
)
def test_amounts_as_people_write_them(text: str, found: float | None) -> None:
    assert bytes_of(text, "--max-memory") == found


@pytest.mark.parametrize("text", ["much", "-1GB", "0", "4 XB", "GB"])
def test_amounts_that_are_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--max-memory"):
        bytes_of(text, "--max-memory")


def test_a_bandwidth_up_and_down() -> None:
    assert bandwidth_of("") == (None, None)
    assert bandwidth_of("8Mbit") == (1e6, 1e6)
    assert bandwidth_of("8Mbit/s") == (1e6, 1e6)
    assert bandwidth_of("8Mbit/80Mbit") == (1e6, 1e7)


# This machine


def test_a_limit_on_memory() -> None:
    free = MemoryLimit(None, CPU)
    assert free.fits()
    assert not free.is_exceeded()
    with pytest.raises(ConfigurationError, match="before it trains"):
        MemoryLimit(1000, CPU)
    wide = MemoryLimit(1 << 50, CPU)
    assert wide.fits()
    assert not wide.is_exceeded()
    assert MemoryLimit(64_000_000_000, CPU).describe() == "the 64000 MB of --max-memory"
    assert MemoryLimit(None, CPU).describe() == "the memory of cpu"


# Leaving


def test_who_leaves_hands_in_with_the_next_epoch() -> None:
    with train_lab() as lab:
        ada, grace = Trainer(lab, 0), Trainer(lab, 1)
        for _ in range(2):
            ada.step()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            leaving = pool.submit(ada.optimizer.hand_in, PATIENCE_SECONDS)
            while grace.optimizer.epoch < 1:
                grace.step()
            assert leaving.result(PATIENCE_SECONDS) == 8
        assert ada.optimizer.epoch == 1
        commit = ada.optimizer.driver.last_result.commit
        weights = {member.peer: member.weight for member in commit.members}
        assert weights[ada.optimizer.run.peer_id] == 8.0
        assert_alike([ada, grace])
        assert ada.optimizer.hand_in(1.0) == 0, "nothing is left"


def test_those_who_leave_at_the_same_time_make_a_last_epoch_together() -> None:
    with train_lab() as lab:
        trainers = [Trainer(lab, number) for number in range(2)]
        for trainer in trainers:
            trainer.step()
        handed_in = together(*(partial(trainer.optimizer.hand_in, PATIENCE_SECONDS) for trainer in trainers))
        assert handed_in == [4, 4]
        assert [trainer.optimizer.epoch for trainer in trainers] == [1, 1]
        assert_alike(trainers)


def test_who_leaves_does_not_wait_for_an_epoch_that_is_far_off() -> None:
    with train_lab() as lab:
        ada, _grace = Trainer(lab, 0), Trainer(lab, 1)
        ada.step()
        assert ada.optimizer.hand_in(0.5) == 0
        assert ada.optimizer.epoch == 0
        assert ada.optimizer.samples == 4


def test_when_all_leave_at_once_nobody_waits_for_the_others() -> None:
    with train_lab() as lab:
        trainers = [Trainer(lab, number) for number in range(2)]
        for trainer in trainers:
            trainer.step()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            leaving = [pool.submit(trainer.optimizer.hand_in, 10 * PATIENCE_SECONDS) for trainer in trainers]
            assert [each.result(PATIENCE_SECONDS) for each in leaving] == [4, 4]
        assert_alike(trainers)


@pytest.mark.parametrize("kind", ["sync", "diloco"])
def test_who_is_alone_hands_in_at_once(kind: str) -> None:
    with train_lab() as lab:
        ada = Trainer(lab, 0, kind=DiLoCo, inner_steps=5) if kind == "diloco" else Trainer(lab, 0)
        ada.step()
        assert ada.optimizer.hand_in(PATIENCE_SECONDS) == 4
        assert ada.optimizer.epoch == 1


@pytest.mark.parametrize("kind", ["sync", "diloco"])
def test_who_leaves_while_the_hub_is_away_is_told_so_soon(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collaboration, "BACK_SECONDS", 0.2)
    with train_lab() as lab:
        ada = Trainer(lab, 0, kind=DiLoCo, inner_steps=5) if kind == "diloco" else Trainer(lab, 0)
        ada.step()
        lab.loop.soon(lambda: lab.memory.hub.disconnect(ada.optimizer.run.peer_id))
        with pytest.raises(HubUnavailableError, match="away"):
            ada.optimizer.hand_in(10 * PATIENCE_SECONDS)
        assert ada.optimizer.epoch == 0


# Beginning


def test_a_hub_that_is_away_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with train_lab() as lab:
        run = lab.join("Ada")
        run.soon(lambda: lab.memory.hub.disconnect(run.peer_id))
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        with caplog.at_level(logging.WARNING), concurrent.futures.ThreadPoolExecutor(1) as pool:
            making = pool.submit(lambda: Optimizer(run, inner, target_batch_size=4, num_threads=1))
            poll_until_sync(lambda: "hub is away" in caplog.text, PATIENCE_SECONDS, "a word of it")
            assert not making.done()
            run.soon(lambda: lab.memory.hub.reconnect(run.peer_id))
            assert making.result(PATIENCE_SECONDS).epoch == 0
