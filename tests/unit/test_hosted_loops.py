"""Programs of people's own in a hosted run: they follow the organiser to the end, and keep their receipts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightninglab
import msgspec
import pytest
import test_transformers as transformerslab
import torch
from trainlab import PATIENCE_SECONDS, TrainLab, loss_of, make_batch, make_model, together, train_lab

import potluck
from potluck.hub.keys import Signer, new_seed
from potluck.hub.stores import MANIFEST_KEY
from potluck.recipes.reference import RecipeRef
from potluck.run.joined import Joined
from potluck.testing.polling import poll_until_sync
from potluck.training.books.receipts import check_receipts, read_lines, receipts_folder
from potluck.training.manifest import noticeboard
from potluck.training.manifest.manifest import DiLoCoSettings, Manifest, OptimizerSpec, Settings, SyncSettings
from potluck.training.trainer.program import ProgramRun

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:.*LeafSpec:FutureWarning",
    "ignore:Checkpoint directory .* is not empty",
    "ignore:Be aware that when using `ckpt_path`",
)
NUM_BATCHES = 6

BATCH_SIZE = 4
END = 3
ORGANISER = Signer(new_seed("user"))
SGD = OptimizerSpec(name="sgd", learning_rate=0.1, weight_decay=0.0, max_grad_norm=0.0)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))


class Organised:
    """A run in memory that somebody steers."""

    def __init__(self, lab: TrainLab, training: SyncSettings | DiLoCoSettings) -> None:
        self.run = lab.join("Ada")
        settings = Settings(training=training, optimizer=SGD, end_epoch=END)
        name = self.run.peer.session.subjects.run
        self.manifest = Manifest(run=name, recipe=RecipeRef(name="own", digest="0" * 64), settings=(settings,))
        self.put_up(self.manifest)

    def put_up(self, manifest: Manifest) -> None:
        async def put() -> None:
            await self.run.peer.session.hub.store("manifest").put(MANIFEST_KEY, noticeboard.sign(manifest, ORGANISER))

        self.manifest = manifest
        self.run.call(put())

    def change(self, **values: Any) -> None:
        """As `potluck run` does, from now on."""
        [settings] = self.manifest.settings
        changed = msgspec.structs.replace(settings, **values)
        self.put_up(msgspec.structs.replace(self.manifest, settings=(changed,), revision=self.manifest.revision + 1))


def receipts_of(run: Joined) -> tuple[set[int], float]:
    peer_id = run.peer_id
    run.close()
    checked, num_bad = check_receipts(line for path in receipts_folder().glob("*.jsonl") for line in read_lines(path))
    assert num_bad == 0
    [only] = checked
    assert only.peer == peer_id
    return only.epochs, only.samples


SYNC = SyncSettings(target_batch_size=2 * BATCH_SIZE, matchmaking_seconds=0.05)


@pytest.mark.parametrize("training", [SYNC, DiLoCoSettings(inner_steps=2, grace_seconds=0.05)], ids=["sync", "diloco"])
def test_a_loop_of_one_s_own_ends_with_the_run_and_keeps_its_receipts(
    training: SyncSettings | DiLoCoSettings, caplog: pytest.LogCaptureFixture
) -> None:
    with train_lab() as lab:
        organised = Organised(lab, training)
        model = make_model()
        make: Callable[..., Any] = potluck.Optimizer if isinstance(training, SyncSettings) else potluck.DiLoCo
        optimizer = make(organised.run, torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9))

        def step(number: int) -> None:
            loss_of(model, make_batch(number, BATCH_SIZE)).backward()
            optimizer.step(batch_size=BATCH_SIZE)
            optimizer.zero_grad()

        steps = 0
        while not optimizer.is_over:
            step(steps)
            steps += 1
        assert (optimizer.epoch, steps) == (END, 2 * END)
        weights = [parameter.clone() for parameter in model.parameters()]
        step(steps)
        step(steps)
        assert optimizer.epoch == END
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
        assert caplog.text.count("is over") == 1, "said once"
        assert receipts_of(organised.run) == ({1, 2, 3}, 2.0 * BATCH_SIZE * END)


def test_taking_the_shared_weights_lands_what_is_under_way() -> None:
    with train_lab() as lab:
        organised = Organised(lab, DiLoCoSettings(inner_steps=2, overlap_steps=1, grace_seconds=0.05))
        model = make_model()
        optimizer = potluck.DiLoCo(organised.run, torch.optim.SGD(model.named_parameters(), lr=0.1))
        for number in range(2):
            loss_of(model, make_batch(number, BATCH_SIZE)).backward()
            optimizer.step(batch_size=BATCH_SIZE)
            optimizer.zero_grad()
        assert optimizer.driver.is_busy
        assert optimizer.epoch == 0
        optimizer.take_shared()
        assert not optimizer.driver.is_busy
        assert optimizer.epoch == 1
        shared = optimizer.method.shared
        assert all(torch.equal(value, shared[name]) for name, value in model.named_parameters())


def lightning_fit(organised: Organised, lab: TrainLab, folder: Path) -> int:
    """How many steps the framework's trainer took; it has data for many more."""
    chosen = lightninglab.strategy(lab, organised.run, source=None, target_batch_size=2 * BATCH_SIZE)
    fitting = lightninglab.trainer(chosen, max_epochs=50)
    module = lightninglab.Regression(lambda module: named_sgd(module))
    fitting.fit(module, lightninglab.loader(10), lightninglab.loader(1))
    return int(fitting.global_step)


def transformers_fit(organised: Organised, lab: TrainLab, folder: Path) -> int:
    with transformerslab.callback(lab, organised.run, source=None, target_batch_size=2 * BATCH_SIZE) as part:
        model = transformerslab.Regression()
        fitting = transformerslab.InOrder(
            model,
            transformerslab.arguments(folder, max_steps=500),
            train_dataset=transformerslab.samples(10),
            callbacks=[part],
            optimizers=part.optimizers(named_sgd(model)),
        )
        fitting.train()
    return int(fitting.state.global_step)


def named_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("fit", [lightning_fit, transformers_fit], ids=["Lightning", "transformers"])
def test_frameworks_wait_while_paused_follow_settings_end_with_the_run_and_keep_receipts(
    fit: Callable[[Organised, TrainLab, Path], int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with train_lab() as lab:
        organised = Organised(lab, SYNC)
        organised.change(paused=True)

        def resume() -> None:
            poll_until_sync(lambda: "is paused by" in caplog.text, PATIENCE_SECONDS, lambda: "a trainer that waits")
            organised.change(paused=False, end_epoch=2)

        steps, _ = together(lambda: fit(organised, lab, tmp_path), resume)
        assert steps in (4, 5), "of two batches an epoch; a framework may take one more that does not count"
        assert "goes on" in caplog.text
        assert receipts_of(organised.run) == ({1, 2}, 2.0 * BATCH_SIZE * 2)


def test_a_program_has_the_run_s_ledger() -> None:
    with train_lab() as lab:
        organised = Organised(lab, SYNC)
        inner = torch.optim.SGD(make_model().named_parameters(), lr=0.1, momentum=0.9)
        potluck.Optimizer(organised.run, inner)  # which coordinates, and so gives out shards
        shards = ProgramRun.shards(organised.run, 8)  # type: ignore[arg-type]
        assert len({shards.take().shard for _ in range(8)}) == 8
