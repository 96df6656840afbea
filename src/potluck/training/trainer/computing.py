"""The model on this machine's devices: a batch in, its loss and its gradients out, within the memory that there is."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from potluck.errors import ConfigurationError
from potluck.optim.cores import share_cores
from potluck.recipes.recipe import Batch, Recipe
from potluck.run.joined import Joined
from potluck.training.manifest.manifest import Manifest
from potluck.training.trainer.batchsize import find_batch_size, to_device
from potluck.training.trainer.config import TrainConfig
from potluck.training.trainer.inneroptimizer import STATE_TENSORS
from potluck.training.trainer.machine import MemoryLimit, find_devices, is_out_of_memory, wait_for
from potluck.training.trainer.models import untrained
from potluck.training.trainer.precision import MixedPrecision, find_precision

if TYPE_CHECKING:
    from potluck.training.trainer.devicepool import DevicePool

logger = logging.getLogger(__name__)


class Computing:
    """Computes the gradients of batches, on one device or on several."""

    def __init__(self, recipe: Recipe[Any], manifest: Manifest, config: TrainConfig) -> None:
        self._recipe = recipe
        self._config = config
        self.num_threads = share_cores(config.num_threads)
        self.devices = find_devices(config.device)
        self.device = self.devices[0]
        self.precision = MixedPrecision(find_precision(config.precision, self.device), self.device)
        self.memory = MemoryLimit(config.max_memory_bytes, self.device)
        self.model = untrained(recipe, manifest.seed)
        self.is_sharded = self._is_to_be_sharded(manifest)
        if not self.is_sharded:
            self.model.to(self.device)
        self.module: nn.Module = compiled(self.model) if config.compile else self.model
        """What batches go through: the model, be it compiled or spread over devices."""
        self._pool: DevicePool | None = None

    def _is_to_be_sharded(self, manifest: Manifest) -> bool:
        if len(self.devices) == 1:
            return False
        if self._config.shard is not None:
            return self._config.shard
        from potluck.training.trainer.sharding import fits

        if fits(self.model, self.device, STATE_TENSORS[manifest.newest.optimizer.name]):
            return False
        logger.warning("the model does not fit on %s: each of %d devices holds a part", self.device, len(self.devices))
        return True

    def open_pool(self, run: Joined, seed: int) -> None:
        """Start processes for the further devices, if there are any; they end with the run."""
        if len(self.devices) == 1:
            return
        from potluck.training.trainer.devicepool import (  # torch.distributed, which one device does not need
            DevicePool,
            DevicePoolSpec,
        )

        if self._recipe.origin is None:
            raise ConfigurationError("several devices need a recipe that their processes can open: by name, or a file")
        spec = DevicePoolSpec(
            origin=self._recipe.origin,
            seed=seed,
            precision=self.precision.precision,
            devices=tuple(map(str, self.devices)),
            is_sharded=self.is_sharded,
        )
        pool = self._pool = DevicePool(spec, self._recipe, self.model)
        self.module = compiled(pool.computing) if self._config.compile else pool.computing

        async def close() -> None:
            await asyncio.to_thread(pool.close)

        run.attach(close)

    def find_batch_size(self, num_beside: int) -> int:
        """What suits this machine, tried before anything is trained, with room for so many tensors beside each."""
        if self.is_sharded:  # which nobody can try before all devices are there
            return len(self.devices)
        with self.memory.reserved(self.model, num_beside):
            size = find_batch_size(
                self._recipe, self.module, self.device, fits=self.memory.fits, precision=self.precision
            )
        return size * len(self.devices)

    def gradients(self, batch: Batch, num_beside: int, *, is_timed: bool) -> tuple[Tensor, float] | None:
        """The loss, with its gradients made, and the seconds that took; None where memory ends.

        `num_beside` tensors are held beside each of the model's meanwhile. Unless `is_timed` the seconds mean nothing
        on a device that computes by itself.
        """
        try:
            with self.memory.reserved(self.model, num_beside):
                started = time.perf_counter()
                loss = self._loss_of(batch)
                if is_timed:
                    wait_for(self.device)
                return loss, time.perf_counter() - started
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if self._pool is not None:  # which waits for gradients that will not come
                raise ConfigurationError(
                    f"batches of {len(batch[0])} on {len(self.devices)} devices need more than "
                    f"{self.memory.describe()}: give a smaller --batch-size"
                ) from error
            return None

    def _loss_of(self, batch: Batch) -> Tensor:
        """The loss, with its gradients made; on several devices, of this one's share, and the gradients of all."""
        if self._pool is None:
            with self.precision.lowered():
                loss = self._recipe.loss(self.module, to_device(batch, self.device))
            self.precision.backward(loss)
            return loss
        scaler = self.precision.scaler
        share, weight = self._pool.hand_out(batch, scaler.get_scale() if scaler is not None else 1.0)
        with self._pool.computed_together():
            with self.precision.lowered():
                loss = self._recipe.loss(self.module, to_device(share, self.device))
            self.precision.backward(loss * weight)
        return loss


def compiled(model: nn.Module) -> nn.Module:
    """The same parameters, with computation that torch has compiled, when it is first used."""
    return torch.compile(model)  # type: ignore[return-value]
