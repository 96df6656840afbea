"""`potluck members`: who may take part. On the machine that hosts the run."""

from __future__ import annotations

import enum
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer

if TYPE_CHECKING:
    from potluck.hub.access.member import AccessRequest
    from potluck.hub.access.organise import MemberState, Organiser
    from potluck.round.plan.messages import Commit
    from potluck.run.hostrecord import HostRecord
    from potluck.training.manifest.steering import Steering

T = TypeVar("T")
MOST_SHOWN = 10  # peers that a name could mean

app = typer.Typer(
    help="Who may take part: invites, requests, members, bans. On the machine that hosts the run.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Run = Annotated[str, typer.Option("--run", help="The run's name. Default: the name in the run.toml of this folder.")]
Folder = Annotated[Path | None, typer.Option(help="The run's folder, if it is not the default one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]
Reason = Annotated[str, typer.Option(help="Shown to the member.")]
Peer = Annotated[str, typer.Argument(help="The peer's name, its id, or the beginning of its id.")]


class RoleName(enum.StrEnum):
    """The roles, as a choice that may be repeated on the command line."""

    TRAINER = "trainer"
    AUX = "aux"
    OBSERVER = "observer"
    WORKER = "worker"
    MACHINE = "machine"


@app.command("invite")
def invite(
    run: Run = "",
    folder: Folder = None,
    uses: Annotated[
        int, typer.Option(help="How many peers may join with it, not counting observers; 0: any number.")
    ] = 1,
    days: Annotated[float, typer.Option(help="How long it is valid; 0 for ever.")] = 7.0,
    roles: Annotated[
        list[RoleName] | None,
        typer.Option("--role", help="A role it allows; may be repeated. Unless given: trainer, and observer to look."),
    ] = None,
    coordinates: Annotated[
        bool, typer.Option("--coordinates", help="Members that join with it may coordinate.")
    ] = False,
    trusted: Annotated[bool, typer.Option("--trusted", help="They may reduce where only trusted peers may.")] = False,
    queues: Annotated[
        list[str] | None,
        typer.Option("--queue", help="A queue or topic they may use: NAME=put,take, or * for all; may be repeated."),
    ] = None,
    groups: Annotated[
        list[str] | None,
        typer.Option("--group", help="A group of the run that they may be in; may be repeated. Unless given: all."),
    ] = None,
    person: Annotated[str, typer.Option(help="The person it is for; seats are counted by person.")] = "",
    note: Annotated[str, typer.Option(help="For yourself.")] = "",
    as_json: AsJson = False,
) -> None:
    """Make an invite and print its join link.

    Example: [bold]potluck members invite --uses 20 --days 3 --note "the Discord"[/bold]

    For a fleet: [bold]potluck members invite --queue experience=put --queue weights=take[/bold]

    For one group of a run: [bold]potluck members invite --group critic[/bold]
    """
    from dataclasses import replace

    import msgspec

    from potluck.cli import console
    from potluck.hub.access.member import Scopes
    from potluck.hub.joinlink import JoinLink
    from potluck.hub.presence import Role
    from potluck.hub.queues import parse_rights

    async def work(organiser: Organiser, record: HostRecord) -> None:
        rights = parse_rights(queues or [])
        usual = (RoleName.WORKER,) if rights else (RoleName.TRAINER, RoleName.OBSERVER)
        wanted = roles or usual
        allowed = msgspec.convert([role.value for role in wanted], tuple[Role, ...])
        made, secret = await organiser.create_invite(
            scopes=Scopes(
                roles=allowed, coordinates=coordinates, trusted=trusted, queues=rights, groups=tuple(groups or ())
            ),
            uses=uses or None,
            lifetime_seconds=days * 86400 or None,
            person=f"guest:{person}" if person and ":" not in person else person,
            note=note,
        )
        link = str(replace(JoinLink.parse(record.link), invite=secret))
        if as_json:
            console.print_json({"id": made.id, "link": link, "expires_at": made.expires_at, "uses": made.uses})
        else:
            console.out.print(f"Invite {made.id}. The link cannot be shown again:\n")
            console.out.print(f"  {link}", soft_wrap=True, highlight=False, markup=False)

    _ask(run, folder, work)


@app.command("invites")
def invites(run: Run = "", folder: Folder = None, as_json: AsJson = False) -> None:
    """List the invites.

    Example: [bold]potluck members invites[/bold]
    """

    async def work(organiser: Organiser, _record: HostRecord) -> None:
        rows = [
            {
                "id": item.id,
                "roles": ", ".join(item.scopes.roles),
                "used": f"{item.used} of {item.uses or 'any'}",
                "expires": _day(item.expires_at),
                "state": "revoked" if item.revoked else "valid",
                "note": item.note,
            }
            for item in await organiser.list_invites()
        ]
        _show(rows, as_json, empty="There are no invites.")

    _ask(run, folder, work)


@app.command("revoke")
def revoke(
    invite_id: Annotated[str, typer.Argument(metavar="INVITE", help="The invite's id.")],
    run: Run = "",
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Let nobody else in by an invite; who is in stays in.

    Example: [bold]potluck members revoke 3fk2[/bold]
    """
    _ask(run, folder, lambda organiser, _record: organiser.revoke_invite(invite_id))
    _tell(as_json, f"Invite {invite_id} is revoked.", revoked=invite_id)


@app.command("requests")
def requests(run: Run = "", folder: Folder = None, as_json: AsJson = False) -> None:
    """List who asks to be let in.

    Example: [bold]potluck members requests[/bold]
    """

    async def work(organiser: Organiser, _record: HostRecord) -> None:
        rows = [
            {
                "peer": item.peer,
                "name": item.name,
                "person": item.person,
                "role": item.role,
                "service": item.service,
                "asked": _day(item.asked_at),
                "state": "denied" if item.denied else "waiting",
                "message": item.message,
            }
            for item in await organiser.list_requests()
        ]
        _show(rows, as_json, empty="Nobody is waiting.")

    _ask(run, folder, work)


@app.command("approve")
def approve(peer: Peer, run: Run = "", folder: Folder = None, as_json: AsJson = False) -> None:
    """Let a waiting peer in; it need not start again.

    Example: [bold]potluck members approve Ada[/bold], or [bold]potluck members approve UAWJEMH4[/bold]
    """

    async def work(organiser: Organiser, _record: HostRecord) -> str:
        found = _one([_of_request(item) for item in await organiser.list_requests()], peer, "potluck members requests")
        await organiser.approve(found)
        return found

    found = _ask(run, folder, work)
    _tell(as_json, f"{found} is in.", approved=found)


@app.command("deny")
def deny(peer: Peer, run: Run = "", folder: Folder = None, reason: Reason = "", as_json: AsJson = False) -> None:
    """Turn a waiting peer down.

    Example: [bold]potluck members deny UAWJEMH4 --reason "this run is full"[/bold]
    """

    async def work(organiser: Organiser, _record: HostRecord) -> str:
        found = _one([_of_request(item) for item in await organiser.list_requests()], peer, "potluck members requests")
        await organiser.deny(found, reason)
        return found

    found = _ask(run, folder, work)
    _tell(as_json, f"{found} was told no.", denied=found)


@app.command("list")
def list_members(run: Run = "", folder: Folder = None, as_json: AsJson = False) -> None:
    """List the members and how they are doing.

    Example: [bold]potluck members list --json[/bold]
    """

    async def work(organiser: Organiser, _record: HostRecord) -> None:
        rows = [
            {
                "peer": state.member.peer,
                "name": state.member.name,
                "person": state.member.person,
                "role": state.member.role,
                "service": state.member.service,
                "state": "banned" if state.banned else state.state or "away",
                "admitted by": state.member.admitted_by,
            }
            for state in await organiser.list_members()
        ]
        _show(rows, as_json, empty="There are no members.")

    _ask(run, folder, work)


@app.command("ban")
def ban(
    target: Annotated[str, typer.Argument(help="A peer's name or id, or a person as in hf:alice.")],
    run: Run = "",
    folder: Folder = None,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Throw a peer or person out, now and for good.

    Example: [bold]potluck members ban hf:mallory --reason "sent noise on purpose"[/bold]
    """

    async def work(organiser: Organiser, _record: HostRecord) -> tuple[str, int]:
        known = [_of_member(state) for state in await organiser.list_members()]
        known += [_of_request(item) for item in await organiser.list_requests()]
        found = target if ":" in target else _one(known, target, "potluck members list")
        return found, await organiser.ban(found, reason)

    found, cut = _ask(run, folder, work)
    member = found if ":" in found else found[:12] if found.startswith(target) else f"{target} ({found[:12]})"
    _tell(as_json, f"{member} is banned; {cut} connections were cut.", banned=found, connections=cut)


@app.command("unban")
def unban(
    target: Annotated[str, typer.Argument(help="A peer's name or id, or a person.")],
    run: Run = "",
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Lift a ban.

    Example: [bold]potluck members unban hf:mallory[/bold]
    """

    async def work(organiser: Organiser, _record: HostRecord) -> str:
        names = {state.member.peer: state.member.name for state in await organiser.list_members()}
        banned = [Candidate(item.target, names.get(item.target, ""), "banned") for item in await organiser.list_bans()]
        found = target if ":" in target else _one(banned, target, "potluck members bans")
        await organiser.unban(found)
        return found

    found = _ask(run, folder, work)
    _tell(as_json, f"{found} may join again.", unbanned=found)


@app.command("pardon")
def pardon(peer: Peer, run: Run = "", folder: Folder = None, as_json: AsJson = False) -> None:
    """Let a member take part again that an audit found out, before its time is over.

    Example: [bold]potluck members pardon UAWJEMH4[/bold]
    """

    async def work(organiser: Organiser, _record: HostRecord) -> str:
        known = [_of_member(state) for state in await organiser.list_members()]
        found = _one(known, peer, "potluck members list")
        await organiser.pardon(found)
        return found

    found = _ask(run, folder, work)
    _tell(as_json, f"{found} takes part in rounds again.", pardoned=found)


@app.command("excluded")
def excluded(run: Run = "", folder: Folder = None, as_json: AsJson = False) -> None:
    """List who takes part in no round for a while, since an audit found it out or it would not testify.

    Example: [bold]potluck members excluded[/bold]; [bold]potluck members pardon PEER[/bold] ends one early.
    """
    from potluck.cli.run import steer

    async def work(helm: Steering, _where: Path) -> Commit | None:
        return await helm.head()

    head = steer(run, folder, work)
    now = time.time()
    rows = [
        {"peer": peer, "since": _day(found.since), "until": _day(found.until), "reason": found.reason}
        for peer, found in sorted((head.excluded if head is not None else {}).items())
        if found.until > now
    ]
    _show(rows, as_json, empty="Nobody is excluded.")


@app.command("bans")
def bans(run: Run = "", folder: Folder = None, as_json: AsJson = False) -> None:
    """List who is banned.

    Example: [bold]potluck members bans[/bold]
    """

    async def work(organiser: Organiser, _record: HostRecord) -> None:
        rows = [
            {
                "target": item.target,
                "reason": item.reason,
                "since": _day(item.banned_at),
                "until": _day(item.until) if item.until else "it is lifted",
            }
            for item in await organiser.list_bans()
        ]
        _show(rows, as_json, empty="Nobody is banned.")

    _ask(run, folder, work)


def _ask(run: str, folder: Path | None, work: Callable[[Organiser, HostRecord], Awaitable[T]]) -> T:
    """Do something in the organiser's name, with the keys in the run's folder."""
    from potluck.cli import console
    from potluck.cli.folders import asking_host, hosted_run

    console.set_up_logging(verbose=False)
    where, record = hosted_run(run, folder)

    from potluck.hub.access.organise import Organiser
    from potluck.hub.address import HubAddress
    from potluck.hub.keys import HubKeys
    from potluck.hub.nats.connection import NatsConnection
    from potluck.hub.subjects import Subjects

    keys = HubKeys.load_or_create(where / "identity")

    async def connected() -> T:
        address = HubAddress(servers=record.servers, ca_pem=record.ca_pem)
        hub = await NatsConnection.connect(address, seed=keys.organiser_seed, run=record.run, name="main")
        try:
            return await work(Organiser(hub, Subjects(record.run), keys.organiser_public), record)
        finally:
            await hub.close()

    with asking_host(record.run):
        return console.run(connected())


class Candidate(NamedTuple):
    """A peer that a command may mean."""

    peer: str
    name: str
    what: str  # by which a person tells it from another of the same name


def _of_member(state: MemberState) -> Candidate:
    member = state.member
    return Candidate(member.peer, member.name, f"{member.role}, {state.state or 'away'}, {member.person}")


def _of_request(request: AccessRequest) -> Candidate:
    return Candidate(request.peer, request.name, f"{request.role} from {request.host}, asked {_day(request.asked_at)}")


def _one(known: list[Candidate], wanted: str, listing: str) -> str:
    """The id of the peer that is called so, or whose id starts so; ConfigurationError says who else it could be.

    A whole id may be unknown. `listing` is the command that lists.
    """
    from potluck.cli.console import named
    from potluck.errors import ConfigurationError
    from potluck.hub.subjects import PEER_ID

    if PEER_ID.fullmatch(wanted):
        return wanted
    by_id = {candidate.peer: candidate for candidate in known}  # who applies again is listed twice
    name = wanted.casefold()
    found = [each for each in by_id.values() if each.peer.startswith(wanted) or each.name.casefold() == name]
    if len(found) == 1:
        return found[0].peer
    if found:
        shown = "; ".join(f"{named(each.name, each.peer)}, {each.what}" for each in found[:MOST_SHOWN])
        more = f"; and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
        raise ConfigurationError(
            f"{len(found)} of the peers listed are called {wanted!r}, or have ids that start so: {shown}{more}. "
            "Give more of the id"
        )
    raise ConfigurationError(
        f"no peer listed is called {wanted!r} or has an id that starts so: the list ({listing}) shows the names. Or "
        "give the whole id"
    )


def _tell(as_json: bool, text: str, **done: object) -> None:
    from potluck.cli import console

    if as_json:
        console.print_json(done)
    else:
        typer.echo(text)


def _show(rows: list[dict[str, Any]], as_json: bool, *, empty: str) -> None:
    from potluck.cli import console

    if as_json:
        console.print_json(rows)
    else:
        console.show_table(rows, empty=empty)


def _day(seconds: float | None) -> str:
    return "never" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
