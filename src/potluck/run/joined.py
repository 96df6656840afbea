"""Taking part in a run from a synchronous program.

    with potluck.join("potluck://…") as run:
        optimizer = potluck.Optimizer(run, torch.optim.AdamW(model.parameters()), target_batch_size=4096)

`Joined` is the run as the user's thread sees it. Entering it starts an event loop in a thread, with a peer on it;
leaving it (also by Ctrl-C or an error) closes whatever was attached to it, last first, says good-bye and ends the
thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import potluck
from potluck.clock import Clock
from potluck.errors import ConfigurationError, StoppedError
from potluck.hub.access.application import Answer
from potluck.hub.joinlink import JoinLink, fetch_address
from potluck.hub.subjects import MAIN, check_group_name
from potluck.link.links import Links
from potluck.peer import environment
from potluck.peer.identity import Identity
from potluck.peer.session import Session
from potluck.run.calls import LOOK_UP_SECONDS, Call
from potluck.run.cuts import Cuts
from potluck.run.group import Group
from potluck.run.loopthread import LEAVE_SECONDS, LoopThread, RunningLoop
from potluck.run.peer import Peer, PeerConfig

logger = logging.getLogger(__name__)

LEAVING_SECONDS = 4.0

T = TypeVar("T")
J = TypeVar("J", bound="Joined")


class RunningPeer(Protocol):
    """What a joined run needs of a peer; `potluck.run.peer.Peer` is one, and so is a test's peer in memory."""

    @property
    def session(self) -> Session:
        """Its session with the hub, open."""
        ...

    @property
    def links(self) -> Links:
        """Its links."""
        ...

    async def close(self) -> None:
        """Leave the run."""
        ...


class Joined:
    """A run that this process takes part in. Its methods are for the user's threads."""

    def __init__(self, start: Callable[[], Awaitable[RunningPeer]], loop: RunningLoop | None = None) -> None:
        """`start` makes the peer, on the loop; `loop` is this run's own unless given."""
        self._start = start
        self._own_loop: LoopThread | None = None
        if loop is None:
            loop = self._own_loop = LoopThread()
        self._loop = loop
        self._peer: RunningPeer | None = None
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._claimed: set[str] = set()
        self._groups: dict[str, Group] = {}
        self._is_interrupted = False
        self.is_leaving: Callable[[], bool] = lambda: False
        """Whether this peer was told to leave; for programs whose training thread gets no Ctrl-C."""
        self.leave_seconds = LEAVING_SECONDS
        """How long that may take in all, whatever the line does; what is not done by then is left."""
        self._leaving_since: float | None = None

    @property
    def peer(self) -> RunningPeer:
        """The peer. It lives on the run's event loop: use it there."""
        if self._peer is None:
            raise ConfigurationError("the run is not joined: use it inside of `with potluck.join(…) as run:`")
        return self._peer

    @property
    def is_interrupted(self) -> bool:
        """Whether the run is being left because of an error or Ctrl-C: then nothing is waited for that can be left."""
        return self._is_interrupted

    @property
    def peer_id(self) -> str:
        """By which the others know this peer."""
        return self.peer.session.peer_id

    @property
    def clock(self) -> Clock:
        """The peer's clock."""
        return self.peer.session.clock

    def open(self) -> Self:
        """Join. What keeps this peer out (no hub, no invite, a ban) is raised here."""
        if self._peer is not None:
            return self
        if self._own_loop is not None:
            self._own_loop.start()
        try:
            self._loop.call(self._enter())
        except BaseException:
            self._is_interrupted = True
            self.close()  # Ctrl-C may come when we are in already
            raise
        return self

    def close(self) -> None:
        """Close what is attached, leave the run, end the thread. Idempotent."""
        try:
            if self._peer is not None:
                self._loop.call(self._leave())
        finally:
            self._peer = None
            if self._own_loop is not None:
                self._own_loop.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_interrupted = error is not None
        self.close()

    def claim(self, part: str) -> None:
        """Take a part that only one can play in a run; ConfigurationError when somebody has it."""
        if part in self._claimed:
            raise ConfigurationError(f"this run has {part} already: a peer has one; join again for another")
        self._claimed.add(part)

    def group(self, name: str = MAIN) -> Group:
        """This peer's place in a group, which it joins now unless it is in it. AccessError when it may not."""
        if name not in self._groups:
            check_group_name(name)
            self._groups[name] = self.call_unless_leaving(self._enter_group(name))
        return self._groups[name]

    @property
    def cuts(self) -> Cuts:
        """The cuts of the run: one committed epoch of each group, by which all of them are saved and resumed."""
        return Cuts(self)

    def attach(self, close: Callable[[], Awaitable[None]]) -> None:
        """Have something closed, on the loop, before the peer leaves."""
        self._closers.append(close)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Have a coroutine run on the loop and wait for it."""
        return self._loop.call(work)

    def sleep(self, seconds: float) -> None:
        """Wait, by the loop's time."""
        self.call(asyncio.sleep(seconds))

    def call_unless_leaving(self, work: Coroutine[Any, Any, T]) -> T:
        """As `call`, for what may take minutes: StoppedError, and an end to it, as soon as this peer is to leave."""
        if self.is_leaving():
            work.close()
            raise StoppedError("this peer leaves the run")
        call = self.submit(work)
        try:
            while not call.wait(LOOK_UP_SECONDS):
                if self.is_leaving():
                    raise StoppedError("this peer leaves the run, and waits for nobody any more")
            return call.result()
        except BaseException:
            call.end(LEAVE_SECONDS)
            raise

    def seconds_to_leave(self, most_seconds: float) -> float:
        """How long to wait for something before leaving: `most_seconds`, or what is left if this peer was told to."""
        if not self.is_leaving():
            return most_seconds
        now = self.clock.monotonic()
        if self._leaving_since is None:
            self._leaving_since = now
        return max(0.0, min(most_seconds, self._leaving_since + self.leave_seconds - now))

    def submit(self, work: Coroutine[Any, Any, T]) -> Call[T]:
        """Have a coroutine run on the loop, and do not wait; the call knows what comes of it."""
        return self._loop.submit(work)

    def soon(self, function: Callable[[], object]) -> None:
        """Have a function called on the loop, and do not wait."""
        self._loop.soon(function)

    def check(self) -> None:
        """Raise why this peer is not in the run any more, if so: banned, replaced by a newer process, or closed."""
        ended = self.peer.session.ended
        if ended.done():
            ended.result()
            raise ConfigurationError("the run was left already")

    async def _enter(self) -> None:
        self._peer = await self._start()

    async def _enter_group(self, name: str) -> Group:
        group = Group(self.peer, name)
        try:
            await group.enter()
        except BaseException:
            group.close()
            raise
        return group

    async def _leave(self) -> None:
        peer = self.peer
        while self._closers:
            close = self._closers.pop()
            try:
                await close()
            except Exception:  # the rest must be closed all the same; logged
                logger.exception("closing a part of the run failed")
        for group in self._groups.values():
            group.close()
        self._groups.clear()
        await peer.close()


