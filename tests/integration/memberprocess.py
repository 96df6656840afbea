"""A member in a process of its own: connects, hands in its card, beacons until it is stopped, and hears the others.

python memberprocess.py SERVER RUN SEED_FILE
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

from potluck.errors import RetryableError
from potluck.hub.address import HubAddress
from potluck.hub.connection import Delivery
from potluck.hub.keys import public_key
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.presence import Beacon, Card
from potluck.hub.subjects import Subjects
from potluck.messages import encode


async def main(server: str, run: str, seed: bytes) -> None:
    peer, subjects, session = public_key(seed), Subjects(run), f"process-{id(object()):x}"
    connection = await NatsConnection.connect(HubAddress(servers=(server,)), seed=seed, run=run, name=f"main.{session}")
    heard: Counter[str] = Counter()

    def hear(delivery: Delivery) -> None:
        sender = delivery.subject.split(".")[3]
        heard[sender] += 1
        if heard[sender] == 1:
            print(f"heard {sender}", flush=True)

    for subject in (subjects.beacon("*"), subjects.news("*", ">")):
        await connection.subscribe(subject, hear)
    card = Card(session=session, role="trainer")
    await connection.request(subjects.card(peer), encode(card), timeout_seconds=30)
    print("joined", flush=True)
    while True:
        try:
            await connection.publish(subjects.beacon(peer), encode(Beacon(session=session)))
        except RetryableError as error:
            print(f"no beacon: {error}", flush=True)
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]).read_bytes()))
