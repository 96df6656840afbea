"""Potluck: train a model together, on whatever everyone brings.

The packages stand in the order in which data flows, and import only upwards in this list:

    hub/      the server that everybody can reach: NATS, its configuration, who may do what, join links
    peer/     one process in a run: identity, session with the hub, the roster of the others
    link/     the bytes between two peers: directly over ZeroMQ, or relayed through the hub
    run/      taking part, whole: a peer with its session and links; a host with its hub and guard
    round/    tensors agreed on together: codecs, shares, plan, exchange, repair, commit
    state/    the run's state: kept by many, fetched from several, saved to disk
    testing/  fakes, fault injection, the NAT lab
    cli/      the `potluck` command
"""

from __future__ import annotations

from potluck.errors import PotluckError

__version__ = "0.1.0"
__all__ = ["PotluckError", "__version__"]
