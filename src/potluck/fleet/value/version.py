"""A version of the value network, as it is published."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from potluck.errors import ProtocolError
from potluck.fleet.value.fragment import Origin
from potluck.fleet.value.network import ValueNetwork
from potluck.hub.queues import NAME

MOST_HEADS = 4096
MOST_WIDTH = 16_384
MOST_DEPTH = 64


class HeadRecord(msgspec.Struct, frozen=True):
    """What a head has been trained on."""

    origin: Origin
    policy_version: int  # of the newest fragment
    num_fragments: int = 0


class ValueVersion(msgspec.Struct, frozen=True, kw_only=True):
    """All weights and statistics, and what they come from."""

    number: int
    width: int
    depth: int
    features: dict[str, int]  # by task
    heads: dict[str, HeadRecord]
    state: dict[str, np.ndarray[Any, Any]]
    statistics: dict[str, float] = {}

    def network(self) -> ValueNetwork:
        """The network; ProtocolError when the parts do not fit together."""
        sizes_are_sane = 0 < self.width <= MOST_WIDTH and 0 < self.depth <= MOST_DEPTH and len(self.heads) <= MOST_HEADS
        names = [
            *self.features,
            *(part for record in self.heads.values() for part in msgspec.structs.astuple(record.origin)),
        ]
        if not sizes_are_sane or not all(NAME.fullmatch(name) for name in names):
            raise ProtocolError("a version of the value network has sizes or names that make no sense")
        weights = sum(array.size for array in self.state.values())
        if self.width * (self.width * (self.depth - 1) + sum(self.features.values())) > weights:
            raise ProtocolError("a version of the value network has fewer weights than its sizes ask for")
        network = ValueNetwork(self.width, self.depth)
        try:
            for record in self.heads.values():
                network.add(record.origin, self.features[record.origin.task])
            state = {name: torch.from_numpy(np.array(array)) for name, array in self.state.items()}
            network.load_state_dict(state)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ProtocolError(f"a version of the value network cannot be used: {str(error)[:300]}") from error
        if not all(bool(tensor.isfinite().all()) for tensor in state.values()):
            raise ProtocolError("a version of the value network has weights that are no numbers")
        return network


def version_of(
    network: ValueNetwork, number: int, depth: int, heads: dict[str, HeadRecord], statistics: dict[str, float]
) -> ValueVersion:
    """A network as it is now."""
    return ValueVersion(
        number=number,
        width=network.width,
        depth=depth,
        features={task: network.num_features(task) for task in network.adapters},
        heads=dict(heads),
        state={name: tensor.detach().cpu().numpy().copy() for name, tensor in network.state_dict().items()},
        statistics=statistics,
    )
