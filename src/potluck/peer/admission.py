"""Getting in: knock at the lobby, wait if an organiser has to decide, and learn in plain words why not.

Members knock too. Their key alone would do, but the lobby is where a refusal comes with its reason: the hub itself
only ever says "authorization violation". For the same reason a member that is not let back in asks there why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from potluck.errors import (
    AccessError,
    BannedError,
    ConfigurationError,
    DeadlineExceededError,
    HubUnavailableError,
    NotAdmittedError,
    PermissionDeniedError,
    PotluckError,
    ProtocolError,
    RetryableError,
    RoleRefusedError,
    SeatsTakenError,
)
from potluck.hub.access.application import TRY_LATER, Answer, Application, waiting_subject
from potluck.hub.connection import Delivery, HubConnection
from potluck.hub.subjects import Subjects
from potluck.messages import decode, encode
from potluck.peer.session import Connector

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_SECONDS = 15.0  # a Hugging Face token may have to be checked on the way
ASK_AGAIN_SECONDS = 20.0  # in case the word that we were let in got lost
KNOCK_AGAIN_SECONDS = 5.0  # while the hub is away and we wait in its list
KNOCKS = 4  # before we give up at a lobby that lets nobody in
FIRST_PAUSE_SECONDS = 0.5  # then twice as long each time
NOBODY_THERE = "the hub is there, but nobody answers at its lobby: is `potluck host` running? Try again in a minute"


NOT_LET_IN = (
    "the hub is there, but lets nobody into its lobby: `potluck host` is not running, or more strangers knock than it "
    "can deal with. Try again in a minute"
)


class LobbyFullError(HubUnavailableError):
    """The lobby is full; come again later."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"{answer.message} (again in {answer.retry_after_seconds or KNOCK_AGAIN_SECONDS:.0f} s)")
        self.answer = answer


async def be_admitted(
    connect: Connector,
    subjects: Subjects,
    peer_id: str,
    application: Application,
    *,
    wait_seconds: float = 0.0,
    on_waiting: Callable[[Answer], None] | None = None,
) -> Answer:
    """Apply and return the answer that lets us in.

    Where an organiser has to decide, waits up to `wait_seconds` for it, also through restarts of the hub and while the
    lobby is full, and calls `on_waiting` when it starts. A refusal is raised: BannedError, SeatsTakenError,
    ConfigurationError (wrong version or role), HubUnavailableError (it cannot be decided now), NotAdmittedError (all
    else).
    """
    line = _WaitingLine(subjects, peer_id, application, wait_seconds, on_waiting or (lambda _answer: None))
    num_failures = 0
    while True:
        try:
            return await line.stand(connect)
        except LobbyFullError as error:
            line.wait_outside(error)
            await line.pause(error.answer.retry_after_seconds or KNOCK_AGAIN_SECONDS)
        except RetryableError as error:
            if line.is_waiting:
                logger.info("the hub went away while we waited for an organiser: %s", error)
                await line.pause(KNOCK_AGAIN_SECONDS)
                continue
            num_failures += 1
            if num_failures == KNOCKS or not line.got_through or isinstance(error.__cause__, DeadlineExceededError):
                raise
            # Cut while we asked, or not let in: a crowded lobby has room again in a moment.
            await asyncio.sleep(FIRST_PAUSE_SECONDS * 2 ** (num_failures - 1))


async def why_refused(
    connect: Connector, subjects: Subjects, peer_id: str, application: Application
) -> AccessError | None:
    """Ask the lobby why a member is not let back in; None when that may pass (the guard is away, a seat is taken)."""
    # Without invite and token: this is a question, and shall use up nothing.
    question = msgspec.structs.replace(application, invite="", token="", message="")
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_SECONDS):
            hub = await connect("lobby")
            try:
                answer = await _ask(hub, subjects, peer_id, question)
            finally:
                await hub.close()
    except (PotluckError, TimeoutError) as error:
        logger.debug("the lobby does not say why we are refused: %s", error)
        return None
    if answer.status == "waiting":
        return NotAdmittedError("you are no longer a member of this run: ask an organiser, and join again")
    if answer.status == "admitted":
        return None
    reason = refusal(answer)
    if isinstance(reason, (HubUnavailableError, SeatsTakenError)):
        logger.warning("not back in the run yet: %s", reason)
        return None
    return reason if isinstance(reason, AccessError) else NotAdmittedError(str(reason))


