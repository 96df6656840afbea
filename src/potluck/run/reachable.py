"""Keeps true where others can reach this peer.

Somebody is asked to dial us back: at the start, again when the first others come or while nobody reached us, when the
hub sees us come from elsewhere, and now and then later, since routers forget. What answers goes into the card, which
makes this peer a full peer.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from potluck import tasks
from potluck.errors import PotluckError
from potluck.hub.presence import Presence
from potluck.link.direct.addresses import MAX_ADDRESSES, Endpoint, announceable, local_interfaces, resolve
from potluck.link.direct.carrier import DirectCarrier
from potluck.link.direct.reachability import (
    DIAL_BACK_SECONDS,
    DialBackAnswer,
    DialBackDesk,
    DialBackRequest,
    Reachability,
    ReachabilityConfig,
    decide,
)
from potluck.link.links import Incoming, Links
from potluck.peer.roster import RosterEvent
from potluck.peer.session import Session

logger = logging.getLogger(__name__)

ASK_SECONDS = DIAL_BACK_SECONDS + 5.0
ASK_PEERS = 3  # how many are asked before we believe that nobody reaches us
AGAIN_SECONDS = 15.0  # after the first failure; it doubles, since most who are not reached never will be
LATER_SECONDS = 600.0


class ReachabilityKeeper:
    """Asks to be dialled back, and dials others back."""

    def __init__(self, session: Session, links: Links, direct: DirectCarrier, config: ReachabilityConfig) -> None:
        self.found: Reachability | None = None
        self._session = session
        self._links = links
        self._direct = direct
        self._config = config
        self._desk = DialBackDesk(interfaces=local_interfaces(), clock=session.clock)
        self._override: tuple[Endpoint, ...] = ()  # what the user announces, resolved
        self._confirmed = False  # whether anybody has been asked with an answer
        self._asked_from = ""  # where the hub saw us when we last asked
        self._decided = asyncio.Event()
        self._look_again = asyncio.Event()
        self._stop_listening: Callable[[], None] = lambda: None
        self._task: asyncio.Task[None] | None = None
        links.handle(DialBackRequest, self._dial_back)

    async def start(self) -> None:
        """Find out, and keep finding out; ConfigurationError when what the user announces cannot be an address."""
        self._override = await self._resolve()
        self._stop_listening = self._session.roster.listen(self._roster_changed)
        self._task = asyncio.create_task(self._keep(), name="reachability")

    async def decided(self) -> Reachability:
        """What was found out the first time."""
        await self._decided.wait()
        assert self.found is not None
        return self.found

    async def close(self) -> None:
        """Stop. Idempotent."""
        self._stop_listening()
        await tasks.end(self._task)
        self._task = None

    async def _keep(self) -> None:
        again_seconds = AGAIN_SECONDS
        while True:
            found = await self._find_out()
            if found != self.found:
                logger.info("this is a %s peer: %s", found.mode, found.reason)
                self.found = found
                self._session.update_card(addresses=found.addresses, lan_addresses=found.lan_addresses)
            self._decided.set()
            if self._config.client_mode:
                return
            has_news = await self._pause(LATER_SECONDS if found.mode == "full" else again_seconds)
            again_seconds = AGAIN_SECONDS if has_news else min(again_seconds * 2, LATER_SECONDS)

    async def _pause(self, seconds: float) -> bool:
        """Wait so long, or until there is reason to look again; whether there was."""
        try:
            async with asyncio.timeout(seconds):
                await self._look_again.wait()
        except TimeoutError:
            return False
        self._look_again.clear()
        return True

    def _roster_changed(self, event: RosterEvent) -> None:
        if event.peer == self._session.peer_id:
            if self._asked_from and event.presence.host != self._asked_from:
                self._look_again.set()
        elif event.change == "joined" and not self._confirmed:
            self._look_again.set()

    async def _find_out(self) -> Reachability:
        try:
            self._override = await self._resolve()
        except PotluckError as error:
            logger.warning("what is announced stays as it is: %s", error)
        asked_from_before, self._asked_from = self._asked_from, self._own_host()
        announced = announceable(self._direct.bound, local_interfaces(), hub_sees=self._asked_from)
        confirmed: set[Endpoint] | None = None
        if announced and not self._config.client_mode:
            confirmed = await self._ask_around((*self._override, *announced)[:MAX_ADDRESSES])
        self._confirmed = confirmed is not None
        is_unchanged = self._asked_from == asked_from_before
        if confirmed is None and is_unchanged and self.found is not None and self.found.mode == "full":
            return self.found  # nobody is there to say otherwise
        return decide(
            announced,
            None if confirmed is None else sorted(confirmed, key=str),
            client_mode=self._config.client_mode,
            announce_override=self._override,
            hub_sees=self._asked_from,
        )

    async def _resolve(self) -> tuple[Endpoint, ...]:
        return tuple([endpoint for text in self._config.announce for endpoint in await resolve(text)])

    async def _ask_around(self, endpoints: tuple[Endpoint, ...]) -> set[Endpoint] | None:
        """What others reach; None when nobody answered."""
        confirmed: set[Endpoint] | None = None
        for presence in self._whom_to_ask():
            answer = await self._ask(presence, endpoints)
            if answer is None or answer.is_busy:
                continue
            reached = {endpoint for endpoint in endpoints if str(endpoint) in answer.reached}
            confirmed = (confirmed or set()) | reached
            if any(endpoint.reach == "public" for endpoint in reached) or len(confirmed) == len(endpoints):
                return confirmed
        return confirmed

    def _whom_to_ask(self) -> list[Presence]:
        """Others, those that are likely to stay and to be outside first."""
        own_host, own_id = self._own_host(), self._session.peer_id
        others = [presence for presence in self._session.roster.alive() if presence.peer != own_id]
        random.shuffle(others)  # or all would ask the same few
        others.sort(key=lambda p: (p.host == own_host, p.card.role != "aux", not p.card.addresses))
        return others[:ASK_PEERS]

    async def _ask(self, presence: Presence, endpoints: tuple[Endpoint, ...]) -> DialBackAnswer | None:
        keys = self._direct.invite_probe(seconds=ASK_SECONDS)
        request = DialBackRequest(
            addresses=tuple(map(str, endpoints)),
            link_key=self._session.card.link_key,
            probe_key=keys.link_key,
            probe_secret=keys.secret,
            plain=self._direct.is_plain,
        )
        try:
            incoming = await self._links.request(
                presence.peer, request, reply=DialBackAnswer, timeout_seconds=ASK_SECONDS
            )
        except PotluckError as error:
            logger.debug("%s could not be asked to dial back: %s", presence.peer, error)
            return None
        return incoming.message

    async def _dial_back(self, incoming: Incoming[DialBackRequest]) -> DialBackAnswer:
        asker = self._session.roster.get(incoming.sender)
        if asker is None:
            failed = dict.fromkeys(incoming.message.addresses, "you are not in the roster yet")
            return DialBackAnswer(failed=failed, is_busy=True)
        return await self._desk.answer(
            incoming.sender, incoming.message, asker_host=asker.host, own_host=self._own_host()
        )

    def _own_host(self) -> str:
        own = self._session.roster.get(self._session.peer_id)
        return own.host if own is not None else ""
