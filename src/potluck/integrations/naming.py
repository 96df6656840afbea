"""hivemind's names for our options, for those who come from there; and which of its options mean nothing here.

What is renamed means the same. What means nothing is left out, with one warning that says why for each.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

RENAMED = {
    "allreduce_timeout": "averaging_timeout_seconds",
    "averaging_timeout": "averaging_timeout_seconds",
    "batch_size_per_step": "batch_size",
    "load_state_timeout": "load_state_timeout_seconds",
    "matchmaking_time": "matchmaking_seconds",
}

_HUB = "peers meet at the run's hub"
_CODECS = "say codecs=CodecChoice(…), the same for all peers"
MEANINGLESS = {
    "announce_maddrs": f"{_HUB}; announce=('tcp://HOST:PORT',) names an address of this peer",
    "averager_opts": "there is no averager to configure apart from the optimizer",
    "bootstrap_timeout": f"{_HUB}, and it is told at once when that cannot be reached",
    "delta_rule_averaging": "states are averaged before the step, so there is no delta to apply later",
    "grad_averager_factory": "say transform=PowerSGD(…) or the like",
    "grad_compression": _CODECS,
    "host_maddrs": f"{_HUB}; listen=('tcp://HOST:PORT',) says where this peer accepts links",
    "load_state_compression": "states travel exactly, packed without loss where the line is slow",
    "next_chunk_timeout": "a slow reducer's parts are given to others",
    "shutdown_timeout": "leaving takes no longer than saying good-bye",
    "state_averaging_compression": _CODECS,
    "sync_timeout": "states are averaged in the gradients' own round",
    "tracker_opts": "progress is kept by the coordinator",
    "use_auto_relay": "a relay is used where no direct link works",
    "use_ipfs": _HUB,
    "use_relay": "a relay is used where no direct link works",
    "wait_timeout": "there is no daemon to wait for",
}


class MeaninglessArgumentWarning(UserWarning):
    """An argument was left out, since it means nothing here."""


def translated(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options under our names; what was given as None is left to its default. One warning tells what is ignored."""
    given = {name: value for name, value in options.items() if value is not None}
    ignored = {name: MEANINGLESS[name] for name in given if name in MEANINGLESS}
    if ignored:
        reasons = "; ".join(f"{name} ({why})" for name, why in ignored.items())
        text = f"these arguments mean nothing here, and are ignored: {reasons}"
        warnings.warn(text, MeaninglessArgumentWarning, 4)  # points to the line that made the strategy or callback
    return {RENAMED.get(name, name): value for name, value in given.items() if name not in ignored}
