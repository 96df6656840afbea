"""Links with a rate, delay, jitter and loss.

Where the kernel has netem, it shapes. Where it has not, the wire between a host and its bridge is cut open and the two
ends are joined by the program in `shaper.py`:

    host eth0 ══ portN ─ segN ─ nearN │ shaper │ farN ─ br0        instead of        host eth0 ══ portN ─ br0

The host's own side stays as it is, so a link can be shaped, reshaped and released while connections are open.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from potluck.errors import ConfigurationError
from potluck.testing import shaper
from potluck.testing.namespaces import LabError, Namespace, NamespaceNames, remove
from potluck.testing.processes import Children

ShaperKind = Literal["auto", "netem", "userspace"]

FRAME_BYTES = 1514
NETEM_LIMIT_FRAMES = 20_000  # for links without a rate; netem's own default of 1,000 would lose packets in bursts
TAP_QUEUE_FRAMES = 5_000  # what may arrive while the shaper waits for the processor
START_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class LinkShape:
    """How one direction of a link behaves."""

    rate_mbit: float | None = None
    """Megabits a second, Ethernet headers included; None for no limit."""
    delay_ms: float = 0.0
    """How long a frame travels, one way: with the same delay both ways a round trip takes twice as long."""
    jitter_ms: float = 0.0
    """Up to so much more, at random, for each frame."""
    loss: float = 0.0
    """The share of packets that vanish, from 0 to 1."""
    queue_ms: float = 100.0
    """How much may wait for the line, in time on the line; what comes then is dropped, as a home router does."""

    def __post_init__(self) -> None:
        if self.rate_mbit is not None and not 0 < self.rate_mbit < 100_000:
            raise ConfigurationError(f"rate_mbit must be above 0, or None for no limit, not {self.rate_mbit}")
        for name in ("delay_ms", "jitter_ms", "queue_ms"):
            if not 0 <= getattr(self, name) <= 60_000:
                raise ConfigurationError(f"{name} must be from 0 to 60,000, not {getattr(self, name)}")
        if not 0 <= self.loss <= 1:
            raise ConfigurationError(f"loss is a share from 0 to 1, not {self.loss}")

    def shaper_arguments(self) -> dict[str, float]:
        """Return it as the program in shaper.py takes it."""
        return {
            "rate_bits_per_second": (self.rate_mbit or 0.0) * 1e6,
            "delay_seconds": self.delay_ms / 1e3,
            "jitter_seconds": self.jitter_ms / 1e3,
            "loss": self.loss,
            "queue_seconds": self.queue_ms / 1e3,
        }

    def netem_arguments(self) -> list[str]:
        """Return it as `tc qdisc … netem` takes it; netem's jitter goes both ways around the delay."""
        limit = NETEM_LIMIT_FRAMES
        words: list[str] = []
        if self.rate_mbit is not None:
            held_seconds = (self.queue_ms + self.delay_ms + self.jitter_ms) / 1e3
            limit = int(max(held_seconds * self.rate_mbit * 1e6 / 8, shaper.MINIMUM_QUEUE_BYTES) / FRAME_BYTES) + 1
            words += ["rate", f"{self.rate_mbit * 1e6:.0f}bit"]
        if self.delay_ms or self.jitter_ms:
            words += ["delay", f"{(self.delay_ms + self.jitter_ms / 2) * 1e3:.0f}us", f"{self.jitter_ms * 500:.0f}us"]
        if self.loss:
            words += ["loss", "random", f"{self.loss * 100:g}%"]
        return ["limit", str(limit), *words]


@dataclass(frozen=True)
class Wire:
    """Where a host or a router is plugged in."""

    host: Namespace
    device: str
    """The host's end."""
    switch: Namespace
    port: str
    """The other end, on the bridge `br0` of the switch."""

    @property
    def number(self) -> str:
        """What tells the devices around this wire from those around others of the switch."""
        return self.port.removeprefix("port")


