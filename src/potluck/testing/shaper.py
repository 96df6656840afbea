"""A link's rate, delay, jitter and loss in user space, for kernels without netem.

The program holds two TAP devices that sit where the link was cut open, and carries frames from one to the other.
`Direction` decides, without any I/O, when a frame leaves: it queues for the line (rate), then travels (delay and
jitter). Frames never overtake each other, since reordering is rare on real paths and would only test the kernel's TCP.

Under load the loop trades a millisecond of precision for batches: it waits `COALESCE_SECONDS`, reads all that has come,
writes all that is due. So 100 Mbit/s each way, some 8,300 frames of 1500 bytes a second, costs a fraction of a core.

It runs as a script with nothing but the standard library (`python -I shaper.py UPLINK DOWNLINK`), so that it starts
quickly whatever the package imports. Commands come as lines of JSON on standard input; when that closes, because the
lab or the whole test run has ended, the program ends too. With a command as its third argument it follows that one, and
goes on until it is killed (slotlines.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence

COALESCE_SECONDS = 0.001
BUSY_FRAMES = 4  # moved in one turn: below that, each frame is carried as soon as it comes
BURST_SECONDS = 0.004  # line time that an idle or late shaper may make up for, like the burst of a token bucket
FRAME_BYTES = 65536
READ_LIMIT = 512  # frames read from one side before the other gets its turn
MINIMUM_QUEUE_BYTES = 48_000  # 32 full frames: slow lines too hold a burst
LOSABLE_TYPES = (b"\x08\x00", b"\x86\xdd")  # IPv4 and IPv6; a lost ARP frame would stall a flow for a whole second

# From <linux/if_tun.h>.
TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000


class Direction:
    """One direction of a link: frames are offered with the time, and taken when they are due."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._queue: deque[tuple[float, bytes]] = deque()
        self._line_free_at = 0.0
        self._last_due_at = 0.0
        self.rate_bits_per_second = 0.0
        self.delay_seconds = 0.0
        self.jitter_seconds = 0.0
        self.loss = 0.0
        self.queue_seconds = 0.0
        self.passed_frames = 0
        self.passed_bytes = 0
        self.lost_frames = 0
        self.overflowed_frames = 0

    def configure(
        self,
        *,
        rate_bits_per_second: float,
        delay_seconds: float,
        jitter_seconds: float,
        loss: float,
        queue_seconds: float,
    ) -> None:
        """Change the shape; frames already under way keep their times. A rate of 0 means no limit."""
        self.rate_bits_per_second = rate_bits_per_second
        self.delay_seconds = delay_seconds
        self.jitter_seconds = jitter_seconds
        self.loss = loss
        self.queue_seconds = queue_seconds

    def offer(self, frames: Sequence[bytes], now: float) -> None:
        """Let frames enter the link; some are lost, and some find the queue full."""
        rate, loss, chance = self.rate_bits_per_second, self.loss, self._random.random
        backlog_limit_seconds = max(self.queue_seconds, MINIMUM_QUEUE_BYTES * 8 / rate) if rate else 0.0
        for frame in frames:
            if loss and frame[12:14] in LOSABLE_TYPES and chance() < loss:
                self.lost_frames += 1
                continue
            leaves_at = now
            if rate:
                if self._line_free_at - now > backlog_limit_seconds:
                    self.overflowed_frames += 1
                    continue
                self._line_free_at = max(self._line_free_at, now - BURST_SECONDS) + len(frame) * 8 / rate
                leaves_at = max(self._line_free_at, now)
            due_at = leaves_at + self.delay_seconds
            if self.jitter_seconds:
                due_at += chance() * self.jitter_seconds
            self._last_due_at = due_at = max(due_at, self._last_due_at)
            self._queue.append((due_at, frame))

    def take(self, now: float) -> list[bytes]:
        """Remove and return the frames that are due."""
        queue = self._queue
        due: list[bytes] = []
        while queue and queue[0][0] <= now:
            due.append(queue.popleft()[1])
        self.passed_frames += len(due)
        self.passed_bytes += sum(map(len, due))
        return due

    def next_due_at(self) -> float:
        """When the next frame is due; infinity when none is under way."""
        return self._queue[0][0] if self._queue else float("inf")

    def statistics(self) -> dict[str, int]:
        """Count what passed, what was lost on purpose, and what found the queue full."""
        return {
            "passed_frames": self.passed_frames,
            "passed_bytes": self.passed_bytes,
            "lost_frames": self.lost_frames,
            "overflowed_frames": self.overflowed_frames,
            "travelling_frames": len(self._queue),
        }