class _WaitingLine:
    """One applicant's place in front of the lobby, over as many connections as it takes."""

    def __init__(
        self,
        subjects: Subjects,
        peer_id: str,
        application: Application,
        wait_seconds: float,
        on_waiting: Callable[[Answer], None],
    ) -> None:
        self._subjects = subjects
        self._peer_id = peer_id
        self._application = application
        self._deadline = asyncio.get_running_loop().time() + wait_seconds
        self._on_waiting = on_waiting
        self._waiting: Answer | None = None
        self._full: LobbyFullError | None = None
        self.got_through = False
        """Whether the hub answered at the last try, if only by not letting us in."""

    @property
    def is_waiting(self) -> bool:
        """Whether an organiser has to decide, as far as we know."""
        return self._waiting is not None

    def check_patience(self) -> None:
        """NotAdmittedError when we have waited long enough; LobbyFullError where it was for a place to wait."""
        if self._full is not None and self._left_seconds() <= 0:
            raise self._full
        if self._waiting is not None and self._left_seconds() <= 0:
            raise NotAdmittedError(
                f"an organiser has not let you in yet (place {self._waiting.place} in the list): "
                "your request stays there, so join again later"
            )

    def wait_outside(self, full: LobbyFullError) -> None:
        """The lobby is full."""
        if self._full is None and self._left_seconds() > 0:
            self._on_waiting(full.answer)
        self._full = full

    async def pause(self, seconds: float) -> None:
        """Wait before the next try, but not beyond our patience."""
        self.check_patience()
        await asyncio.sleep(min(seconds, self._left_seconds()))

    async def stand(self, connect: Connector) -> Answer:
        """Connect, apply, and wait for the decision."""
        self.got_through = False
        try:
            hub = await connect("lobby")
        except NotAdmittedError as error:  # it is open to everybody: there is no guard, or a crowd
            self.got_through = True
            raise HubUnavailableError(NOT_LET_IN) from error
        self.got_through = True
        try:
            return await self._apply(hub)
        finally:
            await hub.close()

    async def _apply(self, hub: HubConnection) -> Answer:
        decisions: asyncio.Queue[Answer] = asyncio.Queue(maxsize=8)

        def decided(delivery: Delivery) -> None:
            if not decisions.full():
                decisions.put_nowait(decode(Answer, delivery.payload))

        await hub.subscribe(waiting_subject(self._peer_id), decided)
        answer = await _ask(hub, self._subjects, self._peer_id, self._application)
        while answer.status == "waiting":
            self._wait_begins(answer)
            self.check_patience()
            try:
                async with asyncio.timeout(min(self._left_seconds(), ASK_AGAIN_SECONDS)):
                    answer = await decisions.get()
            except TimeoutError:
                answer = await _ask(hub, self._subjects, self._peer_id, self._application)
        if answer.status == "refused":
            raise refusal(answer)
        return answer

    def _wait_begins(self, answer: Answer) -> None:
        self._full = None
        if self._waiting is None:
            self._on_waiting(answer)
        self._waiting = answer

    def _left_seconds(self) -> float:
        return self._deadline - asyncio.get_running_loop().time()


async def _ask(hub: HubConnection, subjects: Subjects, peer_id: str, application: Application) -> Answer:
    try:
        payload = await hub.request(
            subjects.lobby(peer_id), encode(application), timeout_seconds=ANSWER_TIMEOUT_SECONDS
        )
        return decode(Answer, payload)
    except PermissionDeniedError as error:  # the lobby is open to everybody, but only that of the hub's own run
        raise ConfigurationError(
            f"this hub has no run called {subjects.run!r}: check the name in the link, or ask the organiser for another"
        ) from error
    except (RetryableError, NotAdmittedError) as error:
        raise HubUnavailableError(NOBODY_THERE) from error
    except ProtocolError as error:
        raise ConfigurationError(
            f"the hub's answer cannot be read ({error}): it runs another version of Potluck; update yours, or ask the "
            "organiser to"
        ) from error


def refusal(answer: Answer) -> AccessError | ConfigurationError | HubUnavailableError:
    """The error that a refusal is told by."""
    if answer.code == "lobby_full":
        return LobbyFullError(answer)
    if answer.code == "banned":
        return BannedError(answer.message)
    if answer.code == "seats":
        return SeatsTakenError(answer.message)
    if answer.code == "role":
        return RoleRefusedError(answer.message, answer.scopes.roles if answer.scopes is not None else ())
    if answer.code in ("version_too_old", "version_too_new"):
        return ConfigurationError(answer.message)
    if answer.code in TRY_LATER and answer.retry_after_seconds is not None:
        return HubUnavailableError(f"{answer.message} (again in {answer.retry_after_seconds:.0f} s)")
    return NotAdmittedError(answer.message)
