"""How many bytes each sender may have on their way through the hub (pure).

The hub keeps in memory what a receiver has not yet taken, and cuts the receiver off when that exceeds a limit (64 MiB
by default), or when it does not empty in time (10 s by default). One sender is held back by the channel; many at once
are not, since each knows only of itself. So the receiver, who sees them all, hands out credit:

    limit   up to which byte a sender may send, counted from the beginning of the path
    base    a little that everyone has at all times, enough for small messages; from a reserve of its own
    share   what each busy sender has beyond that: the budget, divided by the number of busy senders

A sender that has too little for its next packet asks (WANT) and is busy from then on; its limit is moved up as its
packets arrive. When the budget is used up, those who ask queue, first come first served. A sender that has nothing
more to send gives back what is left (YIELD); one that neither sends nor yields while others wait is counted no longer.

The budget follows what the receiver is able to take: two seconds' worth of the best speed seen lately. So a slow line
has seconds of data waiting for it, not minutes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from potluck.errors import ConfigurationError

KIB = 1024
MIB = 1024 * KIB

RATE_SECONDS = 0.25  # over how long the speed is measured
RATE_DECAY = 0.95  # per RATE_SECONDS: half is forgotten in 3 s
RESERVE_BYTES = 8 * MIB  # for all bases together
LEAST_BASE_BYTES = 4 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditConfig:
    """How much may be on its way to this peer."""

    most_bytes: int = 32 * MIB
    """The largest budget. With the reserve for bases it must stay below what the hub keeps for one connection."""

    least_bytes: int = 4 * MIB
    """The smallest budget: what is granted before the speed of the line is known. Several packets must fit."""

    absorb_seconds: float = 2.0
    """The budget is what the line takes in this time."""

    base_bytes: int = 64 * KIB
    """What every sender may send unasked; less with more than 128 of them."""

    idle_seconds: float = 5.0
    """How long a busy sender may sit on its credit while others wait."""

    def __post_init__(self) -> None:
        if not 2 * MIB <= self.least_bytes <= self.most_bytes:
            raise ConfigurationError(
                f"a budget from {self.least_bytes} to {self.most_bytes} bytes cannot work: "
                f"the least must be {2 * MIB} or more, so that every packet fits, and the most not below it"
            )
        if not LEAST_BASE_BYTES <= self.base_bytes <= self.least_bytes:
            raise ConfigurationError(f"base_bytes is {self.base_bytes}: choose between 4 KiB and least_bytes")
        if self.absorb_seconds <= 0 or self.idle_seconds <= 0:
            raise ConfigurationError(f"the times in {self} must be more than 0")


@dataclass(slots=True)
class SendCredit:
    """The sender's side of one path: what it may send."""

    limit_bytes: int
    base_bytes: int
    sent_bytes: int = 0
    serial: int = 0
    wanted_bytes: int = 0  # 0: not asking
    is_busy: bool = False  # the receiver counts us among those who share its budget

    def allows(self, size: int) -> bool:
        """Whether a packet that counts for `size` may leave."""
        return self.sent_bytes + size <= self.limit_bytes

    def want(self, size: int) -> None:
        """Ask for credit for a packet that counts for `size`."""
        self.wanted_bytes = max(size, self.wanted_bytes)
        self.is_busy = True

    def granted(self, limit_bytes: int, serial: int) -> bool:
        """What the receiver grants; whether it frees a packet that was waiting."""
        self.limit_bytes, self.serial = limit_bytes, serial
        self.is_busy = self.is_busy or self._spare_bytes > 0
        if not self.wanted_bytes or not self.allows(self.wanted_bytes):
            return False
        self.wanted_bytes = 0
        return True

    def give_back(self) -> None:
        """Keep no more than the base: there is nothing more to send."""
        self.limit_bytes -= self._spare_bytes
        self.is_busy = False

    @property
    def _spare_bytes(self) -> int:
        return max(0, self.limit_bytes - self.sent_bytes - self.base_bytes)


@dataclass(slots=True, eq=False)
class SenderAccount:
    """The receiver's side of one path: what a sender was granted and has used."""

    grant: Callable[[int, int], None]  # tell the sender its limit, and the serial of this word
    limit_bytes: int
    received_bytes: int = 0
    serial: int = 0
    wanted_bytes: int = 0  # 0: not waiting
    charged_bytes: int = 0  # granted out of the budget and not used yet
    is_busy: bool = False
    active_at: float = 0.0


