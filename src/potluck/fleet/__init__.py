"""A fleet: machines that each train a model of their own, around one central queue.

    items.py        values with arrays as bytes, without pickle and without torch
    member.py       a connection to the fleet's queues: who we are, and requests to the guard
    queue.py        put, take, done, again, dead letters
    pulling.py      asking the hub for a queue's items
    topic.py        publish, latest, follow
    largeitems.py   items that are larger than a message, in parts
    jobs/           what machines shall run: fleet.toml, the signed document, the organiser's side
    agent/          a machine's agent, which makes it so
    currentjob.py   inside of a job: queues, figures, checkpoints, the notice to end
    sync.py         the same for programs without asyncio: `fleet.connect(link)`
    value/          a value network that all machines pool: `fleet.PooledValue` (needs torch)

Items go straight to the hub's JetStream (hub/queues.py says how, and who may).
"""

from typing import TYPE_CHECKING, Any

from potluck.fleet.currentjob import CurrentJob, current
from potluck.fleet.items import Array
from potluck.fleet.sync import Fleet, connect

if TYPE_CHECKING:
    from potluck.fleet.value.fragment import Fragment
    from potluck.fleet.value.learner import ValueLearner
    from potluck.fleet.value.pooled import PooledValue

__all__ = ["Array", "CurrentJob", "Fleet", "Fragment", "PooledValue", "ValueLearner", "connect", "current"]

_WITH_TORCH = {"Fragment": "fragment", "PooledValue": "pooled", "ValueLearner": "learner"}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"potluck.fleet.value.{_WITH_TORCH[name]}"), name)
