"""What a peer does that trains nothing itself: reduces for others, coordinates if it may, and gives out shards."""

from __future__ import annotations

from potluck.optim.helper import Helper
from potluck.round.averager import RoundPeer
from potluck.training.manifest import Manifest
from potluck.training.optimizers import coordinating
from potluck.training.shards import ShardDesk


async def start_helper(peer: RoundPeer, manifest: Manifest | None = None) -> Helper:
    """Help with what the manifest says; without one, with whatever the trainers do."""
    helper = await Helper.of(peer, coordinator=coordinating(manifest) if manifest is not None else None)
    ShardDesk(peer, helper.collaboration.averager.lease)
    return helper
