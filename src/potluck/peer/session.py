"""A peer and the hub: it says who it is, shows that it is alive, knows who else is there, and finds its way back.

    open()    through the lobby (admission.py), connect, watch the roster, hand in the card
    …         a beacon each second, from the connection on: the guard may take long to write the card down, and must not
              take us for silent meanwhile; after a reconnect the card again, since it may have counted us as dead
    close()   good-bye, so that nobody waits for us

The session ends by itself only when the hub does not want us any more (banned, no longer a member, or a newer process
has this peer's place): `ended` then holds why. While the hub is merely away, everything else goes on.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal, Protocol

import msgspec

from potluck import tasks
from potluck.clock import Clock, SystemClock
from potluck.errors import (
    AccessError,
    BannedError,
    DeadlineExceededError,
    FatalError,
    NotAdmittedError,
    PotluckError,
    ProtocolError,
    RetryableError,
)
from potluck.hub.connection import Entry, HubConnection, Store, Subscription
from potluck.hub.presence import Beacon, Card, CardAnswer, Presence, is_link_proven, with_link_proof
from potluck.hub.subjects import MAIN, Subjects
from potluck.messages import decode, encode
from potluck.peer.heartbeat import Heartbeat
from potluck.peer.hubtime import HubTime
from potluck.peer.identity import Identity
from potluck.peer.roster import Roster
from potluck.plaintext import clean_all

logger = logging.getLogger(__name__)

BEACON_EVERY_SECONDS = 1.0
TIME_EVERY_SECONDS = 30.0
FIRST_TIME_SAMPLES = 3
REQUEST_TIMEOUT_SECONDS = 5.0
FIRST_TIMEOUT_SECONDS = 1.5  # of a first try: a question may be on its way to a server that dies
OPEN_SECONDS = 20.0  # a cluster that lost a server has new leaders within 10 s: newcomers wait that long
GOOD_BYE_SECONDS = 2.0
RETRY_SECONDS = 0.5

HubChange = Literal["away", "back"]


class Connector(Protocol):
    """Makes connections to one hub in one identity's name."""

    async def __call__(
        self,
        lane: str,
        *,
        on_connected: Callable[[], None] | None = None,
        on_disconnected: Callable[[], None] | None = None,
        on_refused: Callable[[AccessError], None] | None = None,
    ) -> HubConnection:
        """Connect on a lane: `lobby` for strangers, `main` for members."""
        ...


def new_session_id() -> str:
    """A name for one life of a process."""
    return secrets.token_hex(8)


