"""A hub with its guard in a process of its own: prints where it is, and invites for members of two kinds.

python roundhost.py FOLDER
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from roundhouse import ANYTHING, NO_COORDINATOR, open_house


async def main(folder: Path) -> None:
    parent = os.getppid()
    async with open_house(folder) as house:
        answer = {
            "servers": list(house.address.servers),
            "ca_pem": house.address.ca_pem,
            "invite": await house.invite(ANYTHING),
            "plain_invite": await house.invite(NO_COORDINATOR),
        }
        print(json.dumps(answer), flush=True)
        while os.getppid() == parent:  # noqa: ASYNC110 - there is nobody who could set an event
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
