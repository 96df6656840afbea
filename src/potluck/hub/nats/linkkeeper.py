"""Keeps one link to the hub open: opens the first, watches it, and opens the next when it breaks.

start ──► watching ──lost──► waiting ──► trying each server ──► watching …
                                ▲               │ all failed
                                └───────────────┘
                                                │ refused for too long
                                                ▼
                                             refused: the end
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from potluck import tasks
from potluck.errors import (
    AccessError,
    CertificateError,
    ConfigurationError,
    HubUnavailableError,
    NotAdmittedError,
    PotluckError,
)
from potluck.hub.nats.link import NatsLink
from potluck.hub.nats.reconnect import Absence, Backoff, ServerPool

logger = logging.getLogger(__name__)

LASTING_SECONDS = 5.0  # a link that lived so long was a good one: the next wait starts small again
SECOND_LOOK_SECONDS = 1.0
HELD_UP_SECONDS = 1.5  # a hub that has just started holds up who comes before its guard, and says no 5 s later
LEARNT_TIMEOUT_SECONDS = 3.0  # a hub may name addresses that lead nowhere from here; those given come first


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperConfig:
    """How patient a connection is."""

    connect_timeout_seconds: float = 10.0
    """How long one attempt at one server may take, the guard's decision included."""

    ping_every_seconds: float = 5.0
    """How often the link is tried."""

    pong_within_seconds: float = 15.0
    """A link on which the hub does not answer for so long is given up; bulk data may stand before the answer."""

    backoff_first_seconds: float = 0.1
    """The wait before the first pass over the servers after a loss; it doubles with each pass."""

    backoff_limit_seconds: float = 10.0
    """The longest wait between passes."""

    refusal_patience_seconds: float = 10.0
    """How long to put up with refusals on the way back: a hub that restarts refuses all until its guard is there."""

    def __post_init__(self) -> None:
        for name in ("connect_timeout_seconds", "ping_every_seconds", "pong_within_seconds", "backoff_first_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be more than 0, not {getattr(self, name)}")
        if self.backoff_limit_seconds < self.backoff_first_seconds:
            raise ConfigurationError(
                f"backoff_limit_seconds ({self.backoff_limit_seconds}) must be at least backoff_first_seconds "
                f"({self.backoff_first_seconds})"
            )
        if self.refusal_patience_seconds < 0:
            raise ConfigurationError(f"refusal_patience_seconds must not be negative: {self.refusal_patience_seconds}")


class LinkEvents(Protocol):
    """What the keeper tells its owner."""

    async def link_opened(self, link: NatsLink) -> None:
        """Set up what the link must carry; only then it counts as open."""
        ...

    def link_lost(self, reason: str) -> None:
        """There is no link now; one that comes back is told by `link_restored`."""
        ...

    def link_restored(self) -> None:
        """There is a link again."""
        ...

    async def is_refusal_final(self, error: NotAdmittedError) -> AccessError | None:
        """The hub has refused us for a while: why it is over, or None to go on trying."""
        ...

    def link_refused(self, error: AccessError) -> None:
        """The hub does not let us back in: the keeper has given up."""
        ...


