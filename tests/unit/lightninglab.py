"""A small Lightning module, trained in a run in memory or by plain Lightning: on the same batches in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader
from trainlab import DEVICE, TrainLab, loss_of, make_batch, make_model, parameters_of

from potluck.integrations.lightning import PotluckStrategy
from potluck.round.codecs import CodecChoice
from potluck.run.joined import Joined

EXACT = CodecChoice.everything("float32")
BATCH_SIZE = 4
Configure = Callable[["Regression"], Any]


def sgd(module: Regression) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


class Regression(LightningModule):
    """Learns the sine of a sum."""

    def __init__(self, configure: Configure = sgd, skipped: Sequence[int] = ()) -> None:
        super().__init__()
        self.net = make_model()
        self.configure = configure
        self.skipped = skipped
        self.rates: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        return None if batch_idx in self.skipped else loss_of(self.net, batch)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.net, batch))

    def configure_optimizers(self) -> Any:
        return self.configure(self)

    @property
    def values(self) -> list[Tensor]:
        return parameters_of(self.net)


class OnDevice(Accelerator):
    """The device of these tests, where it is not the CPU (tests/accelerator)."""

    parse_devices = staticmethod(lambda devices: devices)
    get_parallel_devices = staticmethod(lambda devices: [torch.device(DEVICE.type, i) for i in range(devices)])
    auto_device_count = staticmethod(lambda: 1)
    is_available = staticmethod(lambda: True)
    name = staticmethod(lambda: DEVICE.type)

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass


def loader(num_batches: int, first: int = 0) -> DataLoader[Any]:
    """Batches as they are read: on the CPU."""
    made = (make_batch(number, BATCH_SIZE) for number in range(first, first + num_batches))
    batches: Any = [tuple(part.cpu() for part in batch) for batch in made]
    return DataLoader(batches, batch_size=None)


def trainer(strategy: Any = "auto", **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    place = "cpu" if DEVICE.type == "cpu" else OnDevice()
    if strategy == "auto" and DEVICE.type != "cpu":  # which Lightning chooses for devices that it knows alone
        strategy = SingleDeviceStrategy(torch.device(DEVICE.type, 0))
    defaults = {"accelerator": place, "devices": 1, "max_epochs": 1, "enable_model_summary": False}
    return Trainer(strategy=strategy, **{**quiet, **defaults, **options})


def strategy(lab: TrainLab, run: Joined | None = None, **options: Any) -> PotluckStrategy:
    """In a run in memory, exact and quick; the target is one batch."""
    options = {"codecs": EXACT, "num_threads": 1, "source": lab.states, **options}
    if options.get("algorithm", "sync") in ("sync", "local"):
        options.setdefault("target_batch_size", BATCH_SIZE)
    return PotluckStrategy(run=run or lab.join("trainer"), **options)


def assert_same(one: Regression, other: Regression) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one.values, other.values, strict=True))
