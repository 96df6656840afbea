"""`potluck doctor`: what could keep this machine from taking part, and what to do about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from potluck.peer.machinecheck import Check, Level


def doctor(
    link: Annotated[str, typer.Argument(help="A join link, to check the way into that run too.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Check this machine, and with a join link the way into a run. Exit code 1 if something is red.

    Example: [bold]potluck doctor 'potluck://hub.example.org:4222/my-first-run?ca=…#…'[/bold]
    """
    from potluck.cli import console
    from potluck.peer import environment
    from potluck.peer.machinecheck import worst

    console.set_up_logging(verbose=False)

    async def examine() -> list[Check]:
        found: list[Check] = []
        async for check in _checks(link or environment.link()):
            found.append(check)
            if not as_json:
                console.show_check(check)
        return found

    checks = console.run(examine())
    level = worst(checks)
    if as_json:
        rows = [{"name": c.name, "level": c.level, "found": c.found, "remedy": c.remedy} for c in checks]
        console.print_json({"level": level, "checks": rows})
    else:
        words = {
            "green": "All is well.",
            "yellow": "It will work, but could be better.",
            "red": "This has to be mended.",
        }
        console.out.print(f"[bold {level}]{words[level]}[/bold {level}]")
    raise typer.Exit(1 if level == "red" else 0)


async def _checks(link_text: str) -> AsyncIterator[Check]:
    import potluck
    from potluck.errors import PotluckError
    from potluck.hub.joinlink import JoinLink
    from potluck.peer.identity import default_folder
    from potluck.peer.machinecheck import Check, check_machine
    from potluck.run.runcheck import check_run
    from potluck.training.manifest.requirements import checks_of

    for check in check_machine(default_folder()):
        yield check
    if not link_text:
        return
    try:
        link = JoinLink.parse(link_text)
    except PotluckError as error:
        yield Check(name="join link", level="red", found="cannot be read", remedy=str(error))
        return
    notice = link.version_notice(potluck.__version__)
    level: Level = "yellow" if notice else "green"
    yield Check(
        name="join link", level=level, found=f"run {link.run} at {', '.join(map(str, link.places))}", remedy=notice
    )
    for check in await asyncio.to_thread(lambda: list(checks_of(link))):
        yield check
    async for check in check_run(link):
        yield check
