"""The run's figures for those who look at them elsewhere: Weights & Biases, TensorBoard.

Both are optional: they are imported when asked for, and a missing one is the user's to install.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any, Protocol

from potluck.errors import ConfigurationError
from potluck.monitor.view import Overview


class Exporter(Protocol):
    """Takes the run's figures, one epoch after the other."""

    def write(self, overview: Overview) -> None:
        """The figures of now."""
        ...

    def close(self) -> None:
        """No more come."""
        ...


def figures_of(overview: Overview) -> dict[str, float]:
    """What is worth a curve; what is not known or not finite is left out."""
    told: dict[str, float | None] = {
        "loss": overview.loss,
        "held_out_loss": overview.held_out_loss,
        "samples_per_second": overview.samples_per_second,
        "trainers": overview.num_trainers,
        "peers": overview.num_peers,
        "epoch_seconds": overview.seconds_per_epoch,
        "epoch_bytes": overview.bytes_per_epoch,
    }
    return {name: float(value) for name, value in told.items() if value is not None and math.isfinite(value)}


class TensorBoardExporter:
    """Writes an event file that `tensorboard --logdir` shows."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigurationError(f"--tensorboard needs the package: pip install tensorboard ({error})") from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, overview: Overview) -> None:
        """The figures of now."""
        for name, value in figures_of(overview).items():
            self._writer.add_scalar(f"run/{name}", value, overview.epoch)
        self._writer.flush()

    def close(self) -> None:
        """No more come."""
        self._writer.close()


class WandbExporter:
    """Logs to a project of Weights & Biases; its own settings say where that is, or that it stays on this machine."""

    def __init__(self, project: str, run: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigurationError(f"--wandb needs the package: pip install wandb ({error})") from error
        self._wandb_run: Any = wandb.init(project=project, name=run, job_type="monitor")

    def write(self, overview: Overview) -> None:
        """The figures of now."""
        self._wandb_run.log(figures_of(overview), step=overview.epoch)

    def close(self) -> None:
        """No more come."""
        self._wandb_run.finish()


class Exporters:
    """Those that were asked for; each epoch is told once."""

    def __init__(self, exporters: list[Exporter]) -> None:
        self._exporters = exporters
        self._told = 0

    def epoch_seen(self, overview: Overview) -> None:
        """Tell it, if it is a new one whose loss is known."""
        if overview.epoch > self._told and overview.loss is not None:
            self._told = overview.epoch
            for exporter in self._exporters:
                exporter.write(overview)

    def close(self) -> None:
        """No more come."""
        with contextlib.ExitStack() as last_to_first:  # whatever fails, the rest is closed
            for exporter in self._exporters:
                last_to_first.callback(exporter.close)


def open_exporters(run: str, *, wandb_project: str = "", tensorboard_folder: Path | None = None) -> Exporters:
    """Those that were asked for. ConfigurationError, with the remedy, where a package is missing."""
    exporters: list[Exporter] = []
    if tensorboard_folder is not None:
        exporters.append(TensorBoardExporter(tensorboard_folder))
    if wandb_project:
        exporters.append(WandbExporter(wandb_project, run))
    return Exporters(exporters)
