"""A fleet: machines that each train a thing of their own, around one central queue.

    items.py        values with arrays as bytes, without pickle and without torch
    member.py       a connection to the fleet's queues: who we are, and requests to the guard
    queue.py        put, take, done, again, dead letters
    topic.py        publish, latest, follow
    largeitems.py   items that are larger than a message, in parts
    jobs/           what machines shall run: fleet.toml, the signed document, the organiser's side
    agent/          a machine's agent, which makes it so
    currentjob.py   inside of a job: queues, figures, checkpoints, the notice to end
    sync.py         the same for programs without asyncio: `fleet.connect(link)`

Items go straight to the hub's JetStream (hub/queues.py says how, and who may).
"""

from potluck.fleet.currentjob import CurrentJob, current
from potluck.fleet.items import Array
from potluck.fleet.sync import Fleet, connect

__all__ = ["Array", "CurrentJob", "Fleet", "connect", "current"]