class Session:
    """One member's presence in a run."""

    def __init__(
        self,
        connect: Connector,
        identity: Identity,
        subjects: Subjects,
        card: Card,
        clock: Clock | None = None,
        *,
        check_organiser: Callable[[str], None] = lambda _organiser: None,
    ) -> None:
        """`check_organiser` gets the key that a manifest is signed with: ConfigurationError if it is another's."""
        self.identity = identity
        self.peer_id = identity.peer_id
        self.subjects = subjects
        self.roster = Roster()
        self.hub_time = HubTime()
        self.clock = clock or SystemClock()
        self.check_organiser = check_organiser
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the session is over: with the reason, or with None once `close` was called."""
        self._connect = connect
        self._card = with_link_proof(card, subjects.run, identity.peer_id, identity.sign)
        self.refused_groups: dict[str, str] = {}
        """Of those in the card: the hub has accepted it without them, for this reason."""
        self._beacons = {MAIN: Beacon(session=card.session)}  # by group; that of `main` is the sign of life
        self._hub: HubConnection | None = None
        self._heartbeat: Heartbeat | None = None
        self._watch: Subscription | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._card_wanted = asyncio.Event()
        self._card_waiters: list[asyncio.Future[None]] = []
        self._time_wanted = asyncio.Event()
        self._is_away = False
        self._listeners: list[Callable[[HubChange], None]] = []
        self._counts: dict[str, int] = {
            "beacons": 0,
            "cards": 0,
            "reconnects": 0,
            "bad_presences": 0,
            "forged_link_keys": 0,
        }

    @property
    def hub(self) -> HubConnection:
        """The connection, once opened."""
        if self._hub is None:
            raise RuntimeError("the session is not open")
        return self._hub

    @property
    def card(self) -> Card:
        """What this peer says about itself now."""
        return self._card

    def store(self, name: str) -> Store:
        """The run's store of that name."""
        return self.hub.store(name)

    @property
    def heartbeat(self) -> Heartbeat:
        """What keeps this peer's leases of groups alive, all of them."""
        if self._heartbeat is None:
            store = self.hub.store("groups")
            self._heartbeat = Heartbeat(store, self.peer_id, self._card.session, self.clock)
        return self._heartbeat

    def now(self) -> float:
        """Hub time."""
        return self.hub_time.at(self.clock.monotonic())

    async def open(self) -> None:
        """Connect as a member and become visible to the others."""
        try:
            self._hub = await self._connect(
                "main", on_connected=self._came_back, on_disconnected=self._went_away, on_refused=self._end
            )
            self._begin("beacons", self._send_beacons)
            deadline = self.clock.monotonic() + OPEN_SECONDS
            for _ in range(FIRST_TIME_SAMPLES):
                await self._persist(self._ask_time, deadline)
            await self._persist(self._watch_roster, deadline)
            await self._persist(self._hand_in_card, deadline)
            self._begin("card", self._keep_card)
            self._begin("time", self._keep_time)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Say good-bye and disconnect. Idempotent."""
        await tasks.end(*self._tasks)
        self._tasks = []
        hub, self._hub = self._hub, None
        if hub is None:
            return
        try:
            if self._watch is not None:
                await self._watch.cancel()
            if hub.is_connected and not self.ended.done():
                await self._say_good_bye(hub)
        finally:
            if not self.ended.done():
                self.ended.set_result(None)
            await hub.close()

    def listen(self, listener: Callable[[HubChange], None]) -> Callable[[], None]:
        """Call `listener` when the hub goes away, and when it is back and knows us; the returned function ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def update_card(self, **changes: Any) -> None:
        """Change what this peer says about itself; the others learn of it soon."""
        card = msgspec.structs.replace(self._card, **changes)
        if card != self._card:
            self._card = card
            self._card_wanted.set()

    async def card_accepted(self, timeout_seconds: float) -> None:
        """Wait until the hub has the card as it is now. DeadlineExceededError when that takes too long."""
        waiter = asyncio.get_running_loop().create_future()
        self._card_waiters.append(waiter)
        self._card_wanted.set()
        waiting: set[asyncio.Future[None]] = {waiter, self.ended}
        await asyncio.wait(waiting, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            self.ended.result()
        if not waiter.done():
            self._card_waiters.remove(waiter)
            raise DeadlineExceededError(f"the hub did not answer within {timeout_seconds:g} s: it may be away")

    def update_beacon(self, group: str = MAIN, /, **changes: Any) -> None:
        """Change what the next beacons say, of a group; a group has some from its first change on."""
        beacon = self._beacons.get(group) or Beacon(session=self._card.session)
        self._beacons[group] = msgspec.structs.replace(beacon, **changes)

    def end_beacons(self, group: str) -> None:
        """Send no more of a group; `main` always has them."""
        if group != MAIN:
            self._beacons.pop(group, None)

    async def publish_beacon(self, group: str = MAIN) -> None:
        """Say now what the next beacon would say, since others wait for it. RetryableError while the hub is away."""
        beacon = self._beacons.get(group)
        if beacon is not None:
            await self.hub.publish(self.subjects.of_group(group).beacon(self.peer_id), encode(beacon))
            self._counts["beacons"] += 1

    def statistics(self) -> dict[str, int | float]:
        """Counters of this session."""
        return {**self._counts, "peers": len(self.roster)}

    # Beginning

    def _begin(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.create_task(work(), name=name)
        task.add_done_callback(self._task_ended)
        self._tasks.append(task)

    async def _persist(self, step: Callable[[float], Awaitable[None]], deadline: float) -> None:
        """Take one step of the opening, with more patience at each try, until it works or the deadline has passed."""
        timeout_seconds = FIRST_TIMEOUT_SECONDS
        while True:
            try:
                return await step(min(timeout_seconds, max(deadline - self.clock.monotonic(), RETRY_SECONDS)))
            except RetryableError as error:
                if self.clock.monotonic() + RETRY_SECONDS > deadline:
                    raise
                logger.info("the hub does not take us in yet, trying on: %s", error)
            await asyncio.sleep(RETRY_SECONDS)
            timeout_seconds = min(2 * timeout_seconds, REQUEST_TIMEOUT_SECONDS)

    async def _watch_roster(self, _timeout_seconds: float) -> None:
        self._watch = await self.hub.store("roster").watch(self._roster_changed)

    # What the hub tells

    def _roster_changed(self, entry: Entry) -> None:
        if entry.value is None:
            self.roster.forget(entry.key)
            return
        try:
            presence = clean_all(decode(Presence, entry.value))
        except ProtocolError as error:
            self._counts["bad_presences"] += 1
            logger.warning("the roster's entry %s was passed over: %s", entry.key, error)
            return
        self.roster.apply(self._believed(presence))
        if presence.peer == self.peer_id and (
            presence.state in ("dead", "left") or presence.card.session != self._card.session
        ):
            # A pause made the guard give us up, and we are still here; or a newer process has our place, and the guard
            # will say so.
            self._card_wanted.set()

    def _believed(self, presence: Presence) -> Presence:
        """What the hub says of a peer, less a link key that the peer has not signed: nothing may be sent by that."""
        peer, card = presence.peer, presence.card
        known = self.roster.get(peer)
        claim = (card.session, card.link_key, card.link_proof)
        if known is not None and claim == (known.card.session, known.card.link_key, known.card.link_proof):
            return presence
        if is_link_proven(card, self.subjects.run, peer):
            return presence
        self._counts["forged_link_keys"] += 1
        if self._counts["forged_link_keys"].bit_count() == 1:  # the 1st, 2nd, 4th, …
            logger.warning(
                "the hub shows a link key of %s that this peer has not signed: nothing is exchanged with it. It may "
                "run an older version; or the hub's owner wants to listen in",
                peer,
            )
        return msgspec.structs.replace(presence, card=msgspec.structs.replace(card, link_key="", link_proof=b""))

    def _went_away(self) -> None:
        self._is_away = True
        self._tell("away")

    def _came_back(self) -> None:
        self._counts["reconnects"] += 1
        self.hub_time.doubt()  # a machine that slept has lost its connection, and its monotonic clock stood still
        self._time_wanted.set()
        self._card_wanted.set()

    def _tell(self, change: HubChange) -> None:
        for listener in list(self._listeners):
            listener(change)

    # How it ends

    def _end(self, error: PotluckError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # a caller that never looks at `ended` gets no warning about it

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Nobody would notice the loss of a task but by our death in the roster: so it ends the session."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._tasks.remove(task)  # its error is told here
        if not isinstance(error, PotluckError):
            logger.error("the session's %s failed because of a bug", task.get_name(), exc_info=error)
            error = FatalError(f"the session's {task.get_name()} failed: {error!r}. Please report this, and join again")
        self._end(error)

    async def _say_good_bye(self, hub: HubConnection) -> None:
        subject, beacon = self.subjects.leave(self.peer_id), encode(self._beacons[MAIN])
        try:
            await hub.request(subject, beacon, timeout_seconds=GOOD_BYE_SECONDS)
        except PotluckError as error:  # the hub's disconnect event tells the others as well
            logger.debug("good-bye was not heard: %s", error)

    # What it does all the time

    async def _hand_in_card(self, timeout_seconds: float = REQUEST_TIMEOUT_SECONDS) -> None:
        self._card_wanted.clear()
        waiters, self._card_waiters = self._card_waiters, []
        try:
            answer = await self._ask_to_take_card(timeout_seconds)
        except BaseException:
            self._card_waiters += waiters
            raise
        self.refused_groups = dict.fromkeys(answer.refused_groups, answer.message)
        self._counts["cards"] += 1
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _ask_to_take_card(self, timeout_seconds: float) -> CardAnswer:
        payload = await self.hub.request(
            self.subjects.card(self.peer_id), encode(self._card), timeout_seconds=timeout_seconds
        )
        answer = decode(CardAnswer, payload)
        if answer.banned:
            raise BannedError(answer.message)
        if not answer.accepted:
            raise NotAdmittedError(f"the hub does not take this peer in: {answer.message}")
        return answer

    async def _ask_time(self, timeout_seconds: float = REQUEST_TIMEOUT_SECONDS) -> None:
        sent = self.clock.monotonic()
        answer = await self.hub.request(self.subjects.ask(self.peer_id, "time"), b"", timeout_seconds=timeout_seconds)
        self.hub_time.observe(
            sent_monotonic=sent, received_monotonic=self.clock.monotonic(), hub_wall=decode(float, answer)
        )

    async def _send_beacons(self) -> None:
        while True:
            try:
                for group in list(self._beacons):
                    await self.publish_beacon(group)
            except RetryableError as error:
                logger.debug("no beacon this second: %s", error)
            await asyncio.sleep(BEACON_EVERY_SECONDS)

    async def _keep_card(self) -> None:
        while True:
            await self._card_wanted.wait()
            try:
                await self._hand_in_card()
            except (RetryableError, ProtocolError) as error:
                logger.info("the card could not be handed in yet: %s", error)
                self._card_wanted.set()
                await asyncio.sleep(RETRY_SECONDS)
            else:
                if self._is_away and self.hub.is_connected:
                    self._is_away = False
                    self._tell("back")

    async def _keep_time(self) -> None:
        while True:
            try:
                async with asyncio.timeout(TIME_EVERY_SECONDS):
                    await self._time_wanted.wait()
            except TimeoutError:
                pass
            self._time_wanted.clear()
            try:
                await self._ask_time()
            except (RetryableError, ProtocolError) as error:
                logger.debug("the hub's time could not be read: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
                self._time_wanted.set()
