"""The lobby's desk: takes applications, gathers the facts, carries out what `lobby.decide` says.

Applications are worked on side by side, because checking a token waits for a service elsewhere; but one at a time for
each peer, and only so many in all. Who guesses secrets, or asks for access again and again from one address under new
names, is slowed down.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from potluck.clock import Clock
from potluck.errors import ProtocolError, RetryableError
from potluck.hub.access.application import MAX_APPLICATION_BYTES, Answer, Application
from potluck.hub.access.member import known_service
from potluck.hub.guard import lobby
from potluck.hub.guard.connections import Connections
from potluck.hub.guard.door import Door, DoorLimits
from potluck.hub.guard.huggingface import TokenAnswer
from potluck.hub.guard.lobby import Admit, Facts, Refuse, Wait
from potluck.hub.guard.lobbycrowd import first_to_go, num_from_address
from potluck.hub.guard.registry import Registry
from potluck.hub.ratelimit import RateLimit
from potluck.messages import decode
from potluck.plaintext import check_plain

logger = logging.getLogger(__name__)

MAX_UNDER_WAY = 128
REQUEST_TTL_SECONDS = 7 * 24 * 3600
FAILED_TRIES_BURST = 30  # per address: a class behind one router may all mistype once
FAILED_TRIES_PER_SECOND = 0.2
DECIDE_SECONDS = 10.0  # an applicant waits a little longer than this; a cluster has a new leader within 9 s
RETRY_SECONDS = 0.25
COSTLY_REFUSALS = frozenset({"unknown_invite", "bad_token"})

T = TypeVar("T")
CheckToken = Callable[[str], Awaitable[TokenAnswer]]


async def _persist(step: Callable[[], Awaitable[T]], deadline: float) -> T:
    """Try until it works: while a cluster chooses a leader, an applicant had better wait than come again."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await step()
        except RetryableError as error:
            if loop.time() + RETRY_SECONDS > deadline:
                raise
            logger.info("an application waits for the hub's records: %s", error)
        await asyncio.sleep(RETRY_SECONDS)


