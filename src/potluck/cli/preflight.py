"""The preflight of `potluck join`: this machine first, and the way into the run while torch is being imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from potluck.peer.machinecheck import Check
    from potluck.run.peer import Peer


def check_this_machine(as_json: bool, *folders: Path) -> None:
    """Say what is not as it should be; ConfigurationError where it cannot work at all.

    `folders` are where this peer will write, beside the key it is known by.
    """
    from potluck.errors import ConfigurationError
    from potluck.peer.identity import default_folder
    from potluck.peer.machinecheck import check_machine

    checks = check_machine(default_folder(), *folders)
    for check in checks:
        _tell(check, as_json)
    red = [f"{check.name}: {check.found}; {check.remedy}" for check in checks if check.level == "red"]
    if red:
        raise ConfigurationError(f"this machine cannot take part. {'. '.join(red)}")


async def check_the_way(peer: Peer, as_json: bool) -> None:
    """Say how the hub, the clock, the reachability and the speed are, as each is found out; nothing waits for it."""
    from potluck.run.runcheck import look_around

    async for check in look_around(peer):
        if peer.is_closed:
            return  # what was measured while it left says nothing
        _tell(check, as_json)


def _tell(check: Check, as_json: bool) -> None:
    """To a program everything; to a person what could be better. `potluck doctor` shows the rest."""
    from potluck.cli import console

    if as_json:
        fields = {"name": check.name, "level": check.level, "found": check.found, "remedy": check.remedy}
        console.print_json({"event": "check", **fields})
    elif check.level != "green":
        console.show_check(check)
