"""A trainer in a process of its own: an ordinary training loop, as a user would write it.

python trainchild.py NUMBER LINK KEY EPOCHS KIND [OPTIONS]

The options are those of `Options`, as JSON. It tells in lines of JSON when it is in, after each epoch, and at the end
what it holds; then it waits to be ended, so that nobody's leaving disturbs the others. Batches are told with the epoch
that they went into.
"""

from __future__ import annotations

import hashlib
import json
import logging
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import potluck
from potluck.peer.identity import Identity
from potluck.round.codecs import CodecChoice

FEATURES = 6
EXACT = CodecChoice.everything("float32")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a test may choose about a trainer."""

    seed: int = 1
    """Of the initial weights."""

    hidden: int = 16
    """How wide the model is; a million makes a state of many chunks."""

    transformer: bool = False
    """Take the features of a sample for a sequence."""

    lr: float = 0.1
    flip_at: int = 0
    """A bit of this peer's state is flipped in the middle of the epoch after this one; 0: never."""

    flipped_bit: int = 10
    adam: bool = False
    """Train with AdamW and clipping, whose bits depend on the processor's vector instructions."""

    folder: str = ""
    """For backups, which are written after each epoch; empty: none are."""

    full_disk: bool = False
    """No file may be larger than 2 MB from the start of training on."""

    pause_seconds: float = 0.0
    """What a batch takes."""

    until: str = ""
    """A file: the training ends before the last epoch, as soon as it is there."""

    compare_every_seconds: float = 10.0

    batch_size: int = 4
    target: int = 48
    matchmaking_seconds: float = 20.0  # nobody is to be left behind because this machine is busy
    min_peers: int = 1  # of an exchange of DiLoCo
    inner_steps: int = 5
    grace_seconds: float = 20.0
    overlap_steps: int = 0
    num_fragments: int = 1
    first_batch: int = 0
    """Where this life of the trainer begins in its own batches."""


class SmallTransformer(nn.Module):
    """One layer over the features of a sample; smooth, or two equal runs part where a unit is near its kink."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(inputs.unsqueeze(2))).mean(dim=1))


def make_model(seed: int = 1, hidden: int = 16, transformer: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    if transformer:
        return SmallTransformer()
    return nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, 1))


def make_batch(number: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(size, FEATURES, generator=generator)
    return inputs, inputs.sum(dim=1, keepdim=True).sin()


def loss_of(model: nn.Module, number: int, size: int = 4) -> torch.Tensor:
    inputs, targets = make_batch(number, size)
    return nn.functional.mse_loss(model(inputs), targets)


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    """On samples that nobody trains on."""
    return loss_of(model, 999_999_999, 4096).item()


def make_inner(model: nn.Module, lr: float = 0.1, *, adam: bool = False) -> torch.optim.Optimizer:
    if adam:
        return torch.optim.AdamW(model.parameters(), lr=lr)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def make_optimizer(run: Any, model: nn.Module, kind: str, options: Options) -> Any:
    folder = Path(options.folder) if options.folder else None
    common: dict[str, Any] = {
        "codecs": EXACT,
        "num_threads": 1,
        "state": potluck.StateConfig(
            folder=folder,
            backups=potluck.BackupConfig(every_epochs=1),
            grace_seconds=5.0,
            compare_every_seconds=options.compare_every_seconds,
        ),
    }
    if kind == "diloco":
        inner = torch.optim.SGD(model.parameters(), lr=options.lr / 10)  # so that hundreds of epochs stay finite
        names = ("inner_steps", "grace_seconds", "min_peers", "overlap_steps", "num_fragments")
        return potluck.DiLoCo(run, inner, **{name: getattr(options, name) for name in names}, **common)
    return potluck.Optimizer(
        run,
        make_inner(model, options.lr, adam=options.adam),
        max_grad_norm=1.0 if options.adam else None,
        target_batch_size=options.target,
        matchmaking_seconds=options.matchmaking_seconds,
        **common,
    )


def values_of(model: nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def digest_of(model: nn.Module, optimizer: Any) -> str:
    """Of the model and of all that the run's peers hold alike: parameters, statistics, the outer optimizer's memory."""
    found = hashlib.sha256()
    shared = optimizer.method.tensors()
    for tensor in [*model.parameters(), *(shared[name] for name in sorted(shared))]:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def weights_of(optimizer: Any) -> dict[str, float]:
    """Who gave how much to the newest epoch."""
    head = optimizer.collaboration.averager.lineage.head
    return {member.peer: member.weight for member in head.members}


def flip_a_bit(model: nn.Module, optimizer: Any, kind: str, bit: int) -> None:
    """In what is shared: the model itself, or DiLoCo's θ."""
    tensor = next(iter(optimizer.method.shared.values())) if kind == "diloco" else next(model.parameters())
    tensor.detach().view(torch.int32).view(-1)[0] ^= 1 << bit


def say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


def main(number: int, link: str, key: Path, num_epochs: int, kind: str, options: Options) -> None:
    torch.set_num_threads(1)
    model = make_model(options.seed, options.hidden, options.transformer)
    identity = Identity.open(key)
    with potluck.join(link, identity=identity, name=f"trainer {number}", listen=("tcp://127.0.0.1:0",)) as run:
        optimizer = make_optimizer(run, model, kind, options)
        say(joined=run.peer_id, epoch=optimizer.epoch, digest=digest_of(model, optimizer))
        sys.stdin.readline()  # until all are there
        if options.full_disk:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))
        is_flipped = False
        position = 1_000_000 * number + options.first_batch
        while optimizer.epoch < num_epochs and not (options.until and Path(options.until).exists()):
            epoch = optimizer.epoch
            if options.flip_at and epoch >= options.flip_at and not is_flipped:
                flip_a_bit(model, optimizer, kind, options.flipped_bit)
                is_flipped = True
                say(flipped=epoch)
            time.sleep(options.pause_seconds)
            loss_of(model, position, options.batch_size).backward()
            optimizer.step(batch_size=options.batch_size)
            optimizer.zero_grad()
            say(batch=position, epoch=epoch + 1)
            position += 1
            if optimizer.epoch > epoch:
                say(done=optimizer.epoch, digest=digest_of(model, optimizer))
                say(commit=optimizer.epoch, weights=weights_of(optimizer))
        is_small = options.hidden < 1000
        values = values_of(model) if is_small else []
        say(
            finished=number,
            values=values,
            digest=digest_of(model, optimizer),
            loss=held_out_loss(model) if is_small else None,
            statistics=optimizer.statistics(),
        )
        sys.stdin.readline()
    say(left=number)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    chosen = Options(**json.loads(sys.argv[6])) if len(sys.argv) > 6 else Options()
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5], chosen)
