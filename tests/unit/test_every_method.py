"""Every algorithm with every optimizer that a run.toml can name: two peers train each for three epochs, in memory."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from pathlib import Path

import pytest
import torch
from trainlab import together, train_lab

from potluck.errors import ConfigurationError
from potluck.recipes.catalogue import open_recipe
from potluck.recipes.shipped import folder_files
from potluck.training.manifest.manifest import Manifest
from potluck.training.manifest.runfile import manifest_of, read_run_file
from potluck.training.trainer.config import TrainConfig
from potluck.training.trainer.trainer import Trainer

RECIPE = """
import torch
from torch import nn
from potluck.recipes import Recipe, RecipeConfig

class Tiny(Recipe[RecipeConfig]):
    num_shards = 8
    is_light = True

    def model(self):
        return nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 5))

    def samples(self, shard, generator):
        for _ in range(64):
            number = torch.randint(5, (), generator=generator)
            yield number, (number + 1) % 5

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""

SYNC = 'algorithm = "sync"\ntarget_batch_size = 8\nmatchmaking_seconds = 0.05\n'
DILOCO = 'algorithm = "diloco"\ninner_steps = 3\ngrace_seconds = 2.0\n'
ALGORITHMS = {  # under [training], and under [exchange]
    "sync": (SYNC, ""),
    "sync, state averaged": (SYNC + 'average_state_every = 2\naverage_statistics = "exp_avg_sq,momentum_buffer"', ""),
    "sync, delayed": (SYNC + "delay_averaging = true", ""),
    "sync, delayed and offloaded": (
        SYNC + "delay_averaging = true\ndelay_optimizer_step = true\noffload_optimizer = true",
        "",
    ),
    "sync, gradients in place": (SYNC + "reuse_grad_buffers = true", 'codec = "blockwise8"\ncodec_block = 64'),
    "sync, PowerSGD": (SYNC, 'compression = "powersgd"\nrank = 1\ncodec = "float32"'),
    "local updates": (SYNC + "local_updates = true", ""),
    "local updates, delayed": (SYNC + "local_updates = true\ndelay_averaging = true", ""),
    "diloco": (DILOCO + "offload_optimizer = true\ninner_batch_size = 8", 'aggregator = "trimmed_mean"\ntrim = 0.2'),
    "streaming": (DILOCO + "num_fragments = 2\noverlap_steps = 1\nkeep_overlap_work = true", ""),
    "asynchronous": (DILOCO + 'asynchronous = true\nouter = "delayed_nesterov"\nouter_delay = 2', "audit_chunks = 0"),
    "SparseLoCo": (DILOCO + 'outer = "sgd"\nouter_learning_rate = 1.0', 'compression = "sparseloco"\nkeep = 16'),
    "4 bits": (DILOCO + 'weighting = "equal"', 'codec = "e3m0"\ncompression = "error_feedback"'),
    "diloco, PowerSGD": (DILOCO, 'compression = "powersgd"\ncodec = "float32"'),
}
OPTIMIZERS = ["adamw", "adam", "sgd", "lamb", "larc", "muon"]
SCHEDULES = [
    'kind = "constant"\nwarmup_epochs = 1',
    'kind = "linear"\ntotal_epochs = 9',
    'kind = "cosine"\ntotal_epochs = 9',
    'kind = "inverse_sqrt"\nwarmup_epochs = 1',
    'kind = "warmup_stable_decay"\ntotal_epochs = 9\ndecay_epochs = 3',
]
CASES = [(*pair, number) for number, pair in enumerate(itertools.product(ALGORITHMS, OPTIMIZERS))]
CASES.append(("DeMo", "sgd", 0))


def manifest_for(folder: Path, algorithm: str, optimizer: str, number: int) -> Manifest:
    training, exchange = ALGORITHMS.get(algorithm) or (SYNC, 'compression = "demo"\nmemory_decay = 0.9')
    momentum = "beta1 = 0.0" if algorithm == "DeMo" else ""
    text = f"""
name = "test"
recipe = "tiny.py"
end_epoch = 3
[training]
{training}
[optimizer]
name = "{optimizer}"
learning_rate = 1e-2
decay_vectors = {"true" if number % 2 else "false"}
{momentum}
[schedule]
{SCHEDULES[number % len(SCHEDULES)]}
[exchange]
{exchange}
"""
    (folder / "run.toml").write_text(text)
    (folder / "tiny.py").write_text(RECIPE)
    return manifest_of(read_run_file(folder), folder)


@pytest.mark.parametrize(("algorithm", "optimizer", "number"), CASES, ids=lambda value: str(value))
def test_a_run_of_every_kind_trains(tmp_path: Path, algorithm: str, optimizer: str, number: int) -> None:
    manifest = manifest_for(tmp_path, algorithm, optimizer, number)
    with train_lab() as lab:

        def train(name: str) -> tuple[int, float, bool]:
            recipe = open_recipe(manifest.recipe, manifest.model, tmp_path / "tiny.py", folder_files(tmp_path))
            trainer = Trainer(runs[name], lambda: manifest, recipe, TrainConfig(batch_size=4, num_threads=1))
            ready.wait(60.0)  # on a busy machine one could else be over and away before the other has begun
            before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
            last = trainer.train(threading.Event())
            with contextlib.suppress(threading.BrokenBarrierError):
                done.wait(2.0)
            runs[name].close()  # both at once; one that was left behind goes on alone
            moved = any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
            return last.epoch, last.loss, moved

        runs = {name: lab.join(name, coordinates=True) for name in ("Ada", "Bob")}
        ready, done = threading.Barrier(2), threading.Barrier(2)
        found = together(lambda: train("Ada"), lambda: train("Bob"))
    for epoch, _loss, _moved in found:
        assert epoch >= 3
    assert any(moved for _, _, moved in found)
    assert any(math.isfinite(loss) for _, loss, _ in found)


@pytest.mark.parametrize(
    ("training", "optimizer", "exchange", "line", "words"),
    [
        (SYNC, "adamw", 'compression = "demo"', 19, "needs algorithm"),
        (SYNC, "sgd", 'compression = "demo"', 10, "beta1"),
        (SYNC + "local_updates = true", "adamw", 'codec = "e3m0"\ncompression = "error_feedback"', 9, "local_updates"),
        (SYNC + "delay_optimizer_step = true", "adamw", "", 9, "offload_optimizer"),
        (DILOCO + "asynchronous = true\nmin_peers = 2", "adamw", "", 9, "asynchronous"),
        (DILOCO + "overlap_steps = 3", "adamw", "", 9, "overlap_steps=3"),
        (DILOCO, "adamw", 'codec = "uniform8"\ncompression = "error_feedback"', 19, "uniform8"),
        (DILOCO, "adamw", 'aggregator = "krum"', 19, "krum"),
        (DILOCO, "adamw", "trim = 0.7", 19, "trim"),
        (DILOCO + 'weighting = "gold"', "adamw", "", 9, "gold"),
        (DILOCO + "min_pears = 2", "adamw", "", 9, "min_pears"),
        (DILOCO, "adamax", "", 11, "adamax"),
    ],
)
def test_what_does_not_fit_together_is_told_with_its_line(
    tmp_path: Path, training: str, optimizer: str, exchange: str, line: int, words: str
) -> None:
    ALGORITHMS["wrong"] = (training, exchange)
    try:
        with pytest.raises(ConfigurationError, match=rf"run.toml, line {line}\b.*{words}"):
            manifest_for(tmp_path, "wrong", optimizer, 0)
    finally:
        del ALGORITHMS["wrong"]
