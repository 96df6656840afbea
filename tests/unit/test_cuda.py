"""A smoke suite for people who have a GPU: `scripts/test -m cuda`. The pretend accelerator shows everything else."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from trainlab import train_lab

from potluck.optim.modelstate import ModelState
from potluck.optim.staging import Staging
from potluck.recipes.digits import Digits
from potluck.recipes.reference import RecipeRef
from potluck.training.manifest import manifest as manifests
from potluck.training.manifest.manifest import Manifest, Settings, SyncSettings
from potluck.training.trainer.config import TrainConfig
from potluck.training.trainer.machine import MemoryLimit, find_device, find_devices
from potluck.training.trainer.precision import find_precision
from potluck.training.trainer.trainer import Trainer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine"),
]


def test_all_devices_are_found_and_have_an_index() -> None:
    assert find_device("").type == "cuda"
    assert [device.index for device in find_devices("")] == list(range(torch.cuda.device_count()))
    assert find_precision("", find_device("")) in ("bfloat16", "float16")


def test_a_limit_of_memory() -> None:
    device = find_device("cuda")
    limit = MemoryLimit(torch.cuda.get_device_properties(device).total_memory, device)
    assert not limit.is_exceeded()


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=["plain", "fused", "capturable"])
def test_a_state_from_the_cpu_is_stepped_with(options: dict[str, Any]) -> None:
    model, newcomer = (nn.Linear(8, 8).cuda() for _ in range(2))
    here, there = (ModelState(torch.optim.AdamW(each.named_parameters(), **options)) for each in (model, newcomer))
    gradients = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    here.step(gradients)
    there.load({name: tensor.cpu() for name, tensor in here.tensors().items()}, here.metadata())
    for state in (here, there):
        state.step(gradients)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), newcomer.parameters(), strict=True))


def test_what_goes_to_a_round_is_copied_beside_training() -> None:
    tensors = {"a": torch.zeros(1 << 22, device="cuda")}
    for number in range(3):
        tensors["a"].fill_(float(number))
        staged = Staging().stage(tensors)
        staged.copied.wait()
        assert staged.host["a"].is_pinned()
        assert bool((staged.host["a"] == number).all()), "the copy comes after what was begun before it"
        staged.host["a"].add_(1.0)
        staged.bring_back()
        assert tensors["a"].min().item() == number + 1


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("training", [SyncSettings(target_batch_size=64), manifests.DiLoCoSettings(inner_steps=4)])
def test_a_trainer(precision: str, training: Any) -> None:
    manifest = Manifest(run="test", recipe=RecipeRef(name="digits"), settings=(Settings(training=training),))
    config = TrainConfig(device="cuda:0", precision=precision, batch_size=16, max_steps=40)
    with train_lab() as lab:
        trainer = Trainer(lab.join("Ada"), lambda: manifest, Digits(Digits.Config()), config)
        last = trainer.train(threading.Event())
    assert last.steps == 40
    assert last.epoch >= 5
