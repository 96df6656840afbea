"""Potluck: train a model together, on whatever everyone brings.

The packages stand in the order in which data flows, and import only upwards in this list:

    hub/      the server that everybody can reach: NATS, its configuration, who may do what, join links
    peer/     one process in a run: identity, session with the hub, the roster of the others
    link/     the bytes between two peers: directly over TCP, or relayed through the hub
    run/      taking part, whole: a peer with its session and links; a host with its hub and guard
    round/    tensors agreed on together: codecs, shares, plan, exchange, repair, commit
    state/    the run's state: kept by many, fetched from several, saved to disk
    optim/    training together: `Optimizer`, `DiLoCo`, and the methods under them
    pipeline/ models that no single machine holds, in stages
    fleet/    queues and jobs for machines that each train a model of their own
    spot/     rented machines that may be taken away
    recipes/  what to train: models with their data and loss, built in or one's own
    training/ a run from its manifest: what all peers train, and one peer's part in it
    monitor/  watching a run
    integrations/  Lightning's Trainer and that of transformers as peers of a run
    sim/      a whole run in memory, on virtual time
    testing/  real processes, fault injection, the NAT lab
    cli/      the `potluck` command
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from potluck.errors import PotluckError

if TYPE_CHECKING:
    from potluck.state.backups import BackupConfig
    from potluck.state.config import StateConfig
    from potluck.training.trainer.ownloop import DiLoCo, Optimizer
    from potluck.training.trainer.program import join

__version__ = "0.1.0"
__all__ = ["BackupConfig", "DiLoCo", "Optimizer", "PotluckError", "StateConfig", "__version__", "join"]

_LAZY = {
    "BackupConfig": "potluck.state.backups",
    "DiLoCo": "potluck.training.trainer.ownloop",
    "Optimizer": "potluck.training.trainer.ownloop",
    "StateConfig": "potluck.state.config",
    "join": "potluck.training.trainer.program",
}


def __getattr__(name: str) -> Any:
    """Import what is heavy when it is first asked for: `potluck --help` must not wait for torch."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'potluck' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(module), name)
