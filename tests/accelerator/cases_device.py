"""What holds on an accelerator. Run by test_on_accelerator.py, in a process of its own with the pretend device."""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainlab import DEVICE, loss_of, make_batch, make_model, train_lab

from potluck.errors import ConfigurationError
from potluck.optim.diloco import DiLoCo
from potluck.optim.epochlistener import room_for
from potluck.optim.lamb import Lamb
from potluck.optim.methods.delayed import DelayedNesterov
from potluck.optim.methods.outer import Nesterov
from potluck.optim.methods.powersgd import PowerSGD
from potluck.optim.methods.sparseloco import SparseLoCo
from potluck.optim.methods.streaming import FragmentSchedule
from potluck.optim.modelstate import ModelState
from potluck.optim.optimizer import Optimizer
from potluck.optim.outerloop import OuterLoop
from potluck.optim.staging import Staging
from potluck.optim.targetbatch import TargetBatch
from potluck.recipes.recipe import Batch, Recipe, RecipeConfig
from potluck.recipes.reference import RecipeRef
from potluck.round.codecs import CodecChoice
from potluck.testing import accelerator
from potluck.training.manifest import manifest as manifests
from potluck.training.manifest.manifest import Manifest, Settings, SyncSettings
from potluck.training.manifest.method import OptimizerSpec
from potluck.training.trainer.config import TrainConfig
from potluck.training.trainer.inneroptimizer import parameter_groups
from potluck.training.trainer.larc import Larc
from potluck.training.trainer.machine import MemoryLimit, find_device
from potluck.training.trainer.muon import Muon
from potluck.training.trainer.trainer import Trainer

device = accelerator.install()
EXACT = CodecChoice.everything("float32")


@pytest.fixture(autouse=True)
def _as_new() -> Iterator[None]:
    device.counts.clear()
    yield
    device.memory_limit_bytes = accelerator.DEVICE_BYTES


# The device itself


def test_its_tensors_do_not_mix_with_the_cpus() -> None:
    here, there = torch.ones(3), torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError, match="device"):
        there + here
    with pytest.raises(accelerator.MixedDevicesError):
        torch.equal(there, here)
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    assert (there + torch.tensor(2.0)).tolist() == [3.0, 3.0, 3.0], "a number may come from the CPU"


def test_views_share_memory_and_changes_in_place_show() -> None:
    whole = torch.zeros(3, 4, device=DEVICE)
    whole.t()[1].add_(2.0)
    whole.view(-1)[0] = 5.0
    assert whole.cpu().tolist() == [[5.0, 2.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]]
    assert copy.deepcopy(whole).data_ptr() != whole.data_ptr()


def test_what_a_gpu_would_wait_for_is_counted() -> None:
    there = torch.arange(8.0).to(DEVICE)
    assert (device.counts.to_device, device.counts.to_device_bytes, device.counts.synchronisations) == (1, 32, 1)
    there.sum().item()
    assert (device.counts.to_host, device.counts.synchronisations) == (1, 2)
    torch.empty(8).pin_memory().copy_(there, non_blocking=True)
    assert (device.counts.to_host, device.counts.synchronisations) == (2, 2), "nobody waits for pinned memory"
    torch.empty(8).copy_(there, non_blocking=True)
    assert device.counts.synchronisations == 3, "and everybody for memory that is not"


def test_memory_ends() -> None:
    device.memory_limit_bytes = device.memory_allocated() + 1000
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1000, device=DEVICE)


# States that come from others come on the CPU

INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    "adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "adamw fused, amsgrad": lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
    "adam capturable": lambda p: torch.optim.Adam(p, capturable=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
    "asgd": torch.optim.ASGD,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "lamb": Lamb,
    "larc": lambda p: Larc(p, lr=0.1, momentum=0.9),
    "muon": lambda p: Muon(parameter_groups(OptimizerSpec(name="muon"), dict(p))),
}


