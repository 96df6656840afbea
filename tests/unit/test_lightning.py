"""`PotluckStrategy` in runs in memory: alone it is plain Lightning, and with others it is one large batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from lightninglab import BATCH_SIZE, Regression, assert_same, loader, sgd, strategy, trainer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, ReduceLROnPlateau, SequentialLR
from trainlab import loss_of, make_batch, make_model, parameters_of, quality_of, together, train_lab

import potluck
from potluck.errors import ConfigurationError
from potluck.integrations.lightning import PotluckStrategy
from potluck.integrations.naming import MeaninglessArgumentWarning
from potluck.integrations.runoptimizer import RunOptimizer

# What Lightning says about data loaders is advice, and what torch says of Lightning's own code not about us.
pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:.*LeafSpec:FutureWarning",
    "ignore:Checkpoint directory .* is not empty",
    "ignore:Be aware that when using `ckpt_path`",
)
NUM_BATCHES = 6


def adam_in_groups(module: Regression) -> Any:
    first, last = module.net[0], module.net[2]
    return torch.optim.AdamW([{"params": first.parameters(), "lr": 0.02}, {"params": last.parameters()}], lr=0.01)


def warmed_up(module: Regression) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    parts = [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 10)]
    scheduler = SequentialLR(optimizer, parts, milestones=[2])
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


# Alone


@pytest.mark.parametrize(
    ("configure", "options", "num_batches_a_step"),
    [
        (sgd, {}, 1),
        (adam_in_groups, {}, 1),
        (warmed_up, {}, 1),
        (sgd, {"accumulate_grad_batches": 2}, 2),
        (sgd, {"gradient_clip_val": 0.05}, 1),
        (sgd, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, 1),
        (sgd, {"precision": "bf16-mixed"}, 1),
    ],
    ids=["sgd", "groups", "scheduler", "accumulate", "clip", "clip value", "bf16-mixed"],
)
def test_alone_it_is_plain_lightning(configure: Any, options: dict[str, Any], num_batches_a_step: int) -> None:
    plain, ours = Regression(configure), Regression(configure)
    trainer(**options).fit(plain, loader(NUM_BATCHES))
    with train_lab() as lab:
        target = BATCH_SIZE * num_batches_a_step
        trainer(strategy(lab, target_batch_size=target), **options).fit(ours, loader(NUM_BATCHES))
    assert_same(ours, plain)
    assert ours.rates == plain.rates
    assert not torch.equal(ours.values[0], parameters_of(make_model())[0])


@pytest.mark.parametrize("options", [{}, {"reuse_grad_buffers": True}])
def test_a_target_of_two_batches_is_accumulating_two(options: dict[str, Any]) -> None:
    plain, ours = Regression(), Regression()
    trainer(accumulate_grad_batches=2, gradient_clip_val=0.05).fit(plain, loader(NUM_BATCHES))
    with train_lab() as lab:
        chosen = strategy(lab, target_batch_size=2 * BATCH_SIZE, **options)
        trainer(chosen, gradient_clip_val=0.05).fit(ours, loader(NUM_BATCHES))
    assert_same(ours, plain)  # it is the mean of the two that is clipped


def test_sixteen_bits_with_a_scaler_and_a_batch_that_overflows() -> None:
    def precision() -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1))

    plain, ours = Regression(), Regression()
    plugin = precision()
    trainer(plugins=[plugin]).fit(plain, loader(NUM_BATCHES * 8))
    with train_lab() as lab:
        used = precision()
        chosen = strategy(lab)
        trainer(chosen, plugins=[used]).fit(ours, loader(NUM_BATCHES * 8))
    assert_same(ours, plain)
    assert used.scaler is not None
    assert plugin.scaler is not None
    assert used.scaler.get_scale() == plugin.scaler.get_scale() < 2.0**40
    assert not torch.equal(ours.values[0], parameters_of(make_model())[0])


def test_sixteen_bits_with_an_optimizer_that_is_offloaded() -> None:
    def precision() -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))

    plain, ours = Regression(), Regression()
    trainer(plugins=[precision()], gradient_clip_val=0.05).fit(plain, loader(NUM_BATCHES))
    with train_lab() as lab:
        offloaded = strategy(lab, offload_optimizer=True)
        trainer(offloaded, plugins=[precision()], gradient_clip_val=0.05).fit(ours, loader(NUM_BATCHES))
    assert_same(ours, plain)


def test_on_a_cpu_lightning_itself_takes_bfloat16_for_float16() -> None:
    with train_lab() as lab, pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU"):
        assert trainer(strategy(lab), precision="16-mixed").precision == "bf16-mixed"


def test_a_batch_that_the_module_leaves_out_counts_for_nothing() -> None:
    ours = Regression(skipped=[1, 4])
    epochs: list[int] = []
    with train_lab() as lab:
        fitting = trainer(strategy(lab), callbacks=[Epochs(epochs)])
        with pytest.warns(UserWarning, match="training_step` returned `None`"):
            fitting.fit(ours, loader(NUM_BATCHES))
    assert epochs[-1] == NUM_BATCHES - 2
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in (0, 2, 3, 5):
        optimizer.zero_grad()
        loss_of(model, make_batch(number, BATCH_SIZE)).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.values, parameters_of(model), strict=True))


class Epochs(pl.Callback):
    """Notes the run's epoch after each batch."""

    def __init__(self, noted: list[int]) -> None:
        self.noted = noted

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, PotluckStrategy)
        self.noted.append(trainer.strategy.epoch)


