"""What `join`, `train` and `aux` do: look at this machine, get in, do one's part, leave; at the hours named."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from potluck import tasks
from potluck.cli.options import bandwidth_of

if TYPE_CHECKING:
    from potluck.cli.optiongroups import BackupOptions, NetworkOptions, PersonOptions, TrainOptions
    from potluck.hub.joinlink import JoinLink
    from potluck.hub.presence import Role
    from potluck.peer.session import HubChange
    from potluck.run.peer import Peer, PeerConfig
    from potluck.training.hours import Hours

SOON_SECONDS = 1.0


def fitting_role(as_json: bool) -> Role:
    """What this machine can do: train, unless it has too little memory even for a small model."""
    from potluck.cli import console
    from potluck.peer.preflight import is_fit_for_training

    if is_fit_for_training():
        return "trainer"
    if not as_json:
        console.err.print(
            "This machine has too little memory to train: it helps as an aux peer. (--role trainer insists)"
        )
    return "aux"


def take_part(
    command: str,
    link: str,
    role: Role,
    person: PersonOptions,
    network: NetworkOptions,
    training: TrainOptions,
    backups: BackupOptions | None,
    *,
    as_json: bool,
    verbose: bool,
) -> None:
    """The whole command, until it is over or Ctrl-C. Without `backups` it keeps no states at all."""
    from potluck.cli import console
    from potluck.cli.joining import parse_link
    from potluck.cli.preflight import check_this_machine
    from potluck.link.limits import LinkConfig
    from potluck.peer import environment
    from potluck.run.peer import PeerConfig

    console.set_up_logging(verbose)
    parsed = parse_link(link, command)
    up, down = bandwidth_of(network.bandwidth)
    config = PeerConfig(
        role=role,
        name=person.name or environment.person_name(),
        link=parsed,
        message=person.message,
        wait_seconds=person.wait_minutes * 60,
        client_mode=network.client_mode,
        websocket_only=network.websocket,
        relay_only=network.relay_only,
        listen=tuple(network.listen or ()),
        announce=tuple(network.announce or ()),
        trusted_lan=network.trusted_lan,
        links=LinkConfig(send_bytes_per_second=up, receive_bytes_per_second=down),
    )
    path = person.identity_path or environment.identity_path()
    part = Part(link=parsed, identity_path=path, config=config, training=training, backups=backups, as_json=as_json)

    async def work(stop: asyncio.Event) -> None:
        check_this_machine(as_json)
        await part.play(stop)

    console.run(console.until_interrupted(work))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What this machine does in a run."""

    link: JoinLink
    identity_path: Path | None
    config: PeerConfig
    training: TrainOptions
    backups: BackupOptions | None
    as_json: bool

    async def play(self, stop: asyncio.Event) -> None:
        """Take part while it is time to, leave when it is not, and come back when it is."""
        hours = self.training.hours
        if hours is None:
            await self._once(stop)
            return
        while not stop.is_set():
            await _until_open(hours, stop, self.as_json)
            if stop.is_set():
                return
            closing = asyncio.Event()
            watching = asyncio.create_task(_close_at_end(hours, stop, closing))
            try:
                ended_itself = await self._once(closing)
            finally:
                await tasks.end(watching)
            if ended_itself:
                return

    async def _once(self, stop: asyncio.Event) -> bool:
        """Take part until told to stop, or the run is over; whether it was over."""
        from potluck.cli.joining import seated
        from potluck.peer.identity import Identity

        path = self.identity_path
        identity: Identity = Identity.open(path) if path is not None else Identity.open_default()
        try:
            await seated(self.link, identity, self.config, stop, self.as_json, self._stay)
        finally:
            identity.close()
        return not stop.is_set()

    async def _stay(self, peer: Peer, stop: asyncio.Event) -> None:
        """Do our part, and tell who comes and goes, until asked to stop, or until the hub throws us out."""
        from potluck.cli import console
        from potluck.cli.joining import until_ended
        from potluck.cli.preflight import check_the_way
        from potluck.cli.training import help_others, train

        as_json, roster = self.as_json, peer.session.roster
        _tell_joined(peer, as_json)
        end_hub = peer.session.listen(lambda change: _tell_hub_change(change, as_json))
        end = roster.listen(lambda event: console.tell_roster_event(event, len(roster), as_json))
        preflight = asyncio.create_task(check_the_way(peer, as_json), name="preflight")
        try:
            if peer.session.card.role == "trainer":
                await train(peer, self.training, self.backups, stop, as_json)
            elif peer.session.card.role == "aux":
                await help_others(peer, self.backups, stop)
            else:
                await console.unless_stopped(until_ended(peer), stop)
        finally:
            await tasks.end(preflight)
            end()
            end_hub()


def _tell_joined(peer: Peer, as_json: bool) -> None:
    from potluck.cli import console
    from potluck.peer.preflight import check_clock

    roster = peer.session.roster
    if as_json:
        console.print_json({"event": "joined", "peer": peer.peer_id, "peers": len(roster)})
        return
    others = sum(presence.peer != peer.peer_id for presence in roster)
    console.out.print(f"[green]You are in[/green], with {console.count(others, 'other')}. Ctrl-C leaves.")
    clock = check_clock(
        peer.session.hub_time.clock_error_seconds(monotonic=peer.clock.monotonic(), wall=peer.clock.wall())
    )
    if clock.level != "green":
        console.show_check(clock)


def _tell_hub_change(change: HubChange, as_json: bool) -> None:
    from potluck.cli import console

    if as_json:
        console.print_json({"event": f"hub {change}"})
    else:
        console.out.print("The hub is back." if change == "back" else "The hub is away; waiting for it.")


async def _until_open(hours: Hours, stop: asyncio.Event, as_json: bool) -> None:
    from potluck.cli import console

    seconds = hours.seconds_until_open(datetime.now())
    if not seconds:
        return
    if as_json:
        console.print_json({"event": "resting", "until": f"{hours.begin:%H:%M}", "seconds": seconds})
    else:
        console.out.print(f"Resting until {hours.begin:%H:%M} (--schedule {hours}). Ctrl-C ends it.", highlight=False)
    while (seconds := hours.seconds_until_open(datetime.now())) and not stop.is_set():
        # In short naps: a clock that is set, or a machine that sleeps, must not make us miss the hour.
        await console.unless_stopped(asyncio.sleep(min(seconds, 60.0)), stop)


async def _close_at_end(hours: Hours, stop: asyncio.Event, closing: asyncio.Event) -> None:
    from potluck.cli import console

    while (seconds := hours.seconds_until_close(datetime.now())) and not stop.is_set():
        await console.unless_stopped(asyncio.sleep(min(seconds, 60.0)), stop)
    closing.set()
