"""Several devices, one peer: two processes on the CPU, with gloo between them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel
from trainlab import TrainLab, together, train_lab

from potluck.errors import FatalError
from potluck.recipes.catalogue import open_recipe, refer_to
from potluck.recipes.recipe import Recipe
from potluck.recipes.shipped import folder_files
from potluck.round.plan.messages import Commit
from potluck.training.manifest import manifest as manifests
from potluck.training.manifest.manifest import Manifest, Settings, SyncSettings
from potluck.training.trainer import sharding
from potluck.training.trainer.config import TrainConfig
from potluck.training.trainer.devicepool import DevicePool, DevicePoolSpec
from potluck.training.trainer.models import untrained
from potluck.training.trainer.trainer import Trainer

pytestmark = pytest.mark.timeout(240)

RECIPE = '''
import torch
from torch import nn
from potluck.recipes.recipe import Recipe, RecipeConfig

class Line(Recipe[RecipeConfig]):
    """A line, with a hidden layer."""
    num_shards = 4
    is_light = True  # the tests open a feed for each step
    def model(self):
        return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    def samples(self, shard, generator):
        for _ in range(256):
            inputs = torch.randn(3, generator=generator)
            yield inputs, inputs.sum().view(1)
    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])
'''
TWO = "cpu,cpu"


def _warm_up() -> None:
    """What Python and gloo open once in a process, for good: here, before a test counts."""
    resource_tracker.ensure_running()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=FileStore(f"{folder}/meeting", 1), rank=0, world_size=1)
        DistributedDataParallel(torch.nn.Linear(1, 1))(torch.ones(1, 1)).sum().backward()  # torch keeps the last one
        cut = sharding.in_parts(torch.nn.Linear(1, 1), torch.device("cpu"), 1)
        cut(torch.ones(1, 1)).sum().backward()
        sharding.let_go(cut)
        dist.destroy_process_group()


_warm_up()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "line.py"
    path.write_text(RECIPE)
    return path


def manifest_of(file: Path, training: SyncSettings | manifests.DiLoCoSettings) -> Manifest:
    return Manifest(run="test", recipe=refer_to(file.name, file.parent), settings=(Settings(training=training),))


def opened(file: Path) -> Recipe[object]:
    return open_recipe(refer_to(file.name, file.parent), {}, file)


@pytest.mark.parametrize("shard", [False, True], ids=["whole", "in parts"])
def test_gradients_are_those_of_the_whole_batch_and_the_pool_ends_with_its_peer(file: Path, shard: bool) -> None:
    recipe = opened(file)
    model = untrained(recipe, 7)
    assert recipe.origin is not None
    spec = DevicePoolSpec(origin=recipe.origin, seed=7, precision="float32", devices=("cpu", "cpu"), is_sharded=shard)
    pool = DevicePool(spec, recipe, model)
    [process] = multiprocessing.active_children()
    for size in (8, 5, 1):
        inputs = torch.randn(size, 3)
        batch = (inputs, inputs.sum(1, keepdim=True))
        share, weight = pool.hand_out(batch, 1.0)
        with pool.computed_together():
            (recipe.loss(pool.computing, share) * weight).backward()  # type: ignore[no-untyped-call]
        shared = gradients(model)
        recipe.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(shared, gradients(model))
        with torch.no_grad():
            for parameter in model.parameters():  # a step: the others hear of it before the next batch
                parameter.add_(0.1)
    pid = process.pid
    pool.close()
    assert not Path(f"/proc/{pid}").exists()
    pool.close()


def gradients(model: torch.nn.Module) -> list[Tensor]:
    """The model's gradients, which it has no more afterwards."""
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def make_trainer(
    lab: TrainLab,
    name: str,
    file: Path,
    devices: str,
    training: SyncSettings | manifests.DiLoCoSettings,
    shard: bool | None = None,
) -> Trainer:
    config = TrainConfig(num_threads=1, batch_size=8, device=devices, shard=shard)
    return Trainer(lab.join(name), lambda: manifest_of(file, training), opened(file), config)


SYNC = SyncSettings(target_batch_size=32, matchmaking_seconds=20.0)
DILOCO = manifests.DiLoCoSettings(inner_steps=2, grace_seconds=20.0)


