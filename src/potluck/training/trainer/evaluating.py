"""A trusted trainer's part of an evaluation: with the weights that all share at this epoch (books/evaluations.py)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from potluck.errors import PotluckError
from potluck.optim.diloco import DiLoCo
from potluck.optim.sharedoptimizer import SharedOptimizer
from potluck.recipes.recipe import Recipe
from potluck.run.joined import Joined
from potluck.training.books.evaluations import EvaluatedPart, part_of, readers_of

logger = logging.getLogger(__name__)

SEND_SECONDS = 5.0


def share_evaluation(run: Joined, optimizer: SharedOptimizer, recipe: Recipe[Any], model: nn.Module) -> None:
    """Evaluate this peer's part, and tell the trusted aux peers; nothing is done by a peer that is not trusted."""
    roster = list(run.peer.session.roster)
    place, readers = part_of(run.peer_id, roster), readers_of(roster)
    if place is None or not readers:
        return
    epoch, (part, num_parts) = optimizer.epoch, place
    with torch.no_grad(), _shared_weights(optimizer, model):
        figures, samples = recipe.evaluate_part(model, part, num_parts)
    found = EvaluatedPart(epoch=epoch, part=part, num_parts=num_parts, samples=samples, figures=dict(figures))
    links = optimizer.collaboration.peer.links

    async def tell() -> None:
        for reader in readers:
            try:
                await links.send(reader, found, timeout_seconds=SEND_SECONDS)
            except PotluckError as error:  # it evaluates by itself then
                logger.debug("%s does not hear of this peer's evaluation: %s", reader, error)

    run.call(tell())


@contextmanager
def _shared_weights(optimizer: SharedOptimizer, model: nn.Module) -> Iterator[None]:
    """Have the model hold what all share, in evaluation mode, and afterwards what it held."""
    own: list[tuple[torch.Tensor, torch.Tensor]] = []
    was_training = model.training
    model.eval()
    if isinstance(optimizer, DiLoCo):
        for name, parameter in optimizer.method.state.model.items():
            own.append((parameter, parameter.detach().clone()))
            parameter.copy_(optimizer.method.shared[name])
    try:
        yield
    finally:
        for tensor, value in own:
            tensor.copy_(value)
        model.train(was_training)