def test_manual_optimisation_hands_in_what_it_steps_with() -> None:
    class Manual(Regression):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss_of(self.net, batch))
            optimizer.step()

    plain, ours = Regression(), Manual()
    trainer().fit(plain, loader(NUM_BATCHES))
    with train_lab() as lab:
        trainer(strategy(lab)).fit(ours, loader(NUM_BATCHES))
    assert_same(ours, plain)


# Schedules


def test_a_scheduler_counts_epochs_of_the_run_however_lightning_counts() -> None:
    def each_pass(module: Regression) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.5), "interval": "epoch", "frequency": 2}]

    ours = Regression(each_pass)
    with train_lab() as lab:
        trainer(strategy(lab, target_batch_size=2 * BATCH_SIZE)).fit(ours, loader(12))
    assert ours.rates == [1.0] * 4 + [0.5] * 4 + [0.25] * 4


@pytest.mark.parametrize("delays", [False, True])
def test_scheduler_fn_sets_the_rates_with_and_without_delays(tmp_path: Path, delays: bool) -> None:
    options = {"delay_state_averaging": delays, "delay_grad_averaging": delays, "delay_optimizer_step": delays}
    ours = Regression()
    with train_lab() as lab:
        chosen = strategy(lab, scheduler_fn=partial(ExponentialLR, gamma=0.5), offload_optimizer=delays, **options)
        fitting = trainer(chosen, callbacks=[LearningRateMonitor()], logger=CSVLogger(tmp_path))
        fitting.fit(ours, loader(NUM_BATCHES))
    rates = [0.1 * 0.5**epoch for epoch in range(NUM_BATCHES)]
    if not delays:
        assert ours.rates == rates
    assert fitting.optimizers[0].param_groups[0]["lr"] == rates[-1] * 0.5  # each epoch was landed in the end


def plateau(module: Regression, **monitor: str) -> Any:
    optimizer = sgd(module)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **monitor}}


def test_a_plateau_alone_is_that_of_plain_lightning() -> None:
    plain, ours = (Regression(partial(plateau, monitor="val_loss")) for _ in range(2))
    trainer(max_epochs=5).fit(plain, loader(2), loader(1, first=100))
    with train_lab() as lab:
        trainer(strategy(lab), max_epochs=5).fit(ours, loader(2), loader(1, first=100))
    assert_same(ours, plain)
    assert ours.rates[-1] < ours.rates[0]


class Moody(Regression):
    """Whose metric gets better or worse, whatever it learns."""

    def __init__(self, change: float) -> None:
        super().__init__(partial(plateau, monitor="mood"))
        self.change = change
        self.rate_by_epoch: dict[int, float] = {}

    def on_validation_epoch_end(self) -> None:
        self.log("mood", 10.0 + self.change * self.current_epoch)

    def on_train_batch_end(self, *_: Any) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, PotluckStrategy)
        self.rate_by_epoch[strategy.epoch] = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.trainer.should_stop = strategy.epoch >= 12


def test_peers_whose_metrics_differ_have_the_same_rates() -> None:
    modules = [Moody(-4.0), Moody(+5.0)]  # alone the first would keep its rate, and the second halve it each time
    with train_lab() as lab:
        runs = [lab.join(f"trainer {number}") for number in range(2)]

        def train(number: int) -> None:
            chosen = strategy(lab, runs[number], target_batch_size=2 * BATCH_SIZE, matchmaking_time=20.0)
            fitting = trainer(chosen, max_epochs=-1, num_sanity_val_steps=0)
            fitting.fit(modules[number], loader(2, first=1000 * number), loader(1))

        together(partial(train, 0), partial(train, 1))
    one, other = (module.rate_by_epoch for module in modules)
    common = sorted(one.keys() & other.keys())
    assert len(common) >= 6
    assert [one[epoch] for epoch in common] == [other[epoch] for epoch in common]
    assert one[common[-1]] < 0.1
    assert_same(*modules)


