"""The relayed path to one peer: greeting, signs of life, credit both ways (pure).

Each side picks a random number for its end of the path, its epoch, and names both in every packet. A packet that names
ours proves that the other has heard us, and the path is open. When either side gives the path up it picks another
number; the other sees that, and both begin anew with all counts at zero. So nothing that was on its way before can be
taken for something of now.

    A ── HELLO(a, ?) ──► B      B ── HELLO(b, a) ──► A: open      A ── HELLO(a, b) ──► B: open

Greetings also carry the handshake by which both prove their link keys (greeting.py); without that no path opens, and
all that follows is sealed. Whatever does not open makes both begin anew.

The same HELLO asks whether an open path lives: only one on which something was sent and nothing heard since.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from potluck.errors import ConfigurationError, ProtocolError
from potluck.link.relay.credit import InboundBudget, SendCredit, SenderAccount
from potluck.link.relay.greeting import RelayGreeting
from potluck.link.relay.packet import PLEASE_ANSWER, Control, RelayKind, RelayPacket, read_hello
from potluck.link.relay.sealing import RelaySeal, ReplayedError

FORGIVEN_SECONDS = 60.0  # a path on which nothing was forged for so long is as good as any


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayTimes:
    """How patient a relayed path is."""

    hello_first_seconds: float = 0.25
    """The wait before a greeting is repeated; it doubles each time."""

    hello_limit_seconds: float = 10.0
    """The longest wait. A peer whose wire comes up greets us by itself."""

    ping_seconds: float = 2.0
    """When something was sent and nothing heard for so long, ask."""

    silent_seconds: float = 10.0
    """When there is still no answer after so long, the path is closed. Bulk data may stand before the answer."""

    want_seconds: float = 1.0
    """How often a want of credit is repeated."""

    yield_seconds: float = 0.25
    """Credit that was not used for so long is given back."""

    def __post_init__(self) -> None:
        for name in ("hello_first_seconds", "ping_seconds", "want_seconds", "yield_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: it must be more than 0")
        if self.hello_limit_seconds < self.hello_first_seconds or self.silent_seconds <= self.ping_seconds:
            raise ConfigurationError(f"{self} cannot work: the limits must be above the first waits")


class PathOwner(Protocol):
    """Who sends for a path and is told about it."""

    def send_control(self, path: RelayPath, packet: bytes) -> None:
        """Send something small, at once."""
        ...

    def opened(self, path: RelayPath) -> None:
        """The other side has heard us."""
        ...

    def given_up(self, path: RelayPath, granted_bytes: int) -> None:
        """We gave it up of our own accord; so much credit may have been used by what is on its way."""
        ...

    def closed(self, path: RelayPath, reason: str) -> None:
        """It was open, and is not any more."""
        ...

    def credited(self, path: RelayPath) -> None:
        """A packet that had to wait for credit may leave."""
        ...

    def forged(self, path: RelayPath, error: ProtocolError) -> None:
        """Something came in the peer's name that the peer cannot have sent like this, or not now."""
        ...


