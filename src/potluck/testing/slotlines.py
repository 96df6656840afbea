"""Lines for the processes of `potluck spot up --provider local`: each slot a network namespace behind a shaped line.

    hub ──────────┐
    worker-0 ══╪══┤ internet          ══╪══  a line with its slot's speed, both ways
    aux-0    ══╪══┘

A machine outlives the runner that started it, so its line does too. All is found by the names of namespaces,
`potluck-spot.EXPERIMENT.SLOT.…`. A slot is plugged in anew for each machine. Unplugging cuts the line first: a machine
that is taken away says nothing to anybody. Nothing has a route to the machine's real network.
"""

from __future__ import annotations

import ipaddress
import json
import subprocess

from potluck.spot.tiers import MAX_SLOTS, Slot
from potluck.testing import namespaces
from potluck.testing.namespaces import LabError, Namespace
from potluck.testing.shaping import LinkShape, NetemLink, Wire, join_shaper, netem_available, shaper_argv

PREFIX = "potluck-spot"
NETWORK = ipaddress.IPv4Network("25.1.0.0/16")  # as in the lab (natlab.py): looks public, and is on no internet
HUB, INTERNET = "hub", "internet"
HUB_ADDRESS = str(NETWORK[1])
FIRST_WORKER, FIRST_AUX = 256, 256 + MAX_SLOTS
START_SECONDS = 30.0


class SlotLines:
    """The lines of one experiment."""

    def __init__(self, experiment: str) -> None:
        """Nothing is built before the first slot is plugged in."""
        self._prefix = f"{PREFIX}.{experiment}."

    def plug_hub(self) -> list[str]:
        """Give the host an unshaped line and HUB_ADDRESS; returns `hub_argv`."""
        return self._plug(HUB, 1, None)

    @property
    def hub_argv(self) -> list[str]:
        """The words that run a command where the host is."""
        return namespaces.exec_argv(f"{self._prefix}{HUB}.host", [])

    def plug(self, slot: Slot) -> list[str]:
        """Give a slot its line; returns the words that run a command at its end."""
        number = slot.index + (FIRST_WORKER if slot.role == "worker" else FIRST_AUX)
        return self._plug(slot.name, number, slot.bandwidth_mbit)

    def unplug(self, name: str) -> None:
        """Cut a slot's line without a word, and then end what runs behind it."""
        namespaces.remove(f"{self._prefix}{name}.line")
        namespaces.remove(f"{self._prefix}{name}.host")

    def remove(self) -> list[str]:
        """Remove all lines of the experiment; returns the names of their namespaces."""
        found = namespaces.existing(self._prefix)
        namespaces.remove(self._prefix)
        return found

    def _plug(self, name: str, number: int, rate_mbit: float | None) -> list[str]:
        self.unplug(name)
        internet = self._internet()
        line = Namespace(f"{self._prefix}{name}.line")
        line.ip(
            "link add br0 type bridge forward_delay 0 mcast_snooping 0",
            "link set br0 up",
            f"link add up0 type veth peer name port{number} netns {internet.name}",
            "link set up0 master br0 up",
        )
        internet.ip(f"link set port{number} master br0 up")
        host = Namespace(f"{self._prefix}{name}.host")
        wire = Wire(host=host, device="eth0", switch=line, port="port0")
        host.ip(
            f"link add eth0 type veth peer name {wire.port} netns {line.name}",
            f"addr add {NETWORK[number]}/{NETWORK.prefixlen} dev eth0",
            "link set eth0 up",
        )
        line.ip(f"link set {wire.port} master br0 up")
        if rate_mbit is not None:
            _shape(wire, LinkShape(rate_mbit=rate_mbit))
        return host.exec_argv([])

    def _internet(self) -> Namespace:
        name = f"{self._prefix}{INTERNET}"
        if namespaces.existing(name):
            return Namespace(name, exists=True)
        internet = Namespace(name)
        internet.ip("link add br0 type bridge forward_delay 0 mcast_snooping 0", "link set br0 up")
        return internet


def _shape(wire: Wire, both_ways: LinkShape) -> None:
    if netem_available():
        wire.host.ip("link set eth0 gso_max_segs 1")  # as in the lab (natlab.py)
        NetemLink(wire).apply(both_ways, both_ways)
        return
    shape = json.dumps(dict.fromkeys(("up", "down"), both_ways.shaper_arguments()))
    process = subprocess.Popen(
        wire.switch.exec_argv(shaper_argv(wire, shape)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # it goes on without us, until its namespace is removed
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as output:
        if output.readline() != "ready\n":
            raise LabError(f"the shaper of {wire.switch.name} did not start (exit code {process.wait(START_SECONDS)})")
    join_shaper(wire)
