"""What all commands share that take part in a run: from the link to a peer that is in, and out again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from potluck.hub.access.application import Answer
    from potluck.hub.joinlink import JoinLink
    from potluck.peer.identity import Identity
    from potluck.run.peer import Peer, PeerConfig

LOOK_AS_YOURSELF = (
    "An organiser has let you in already? That was for the key you joined with, and this is another: stop your peer, "
    "and name its key with --identity-path"
)


def parse_link(text: str, command: str) -> JoinLink:
    """The link that was given, or the one in POTLUCK_LINK; ConfigurationError without any."""
    from potluck.errors import ConfigurationError
    from potluck.hub.joinlink import JoinLink
    from potluck.peer import environment

    found = text or environment.link()
    if not found:
        raise ConfigurationError(f"which run? Give its join link: {command} 'potluck://…' (or set POTLUCK_LINK)")
    return JoinLink.parse(found)


async def seated(
    link: JoinLink,
    identity: Identity,
    config: PeerConfig,
    stop: asyncio.Event,
    as_json: bool,
    work: Callable[[Peer, asyncio.Event], Awaitable[None]],
) -> None:
    """Join, do the work, leave. While an organiser has to let us in, say so and wait."""
    from potluck.cli import console
    from potluck.hub.access.application import why_we_wait
    from potluck.hub.joinlink import fetch_address
    from potluck.run.peer import Peer

    with console.err.status(f"looking for the hub at {', '.join(map(str, link.places))}"):
        address = await console.unless_stopped(fetch_address(link, websocket_only=config.websocket_only), stop)
    if address is None:
        return
    peer = Peer(address, link.run, identity, config)

    def waiting(answer: Answer) -> None:
        if as_json:
            event = "lobby full" if answer.code == "lobby_full" else "waiting"
            console.print_json({"event": event, "place": answer.place, "peer": peer.peer_id})
        else:
            console.out.print(f"{why_we_wait(answer)}. Ctrl-C gives up.", markup=False)

    async def start() -> bool:
        await peer.start(waiting)
        return True

    try:
        if await console.unless_stopped(start(), stop):
            await work(peer, stop)
    finally:
        await peer.close()


def observe(
    link: JoinLink,
    name: str,
    identity_path: Path | None,
    as_json: bool,
    work: Callable[[Peer, asyncio.Event], Awaitable[None]],
    *,
    takes_key: bool = True,
) -> None:
    """Be in the run for a while, as an observer, to look at it. `takes_key`: the command has --identity-path for it."""
    from potluck.cli import console
    from potluck.errors import NotAdmittedError
    from potluck.peer.identity import Identity
    from potluck.run.peer import PeerConfig

    config = PeerConfig(role="observer", name=name, link=link, client_mode=True)
    identity = Identity.open(identity_path) if identity_path is not None else Identity.temporary()
    try:
        console.run(console.until_interrupted(lambda stop: seated(link, identity, config, stop, as_json, work)))
    except NotAdmittedError as error:
        if identity_path is not None or link.invite or not takes_key:
            raise
        raise NotAdmittedError(f"{error}. {LOOK_AS_YOURSELF}") from error
    finally:
        identity.close()


async def until_ended(peer: Peer) -> None:
    """Wait until the session is over, and raise why."""
    await asyncio.shield(peer.session.ended)
