"""Who may take part: requests, invites, members, bans. For organisers only; everything asks first and is logged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import cast

import segno
from nicegui import ui

from potluck.errors import PotluckError
from potluck.hub.access.invite import Invite
from potluck.hub.access.member import ROLES, AccessRequest, Ban, Scopes
from potluck.hub.access.organise import MemberState, Organiser
from potluck.hub.presence import Role
from potluck.monitor import figures
from potluck.monitor.dashboard.frame import Page
from potluck.monitor.dashboard.parts import box, button, card, confirm, words

EVERY_SECONDS = 2.0
SHOWN = 200


@dataclass(frozen=True, slots=True)
class _Records:
    """What the page shows."""

    requests: list[AccessRequest]
    invites: list[Invite]
    members: list[MemberState]
    bans: list[Ban]


class MembersPage:
    """The organisers' desk."""

    def __init__(self, page: Page) -> None:
        self._page = page
        assert page.dashboard.organising is not None
        self._organiser: Organiser = page.dashboard.organising.organiser
        self._link = page.dashboard.organising.link
        self._own_id = page.dashboard.follower.session.peer_id
        self._shown: _Records | None = None
        with card("Waiting to be let in"):
            self._requests = box("list requests")
        with box("grid two"):
            with card("Invites") as sheet:
                with sheet.default_slot.children[0]:
                    button("New invite", self._new_invite, kind="main").classes("push")
                self._invites = box("list")
            with card("Banned"):
                self._bans = box("list")
        with card("Members"):
            self._members = box("list")
        ui.timer(EVERY_SECONDS, self.refresh, immediate=True)

    async def refresh(self) -> None:
        """Show how it is now, if this is still an organiser's page."""
        if self._page.dashboard.visitor(self._page.session) is None:
            ui.navigate.to("/login")
            return
        organiser = self._organiser
        try:
            records = _Records(
                await organiser.list_requests(),
                await organiser.list_invites(),
                await organiser.list_members(),
                await organiser.list_bans(),
            )
        except PotluckError as error:  # the hub is away: what is shown stays, and the head of the page says so
            ui.notify(str(error), type="warning")
            return
        before, self._shown = self._shown, records
        if before is None or before.requests != records.requests:
            self._show_requests(records.requests)
        if before is None or before.invites != records.invites:
            self._show_invites(records.invites)
        if before is None or before.members != records.members:
            self._show_members(records.members)
        if before is None or before.bans != records.bans:
            self._show_bans(records.bans)

    def _show_requests(self, requests: list[AccessRequest]) -> None:
        waiting = [request for request in requests if not request.denied]
        self._requests.clear()
        with self._requests:
            for request in waiting[:SHOWN]:
                since = figures.ago(request.asked_at, self._page.dashboard.now())
                note = f"{request.peer[:12]} · {request.role} · {request.service} · {request.host} · asked {since}"
                with box("item request"):
                    _text(request.name or request.peer[:12], note, request.message)
                    button("Deny", self._on(self._deny, request.peer, request.name), kind="danger")
                    button("Approve", self._on(self._approve, request.peer, request.name), kind="main")
            if not waiting:
                words("Nobody waits.", "empty")

    def _show_invites(self, invites: list[Invite]) -> None:
        self._invites.clear()
        with self._invites:
            now = self._page.dashboard.now()
            for invite in sorted(invites, key=lambda each: (_over(each, now), -each.created_at))[:SHOWN]:
                limits = f"{invite.used} of {invite.uses or 'any number'} used · {', '.join(invite.scopes.roles)}"
                until = f"until {figures.clock(invite.expires_at)}" if invite.expires_at else "for ever"
                over = _over(invite, now)
                with box("item"):
                    _text(invite.note or f"Invite {invite.id}", f"{limits} · {until}")
                    if over:
                        words(over, "chip")
                    else:
                        button("Revoke", self._on(self._revoke, invite.id, invite.note), kind="danger")

    def _show_members(self, members: list[MemberState]) -> None:
        self._members.clear()
        with self._members:
            for state in sorted(members, key=_absent_last)[:SHOWN]:
                member = state.member
                rights = [name for name in ("organiser", "coordinates", "trusted") if getattr(member.scopes, name)]
                person = member.person.replace(member.peer, f"{member.peer[:12]}…")
                known = " · ".join(part for part in (member.role, member.service, state.host, person, *rights) if part)
                with box("item"):
                    _text(member.name or member.peer[:12], known)
                    tone = {"alive": "good", "suspect": "idle"}.get(state.state or "", "")
                    words(
                        "banned" if state.banned else state.state or "away", f"chip {'bad' if state.banned else tone}"
                    )
                    is_ours = member.scopes.organiser or member.scopes.coordinates or member.peer == self._own_id
                    if not state.banned and not is_ours:  # without its host there is no run any more
                        button("Ban", self._on(self._ban, member.peer, member.name), kind="danger")

    def _show_bans(self, bans: list[Ban]) -> None:
        self._bans.clear()
        with self._bans:
            for ban in bans[:SHOWN]:
                with box("item"):
                    _text(ban.target[:40], f"{ban.reason or 'no reason given'}; since {figures.clock(ban.banned_at)}")
                    button("Lift", self._on(self._unban, ban.target))
            if not bans:
                words("Nobody is banned.", "empty")

    # What can be done

    def _on(self, work: Callable[..., Awaitable[None]], *arguments: str) -> Callable[[], Awaitable[None]]:
        async def clicked() -> None:
            await work(*arguments)

        return clicked

    async def _do(self, what: str, work: Awaitable[object]) -> bool:
        try:
            await self._page.dashboard.act(self._page.session, what, work)
        except PotluckError as error:
            ui.notify(str(error), type="negative")
            return False
        ui.notify("Done.", type="positive")
        await self.refresh()
        return True

    async def _approve(self, peer: str, name: str) -> None:
        who = name or peer[:12]
        if await confirm(f"Let {who} in?", "It may join from now on, with this key, until you ban it.", "Approve"):
            await self._do(f"approve {who} ({peer})", self._organiser.approve(peer))

    async def _deny(self, peer: str, name: str) -> None:
        who = name or peer[:12]
        if await confirm(f"Turn {who} down?", "It is told so.", "Deny", dangerous=True):
            await self._do(f"deny {who} ({peer})", self._organiser.deny(peer))

    async def _ban(self, peer: str, name: str) -> None:
        who = name or peer[:12]
        text = "Its connection is cut now, and it cannot come back until the ban is lifted."
        if await confirm(f"Ban {who}?", text, "Ban", dangerous=True):
            await self._do(f"ban {who} ({peer})", self._organiser.ban(peer, "by an organiser"))

    async def _unban(self, target: str) -> None:
        if await confirm("Lift this ban?", f"{target} may join again.", "Lift"):
            await self._do(f"lift the ban of {target}", self._organiser.unban(target))

    async def _revoke(self, invite: str, note: str) -> None:
        text = "Nobody else can join with it. Members that are in stay in."
        if await confirm(f"Revoke {note or invite}?", text, "Revoke", dangerous=True):
            await self._do(f"revoke invite {invite} ({note})", self._organiser.revoke_invite(invite))

    async def _new_invite(self) -> None:
        with ui.dialog() as dialog, box("card dialog"):
            words("New invite", "card-title")
            with box("fields").style("margin-top: 14px"):
                note = ui.input("Who it is for (a note for yourself)").props("outlined dense").classes("whole")
                uses = ui.number("How many may use it (0: any)", value=1, min=0, precision=0).props("outlined dense")
                days = ui.number("Valid for days (0: for ever)", value=7, min=0).props("outlined dense")
                usual = ["trainer", "observer"]
                roles = ui.select(list(ROLES), value=usual, multiple=True, label="As").props("outlined dense")
                trusted = ui.checkbox("May reduce where only trusted peers do")
            with box("buttons"):
                button("Cancel", lambda: dialog.submit(False))
                button("Make it", lambda: dialog.submit(True), kind="main")
        dialog.open()
        wanted = await dialog
        dialog.delete()
        if not wanted:
            return
        try:
            scopes = Scopes(roles=tuple(cast("list[Role]", roles.value)), trusted=bool(trusted.value))
            making = self._organiser.create_invite(
                scopes=scopes,
                uses=int(uses.value or 0) or None,
                lifetime_seconds=float(days.value or 0) * 86400 or None,
                note=str(note.value or ""),
            )
            _, secret = await self._page.dashboard.act(self._page.session, f"make an invite ({note.value})", making)
        except PotluckError as error:
            ui.notify(str(error), type="negative")
            return
        _show_link(str(replace(self._link, invite=secret)))
        await self.refresh()


def _absent_last(state: MemberState) -> tuple[bool, str]:
    return state.state not in ("alive", "suspect"), state.member.name


def _over(invite: Invite, now: float) -> str:
    """Why nobody comes in by it any more; empty while somebody can."""
    if invite.revoked:
        return "revoked"
    if invite.expires_at is not None and invite.expires_at <= now:
        return "expired"
    return "used up" if invite.uses is not None and invite.used >= invite.uses else ""


def _show_link(link: str) -> None:
    with ui.dialog() as dialog, box("card dialog"):
        words("The join link", "card-title")
        words("It cannot be shown again. Anyone who has it can join, within its limits.", "quiet")
        words(link, "linkbox mono invite-link")
        ui.image(segno.make(link, error="m").svg_data_uri(scale=4, border=1)).classes("qr")
        with box("buttons"):
            button("Copy", lambda: ui.clipboard.write(link), kind="main")
            button("Close", dialog.delete)
    dialog.open()


def _text(title: str, *notes: str) -> None:
    with box("item-text"):
        words(title, "item-title")
        for note in notes:
            if note:
                words(note, "item-note")