# Checkpoints


class ByStep(Regression):
    """Takes its batches by the number of the step: a loader does not know how far it was."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return loss_of(self.net, make_batch(self.trainer.global_step, BATCH_SIZE))


def resumable(strategy: Any, folder: Path, **options: Any) -> pl.Trainer:
    saved = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    return trainer(strategy, callbacks=[saved], enable_checkpointing=True, **options)


@pytest.mark.parametrize("num_batches_an_epoch", [1, 2])  # with two, a batch waits in the checkpoint for another
@pytest.mark.parametrize("algorithm", ["sync", "diloco"])
def test_training_goes_on_from_a_checkpoint_to_the_same_bits(
    tmp_path: Path, num_batches_an_epoch: int, algorithm: Any
) -> None:
    options = {"algorithm": algorithm}
    options |= {"inner_steps": 2} if algorithm == "diloco" else {"target_batch_size": BATCH_SIZE * num_batches_an_epoch}
    whole, half, rest = ByStep(warmed_up), ByStep(warmed_up), ByStep(warmed_up)
    with train_lab() as lab:
        trainer(strategy(lab, **options)).fit(whole, loader(NUM_BATCHES))
    with train_lab() as lab:
        resumable(strategy(lab, **options), tmp_path, max_steps=3).fit(half, loader(NUM_BATCHES))
    with train_lab() as lab:
        resumable(strategy(lab, **options), tmp_path).fit(rest, loader(NUM_BATCHES), ckpt_path=tmp_path / "step=3.ckpt")
    assert_same(rest, whole)


def test_a_checkpoint_is_one_like_any_other(tmp_path: Path) -> None:
    ours, plain, continued = ByStep(warmed_up), ByStep(warmed_up), ByStep(warmed_up)
    trainer().fit(plain, loader(NUM_BATCHES))
    with train_lab() as lab:
        resumable(strategy(lab), tmp_path, max_steps=3).fit(ours, loader(NUM_BATCHES))
    trainer().fit(continued, loader(NUM_BATCHES), ckpt_path=tmp_path / "step=3.ckpt")
    assert_same(continued, plain)
    loaded = ByStep.load_from_checkpoint(tmp_path / "step=3.ckpt", configure=warmed_up)
    assert_same(loaded, ours)


def test_a_run_that_goes_on_counts_more_than_a_checkpoint(tmp_path: Path) -> None:
    first, later = Regression(), Regression()
    with train_lab() as lab:
        resumable(strategy(lab), tmp_path, max_steps=2).fit(Regression(), loader(NUM_BATCHES))
    with train_lab() as lab:
        trainer(strategy(lab, lab.join("first"))).fit(first, loader(NUM_BATCHES))
        come_back = trainer(strategy(lab, lab.join("later", coordinates=True)), max_steps=3)
        come_back.fit(later, loader(3, first=NUM_BATCHES), ckpt_path=tmp_path / "step=2.ckpt")
    reference = Regression()
    trainer().fit(reference, loader(NUM_BATCHES + 1))  # one step after the two of the checkpoint
    assert_same(later, reference)


# The end


def test_samples_that_wait_at_the_end_are_handed_in() -> None:
    ours, model = Regression(), make_model()
    with train_lab() as lab:
        trainer(strategy(lab, target_batch_size=4 * BATCH_SIZE)).fit(ours, loader(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for numbers in ((0, 1, 2, 3), (4, 5)):
        optimizer.zero_grad()
        for number in numbers:
            (loss_of(model, make_batch(number, BATCH_SIZE)) / len(numbers)).backward()
        optimizer.step()
    for got, wanted in zip(ours.values, parameters_of(model), strict=True):
        torch.testing.assert_close(got, wanted)


def test_whoever_does_not_want_that_leaves_at_once() -> None:
    ours = Regression()
    with train_lab() as lab:
        chosen = strategy(lab, target_batch_size=4 * BATCH_SIZE, hand_in_seconds=0)
        trainer(chosen).fit(ours, loader(3))
    assert all(torch.equal(a, b) for a, b in zip(ours.values, parameters_of(make_model()), strict=True))


# Together


def test_two_trainers_make_one_large_batch_and_know_of_each_other() -> None:
    seen: list[int] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            assert isinstance(trainer.strategy, PotluckStrategy)
            seen.append(trainer.strategy.num_peers)
            trainer.should_stop = trainer.strategy.epoch >= 4

    modules = [Regression(), Regression()]
    with train_lab() as lab:
        runs = [lab.join(f"trainer {number}") for number in range(2)]

        def train(number: int) -> None:
            chosen = strategy(lab, runs[number], target_batch_size=4 * BATCH_SIZE, matchmaking_time=20.0)
            fitting = trainer(chosen, callbacks=[Watch()], max_epochs=-1)
            fitting.fit(modules[number], loader(50, first=1000 * number))

        together(partial(train, 0), partial(train, 1))
    assert_same(*modules)
    assert max(seen) == 2
    assert not torch.equal(modules[0].values[0], parameters_of(make_model())[0])


@pytest.mark.parametrize("algorithm", ["local", "diloco", "streaming", "sparseloco", "asynchronous"])
def test_every_algorithm_trains(algorithm: Any) -> None:
    ours = Regression(lambda module: torch.optim.SGD(module.parameters(), lr=0.02))
    options: dict[str, Any] = {"target_batch_size": 2 * BATCH_SIZE} if algorithm == "local" else {"inner_steps": 4}
    if algorithm == "streaming":
        options |= {"inner_steps": 8, "overlap_steps": 1}
    epochs: list[int] = []
    with train_lab() as lab:
        chosen = strategy(lab, algorithm=algorithm, **options)
        trainer(chosen, callbacks=[Epochs(epochs)]).fit(ours, loader(24))
    assert epochs[-1] >= 3
    assert quality_of(ours.net) < quality_of(make_model())


def test_diloco_is_that_of_a_plain_loop() -> None:
    ours, model = Regression(), make_model()
    with train_lab() as lab:
        trainer(strategy(lab, algorithm="diloco", inner_steps=3)).fit(ours, loader(NUM_BATCHES))
    with train_lab() as lab:
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run = lab.join("trainer")
        optimizer = potluck.DiLoCo(run, inner, inner_steps=3, source=lab.states, num_threads=1)
        for number in range(NUM_BATCHES):
            loss_of(model, make_batch(number, BATCH_SIZE)).backward()
            optimizer.step(batch_size=BATCH_SIZE)
    assert all(torch.equal(a, b) for a, b in zip(ours.values, parameters_of(model), strict=True))


# Around it


def test_validation_needs_no_run() -> None:
    module = Regression()
    alone = PotluckStrategy(target_batch_size=8, initial_peers="potluck://nowhere.invalid:1/run?ca=none#ask")
    [result] = trainer(alone).validate(module, loader(2), verbose=False)
    assert result["val_loss"] == pytest.approx(sum(loss_of(module.net, make_batch(n)).item() for n in (0, 1)) / 2)
    assert alone.num_peers == 1
    assert alone.epoch == 0


def test_after_training_the_optimizer_is_torchs_again() -> None:
    with train_lab() as lab:
        fitting = trainer(strategy(lab))
        fitting.fit(Regression(), loader(2), loader(1))
    [optimizer] = fitting.optimizers
    assert isinstance(optimizer, RunOptimizer)
    assert optimizer.shared is None
    assert set(optimizer.state_dict()) == {"state", "param_groups"}


def test_the_strategy_is_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"potluck", "potluck_diloco"} <= set(StrategyRegistry.available_strategies())
    monkeypatch.setenv("POTLUCK_TARGET_BATCH_SIZE", "64")
    named = trainer("potluck").strategy
    assert isinstance(named, PotluckStrategy)
    assert named._part.training.target_batch_size == 64
    monkeypatch.delenv("POTLUCK_TARGET_BATCH_SIZE")
    assert isinstance(trainer("potluck_diloco").strategy, PotluckStrategy)
    with pytest.raises(ConfigurationError, match="target_batch_size"):
        trainer("potluck")


# Refusals


def refused(match: str, module: Regression | None = None, batches: Any = None, **options: Any) -> None:
    with train_lab() as lab, pytest.raises(ConfigurationError, match=match):
        trainer(strategy(lab, **options)).fit(module or Regression(), batches or loader(2))


def test_more_than_one_optimizer_is_refused() -> None:
    class Two(Regression):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__(lambda module: [sgd(module), sgd(module)])
            self.automatic_optimization = False

    refused("2 optimizers, and a run trains with one", Two())


def test_a_plateau_without_a_metric_is_refused() -> None:
    refused("ReduceLROnPlateau has no metric to follow", scheduler_fn=ReduceLROnPlateau)
    with train_lab() as lab, pytest.raises(Exception, match="must include a monitor"):
        trainer(strategy(lab)).fit(Regression(plateau), loader(2))


def test_a_batch_without_a_size_is_refused_unless_somebody_says_it() -> None:
    class Opaque:
        pass

    class Blind(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return loss_of(self.net, make_batch(batch_idx, BATCH_SIZE))

    from torch.utils.data import DataLoader

    batches: Any = DataLoader([Opaque() for _ in range(NUM_BATCHES)], batch_size=None)  # type: ignore[arg-type]
    refused("size of a batch cannot be inferred from a Opaque", Blind(), batches)
    plain, ours = Regression(), Blind()
    trainer().fit(plain, loader(NUM_BATCHES))
    with train_lab() as lab:
        trainer(strategy(lab, batch_size=BATCH_SIZE)).fit(ours, batches)
    assert_same(ours, plain)


def test_accelerators_that_are_not_known_and_several_devices_are_refused() -> None:
    class Odd(CPUAccelerator.__base__):  # type: ignore[name-defined, misc]
        """A device that nobody has heard of."""

        parse_devices = staticmethod(CPUAccelerator.parse_devices)
        get_parallel_devices = staticmethod(CPUAccelerator.get_parallel_devices)
        auto_device_count = is_available = staticmethod(lambda: 1)
        setup_device = CPUAccelerator.setup_device
        get_device_stats = CPUAccelerator.get_device_stats
        get_device_type = staticmethod(lambda: "odd")
        name = staticmethod(lambda: "odd")

        def teardown(self) -> None:
            pass

    with (
        train_lab() as lab,
        pytest.raises(ConfigurationError, match="Odd, and torch finds no such device"),
    ):
        trainer(strategy(lab), accelerator=Odd()).fit(Regression(), loader(2))
    with train_lab() as lab, pytest.raises(ConfigurationError, match="2 devices, and a peer computes on one"):
        trainer(strategy(lab), devices=2).fit(Regression(), loader(2))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"algorithm": "magic"}, "choose one of sync, local"),
        ({"target_batch_size": 8, "matchmaking_tim": 3}, "did you mean matchmaking_seconds"),
        ({"target_batch_size": 8, "auxiliary": True}, "potluck join LINK --role aux"),
        ({"target_batch_size": 8, "delay_optimizer_step": True, "offload_optimizer": False}, "offload_optimizer=True"),
        ({"algorithm": "diloco", "delay_grad_averaging": True}, "overlap_steps"),
        ({"target_batch_size": 8, "batch_size": 0}, "batch_size=0"),
        ({"target_batch_size": 8, "hand_in_seconds": -1}, "hand_in_seconds=-1"),
        ({"target_batch_size": 8, "initial_peers": "/ip4/1.2.3.4/tcp/1/p2p/x"}, "address of hivemind's"),
        ({"target_batch_size": 8, "initial_peers": ["potluck://a", "potluck://b"]}, "2 links"),
        ({}, "POTLUCK_TARGET_BATCH_SIZE"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        PotluckStrategy(**options)


def test_gradients_that_are_scaled_cannot_be_added_up_where_they_are() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with train_lab() as lab, pytest.raises(ConfigurationError, match="leave reuse_grad_buffers out"):
        trainer(strategy(lab, reuse_grad_buffers=True), plugins=[plugin]).fit(Regression(), loader(2))


def test_arguments_of_hivemind_that_mean_nothing_are_told_in_one_warning() -> None:
    with pytest.warns(MeaninglessArgumentWarning) as told:
        PotluckStrategy(
            target_batch_size=8, use_ipfs=True, host_maddrs=["/ip4/0.0.0.0/tcp/0"], wait_timeout=3, use_relay=None
        )
    [warning] = told
    text = str(warning.message)
    assert "use_ipfs" in text
    assert "listen=('tcp://HOST:PORT',)" in text
    assert "use_relay" not in text  # None is what it is without being asked for
    assert warning.filename == __file__


def test_errors_in_training_leave_the_run() -> None:
    class Broken(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError

    with train_lab() as lab:
        chosen = strategy(lab)
        with pytest.raises(ZeroDivisionError):
            trainer(chosen).fit(Broken(), loader(2))
        assert chosen.shared is None
