"""What `join`, `train` and `aux` do: look at this machine, get in, do one's part, leave; at the hours named."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self

from potluck import tasks
from potluck.cli.options import bandwidth_of, bytes_of

if TYPE_CHECKING:
    from potluck.hub.joinlink import JoinLink
    from potluck.hub.presence import Role
    from potluck.peer.identity import Identity
    from potluck.peer.session import HubChange
    from potluck.run.peer import Peer, PeerConfig
    from potluck.training.hours import Hours

SOON_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonOptions:
    """Who takes part."""

    name: str
    message: str
    wait_seconds: float
    identity_path: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """How this machine reaches the others."""

    client_mode: bool
    websocket_only: bool
    relay_only: bool
    listen: tuple[str, ...]
    announce: tuple[str, ...]
    trusted_lan: bool
    send_bytes_per_second: float | None
    receive_bytes_per_second: float | None

    @classmethod
    def of(
        cls,
        client_mode: bool,
        websocket_only: bool,
        relay_only: bool,
        listen: list[str] | None,
        announce: list[str] | None,
        trusted_lan: bool,
        bandwidth: str,
    ) -> Self:
        """As the command line has it."""
        up, down = bandwidth_of(bandwidth)
        return cls(
            client_mode=client_mode,
            websocket_only=websocket_only,
            relay_only=relay_only,
            listen=tuple(listen or ()),
            announce=tuple(announce or ()),
            trusted_lan=trusted_lan,
            send_bytes_per_second=up,
            receive_bytes_per_second=down,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What a person says about training on the command line."""

    recipe: Path | None
    batch_size: int | None
    num_readers: int
    device: str
    threads: int | None
    max_memory_bytes: int | None
    max_steps: int | None
    hours: Hours | None
    backup_every: int
    state_path: Path | None
    hand_in_seconds: float

    @classmethod
    def of(
        cls,
        *,
        recipe: Path | None = None,
        batch_size: int | None = None,
        num_readers: int = 1,
        device: str = "",
        threads: int | None = None,
        max_memory: str = "",
        max_steps: int | None = None,
        schedule: str = "",
        backup_every: int = 0,
        state_path: Path | None = None,
        hand_in_seconds: float = 60.0,
    ) -> Self:
        """As the command line has it; ConfigurationError for what cannot be."""
        from potluck.errors import ConfigurationError
        from potluck.training.hours import Hours

        if backup_every < 0:
            raise ConfigurationError(f"--backup-every-step {backup_every}: it is a number of epochs, or 0 for never")
        memory = bytes_of(max_memory, "--max-memory")
        return cls(
            recipe=recipe,
            batch_size=batch_size,
            num_readers=num_readers,
            device=device,
            threads=threads,
            max_memory_bytes=int(memory) if memory is not None else None,
            max_steps=max_steps,
            hours=Hours.parse(schedule) if schedule else None,
            backup_every=backup_every,
            state_path=state_path,
            hand_in_seconds=hand_in_seconds,
        )


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
    options: TrainOptions,
    *,
    keeps_states: bool = True,
    as_json: bool,
    verbose: bool,
) -> None:
    """The whole command, until it is over or Ctrl-C."""
    from potluck.cli import console
    from potluck.cli.joining import parse_link
    from potluck.cli.preflight import check_this_machine
    from potluck.link.limits import LinkConfig
    from potluck.peer import environment
    from potluck.run.peer import PeerConfig

    console.set_up_logging(verbose)
    parsed = parse_link(link, command)
    config = PeerConfig(
        role=role,
        name=person.name or environment.person_name(),
        link=parsed,
        message=person.message,
        wait_seconds=person.wait_seconds,
        client_mode=network.client_mode,
        websocket_only=network.websocket_only,
        relay_only=network.relay_only,
        listen=network.listen,
        announce=network.announce,
        trusted_lan=network.trusted_lan,
        links=LinkConfig(
            send_bytes_per_second=network.send_bytes_per_second,
            receive_bytes_per_second=network.receive_bytes_per_second,
        ),
    )
    path = person.identity_path or environment.identity_path()

    async def work(stop: asyncio.Event) -> None:
        check_this_machine(as_json)
        await _at_its_hours(parsed, path, config, options, keeps_states, stop, as_json)

    console.run(console.until_interrupted(work))


async def _at_its_hours(
    link: JoinLink,
    path: Path | None,
    config: PeerConfig,
    options: TrainOptions,
    keeps_states: bool,
    stop: asyncio.Event,
    as_json: bool,
) -> None:
    """Take part while it is time to, leave when it is not, and come back when it is."""
    hours = options.hours
    if hours is None:
        await _once(link, path, config, options, keeps_states, stop, as_json)
        return
    while not stop.is_set():
        await _until_open(hours, stop, as_json)
        if stop.is_set():
            return
        closing = asyncio.Event()
        watching = asyncio.create_task(_close_at_end(hours, stop, closing))
        try:
            ended_itself = await _once(link, path, config, options, keeps_states, closing, as_json)
        finally:
            watching.cancel()
            await asyncio.wait([watching])
        if ended_itself:
            return


async def _once(
    link: JoinLink,
    path: Path | None,
    config: PeerConfig,
    options: TrainOptions,
    keeps_states: bool,
    stop: asyncio.Event,
    as_json: bool,
) -> bool:
    """Take part until told to stop, or the run is over; whether it was over."""
    from potluck.cli.joining import seated
    from potluck.peer.identity import Identity

    async def stay(peer: Peer, stop: asyncio.Event) -> None:
        await _stay(peer, options, keeps_states, stop, as_json)

    identity: Identity = Identity.open(path) if path is not None else Identity.open_default()
    try:
        await seated(link, identity, config, stop, as_json, stay)
    finally:
        identity.close()
    return not stop.is_set()


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


async def _stay(peer: Peer, options: TrainOptions, keeps_states: bool, stop: asyncio.Event, as_json: bool) -> None:
    """Do our part, and tell who comes and goes, until asked to stop, or until the hub throws us out."""
    from potluck.cli import console
    from potluck.cli.joining import until_ended
    from potluck.cli.preflight import check_the_way
    from potluck.cli.training import help_others, train
    from potluck.peer.preflight import check_clock

    roster = peer.session.roster
    if as_json:
        console.print_json({"event": "joined", "peer": peer.peer_id, "peers": len(roster)})
    else:
        others = sum(presence.peer != peer.peer_id for presence in roster)
        console.out.print(f"[green]You are in[/green], with {console.count(others, 'other')}. Ctrl-C leaves.")

    clock = check_clock(
        peer.session.hub_time.clock_error_seconds(monotonic=peer.clock.monotonic(), wall=peer.clock.wall())
    )
    if clock.level != "green" and not as_json:
        console.show_check(clock)

    def hub_changed(change: HubChange) -> None:
        if as_json:
            console.print_json({"event": f"hub {change}"})
        else:
            console.out.print("The hub is back." if change == "back" else "The hub is away; waiting for it.")

    end_hub = peer.session.listen(hub_changed)
    end = roster.listen(lambda event: console.tell_roster_event(event, len(roster), as_json))
    preflight = asyncio.create_task(check_the_way(peer, as_json), name="preflight")
    try:
        if peer.session.card.role == "trainer":
            await train(peer, options, stop, as_json)
        elif peer.session.card.role == "aux":
            await help_others(peer, options, keeps_states, stop)
        else:
            await console.unless_stopped(until_ended(peer), stop)
    finally:
        await tasks.end(preflight)
        end()
        end_hub()