@pytest.mark.parametrize(
    ("training", "shard"),
    [(SYNC, False), (SYNC, True), pytest.param(DILOCO, True, marks=pytest.mark.soak)],
    ids=["sync", "sync, in parts", "diloco, in parts"],
)
def test_the_run_sees_one_peer_until_a_device_is_lost_and_then_goes_on_without_it(
    file: Path, training: SyncSettings | manifests.DiLoCoSettings, shard: bool
) -> None:
    """Its traffic and its state are those of a peer with one device; it ends with a reason."""
    with train_lab() as lab:
        bob = make_trainer(lab, "Bob", file, "cpu", training)
        ada = make_trainer(lab, "Ada", file, TWO, training, shard)
        [process] = multiprocessing.active_children()
        ended, enough = threading.Event(), threading.Event()
        later: list[int] = []  # epochs without Ada

        def lose(commit: Commit) -> None:
            if commit.epoch == 4:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)

        def count(commit: Commit) -> None:
            if ended.is_set():
                later.append(commit.epoch)
                if len(later) == 3:
                    enough.set()

        ada.optimizer.collaboration.averager.listen(lose)
        bob.optimizer.collaboration.averager.listen(count)

        def train_and_lose() -> dict[str, int]:
            with pytest.raises(
                FatalError, match=r"computes on cpu for this peer was killed \(SIGKILL\).*the run goes on"
            ):
                ada.train(threading.Event())
            assert len(lab.runs[0].peer.session.roster) == 2
            sent = ada.optimizer.collaboration.averager.statistics()
            lab.runs[1].close()
            ended.set()
            return sent

        sent, last = together(train_and_lose, lambda: bob.train(enough), seconds=200)
        assert last.epoch >= later[-1] >= 4 + 3
        of_bob = bob.optimizer.collaboration.averager.statistics()
        keys = [key for key in sent if "bytes" in key and of_bob.get(key)]
        assert keys, sent
        for key in keys:
            assert sent[key] <= 1.5 * of_bob[key], key
        tensors = ada.optimizer.method.tensors()
        assert tensors.keys() == bob.optimizer.method.tensors().keys()
        assert len(tensors) >= 4


class NoRoom:
    """A device of which little is free."""

    @staticmethod
    def mem_get_info(device: torch.device) -> tuple[int, int]:
        return 4 * 81 * 5 - 1, 1 << 30  # of the model's 81 values: itself, gradients, AdamW's two and their sum


def test_a_model_that_does_not_fit_is_cut(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = untrained(opened(file), 0)
    assert sharding.fits(model, torch.device("cpu"), 3)
    monkeypatch.setattr(torch, "get_device_module", lambda _device: NoRoom)
    assert not sharding.fits(model, torch.device("cuda", 0), 3)
    assert sharding.fits(model, torch.device("cuda", 0), 1)


def test_who_has_no_room_on_one_of_its_devices_says_what_to_do(file: Path) -> None:
    file.write_text(RECIPE.replace("        return nn.functional", HOG + "        return nn.functional"))
    with train_lab() as lab:
        ada = make_trainer(lab, "Ada", file, TWO, SyncSettings(target_batch_size=32))
        with pytest.raises(FatalError, match=r"no room for its share of a batch.*smaller --batch-size"):
            ada.train(threading.Event())


HOG = """\
        import torch.distributed as dist
        if dist.is_initialized() and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("out of memory")
"""


def test_a_pool_has_the_files_of_its_run(tmp_path: Path) -> None:
    """A tokenizer, for one: without it no process but the first could make the model."""
    (tmp_path / "width.txt").write_text("16")
    (tmp_path / "line.py").write_text(
        RECIPE.replace("nn.Linear(3, 16)", "nn.Linear(3, self.width())").replace(
            "    num_shards = 4",
            "    num_shards = 4\n    def width(self):\n        return int(self.file('width.txt').read_text())",
        )
    )
    recipe = open_recipe(refer_to("line.py", tmp_path), {}, tmp_path / "line.py", folder_files(tmp_path))
    manifest = manifest_of(tmp_path / "line.py", SyncSettings(target_batch_size=16, matchmaking_seconds=0.1))
    with train_lab() as lab:
        config = TrainConfig(num_threads=1, batch_size=8, device=TWO, max_steps=4, precision="float16")
        trainer = Trainer(lab.join("Ada"), lambda: manifest, recipe, config)
        assert trainer.train(threading.Event()).steps == 4
