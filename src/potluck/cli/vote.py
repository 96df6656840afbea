"""`potluck vote`: a name for the model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from potluck.run.peer import Peer

PATIENCE_SECONDS = 15.0
LOOK_SECONDS = 0.5


def vote(
    link: Annotated[str, typer.Argument(help="The join link, in quotes.")],
    name: Annotated[str, typer.Argument(help="A name for the model; an empty name takes your vote back.")],
    identity_path: Annotated[
        Path | None, typer.Option(help="File with the key of your peer; else POTLUCK_IDENTITY, else the usual one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Tell in JSON.")] = False,
) -> None:
    """Propose a name for the model, or vote for one. Your peer must be in the run; it goes on training.

    Example: [bold]potluck vote 'potluck://hub.example.org:4222/my-run?ca=…#…' Sourdough[/bold]
    """
    from potluck.cli import console
    from potluck.cli.dashboard import read_signer
    from potluck.cli.joining import observe, parse_link
    from potluck.errors import ConfigurationError

    console.set_up_logging(verbose=False)
    parsed = parse_link(link, "potluck vote")
    signer = read_signer(identity_path)
    if signer is None:
        raise ConfigurationError("this machine has no identity to vote with: join the run first")

    async def cast(peer: Peer, _stop: asyncio.Event) -> None:
        from potluck.errors import NotAdmittedError
        from potluck.training.books import ballot as ballots

        await ballots.send_vote(peer.session, name, signer)
        presence = peer.session.roster.get(signer.public_key)
        person = presence.person if presence is not None else ""
        deadline = peer.session.clock.monotonic() + PATIENCE_SECONDS
        while peer.session.clock.monotonic() < deadline:
            entry = await peer.session.hub.store("ballot").get(ballots.KEY)
            ballot = ballots.read_ballot(entry.value if entry is not None else None)
            known = ballot.votes.get(person)
            if known is not None and known.name == (ballots.clean_name(name) if name else ""):
                _tell(ballot.counted(), as_json)
                return
            await asyncio.sleep(LOOK_SECONDS)
        raise NotAdmittedError(
            "the vote was not counted: your peer must be in the run as a trainer or aux peer, and the run needs a "
            "coordinator"
        )

    observe(parsed, "voter", None, as_json, cast, takes_key=False)


def _tell(counted: list[tuple[str, int]], as_json: bool) -> None:
    from potluck.cli import console

    if as_json:
        console.print_json({"event": "voted", "names": dict(counted)})
        return
    console.out.print("Your vote counts. So far:")
    for name, count in counted:
        console.out.print(f"  {count}  {name}", markup=False, highlight=False)
