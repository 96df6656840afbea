"""A Lightning program in a process of its own, as a user would write it.

python lightningchild.py NUMBER EPOCHS OPTIONS [SNIPPET]

The options are PotluckStrategy's, as JSON, for a Trainer that is made here; or a file with a snippet makes `trainer`.
Everything else comes from the environment, the link too. It tells in lines of JSON when it is in, which batch it goes
on to, and after each epoch what it holds; at the end it waits to be ended, so that none disturbs the others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

warnings.filterwarnings("ignore", ".*does not have many workers.*")

import lightning.pytorch as pl  # noqa: E402
from trainchild import make_batch, make_inner, make_model, values_of  # noqa: E402

from potluck.integrations.lightning import PotluckStrategy  # noqa: E402
from potluck.round.codecs import CodecChoice  # noqa: E402

BATCH_SIZE = 4


def say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


class Program(pl.LightningModule):
    """Takes batches that nobody else takes, and notes the epoch that each goes into."""

    def __init__(self, number: int, num_epochs: int) -> None:
        super().__init__()
        self.net = make_model(seed=number)  # whoever comes later takes the first one's
        self.position = 1_000_000 * number
        self.num_epochs = num_epochs
        self.told_epoch = 0

    @property
    def strategy(self) -> PotluckStrategy:
        assert isinstance(self.trainer.strategy, PotluckStrategy)
        return self.trainer.strategy

    def digest(self) -> str:
        """Of what all peers hold alike."""
        found = hashlib.sha256()
        assert self.strategy.shared is not None
        shared = self.strategy.shared.method.tensors()
        for name in sorted(shared):
            found.update(shared[name].detach().contiguous().numpy().tobytes())
        return found.hexdigest()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 0:
            self.told_epoch = self.strategy.epoch
            say(joined=self.strategy.link, epoch=self.strategy.epoch)
            sys.stdin.readline()  # until all are there
        say(batch=self.position, epoch=self.strategy.epoch + 1)
        inputs, targets = make_batch(self.position, BATCH_SIZE)
        self.position += 1
        return torch.nn.functional.mse_loss(self.net(inputs), targets)

    def on_train_batch_end(self, *_: Any) -> None:
        epoch = self.strategy.epoch
        if epoch > self.told_epoch:
            self.told_epoch = epoch
            [rate] = {group["lr"] for group in self.trainer.optimizers[0].param_groups}
            say(done=epoch, digest=self.digest(), rate=rate, peers=self.strategy.num_peers)
        self.trainer.should_stop = epoch >= self.num_epochs

    def on_train_end(self) -> None:
        say(finished=values_of(self.net), statistics=self.strategy.statistics())
        sys.stdin.readline()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_inner(self.net)


def made_here(options: dict[str, Any]) -> pl.Trainer:
    chosen = PotluckStrategy(codecs=CodecChoice.everything("float32"), num_threads=1, **options)
    return pl.Trainer(strategy=chosen, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)


def main(number: int, num_epochs: int, options: dict[str, Any], snippet: str) -> None:
    torch.set_num_threads(1)
    names: dict[str, Any] = {}
    if snippet:
        exec(snippet, names)
    trainer: pl.Trainer = names["trainer"] if snippet else made_here(options)
    trainer.fit_loop.max_epochs = -1
    batches: Any = torch.utils.data.DataLoader([torch.zeros(BATCH_SIZE)] * 100_000, batch_size=None)
    module = Program(number, num_epochs)
    trainer.fit(module, batches)
    say(left=values_of(module.net))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    text = Path(sys.argv[4]).read_text() if len(sys.argv) > 4 else ""
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), text)