def gradients_of(model: nn.Module, number: int) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model, make_batch(number)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def as_fetched(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def model_state(kind: str, seed: int, **options: Any) -> tuple[nn.Module, ModelState]:
    model = make_model(seed)
    return model, ModelState(INNER[kind](model.named_parameters()), **options)


@pytest.mark.parametrize("kind", INNER)
@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
def test_a_newcomer_steps_with_any_optimizer_as_those_who_were_there(kind: str, offload: bool) -> None:
    model, state = model_state(kind, 0, offload=offload)
    for number in range(2):
        state.step(gradients_of(model, number))
        state.land()
    newcomer, theirs = model_state(kind, 1, offload=offload)
    theirs.load(as_fetched(state.tensors()), state.metadata())
    for number in range(2, 4):
        for each, its in ((model, state), (newcomer, theirs)):
            its.step(gradients_of(each, number))
            its.land()
    for one, other in zip(model.parameters(), newcomer.parameters(), strict=True):
        assert torch.equal(one, other)


def test_flags_of_one_machine_do_not_reach_another() -> None:
    model, fused = model_state("adam fused", 0)
    fused.step(gradients_of(model, 0))
    _, plain = model_state("adam", 1)
    plain.load(as_fetched(fused.tensors()), fused.metadata())
    assert not plain.optimizer.param_groups[0]["fused"]
    assert plain.metadata() == fused.metadata(), "else the two would hold different states for ever"
    old = fused.metadata()
    old["groups"][0]["fused"] = True  # as peers of an earlier version say
    plain.load_numbers(old)
    assert not plain.optimizer.param_groups[0]["fused"]


def outer_loop(seed: int, outer: Any, transform: Any) -> tuple[nn.Module, OuterLoop]:
    model = make_model(seed, hidden=80)
    state = ModelState(torch.optim.AdamW(model.named_parameters(), lr=0.02))
    return model, OuterLoop(
        state, outer(), FragmentSchedule(inner_steps=1), transform=transform() if transform else None
    )


def one_epoch(model: nn.Module, method: OuterLoop, epoch: int) -> None:
    loss_of(model, make_batch(epoch)).backward()
    method.local_step(4)
    offer = method.offer(epoch)
    offer.tensors  # noqa: B018 - made
    method.accept(offer, epoch=epoch, alone=False)
    method.land()


@pytest.mark.parametrize("outer", [Nesterov, lambda: DelayedNesterov(delay=2)], ids=["nesterov", "delayed"])
@pytest.mark.parametrize("transform", [None, PowerSGD, SparseLoCo], ids=["plain", "powersgd", "sparseloco"])
@pytest.mark.parametrize("saved", [False, True], ids=["fetched", "saved"])
def test_a_newcomer_takes_the_outer_step_as_well(outer: Any, transform: Any, saved: bool) -> None:
    model, method = outer_loop(0, outer, transform)
    for epoch in (1, 2):
        one_epoch(model, method, epoch)
    newcomer, theirs = outer_loop(1, outer, transform)
    if saved:
        theirs.load_state_dict(_on_cpu(method.state_dict()))
    else:
        theirs.load(as_fetched(method.tensors()), method.metadata())
    for epoch in (3, 4):
        one_epoch(newcomer, theirs, epoch)
    assert all(tensor.device.type == DEVICE.type for tensor in theirs.tensors().values())
    if saved:
        for epoch in (3, 4):
            one_epoch(model, method, epoch)
        assert all(torch.equal(method.shared[name], theirs.shared[name]) for name in method.shared)


def _on_cpu(value: Any) -> Any:
    """As `torch.load(map_location="cpu")` has it."""
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return value.cpu() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("of", ["gradients", "changes"])
def test_who_listens_keeps_what_it_hears_in_memory_of_the_cpu(of: str) -> None:
    method: Any = outer_loop(0, Nesterov, None)[1] if of == "changes" else TargetBatch(model_state("adam", 0)[1])
    heard = room_for(method, 1)
    assert heard
    assert {tensor.device.type for tensor in heard.values()} == {"cpu"}


# Between the device and a round


def test_what_goes_to_a_round_is_copied_once_beside_training() -> None:
    staging, tensors = Staging(), {"a": torch.ones(4, device=DEVICE), "b": torch.zeros(2, 3, device=DEVICE)}
    device.counts.clear()
    staged = staging.stage(tensors)
    assert (device.counts.to_host, device.counts.synchronisations) == (2, 0)
    assert all(tensor.is_pinned() for tensor in staged.host.values())
    stream = staging._streams[torch.device(DEVICE.type, 0)]
    assert stream.waited_for == [device.current_stream()], "the copies come after what training has begun"
    (event,) = staged.copied._events.values()
    assert event.stream is stream
    staged.copied.wait()
    staged.host["a"].mul_(3.0)
    staged.bring_back()
    assert (device.counts.to_device, device.counts.synchronisations) == (2, 0)
    assert tensors["a"].tolist() == [3.0] * 4
    again = staging.stage(tensors)
    assert all(again.host[name] is staged.host[name] for name in tensors), "memory is used again"


def test_tensors_of_the_cpu_are_not_copied() -> None:
    tensors = {"a": torch.ones(4)}
    staged = Staging().stage(tensors)
    assert staged.host["a"] is tensors["a"]
    assert staged.copied.is_now


@pytest.mark.parametrize("kind", ["sync", "delayed", "diloco", "overlap"])
def test_transfers_of_a_step_and_of_a_round(kind: str, record_property: Callable[[str, object], None]) -> None:
    """Between rounds a step waits once, to see whether its gradients are finite; a round copies each tensor once."""
    with train_lab() as lab:
        model = make_model()
        inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
        run = lab.join("Ada")
        for_all = {"codecs": EXACT, "num_threads": 1, "source": None, "keep_last_good": False}
        optimizer: Any
        if kind in ("sync", "delayed"):
            delays = {"delay_grad_averaging": kind == "delayed"}
            optimizer = Optimizer(run, inner, target_batch_size=1 << 20, matchmaking_seconds=0.1, **delays, **for_all)
        else:
            overlap = {"overlap_steps": 2} if kind == "overlap" else {}
            optimizer = DiLoCo(run, inner, inner_steps=1000, **overlap, **for_all)
        batches = [make_batch(number) for number in range(12)]

        def step(number: int) -> None:
            loss_of(model, batches[number]).backward()
            optimizer.step(batch_size=4)

        step(0)
        device.counts.clear()
        for number in range(1, 11):
            step(number)
        between = copy.copy(device.counts)
        assert (between.to_device, between.to_host, between.synchronisations) == (0, 10, 10)
        device.counts.clear()
        assert optimizer.driver.round()
        tensors = len(list(model.parameters()))
        assert device.counts.to_device == 0, "who is alone has its own values, which are there"
        assert device.counts.to_host <= tensors + 3, "beside, it looks whether all is finite"
        record_property("per_round", str(device.counts))


# The trainer


class Small(Recipe[RecipeConfig]):
    """A line."""

    num_shards = 4

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def samples(self, shard: int, generator: torch.Generator) -> Iterable[tuple[Tensor, ...]]:
        for _ in range(64):
            inputs = torch.randn(2, generator=generator)
            yield inputs, inputs.sum().view(1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]).float(), batch[1])


