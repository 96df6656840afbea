"""What `join`, `train` and `aux` do: look at this machine, get in, do one's part, leave; at the hours named."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from potluck import tasks
from potluck.cli.options import bandwidth_of

if TYPE_CHECKING:
    from potluck.cli.optiongroups import BackupOptions, NetworkOptions, PersonOptions, TrainOptions
    from potluck.errors import RetryableError
    from potluck.hub.joinlink import JoinLink
    from potluck.hub.presence import Role
    from potluck.peer.session import HubChange
    from potluck.run.peer import Peer, PeerConfig
    from potluck.training.trainer.hours import Hours

RETRY_SECONDS = 60.0  # between two tries to reach a hub that is away at the hours of --schedule


def fitting_roles(as_json: bool) -> tuple[Role, ...]:
    """What this machine can do, the best first: train, unless it has too little memory even for a small model."""
    from potluck.cli import console
    from potluck.peer.machinecheck import is_fit_for_training

    if is_fit_for_training():
        return ("trainer", "aux")
    if not as_json:
        console.err.print(
            "This machine has too little memory to train: it helps as an aux peer. (--role trainer insists)"
        )
    return ("aux",)


def run_participant(
    command: str,
    link: str,
    roles: tuple[Role, ...],
    person: PersonOptions,
    network: NetworkOptions,
    training: TrainOptions,
    backups: BackupOptions | None,
    *,
    as_json: bool,
    verbose: bool,
) -> None:
    """The whole command, until it is over or Ctrl-C. Without `backups` it keeps no states at all.

    Of the roles, the first is taken that the link allows.
    """
    from potluck.cli import console
    from potluck.cli.joining import parse_link
    from potluck.cli.preflight import check_this_machine
    from potluck.cli.requirements import make_ready
    from potluck.link.limits import LinkConfig
    from potluck.peer import environment
    from potluck.run.peer import PeerConfig

    console.set_up_logging(verbose)
    parsed = parse_link(link, command)
    _tell_version(parsed, as_json)
    if person.sync_args and not as_json:
        console.err.print("--sync-args: a peer always takes its settings from the run, and follows their changes.")
    up, down = bandwidth_of(network.bandwidth)
    config = PeerConfig(
        role=roles[0],
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
    part = Part(
        link=parsed,
        identity_path=path,
        config=config,
        roles=roles,
        training=training,
        backups=backups,
        as_json=as_json,
    )

    check_this_machine(as_json, *([backups.state_path] if backups is not None and backups.state_path else []))
    if "trainer" in roles:  # before there is a loop: a question waits for a person, and Ctrl-C ends it
        make_ready(parsed, yes=training.yes, as_json=as_json, own_copy=training.recipe is not None)

    async def work(stop: asyncio.Event) -> None:
        if "trainer" in roles:
            await check_choices(training)
        await part.play(stop)

    console.run(console.until_interrupted(work))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What this machine does in a run."""

    link: JoinLink
    identity_path: Path | None
    config: PeerConfig
    roles: tuple[Role, ...]
    training: TrainOptions
    backups: BackupOptions | None
    as_json: bool

    async def play(self, stop: asyncio.Event) -> None:
        """Take part while it is time to, leave when it is not, and come back when it is."""
        from potluck.cli import console
        from potluck.errors import RetryableError

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
                if await self._once(closing):
                    return
            except RetryableError as error:  # a hub that is away at ten may be back at eleven
                _tell_retry(error, self.as_json)
                await console.unless_stopped(asyncio.sleep(RETRY_SECONDS), stop)
            finally:
                await tasks.end(watching)

    async def _once(self, stop: asyncio.Event) -> bool:
        """Take part until told to stop, or the run is over; whether it was over."""
        from potluck.errors import RoleRefusedError

        for role, other in zip(self.roles, (*self.roles[1:], None), strict=True):
            try:
                await self._as(role, stop)
                break
            except RoleRefusedError as error:
                if other not in error.allowed:
                    raise
                _tell_other_role(role, other, self.as_json)
        return not stop.is_set()

    async def _as(self, role: Role, stop: asyncio.Event) -> None:
        from potluck.cli.joining import seated
        from potluck.peer.identity import Identity

        path = self.identity_path
        identity: Identity = Identity.open(path) if path is not None else Identity.open_default()
        try:
            await seated(self.link, identity, replace(self.config, role=role), stop, self.as_json, self._stay)
        finally:
            identity.close()

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
                await help_others(peer, self.training, self.backups, stop, as_json)
            else:
                await console.unless_stopped(until_ended(peer), stop)
        finally:
            await tasks.end(preflight)
            end()
            end_hub()


async def check_choices(training: TrainOptions) -> None:
    """Look at what a trainer has named, before anybody is looked for; ConfigurationError where it cannot be used."""
    from potluck.cli import console
    from potluck.recipes.reference import compile_source, read_source

    if training.recipe is not None:
        compile_source(read_source(training.recipe), training.recipe)
    if training.device:  # it takes torch to tell, whose import comes now instead of later
        machine = await console.import_slowly("potluck.training.trainer.machine")
        machine.find_devices(training.device)


def _tell_version(link: JoinLink, as_json: bool) -> None:
    import potluck
    from potluck.cli import console

    notice = link.version_notice(potluck.__version__)
    if notice and as_json:
        console.print_json({"event": "other version", "notice": notice})
    elif notice:
        console.err.print(f"Note: {notice}", markup=False, highlight=False, soft_wrap=True)


def _tell_other_role(role: Role, other: Role | None, as_json: bool) -> None:
    from potluck.cli import console

    if not as_json:
        console.err.print(f"This link allows no {role}: this machine helps as an {other} peer.")


def _tell_retry(error: RetryableError, as_json: bool) -> None:
    from potluck.cli import console

    if as_json:
        console.print_json({"event": "trying again", "seconds": RETRY_SECONDS, "reason": str(error)})
    else:
        console.err.print(f"{error}. Trying again in {RETRY_SECONDS:.0f} s. Ctrl-C ends it.", markup=False)


def _tell_joined(peer: Peer, as_json: bool) -> None:
    from potluck.cli import console
    from potluck.peer.machinecheck import check_clock

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
