"""A program with the Trainer of transformers in a process of its own, as a user would write it.

python transformerschild.py NUMBER EPOCHS FOLDER

The link comes from the environment. It tells in lines of JSON when it is in and after each epoch what it holds; at the
end it waits to be ended, so that nobody's leaving disturbs the others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn
from trainchild import make_batch, make_inner, make_model, values_of
from transformers import Trainer, TrainerCallback, TrainingArguments

from potluck.integrations.transformers import PotluckCallback
from potluck.round.codecs import CodecChoice

BATCH_SIZE = 4


def say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


class Model(nn.Module):
    """Takes batches that nobody else takes, and notes the epoch that each goes into."""

    def __init__(self, number: int, together: PotluckCallback) -> None:
        super().__init__()
        self.net = make_model(seed=number)  # whoever comes later takes the first one's
        self.position = 1_000_000 * number
        self.together = [together]  # in a list: no part of the model

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        say(batch=self.position, epoch=self.together[0].epoch + 1)
        features, targets = make_batch(self.position, BATCH_SIZE)
        self.position += 1
        return {"loss": nn.functional.mse_loss(self.net(features), targets)}


class Tell(TrainerCallback):
    """Says how it goes."""

    def __init__(self, together: PotluckCallback, model: Model, num_epochs: int) -> None:
        self.together, self.model, self.num_epochs = together, model, num_epochs
        self.told_epoch = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.told_epoch = self.together.epoch
        say(joined=self.together.link, epoch=self.told_epoch)
        sys.stdin.readline()  # until all are there

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.together.epoch > self.told_epoch:
            self.told_epoch = self.together.epoch
            assert self.together.shared is not None
            shared = self.together.shared.method.tensors()
            held = b"".join(shared[name].detach().contiguous().numpy().tobytes() for name in sorted(shared))
            say(done=self.told_epoch, digest=hashlib.sha256(held).hexdigest(), **self.together.progress())
        control.should_training_stop = self.told_epoch >= self.num_epochs
        if control.should_training_stop:
            say(finished=values_of(self.model.net))
            sys.stdin.readline()


def main(number: int, num_epochs: int, folder: str) -> None:
    torch.set_num_threads(1)
    together = PotluckCallback(
        target_batch_size=48, matchmaking_time=20.0, codecs=CodecChoice.everything("float32"), num_threads=1
    )
    model = Model(number, together)
    args = TrainingArguments(
        output_dir=folder,
        max_steps=100_000,
        per_device_train_batch_size=BATCH_SIZE,
        max_grad_norm=0.0,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    data: Any = [{"inputs": torch.zeros(1)}] * 1000
    callbacks: Any = [together, Tell(together, model, num_epochs)]
    optimizers: Any = together.optimizers(make_inner(model.net))
    with together:
        Trainer(model, args, train_dataset=data, callbacks=callbacks, optimizers=optimizers).train()
    say(left=values_of(model.net))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