def manifest(training: Any) -> Manifest:
    return Manifest(run="test", recipe=RecipeRef(name="small"), settings=(Settings(training=training),))


SYNC = SyncSettings(target_batch_size=16, matchmaking_seconds=0.1)
DILOCO = manifests.DiLoCoSettings(inner_steps=4, grace_seconds=0.1)


def make_trainer(lab: Any, training: Any = SYNC, **options: Any) -> Trainer:
    config = TrainConfig(num_threads=1, **{"batch_size": 4, "max_steps": 24, **options})
    return Trainer(lab.join("Ada"), lambda: manifest(training), Small(RecipeConfig()), config)


@pytest.mark.parametrize("training", [SYNC, DILOCO], ids=["sync", "diloco"])
@pytest.mark.parametrize("precision", ["", "float32", "bfloat16", "float16"])
def test_a_trainer_finds_the_device_and_trains_on_it(training: Any, precision: str) -> None:
    with train_lab() as lab:
        trainer = make_trainer(lab, training, precision=precision)
        assert trainer.computing.device == torch.device(DEVICE.type, 0)
        assert trainer.computing.precision.precision == (precision or "float32")
        last = trainer.train(threading.Event())
        assert (last.steps, last.samples) == (24, 96)
        assert last.epoch >= (5 if precision == "float16" else 6), "the first scale may be too large for some batches"
        assert math.isfinite(last.loss)
        parameters = list(trainer.model.parameters())
        assert {(p.device.type, p.dtype) for p in parameters} == {(DEVICE.type, torch.float32)}


def test_a_trainers_step_waits_once_and_its_batches_come_from_pinned_memory() -> None:
    with train_lab() as lab:
        trainer = make_trainer(lab, SyncSettings(target_batch_size=1 << 20, matchmaking_seconds=0.1), max_steps=1)
        trainer.train(threading.Event())
        device.counts.clear()
        trainer._config = TrainConfig(num_threads=1, batch_size=4, max_steps=41)
        trainer._told_at = float("inf")  # telling reads the loss
        trainer.train(threading.Event())
        told = 1  # at its end
        assert device.counts.synchronisations == 40 + told
        assert device.counts.to_device == 2 * 40, "the parts of a batch"


@pytest.mark.parametrize("training", [SYNC, DILOCO], ids=["sync", "diloco"])
def test_batch_sizes_are_found_by_trial(training: Any) -> None:
    with train_lab() as lab:
        trainer = make_trainer(lab, training, batch_size=None)
        assert trainer.train(threading.Event()).steps == 24
        assert trainer.batch_size >= 1


def test_memory_that_ends_within_a_step(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer's statistics come with the first epoch, and may be what does not fit."""
    failed: list[str] = []
    step = torch.optim.AdamW.step

    def fails_once(self: Any, closure: Any = None) -> Any:
        if not failed:
            failed.append("step")
            with torch.no_grad():
                next(iter(self.param_groups[0]["params"])).add_(100.0)  # half of a step
            raise torch.OutOfMemoryError("pretend is out of memory")
        return step(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", fails_once)
    with train_lab() as lab, caplog.at_level(logging.WARNING):
        trainer = make_trainer(lab, SYNC, batch_size=8)
        last = trainer.train(threading.Event())
        assert failed == ["step"]
        assert trainer.batch_size == 4
        assert last.steps == 24
        assert trainer.optimizer.statistics()["rolled_back"] == 1
        assert all(parameter.abs().max() < 50 for parameter in trainer.model.parameters()), "half a step is undone"
    assert "was not enough for a step" in caplog.text


def test_a_limit_of_memory_on_a_device_without_an_index() -> None:
    found = find_device(DEVICE.type)
    assert found.index == 0
    limit = MemoryLimit(1 << 20, found)
    assert device.memory_limit_bytes == 1 << 20
    assert not limit.is_exceeded()
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1 << 20, device=found)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigurationError, match="cannot be used here"):
        find_device("cuda")