class LinkKeeper:
    """Owns the present link."""

    def __init__(
        self,
        servers: Iterable[str],
        open_link: Callable[[str, float], Awaitable[NatsLink]],
        events: LinkEvents,
        config: KeeperConfig,
    ) -> None:
        self.link: NatsLink | None = None
        self.round_trip_seconds = 0.0
        self.num_failed_attempts = 0
        self.num_refusals = 0
        self.num_restored = 0
        self._pool = ServerPool(servers)
        self._open_link = open_link
        self._events = events
        self._config = config
        self._backoff = Backoff(config.backoff_first_seconds, config.backoff_limit_seconds)
        self._ending: NatsLink | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the first link, trying each server in turn, or raise why none could be opened."""
        failures: list[PotluckError] = []
        for server in self._pool.first_order():
            try:
                self.link = await self._open(server, self._config.connect_timeout_seconds)
            except (CertificateError, HubUnavailableError) as error:
                failures.append(error)
            else:
                self._task = asyncio.create_task(self._keep(self.link), name="hub connection")
                return
        raise _the_one_to_fix(failures)

    async def close(self) -> None:
        """Stop watching and end the link, after what was sent has arrived. Idempotent."""
        await tasks.end(self._task)
        link, self.link = self.link, None
        if link is not None:
            await link.close(flush=True)
        if self._ending is not None:  # its end was broken off just now
            await self._ending.close()

    async def _keep(self, link: NatsLink) -> None:
        while True:
            opened_at = time.monotonic()
            reason = await self._watch(link)
            logger.info("the connection to the hub at %s is lost: %s", link.server, reason)
            self.link, self._ending = None, link
            self._pool.learn(link.discovered_servers)
            self._events.link_lost(reason)
            await link.close()
            self._ending = None
            if time.monotonic() - opened_at >= LASTING_SECONDS:
                self._backoff.reset()
            try:
                self.link = link = await self._next_link(link.server)
            except AccessError as error:
                logger.warning("the hub does not let us back in: %s", error)
                self._events.link_refused(error)
                return
            self.num_restored += 1
            logger.info("connected to the hub at %s again", link.server)
            self._events.link_restored()

    async def _watch(self, link: NatsLink) -> str:
        """Return when the link has ended or no longer answers, with the reason."""
        while True:
            await asyncio.wait({link.ended}, timeout=self._config.ping_every_seconds)
            if link.ended.done():
                return link.ended.result()
            try:
                await self._try(link)
            except HubUnavailableError as error:
                return str(error)

    async def _try(self, link: NatsLink) -> None:
        sent_at = time.monotonic()
        try:
            await link.round_trip(self._config.pong_within_seconds)
        except HubUnavailableError:
            # A process that was stopped for a while sees its deadline pass before it reads the answer.
            await link.round_trip(SECOND_LOOK_SECONDS)
        self.round_trip_seconds = time.monotonic() - sent_at

    async def _next_link(self, lost: str) -> NatsLink:
        refused_since: float | None = None
        absence = Absence(time.monotonic())
        while True:
            await asyncio.sleep(self._backoff.next_seconds())
            for server in self._pool.order_after(lost):
                try:
                    return await self._open_again(server)
                except NotAdmittedError as error:
                    self.num_refusals += 1
                    refused_since = refused_since or time.monotonic()
                    if time.monotonic() - refused_since >= self._config.refusal_patience_seconds:
                        if (final := await self._events.is_refusal_final(error)) is not None:
                            raise final from error
                        refused_since = None
                    break  # the other servers ask the same guard
                except PotluckError as error:
                    self.num_failed_attempts += 1
                    told = absence.failed(error, time.monotonic())
                    logger.log(logging.WARNING if told else logging.DEBUG, "%s", told or f"not back yet: {error}")
                except Exception:  # an attempt ends here: whatever went wrong, the next one must be made
                    self.num_failed_attempts += 1
                    logger.exception("an attempt to reconnect to %s failed in an unforeseen way", server)
            else:
                refused_since = None

    async def _open_again(self, server: str) -> NatsLink:
        """On the way back: who came a moment before the guard does not wait for the hub's answer, but asks again."""
        began = time.monotonic()
        try:
            return await self._open(server, min(HELD_UP_SECONDS, self._config.connect_timeout_seconds))
        except HubUnavailableError:
            if time.monotonic() - began < HELD_UP_SECONDS:  # it did answer, or nothing is there
                raise
        return await self._open(server, self._config.connect_timeout_seconds)

    async def _open(self, server: str, timeout_seconds: float) -> NatsLink:
        if self._pool.is_learnt(server):
            timeout_seconds = min(timeout_seconds, LEARNT_TIMEOUT_SECONDS)
        link = await self._open_link(server, timeout_seconds)
        try:
            await self._events.link_opened(link)
        except BaseException:
            await link.close()
            raise
        return link


def _the_one_to_fix(failures: list[PotluckError]) -> PotluckError:
    """Of several failures, the one that the user can act on; all the others are told too."""
    if len(failures) == 1:
        return failures[0]
    wrong_certificates = [failure for failure in failures if isinstance(failure, CertificateError)]
    if wrong_certificates:
        return wrong_certificates[0]
    return HubUnavailableError("no server of the hub could be reached: " + "; ".join(map(str, failures)))