def open_tap(name: str) -> int:
    """Create the TAP device and return its descriptor; the device goes away when the descriptor is closed."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


def read_frames(tap: int) -> list[bytes]:
    """Read what the device has, without waiting."""
    frames: list[bytes] = []
    try:
        while len(frames) < READ_LIMIT:
            frames.append(os.read(tap, FRAME_BYTES))
    except BlockingIOError:
        pass
    except OSError as error:
        if error.errno not in {errno.EIO, errno.EBADFD}:  # the device is not up yet, or no longer
            raise
    return frames


def write_frames(tap: int, frames: Sequence[bytes]) -> int:
    """Write the frames and return how many the device did not take."""
    refused = 0
    for frame in frames:
        try:
            os.write(tap, frame)
        except OSError as error:
            if error.errno not in {errno.EAGAIN, errno.EIO, errno.ENOBUFS}:
                raise
            refused += 1
    return refused


class Shaper:
    """Carries frames between two TAP devices: up from the host's side, down from the network's side."""

    def __init__(self, uplink_tap: int, downlink_tap: int) -> None:
        self._taps = (uplink_tap, downlink_tap)
        self._directions = {"up": Direction(), "down": Direction()}
        self._routes = (
            (uplink_tap, self._directions["up"], downlink_tap),
            (downlink_tap, self._directions["down"], uplink_tap),
        )
        self._refused_frames = 0
        self._commands = b""

    def run(self, control: int | None) -> None:
        """Carry frames, and follow commands, until there will be no more; without `control`, for ever."""
        waiting_for = [*self._taps]
        if control is not None:
            os.set_blocking(control, False)
            waiting_for.append(control)
        busy = False
        while True:
            due_at = min(direction.next_due_at() for direction in self._directions.values())
            timeout = None if due_at == float("inf") else max(due_at - time.monotonic(), 0.0)
            readable, _, _ = select.select(waiting_for, (), (), timeout)
            if control is not None and control in readable and not self._obey(control):
                return
            if busy:
                time.sleep(COALESCE_SECONDS)
            busy = self._carry() >= BUSY_FRAMES

    def _carry(self) -> int:
        """Read what has come and write what is due, in both directions; return how many frames moved."""
        moved = 0
        for source, direction, target in self._routes:
            if frames := read_frames(source):
                direction.offer(frames, time.monotonic())
                moved += len(frames)
            if frames := direction.take(time.monotonic()):
                self._refused_frames += write_frames(target, frames)
                moved += len(frames)
        return moved

    def _obey(self, control: int) -> bool:
        """Follow the commands that have come; false when there will be no more."""
        received = os.read(control, 65536)
        if not received:
            return False
        *lines, self._commands = (self._commands + received).split(b"\n")
        for line in lines:
            self.configure(json.loads(line))
            self._tell()
        return True

    def configure(self, shapes: dict[str, dict[str, float]]) -> None:
        """Take new shapes, by direction."""
        for name, shape in shapes.items():
            if name in self._directions:
                self._directions[name].configure(**shape)

    def _tell(self) -> None:
        answer: dict[str, object] = {name: way.statistics() for name, way in self._directions.items()}
        answer |= {"refused_frames": self._refused_frames, "cpu_seconds": time.process_time()}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Create both devices, say so, and carry frames."""
    uplink, downlink, *shape = sys.argv[1:]
    # A shaper that waits for the processor looks like a slow line, so it goes first where it may.
    with contextlib.suppress(PermissionError):
        os.nice(-10)
    shaper = Shaper(open_tap(uplink), open_tap(downlink))
    if shape:
        shaper.configure(json.loads(shape[0]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    shaper.run(None if shape else sys.stdin.fileno())


if __name__ == "__main__":
    main()