class LobbyDesk:
    """Answers applications."""

    def __init__(
        self,
        registry: Registry,
        connections: Connections,
        door: Door,
        check_token: CheckToken,
        clock: Clock,
        limits: DoorLimits,
    ) -> None:
        self._registry = registry
        self._connections = connections
        self._door = door
        self._check_token = check_token
        self._clock = clock
        self._limits = limits
        self._under_way: set[str] = set()
        self._tries = RateLimit(burst=FAILED_TRIES_BURST, per_second=FAILED_TRIES_PER_SECOND, clock=clock)
        self.counts: Counter[str] = Counter()

    def may_stay(self, peer: str) -> bool:
        """Whether a stranger has a reason to stay: its application is being decided, or it is on the waiting list."""
        request = self._registry.requests.get(peer)
        return peer in self._under_way or (request is not None and not request.denied)

    async def answer(self, peer: str, payload: bytes) -> Answer:
        """The answer to one application."""
        try:
            application = decode(Application, payload, limit_bytes=MAX_APPLICATION_BYTES)
            check_plain(application)
        except ProtocolError as error:
            self.counts["malformed"] += 1
            return lobby.refused(Refuse(code="malformed", message=f"the hub does not take this application: {error}"))
        host = self._connections.host_of(peer)
        source = host or peer  # the hub may not have told us yet where it comes from
        if peer in self._under_way or len(self._under_way) >= MAX_UNDER_WAY:
            return self._refuse(
                Refuse(code="too_many_tries", message="one application at a time", retry_after_seconds=5)
            )
        if self._tries.is_exhausted(source):
            seconds = self._tries.seconds_until_next(source)
            message = "too many failed tries came from your address: wait before the next"
            return self._refuse(Refuse(code="too_many_tries", message=message, retry_after_seconds=seconds))
        self._under_way.add(peer)
        try:
            return await self._handle(peer, host, application)
        except RetryableError as error:  # a cluster that chooses a leader, most often
            logger.warning("an application could not be decided now: %s", error)
            message = "the hub cannot look at its records just now: try again in a moment"
            return self._refuse(Refuse(code="hub_busy", message=message, retry_after_seconds=3))
        finally:
            self._under_way.discard(peer)

    async def _handle(self, peer: str, host: str, application: Application) -> Answer:
        deadline = asyncio.get_running_loop().time() + DECIDE_SECONDS
        facts = await _persist(lambda: self._gather(peer, host, application), deadline)
        decision = lobby.decide(application, facts)
        return await _persist(lambda: self._carry_out(decision, peer, host, application), deadline)

    async def _carry_out(
        self, decision: Admit | Wait | Refuse, peer: str, host: str, application: Application
    ) -> Answer:
        """May be done again where it was broken off."""
        match decision:
            case Admit():
                return await self._admit(decision, application)
            case Wait():
                return await self._wait(decision, host)
            case Refuse():
                if decision.code in COSTLY_REFUSALS:
                    self._tries.take(host or peer)
                return self._refuse(decision)

    async def _gather(self, peer: str, host: str, application: Application) -> Facts:
        registry = self._registry
        member = await registry.member(peer)
        policy = registry.policy
        invite = await registry.invite_for(application.invite) if application.invite else None
        token: TokenAnswer | None = None
        banned_already = registry.bans_of(peer, member.person if member is not None else "")
        if not banned_already and lobby.needs_token_check(application, member, policy):
            token = await self._check_token(application.token)
        requests = registry.waiting()
        waiting = [request.peer for request in requests]
        facts = Facts(
            peer=peer,
            host=host,
            now=self._clock.wall(),
            policy=policy,
            member=member,
            invite=invite,
            token=token,
            request=registry.requests.get(peer),
            place=waiting.index(peer) + 1 if peer in waiting else 0,
            num_waiting=len(waiting),
            num_from_address=num_from_address(requests, host),
            first_to_go=first_to_go(requests, host),
            lobby_places=self._limits.lobby,
        )
        person = lobby.person_for(application, facts)
        return lobby.with_person(
            facts,
            bans=registry.bans_of(peer, person, member.person if member is not None else ""),
            seats_taken=self._door.seats_taken(person, known_service(application.service), besides=peer),
        )

    async def _admit(self, decision: Admit, application: Application) -> Answer:
        """Write the record. An invite's use is counted first: rather one use lost than one too many."""
        member, registry = decision.member, self._registry
        if decision.invite_id:
            verdict = await registry.use_invite(
                decision.invite_id, application.invite, application.role, self._clock.wall(), member.peer
            )
            if verdict != "valid":
                return self._refuse(lobby.invite_refused(verdict, member.role, member.scopes))
            if registry.members.get(member.peer) is None and not await registry.members.create(member.peer, member):
                # Another guard let this very peer in at the same time. By the same invite, it was counted once.
                known = await registry.members.fetch(member.peer)
                if known is None or known.admitted_by != member.admitted_by:
                    await registry.return_invite_use(decision.invite_id, member.peer)
        if registry.members.get(member.peer) != member:
            await registry.members.put(member.peer, member)
        if registry.requests.get(member.peer) is not None:
            await registry.requests.remove(member.peer)
        self.counts["admitted"] += 1
        logger.info("admitted %s of %s as %s (%s)", member.peer, member.person, member.role, member.admitted_by)
        return lobby.admitted(member)

    async def _wait(self, decision: Wait, host: str) -> Answer:
        request = decision.request
        if decision.is_new:
            if decision.displaces:
                await self._registry.requests.remove(decision.displaces)
                logger.info("the waiting list is full: %s makes room for %s", decision.displaces, request.peer)
            self._tries.take(host or request.peer)
            await self._registry.requests.put(request.peer, request, ttl_seconds=REQUEST_TTL_SECONDS)
            logger.info("%s of %s asks for access as %s", request.peer, request.person, request.role)
        self.counts["waiting"] += 1
        return lobby.waiting(decision.place)

    def _refuse(self, refusal: Refuse) -> Answer:
        self.counts[f"refused_{refusal.code}"] += 1
        return lobby.refused(refusal)
