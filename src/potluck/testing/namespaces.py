"""The network namespaces that a lab is made of, and their removal.

Every namespace is named `potluck-lab-PID-START-COUNTER-NODE`, where PID and START (the start time that the kernel
keeps) say for certain which process it belongs to. So labs can run side by side, and what a killed run has left behind
is found and removed at the next start. Devices are made inside the namespaces: the machine's own network is never
touched, and nothing in a lab has a route to it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from potluck.errors import PotluckError

PREFIX = "potluck-lab"
FOLDER = Path("/run/netns")
TUN_DEVICE = Path("/dev/net/tun")
TOOLS = {"ip": "iproute2", "tc": "iproute2", "iptables": "iptables"}
COMMAND_SECONDS = 30.0
END_SECONDS = 10.0

_NAME = re.compile(rf"{PREFIX}-(?P<pid>\d+)-(?P<start>\d+)-\d+-.+")


class LabError(PotluckError):
    """The lab could not be built, changed or removed."""


def run_tool(argv: Sequence[str], stdin: str = "") -> str:
    """Run a tool of the system to its end and return its output; LabError with its words if it fails."""
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    if done.returncode != 0:
        raise LabError(f"`{' '.join(argv)}` failed with exit code {done.returncode}: {done.stderr.strip()}\n{stdin}")
    return done.stdout


def exec_argv(namespace: str, argv: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the command that runs a command in a namespace."""
    return ["ip", "netns", "exec", namespace, *(os.fspath(word) for word in argv)]


class Namespace:
    """One network namespace: a host, a router or the public network."""

    def __init__(self, name: str, *, exists: bool = False) -> None:
        """Create it, with loopback up and without IPv6, which would only add noise to what tests count."""
        self.name = name
        if exists:
            return
        run_tool(["ip", "netns", "add", name])
        self.write_settings(
            {
                "net/ipv6/conf/all/disable_ipv6": "1",
                "net/ipv6/conf/default/disable_ipv6": "1",
                # Frames that only cross a bridge must not pass the router's firewall.
                "net/bridge/bridge-nf-call-iptables": "0",
            }
        )
        self.ip("link set lo up")

    def exec_argv(self, argv: Sequence[str | os.PathLike[str]]) -> list[str]:
        """Return the command that runs the command in here; its process id is the command's own."""
        return exec_argv(self.name, argv)

    def ip(self, *commands: str) -> None:
        """Run `ip` commands in here, in order, in one process."""
        run_tool(["ip", "-n", self.name, "-batch", "-"], "\n".join(commands) + "\n")

    def tc(self, *words: str) -> str:
        """Run a `tc` command in here."""
        return run_tool(["tc", "-n", self.name, *words])

    def filter_packets(self, rules: str) -> None:
        """Add to the packet filter, all or nothing, what `iptables-restore` reads; the rules there stay."""
        run_tool(self.exec_argv(["iptables-restore", "--noflush", "--wait"]), rules)

    def write_settings(self, settings: dict[str, str]) -> None:
        """Write kernel settings of this namespace (paths below /proc/sys); those the kernel lacks are left out."""
        lines = [f"[ ! -e /proc/sys/{path} ] || echo {value} > /proc/sys/{path}" for path, value in settings.items()]
        run_tool(self.exec_argv(["/bin/sh", "-e"]), "\n".join(lines))


class NamespaceNames:
    """The names of one lab's namespaces."""

    _labs_made = 0

    def __init__(self) -> None:
        NamespaceNames._labs_made += 1
        pid = os.getpid()
        self.prefix = f"{PREFIX}-{pid}-{start_time(pid)}-{NamespaceNames._labs_made}-"

    def of(self, node: str) -> str:
        """Return the name of a node's namespace."""
        return self.prefix + node


def existing(prefix: str = f"{PREFIX}-") -> list[str]:
    """List the namespaces whose name starts so."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(entry.name for entry in FOLDER.iterdir() if entry.name.startswith(prefix))
    return []


def remove(prefix: str) -> None:
    """End the processes in every namespace with that prefix and remove it, all of them even if one resists."""
    failures: list[Exception] = []
    for name in existing(prefix):
        try:
            _remove_one(name)
        except (LabError, subprocess.TimeoutExpired) as error:
            failures.append(error)
    if failures:
        raise LabError(f"namespaces are left: {existing(prefix)}; remove each with `ip netns del NAME`") from failures[
            0
        ]


def remove_leftovers() -> list[str]:
    """Remove what test runs that were killed have left behind, and return the names; those of live ones stay."""
    left = [name for name in existing() if (match := _NAME.fullmatch(name)) and not _is_alive(match)]
    for name in left:
        remove(name)
    return left


def start_time(pid: int) -> int:
    """When the process started, in the kernel's ticks: with the id, this names a process for ever."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(after_name[19])


def _is_alive(match: re.Match[str]) -> bool:
    try:
        return start_time(int(match["pid"])) == int(match["start"])
    except (FileNotFoundError, ProcessLookupError):
        return False


def _remove_one(name: str) -> None:
    try:
        _end_processes_in(name)
        run_tool(["ip", "netns", "del", name])
    except LabError:
        if (FOLDER / name).exists():  # else somebody else, who cleans up too, was quicker
            raise


def _end_processes_in(name: str) -> None:
    """Kill what runs in there; a process would keep the namespace alive without a name."""
    end = time.monotonic() + END_SECONDS
    while pids := _pids_in(name):
        if time.monotonic() > end:
            raise LabError(f"processes {pids} in the namespace {name} survive SIGKILL for {END_SECONDS:g} s")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _pids_in(name: str) -> list[int]:
    pids = [int(word) for word in run_tool(["ip", "netns", "pids", name]).split()]
    if os.getpid() in pids:
        raise LabError(f"this process is itself in the namespace {name}; leave it before the lab is removed")
    return pids


@functools.cache
def lab_available() -> str | None:
    """Say why no lab can be built on this machine, and what to do; None when one can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root: run this as root"
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            return f"there is no `{tool}` command; install {package}"
    if not TUN_DEVICE.exists():
        return f"there is no {TUN_DEVICE}; load the kernel module tun"
    return _try_namespaces()


def _try_namespaces() -> str | None:
    """Build in miniature what a lab needs: root in a container may lack the rights, the kernel a module."""
    names = NamespaceNames()
    try:
        namespace = Namespace(names.of("probe"))
        namespace.ip("link add br0 type bridge", "link add eth0 type veth peer name port0", "tuntap add tap0 mode tap")
        namespace.filter_packets(
            "*nat\n-A POSTROUTING -o eth0 -j MASQUERADE\nCOMMIT\n"
            "*filter\n-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT\nCOMMIT\n"
        )
    except (LabError, subprocess.TimeoutExpired) as error:
        return f"this machine does not let us build networks: {error}"
    finally:
        remove(names.prefix)
    return None
