"""How much may be on its way at once (pure).

A path takes `rate` bytes per second and needs `rtt` seconds for a packet and its acknowledgement. With rate × rtt
bytes in flight the path is full; whatever is sent beyond that only stands in a queue somewhere (in a home router, in
the hub) and delays everything behind it. Both numbers have to be measured, and each can only be seen when the other
is out of the way: the rate while the path is full, the rtt while it is empty. So:

- each packet is stamped with how much had been acknowledged when it left; its acknowledgement then gives one sample of
  the rate. A sample taken while we had too little to send says nothing about the path unless it is the best so far.
  `rate` is the best of the last ten round trips.
- `rtt` is the least seen. When it has not been seen again for ten seconds the path may have become longer, or it is
  only our own queue that makes it look so; so then a packet is believed that left when next to nothing was in flight.
  There always is one soon: with too small an rtt the window below sinks by itself until packets travel alone.

    window = rate × (2 × rtt + 20 ms) + 2 fragments

Twice the path, so that the window doubles with every round trip until the rate stops growing, and a little queue, since
on loopback the rtt is nothing but scheduling. Fragments shrink until one takes about 25 ms, so that on a slow uplink
neither the window nor a single packet is seconds long. The idea is BBR's (Cardwell et al., 2016), without its
state machine: the carriers below have congestion control of their own, and only queues are ours to avoid.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from potluck.link.channel.packet import PACKET_BYTES
from potluck.link.limits import KIB

INITIAL_WINDOW_BYTES = 128 * KIB  # a second at 1 Mbit/s; doubles with every round trip
INITIAL_FRAGMENT_BYTES = 32 * KIB
LEAST_FRAGMENT_BYTES = 16 * KIB  # smaller, and headers and hops weigh too much
FRAGMENT_SECONDS = 0.025
QUEUE_SECONDS = 0.020
RATE_ROUNDS = 10
RTT_SECONDS = 10.0  # how long the least rtt is believed

INITIAL_TIMEOUT_SECONDS = 1.0
LEAST_TIMEOUT_SECONDS = 0.5
LARGEST_TIMEOUT_SECONDS = 8.0


@dataclass(slots=True)
class Stamp:
    """What was true when a packet left."""

    sent_at: float
    delivered_bytes: int
    delivered_at: float
    first_sent_at: float
    is_limited: bool  # we had less to send than the path would have taken
    is_undisturbed: bool  # next to nothing of ours was before it


class CongestionWindow:
    """The window of one path to one peer."""

    def __init__(self, max_in_flight_bytes: int, most_bytes_per_second: float = math.inf) -> None:
        """`most_bytes_per_second` is a cap that the path does not know of: what it carries at once is no measure."""
        self._max_in_flight_bytes = max_in_flight_bytes
        self._most_bytes_per_second = most_bytes_per_second
        self.window_bytes = INITIAL_WINDOW_BYTES
        self.fragment_bytes = INITIAL_FRAGMENT_BYTES
        self.rate_bytes_per_second = 0.0
        self.least_rtt_seconds = 0.0  # 0: not known yet
        self.rtt_seconds = 0.0  # smoothed
        self._rtt_variation_seconds = 0.0
        self._least_rtt_at = 0.0
        self._delivered_bytes = 0
        self._delivered_at = 0.0
        self._first_sent_at = 0.0
        self._limited_until_bytes = 0
        self._next_round_bytes = 0
        self._round_rates: deque[float] = deque([0.0], maxlen=RATE_ROUNDS)
        self._was_full = False

    @property
    def timeout_seconds(self) -> float:
        """How long an acknowledgement may take before something must be wrong."""
        if not self.rtt_seconds:
            return INITIAL_TIMEOUT_SECONDS
        timeout = self.rtt_seconds + 4 * self._rtt_variation_seconds
        return min(max(timeout, LEAST_TIMEOUT_SECONDS), LARGEST_TIMEOUT_SECONDS)

    def stamp(self, now: float, in_flight_bytes: int) -> Stamp:
        """A packet leaves while so much is on its way already."""
        if in_flight_bytes == 0:
            self._first_sent_at = self._delivered_at = now
        return Stamp(
            now,
            self._delivered_bytes,
            self._delivered_at,
            self._first_sent_at,
            self._limited_until_bytes > self._delivered_bytes,
            in_flight_bytes <= self.fragment_bytes,
        )

    def ran_dry(self, in_flight_bytes: int) -> None:
        """There was room in the window and nothing to send, or no credit to send it."""
        self._limited_until_bytes = self._delivered_bytes + max(1, in_flight_bytes)

    def acknowledged(self, stamp: Stamp, num_bytes: int, now: float, ack_age_seconds: float) -> None:
        """So many bytes have arrived, the newest of which left with this stamp, and were acknowledged with a delay."""
        self._delivered_bytes += num_bytes
        self._delivered_at = now
        self._first_sent_at = stamp.sent_at
        self._take_rtt(max(now - stamp.sent_at - ack_age_seconds, 1e-5), stamp, now)
        interval = max(now - stamp.delivered_at, stamp.sent_at - stamp.first_sent_at)
        if interval >= self.least_rtt_seconds:  # shorter than the path is long: acknowledgements came in a heap
            self._take_rate((self._delivered_bytes - stamp.delivered_bytes) / interval, stamp)
        self._size()

    def arrived_unmeasured(self, num_bytes: int, now: float) -> None:
        """So many bytes have arrived of which it is not known when they left, since they were sent again."""
        self._delivered_bytes += num_bytes
        self._delivered_at = now

    def _take_rtt(self, rtt: float, stamp: Stamp, now: float) -> None:
        if self.rtt_seconds:
            self._rtt_variation_seconds += (abs(rtt - self.rtt_seconds) - self._rtt_variation_seconds) / 4
            self.rtt_seconds += (rtt - self.rtt_seconds) / 8
        else:
            self.rtt_seconds, self._rtt_variation_seconds = rtt, rtt / 2
        too_old = now - self._least_rtt_at > RTT_SECONDS
        if not self.least_rtt_seconds or rtt <= self.least_rtt_seconds or (too_old and stamp.is_undisturbed):
            self.least_rtt_seconds, self._least_rtt_at = rtt, now

    def _take_rate(self, measured: float, stamp: Stamp) -> None:
        rate = min(measured, self._most_bytes_per_second)
        if stamp.is_limited and rate <= self.rate_bytes_per_second:
            return
        self._was_full = self._was_full or not stamp.is_limited
        if stamp.delivered_bytes >= self._next_round_bytes:
            self._next_round_bytes = self._delivered_bytes
            self._round_rates.append(rate)
        elif rate > self._round_rates[-1]:
            self._round_rates[-1] = rate
        self.rate_bytes_per_second = max(self._round_rates)

    def _size(self) -> None:
        rate = self.rate_bytes_per_second
        if self._was_full:  # until then we have not seen what the path can do
            fragment = min(max(int(rate * FRAGMENT_SECONDS), LEAST_FRAGMENT_BYTES), PACKET_BYTES)
            self.fragment_bytes = fragment & ~4095  # whole pages
        window = rate * (2 * self.least_rtt_seconds + QUEUE_SECONDS) + 2 * self.fragment_bytes
        if not self._was_full:
            window = max(window, INITIAL_WINDOW_BYTES)
        self.window_bytes = min(int(window), self._max_in_flight_bytes)