def join(
    link: str = "",
    *,
    identity: Identity | None = None,
    on_waiting: Callable[[Answer], None] | None = None,
    **config: Any,
) -> Joined:
    """Take part in a run by its join link (else POTLUCK_LINK), as a context manager.

    `config` is what `potluck.run.peer.PeerConfig` has: name, role, client_mode, wait_seconds and so on. `on_waiting` is
    called, on the event loop, while an organiser has to let this peer in.
    """
    return join_as(Joined, link, identity=identity, on_waiting=on_waiting, **config)


def join_as(
    kind: type[J],
    link: str = "",
    *,
    identity: Identity | None = None,
    on_waiting: Callable[[Answer], None] | None = None,
    **config: Any,
) -> J:
    """As `join`, with what a program sees of the run made of `kind`."""
    parsed = parsed_link(link)
    if notice := parsed.version_notice(potluck.__version__):
        logger.warning("%s", notice)
    options = PeerConfig(**{"link": parsed, **config})

    async def start() -> Peer:
        own = identity or _own_identity()
        try:
            address = await fetch_address(parsed, websocket_only=options.websocket_only)
            peer = Peer(address, parsed.run, own, options)
        except BaseException:
            own.close()
            raise
        await peer.start(on_waiting)
        return peer

    return kind(start)


def parsed_link(link: str) -> JoinLink:
    """The link that was given, or the one in POTLUCK_LINK; ConfigurationError without any."""
    text = link or environment.link()
    if not text:
        raise ConfigurationError("which run? Give its join link: potluck.join('potluck://…') (or set POTLUCK_LINK)")
    return JoinLink.parse(text)


def _own_identity() -> Identity:
    path = environment.identity_path()
    return Identity.open(path) if path is not None else Identity.open_default()