class InboundBudget:
    """All that may be on its way to this peer."""

    def __init__(self, config: CreditConfig | None = None) -> None:
        self.config = config or CreditConfig()
        self.budget_bytes = self.config.least_bytes
        self.charged_bytes = 0
        self._accounts: dict[SenderAccount, None] = {}
        self._waiting: deque[SenderAccount] = deque()
        self._num_busy = 0
        self._rate_since = 0.0
        self._rate_bytes = 0
        self._best_rate = 0.0

    @property
    def num_waiting(self) -> int:
        """Senders that asked and have to wait."""
        return len(self._waiting)

    @property
    def base_bytes(self) -> int:
        """What a sender may send unasked."""
        share = RESERVE_BYTES // max(1, len(self._accounts))
        return max(LEAST_BASE_BYTES, min(self.config.base_bytes, share))

    @property
    def _share_bytes(self) -> int:
        return self.budget_bytes // max(1, self._num_busy)

    def open(self, grant: Callable[[int, int], None], now: float) -> SenderAccount:
        """An account for a new path. Its `limit_bytes` has to be told to the sender; changes go through `grant`."""
        account = SenderAccount(grant, limit_bytes=0, active_at=now)
        self._accounts[account] = None
        account.limit_bytes = self.base_bytes
        return account

    def close(self, account: SenderAccount) -> None:
        """The path is gone, and with it what was granted. Idempotent."""
        self._accounts.pop(account, None)
        self._rest(account)
        self._serve()

    def arrived(self, account: SenderAccount, size: int, now: float) -> bool:
        """A packet that counts for `size` is here; False when its sender had no credit for it."""
        if account.received_bytes + size > account.limit_bytes:
            return False
        self._measure(size, now)
        account.active_at = now
        account.received_bytes += size
        self._charge(account, -min(size, account.charged_bytes))
        if self._waiting:
            self._serve()
        if not account.wanted_bytes:
            self._replenish(account)
        return True

    def wants(self, account: SenderAccount, sent_bytes: int, wanted_bytes: int, now: float) -> None:
        """A sender has so little credit that it cannot go on."""
        account.active_at = now
        self._catch_up(account, sent_bytes)
        if not account.is_busy:
            account.is_busy = True
            self._num_busy += 1
        if not account.wanted_bytes:
            self._waiting.append(account)
        account.wanted_bytes = max(1, min(wanted_bytes, self.config.least_bytes))
        self._serve()

    def yields(self, account: SenderAccount, sent_bytes: int, limit_bytes: int, serial: int) -> None:
        """A sender gives back what it does not use; unless it did not know yet of our newest grant."""
        self._catch_up(account, sent_bytes)
        if serial == account.serial and account.received_bytes <= limit_bytes <= account.limit_bytes:
            account.limit_bytes = limit_bytes
            self._rest(account)
            self._serve()

    def write_off_idle(self, now: float) -> None:
        """Stop counting senders that sit on their credit while others wait; call this now and then."""
        if not self._waiting:
            return
        for account in self._accounts:
            idle = now - account.active_at > self.config.idle_seconds
            if idle and account.is_busy and not account.wanted_bytes:
                self._rest(account)
        self._serve()

    def _serve(self) -> None:
        """Grant credit to those who wait, in the order in which they asked."""
        while self._waiting:
            account = self._waiting[0]
            free = self.budget_bytes - self.charged_bytes
            left = account.limit_bytes - account.received_bytes
            needed = account.wanted_bytes - left
            # A waiting sender holds credit too, less than it needs for a packet. If nobody else has any, nothing is on
            # its way that could free the rest: then the first one gets through, whatever the sums say.
            if needed > free and self.charged_bytes > sum(waiting.charged_bytes for waiting in self._waiting):
                return
            self._waiting.popleft()
            account.wanted_bytes = 0
            self._raise(account, max(needed, min(self._share_bytes - left, free), 0), must_tell=True)

    def _replenish(self, account: SenderAccount) -> None:
        """Move the limit up before the sender has to ask."""
        left = account.limit_bytes - account.received_bytes
        if not account.is_busy:
            base = self.base_bytes
            if left < base // 2:
                self._tell(account, account.received_bytes + base)
        elif left < self._share_bytes // 2 and not self._waiting:
            self._raise(account, min(self._share_bytes - left, self.budget_bytes - self.charged_bytes))

    def _raise(self, account: SenderAccount, size: int, *, must_tell: bool = False) -> None:
        if size > 0 or must_tell:
            self._charge(account, max(size, 0))
            self._tell(account, account.limit_bytes + max(size, 0))

    def _tell(self, account: SenderAccount, limit_bytes: int) -> None:
        account.limit_bytes = limit_bytes
        account.serial += 1
        account.grant(account.limit_bytes, account.serial)

    def _charge(self, account: SenderAccount, size: int) -> None:
        account.charged_bytes += size
        self.charged_bytes += size

    def _rest(self, account: SenderAccount) -> None:
        """Not busy, not waiting, nothing granted."""
        self._charge(account, -account.charged_bytes)
        if account.is_busy:
            account.is_busy = False
            self._num_busy -= 1
        if account.wanted_bytes:
            account.wanted_bytes = 0
            self._waiting.remove(account)

    def _catch_up(self, account: SenderAccount, sent_bytes: int) -> None:
        """All that was sent before has arrived or is lost: packets keep their order."""
        lost = sent_bytes - account.received_bytes
        if 0 < lost <= account.limit_bytes - account.received_bytes:
            account.received_bytes += lost
            self._charge(account, -min(lost, account.charged_bytes))

    def _measure(self, size: int, now: float) -> None:
        self._rate_bytes += size
        elapsed = now - self._rate_since
        if elapsed < RATE_SECONDS:
            return
        if elapsed > 4 * RATE_SECONDS:  # there was a pause, so this says nothing about the line
            self._rate_since, self._rate_bytes = now, 0
            return
        self._best_rate = max(self._rate_bytes / elapsed, self._best_rate * RATE_DECAY)
        self._rate_since, self._rate_bytes = now, 0
        budget = int(self._best_rate * self.config.absorb_seconds)
        self.budget_bytes = max(self.config.least_bytes, min(budget, self.config.most_bytes))