class ShapedLink(Protocol):
    """A wire that is shaped until it is released."""

    def apply(self, up: LinkShape, down: LinkShape) -> None:
        """Shape what the host sends, and what it receives."""
        ...

    def statistics(self) -> dict[str, Any]:
        """Count what passed and what was dropped, by direction."""
        ...

    def release(self) -> None:
        """Make it a plain wire again."""
        ...


class UserspaceLink:
    """A wire with the shaper program in it."""

    def __init__(self, wire: Wire, children: Children) -> None:
        self._wire = wire
        self._process = children.spawn(wire.switch.exec_argv(shaper_argv(wire)), name=f"shaper-{wire.port}", stdin=True)
        self._process.wait_for_line("^ready$", START_SECONDS)
        join_shaper(wire)

    def apply(self, up: LinkShape, down: LinkShape) -> None:
        """Tell the program the new shapes, and wait until it has them."""
        self._ask({"up": up.shaper_arguments(), "down": down.shaper_arguments()})

    def statistics(self) -> dict[str, Any]:
        """Ask the program for its counters; its processor time is among them."""
        return self._ask({})

    def release(self) -> None:
        """Plug the wire into the bridge again, and end the program; its devices go with it."""
        self._wire.switch.ip(f"link set {self._wire.port} master br0", f"link del seg{self._wire.number}")
        self._process.close()

    def _ask(self, command: Mapping[str, object]) -> dict[str, Any]:
        mark = self._process.mark()
        self._process.send_line(json.dumps(command))
        answer: dict[str, Any] = json.loads(self._process.wait_for_line(r"^\{.*\}$", START_SECONDS, since=mark)[0])
        return answer


def shaper_argv(wire: Wire, *shape: str) -> list[str]:
    """Return the command of a wire's shaper; with a shape, in JSON, it keeps that, and does not end with its input."""
    return [sys.executable, "-I", str(Path(shaper.__file__)), f"near{wire.number}", f"far{wire.number}", *shape]


def join_shaper(wire: Wire) -> None:
    """Lead the wire through its shaper, whose devices are there."""
    number = wire.number
    wire.switch.ip(
        f"link add seg{number} type bridge forward_delay 0 mcast_snooping 0",
        # Without `arp off` this bridge, which lives in the router, would answer for the router past the shaper.
        f"link set seg{number} arp off up",
        f"link set near{number} txqueuelen {TAP_QUEUE_FRAMES} master seg{number} up",
        f"link set far{number} txqueuelen {TAP_QUEUE_FRAMES} master br0 up",
        f"link set {wire.port} master seg{number}",
    )


class NetemLink:
    """A wire with netem on both ends."""

    def __init__(self, wire: Wire) -> None:
        self._ends = {"up": (wire.host, wire.device), "down": (wire.switch, wire.port)}

    def apply(self, up: LinkShape, down: LinkShape) -> None:
        """Replace both ends' settings."""
        for way, shape in (("up", up), ("down", down)):
            namespace, device = self._ends[way]
            namespace.tc("qdisc", "replace", "dev", device, "root", "netem", *shape.netem_arguments())

    def statistics(self) -> dict[str, Any]:
        """Read the kernel's counters. It does not tell loss from a full queue: both are `lost_frames`."""
        answer: dict[str, Any] = {}
        for way, (namespace, device) in self._ends.items():
            for counters in json.loads(namespace.tc("-s", "-j", "qdisc", "show", "dev", device)):
                if counters["kind"] == "netem":
                    answer[way] = {
                        "passed_frames": counters["packets"],
                        "passed_bytes": counters["bytes"],
                        "lost_frames": counters["drops"],
                    }
        return answer

    def release(self) -> None:
        """Take netem off both ends."""
        for namespace, device in self._ends.values():
            namespace.tc("qdisc", "del", "dev", device, "root")


@functools.cache
def netem_available() -> bool:
    """Whether this kernel has netem: it is tried, on a device of a namespace made for that."""
    names = NamespaceNames()
    try:
        namespace = Namespace(names.of("netem"))
        namespace.ip("link add eth0 type veth peer name port0")
        try:
            namespace.tc("qdisc", "add", "dev", "eth0", "root", "netem", "delay", "1ms")
        except LabError:
            return False
        return True
    finally:
        remove(names.prefix)
