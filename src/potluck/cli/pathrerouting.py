"""How a new routing reaches a run that trains: a file of the run, and a phase from which on it counts for all paths."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from potluck.paths.sharding import Routing
    from potluck.training.manifest.manifest import Manifest
    from potluck.training.manifest.steering import Steering


def put_up_route(run: str, folder: Path | None, routing: Routing, in_phases: int) -> int:
    """Put the routing where volunteers fetch files from, and into the manifest; from which phase on it counts."""
    from potluck.cli.run import steer
    from potluck.errors import ConfigurationError
    from potluck.messages import decode
    from potluck.paths.phasebook import PHASES_KEY, PhaseBook
    from potluck.paths.phasedesk import STORE
    from potluck.paths.sharding import write_routing
    from potluck.recipes.shipped import keep_copies, refs_of
    from potluck.training.trainer.pathuse import with_route

    async def work(helm: Steering, where: Path) -> int:
        entry = await helm.hub.store(STORE).get(PHASES_KEY)
        if entry is None or entry.value is None:
            raise ConfigurationError("no phase is trained yet: route the documents by `potluck paths prepare`")
        book = decode(PhaseBook, entry.value)
        # No path has begun the phase at which it counts: so all change at one cut.
        phase = max(each.done for each in book.entries) + in_phases
        name = f"paths-routing-{phase}.json"
        write_routing(routing, where / name)
        (ref,) = refs_of(where, [name])
        keep_copies(where, (ref,))

        def next_one(present: Manifest | None, _epoch: int) -> Manifest | None:
            if present is None:
                return None
            changed = with_route(present, ref, phase)
            return changed.recorded("rerouted", by="potluck paths reroute", at=time.time(), from_epoch=phase)

        await helm.revise(next_one)
        return phase

    return steer(run, folder, work)