class RelayPath:
    """One peer, as far as the relay is concerned."""

    def __init__(
        self,
        peer: str,
        session: str,
        link_key: str,
        subject: str,
        owner: PathOwner,
        budget: InboundBudget,
        times: RelayTimes,
        now: Callable[[], float],
        greeting: Callable[[], RelayGreeting],
        *,
        wanted: bool = True,
    ) -> None:
        """`wanted`: greet as soon as there is a wire; else once somebody wants to send, or the peer greets us."""
        self.peer = peer
        self.session = session
        self.link_key = link_key
        self.subject = subject
        self.is_open = False
        self.remote_epoch = 0  # 0: not known
        self._owner = owner
        self._budget = budget
        self._times = times
        self._now = now
        self._make_greeting = greeting
        self._connected = False
        self._wanted = wanted
        self._mistrusted_at = -math.inf
        self._mistrust_wait = 0.0
        self._begin_anew()

    def _begin_anew(self) -> None:
        now = self._now()
        self.epoch = random.randrange(1, 1 << 32)
        self._greeting = self._make_greeting()
        self.is_open = False
        self.remote_epoch = 0
        self.allowance = SendCredit(limit_bytes=0, base_bytes=0)
        self.account: SenderAccount = self._budget.open(self._grant, now)
        self._hello_at = now
        self._greeted_at = -math.inf
        self._hello_wait = self._times.hello_first_seconds
        self._unanswered_since: float | None = None
        self._ping_at = 0.0
        self._credit_moved_at = now
        self._want_at = 0.0

    @property
    def seal(self) -> RelaySeal | None:
        """What packets are sealed by and opened; None before the peer has proven its key."""
        return self._greeting.seal

    @property
    def epochs(self) -> tuple[int, int]:
        """Both numbers of the path, ours first."""
        return self.epoch, self.remote_epoch

    # What the owner tells

    def wire_connected(self) -> None:
        """Greet the peer, if it is wanted."""
        self._connected = True
        self._hello_wait = self._times.hello_first_seconds
        if self._wanted:
            self._greet()

    def call(self) -> None:
        """Somebody has something to send, and there is no path: greet now, and often at first."""
        self._wanted = True
        self._hello_wait = self._times.hello_first_seconds
        if self._connected and self._now() - self._greeted_at >= self._hello_wait:
            self._greet()

    def give_up(self, reason: str) -> None:
        """Close the path, if it is open, and begin anew."""
        was_open = self.is_open
        self._budget.close(self.account)
        self._begin_anew()
        if was_open:
            self._owner.closed(self, reason)

    def abandon(self, reason: str) -> None:
        """Give it up though the peer has not."""
        self._expect_leftovers()
        self.give_up(reason)

    def mistrust(self, reason: str) -> None:
        """Give it up since somebody forges packets, and greet the peer anew: at once, then less and less often."""
        now, times = self._now(), self._times
        is_again = now - self._mistrusted_at < FORGIVEN_SECONDS
        self._mistrust_wait = min(2 * self._mistrust_wait, times.hello_limit_seconds) if is_again else 0.0
        self._mistrusted_at = now
        self.abandon(reason)
        self._hello_wait = max(self._mistrust_wait, times.hello_first_seconds)
        if is_again:
            self._mistrust_wait = self._hello_wait
            self._greeted_at = now
            self._hello_at = now + self._hello_wait

    def _expect_leftovers(self) -> None:
        """What the peer sends until it knows that the path is gone is its good right."""
        if self.is_open:
            self._owner.given_up(self, self.account.limit_bytes - self.account.received_bytes)

    def wire_lost(self, reason: str) -> None:
        """Nothing can be sent until the wire is back."""
        self._connected = False
        self.abandon(reason)

    def end(self, reason: str) -> None:
        """The peer is gone, or this process goes."""
        self._connected = False
        self._expect_leftovers()
        self._budget.close(self.account)
        was_open, self.is_open = self.is_open, False
        if was_open:
            self._owner.closed(self, reason)

    def want(self, size: int) -> None:
        """A packet that counts for so much has to wait for credit."""
        now = self._now()
        if size > self.allowance.wanted_bytes or now >= self._want_at:
            self.allowance.want(size)
            self._ask_for_credit(now)

    def sent(self, size: int) -> None:
        """A packet that counts for so much has left."""
        now = self._now()
        self.allowance.sent_bytes += size
        self._credit_moved_at = now
        self._expect_answer(now)

    # What the peer says

    def receive(self, packet: RelayPacket) -> bool:
        """Take in a packet; whether it is a link packet, to be opened and handed on."""
        if packet.kind is RelayKind.HELLO:
            self._greeted(packet)
            return False
        seal = self._greeting.seal
        is_of_now = packet.sender_epoch == self.remote_epoch and packet.receiver_epoch == self.epoch
        if not is_of_now or not self.is_open or seal is None:
            return False
        if packet.kind is RelayKind.DATA:
            self._unanswered_since = None
            return True
        try:
            control = seal.open_control(packet)
        except ProtocolError as error:
            self._owner.forged(self, error)
            return False
        self._unanswered_since = None
        now = self._now()
        if packet.kind is RelayKind.CREDIT:
            self._credit_moved_at = now
            if self.allowance.granted(control.limit_bytes, control.number):
                self._owner.credited(self)
        elif packet.kind is RelayKind.WANT:
            self._budget.wants(self.account, control.sent_bytes, control.number, now)
        else:
            self._budget.yields(self.account, control.sent_bytes, control.limit_bytes, control.number)
        return False

    def _greeted(self, packet: RelayPacket) -> None:
        self._wanted = True
        limit_bytes, proof = read_hello(packet.body)
        if packet.sender_epoch != self.remote_epoch:
            if self.seal is not None:  # a handshake with what the peer was before
                self.give_up("the peer has begun anew")
            self.remote_epoch = packet.sender_epoch
        self._unanswered_since = None
        is_to_us = packet.receiver_epoch == self.epoch
        opens = False
        if not self.is_open:
            try:
                opens = self._greeting.hear(packet, proof, is_to_us=is_to_us)
            except ReplayedError:
                pass  # said again, since we did not answer yet
            except ProtocolError as error:
                self._owner.forged(self, error)
                self.mistrust(str(error))
                return
        if opens:
            self.allowance = SendCredit(limit_bytes=limit_bytes, base_bytes=limit_bytes)
            self.is_open = True
        if packet.flags & PLEASE_ANSWER:
            self._hello()
        if opens:
            self._owner.opened(self)

    # Time

    def tick(self, now: float) -> None:
        """Look for what is due."""
        if not self._connected:
            return
        if not self.is_open:
            if self._wanted and now >= self._hello_at:
                self._greet()
            return
        times, since = self._times, self._unanswered_since
        if since is not None and now - since >= times.silent_seconds:
            self.abandon(f"nothing was heard from the peer for {times.silent_seconds:g} s")
            return
        if since is not None and now - since >= times.ping_seconds and now >= self._ping_at:
            self._ping_at = now + times.ping_seconds
            self._hello(please_answer=True)
        allowance = self.allowance
        if allowance.wanted_bytes:
            if now >= self._want_at:
                self._ask_for_credit(now)
        elif allowance.is_busy and now - self._credit_moved_at >= times.yield_seconds:
            allowance.give_back()
            self._control(
                RelayKind.YIELD,
                sent_bytes=allowance.sent_bytes,
                limit_bytes=allowance.limit_bytes,
                number=allowance.serial,
            )

    @property
    def needs_ticks(self) -> bool:
        """Whether there is anything that time changes."""
        if not self._connected:
            return False
        is_greeting = self._wanted and not self.is_open
        return is_greeting or self.allowance.is_busy or self._unanswered_since is not None

    # What is said

    def _greet(self) -> None:
        self._greeted_at = self._now()
        self._hello_at = self._greeted_at + self._hello_wait
        self._hello_wait = min(self._hello_wait * 2, self._times.hello_limit_seconds)
        self._hello(please_answer=True)

    def _hello(self, *, please_answer: bool = False) -> None:
        flags = PLEASE_ANSWER if please_answer or not self.is_open else 0
        self._owner.send_control(self, self._greeting.hello(self.epochs, flags, self.account.limit_bytes))

    def _ask_for_credit(self, now: float) -> None:
        self._want_at = now + self._times.want_seconds
        self._expect_answer(now)
        self._control(RelayKind.WANT, sent_bytes=self.allowance.sent_bytes, number=self.allowance.wanted_bytes)

    def _expect_answer(self, now: float) -> None:
        if self._unanswered_since is None:
            self._unanswered_since = now
            self._ping_at = 0.0

    def _grant(self, limit_bytes: int, serial: int) -> None:
        self._control(RelayKind.CREDIT, limit_bytes=limit_bytes, number=serial)

    def _control(self, kind: RelayKind, **fields: int) -> None:
        if self.seal is not None:
            self._owner.send_control(self, b"".join(self.seal.seal_word(kind, self.epochs, Control(**fields).pack())))
