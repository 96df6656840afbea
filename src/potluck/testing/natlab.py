"""A small internet on one machine: public hosts, home routers, and hosts behind them.

    with NatLab() as lab:
        hub = lab.public("hub")
        alice = lab.behind_nat("alice")
        bob = lab.behind_nat("bob")
        alice.shape(rate_mbit=100, delay_ms=50, loss=0.01)
        server = hub.popen(["nats-server", "-a", hub.address])
        alice.run(["potluck", "join", link])

    hub ─────┐                      ┌─ alice
    …    ────┤ internet ── router ──┤
             │                      └─ more hosts of the same home
             └──────────── router ──── bob

Each node is a network namespace with wires (veth pairs) to bridges; routers translate addresses with the kernel's own
connection tracking. A router lets everything out and nothing in that was not asked for. Hosts of one home reach each
other. Nothing has a route to the machine's real network. Needs root: ask `lab_available()`, which says why not.

When the lab closes, and it does so however its block ends, all its processes and namespaces are gone. Those of a run
that was killed are removed when the next lab opens.
"""

from __future__ import annotations

import atexit
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from potluck.testing import namespaces
from potluck.testing.cuts import Cut, Cuts, How, Protocol
from potluck.testing.namespaces import LabError, Namespace, NamespaceNames, lab_available
from potluck.testing.processes import Children, ManagedProcess
from potluck.testing.shaping import LinkShape, NetemLink, ShapedLink, ShaperKind, UserspaceLink, Wire, netem_available

__all__ = ["Host", "LabError", "LinkShape", "NatKind", "NatLab", "Router", "lab_available"]

NatKind = Literal["port-restricted", "symmetric"]
"""`port-restricted`: a port keeps its number outside for all destinations, as in most homes. `symmetric`: each
connection gets a random port, as on mobile networks. In both, an answer must come from the address that was asked."""

# Looks public to any code that asks (the ranges for documentation and benchmarks do not), yet is on no internet: the
# British military uses it only inside. Here too nothing leaves the namespaces.
PUBLIC_NETWORK = ipaddress.IPv4Network("25.1.0.0/16")
# A bridge takes the lowest address of its ports unless it has its own; hosts would notice when a link gets shaped.
BRIDGE_MAC = "02:70:6f:74:00:01"
NODE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")


class Node:
    """What hosts and routers have in common: a namespace, an address, and a wire that can be shaped."""

    def __init__(self, lab: NatLab, name: str, namespace: Namespace, address: str, wire: Wire) -> None:
        self.lab = lab
        self.name = name
        self.namespace = namespace
        self.address = address
        """Its address on the network that it is plugged into."""
        self._wire = wire
        self._link: ShapedLink | None = None

    def shape(
        self,
        *,
        rate_mbit: float | None = None,
        delay_ms: float = 0.0,
        jitter_ms: float = 0.0,
        loss: float = 0.0,
        queue_ms: float = 100.0,
    ) -> None:
        """Shape its link, each direction by itself like this: a delay of 50 ms makes a round trip of 100 ms."""
        both = LinkShape(rate_mbit=rate_mbit, delay_ms=delay_ms, jitter_ms=jitter_ms, loss=loss, queue_ms=queue_ms)
        self.shape_each(up=both, down=both)

    def shape_each(self, *, up: LinkShape, down: LinkShape) -> None:
        """Shape what it sends and what it receives differently, as most homes have it. May be called again."""
        if self._link is None:
            self._link = self.lab._shaped_link(self._wire)
        self._link.apply(up, down)

    def unshape(self) -> None:
        """Make its link a plain wire again; frames that are under way are lost."""
        if self._link is not None:
            self._link.release()
            self._link = None

    def link_statistics(self) -> dict[str, Any]:
        """Count what passed its link and what was dropped, by direction (`up`, `down`)."""
        if self._link is None:
            raise LabError(f"the link of {self.name} is not shaped, so nothing counts; call shape() first")
        return self._link.statistics()

    def popen(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: bool = False,
        fresh: bool = False,
    ) -> ManagedProcess:
        """Start a process on this node; it ends at the latest with the lab."""
        label = f"{self.name}-{name or Path(argv[0]).name}"
        return self.lab._children.spawn(
            argv, name=label, env=env, cwd=cwd, stdin=stdin, network=self.namespace.name, fresh=fresh
        )

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        deadline_seconds: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> ManagedProcess:
        """Run a process on this node to its end and return it; with `check` it must end with exit code 0."""
        process = self.popen(argv, env=env, cwd=cwd)
        if check:
            process.check(deadline_seconds)
        else:
            process.wait(deadline_seconds)
        return process

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.address}>"


class Router(Node):
    """A home router: public address outside, a private network inside."""

    def __init__(
        self, lab: NatLab, name: str, namespace: Namespace, address: str, wire: Wire, *, kind: NatKind, lan: str
    ) -> None:
        super().__init__(lab, name, namespace, address, wire)
        self.kind = kind
        self.lan = ipaddress.IPv4Network(lan)
        self._addresses = self.lan.hosts()
        self.lan_address = str(next(self._addresses))
        namespace.ip(
            f"link add br0 address {BRIDGE_MAC} type bridge forward_delay 0 mcast_snooping 0",
            f"addr add {self.lan_address}/{self.lan.prefixlen} dev br0",
            "link set br0 up",
        )
        masquerade = "MASQUERADE --random-fully" if kind == "symmetric" else "MASQUERADE"
        answers = "-m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT"
        namespace.filter_packets(
            f"*nat\n-A POSTROUTING -o eth0 -j {masquerade}\nCOMMIT\n"
            f"*filter\n:INPUT DROP [0:0]\n:FORWARD DROP [0:0]\n"
            f"-A INPUT -i lo -j ACCEPT\n-A INPUT -i br0 -j ACCEPT\n-A INPUT {answers}\n"
            f"-A FORWARD -i br0 -o eth0 -j ACCEPT\n-A FORWARD {answers}\nCOMMIT\n"
        )
        # Only now, with the filter in place, does anything pass.
        namespace.write_settings({"net/ipv4/ip_forward": "1"})

    def forward(self, port: int, host: Host, *, protocol: Protocol = "tcp") -> None:
        """Let the public in on that port to that host, as a person sets it up in the router's menu."""
        if host.router is not self:
            raise LabError(f"{host.name} is not behind the router {self.name}; use its own router")
        self.namespace.filter_packets(
            f"*nat\n-A PREROUTING -i eth0 -p {protocol} --dport {port} -j DNAT --to-destination {host.address}:{port}\n"
            f"COMMIT\n*filter\n-A FORWARD -i eth0 -o br0 -p {protocol} -d {host.address} --dport {port} -j ACCEPT\n"
            "COMMIT\n"
        )

    def _take_address(self) -> str:
        return str(next(self._addresses))


class Host(Node):
    """A machine: on the public network, or in a home behind a router."""

    def __init__(
        self, lab: NatLab, name: str, namespace: Namespace, address: str, wire: Wire, *, router: Router | None
    ) -> None:
        super().__init__(lab, name, namespace, address, wire)
        self.router = router
        self._cuts = Cuts(namespace)

    @property
    def public_address(self) -> str:
        """The address under which the public network knows it: its router's, or its own."""
        return self.router.address if self.router is not None else self.address

    def address_seen_from(self, other: Host) -> str:
        """The address under which another host knows it."""
        return self.address if self.router is other.router else self.public_address

    def block(
        self,
        *,
        port: int | None = None,
        to: Host | str | None = None,
        protocol: Protocol | None = None,
        how: How = "drop",
    ) -> Cut:
        """Cut a path, open connections included: a port (at either end), another host, or that port of that host.

        Without any of these the host is cut off from everything. `how` says whether packets vanish (`drop`, a dead
        line) or connections break at once (`reject`, a firewall).
        """
        address = to.address_seen_from(self) if isinstance(to, Host) else to
        return self._cuts.block(port=port, address=address, protocol=protocol, how=how)

    def allow_only_tcp(self, port: int, *, how: How = "drop") -> Cut:
        """Leave only connections that this host makes to that TCP port."""
        return self._cuts.allow_only_tcp(port, how)

    def unblock(self, cut: Cut | None = None) -> None:
        """Take one cut back, or all of them."""
        if cut is None:
            self._cuts.undo_all()
        else:
            self._cuts.undo(cut)


class NatLab:
    """A network of hosts and routers that exists as long as its `with` block."""

    def __init__(
        self,
        *,
        shaper: ShaperKind = "auto",
        congestion_control: str | None = None,
        log_folder: Path | None = None,
    ) -> None:
        """Prepare a lab.

        `congestion_control` is the hosts' TCP algorithm (`cubic`, `bbr`), the machine's own by default: with loss,
        their speeds are worlds apart. `log_folder` keeps what the processes write.
        """
        self._shaper = shaper
        # By route, since the setting of a namespace may only name what the whole machine allows everybody.
        self._route_options = f"congctl {congestion_control}" if congestion_control else ""
        self._names = NamespaceNames()
        self._children = Children(log_folder)
        self._internet: Namespace | None = None
        self._nodes: dict[str, Node] = {}
        self._public_addresses = PUBLIC_NETWORK.hosts()
        self._wires = 0
        self._homes = 0

    def __enter__(self) -> Self:
        if (reason := lab_available()) is not None:
            raise LabError(reason)
        namespaces.remove_leftovers()
        # If even closing is interrupted, by a second Ctrl-C, the end of the process tries again.
        atexit.register(self.close)
        try:
            if self._shaper == "auto":
                self._shaper = "netem" if netem_available() else "userspace"
            self._internet = Namespace(self._names.of("internet"))
            self._internet.ip(
                f"link add br0 address {BRIDGE_MAC} type bridge forward_delay 0 mcast_snooping 0", "link set br0 up"
            )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def public(self, name: str) -> Host:
        """Add a host on the public network, with nothing in its way."""
        namespace, address, wire = self._plug_into_internet(name)
        host = Host(self, name, namespace, address, wire, router=None)
        self._nodes[name] = host
        return host

    def router(self, name: str, *, kind: NatKind = "port-restricted", lan: str | None = None) -> Router:
        """Add a home router. `lan` is its private network; homes may well have the same one, as in life."""
        namespace, address, wire = self._plug_into_internet(name)
        self._homes += 1
        home = Router(self, name, namespace, address, wire, kind=kind, lan=lan or f"192.168.{self._homes}.0/24")
        self._nodes[name] = home
        return home

    def behind_nat(self, name: str, *, router: Router | None = None, kind: NatKind = "port-restricted") -> Host:
        """Add a host at home, behind that router, or behind a new one of that kind."""
        home = router or self.router(f"{name}-router", kind=kind)
        namespace = self._namespace(name)
        address = home._take_address()
        wire = self._plug(namespace, home.namespace, address, home.lan)
        namespace.ip(f"route add default via {home.lan_address} {self._route_options}")
        host = Host(self, name, namespace, address, wire, router=home)
        self._nodes[name] = host
        return host

    def only_websocket(self, host: Host, port: int, *, how: How = "drop") -> Cut:
        """Leave the host only the TCP port of the hub's WebSocket, as behind a strict firewall."""
        return host.allow_only_tcp(port, how=how)

    def close(self) -> None:
        """End every process in the lab and remove every namespace of it. May be called again."""
        try:
            self._children.close()
        finally:
            namespaces.remove(self._names.prefix)
        self._nodes.clear()
        atexit.unregister(self.close)

    def _namespace(self, name: str) -> Namespace:
        if self._internet is None:
            raise LabError("the lab is not open; use it as `with NatLab() as lab:`")
        if not NODE_NAME.fullmatch(name) or name == "internet" or name in self._nodes:
            raise LabError(f"a node cannot be called {name!r}; use a new name of a-z, 0-9 and -")
        namespace = Namespace(self._names.of(name))
        # What one connection learned about its path must not shape the next.
        namespace.write_settings({"net/ipv4/tcp_no_metrics_save": "1"})
        return namespace

    def _plug_into_internet(self, name: str) -> tuple[Namespace, str, Wire]:
        namespace = self._namespace(name)
        assert self._internet is not None  # or _namespace would have refused
        address = str(next(self._public_addresses))
        return namespace, address, self._plug(namespace, self._internet, address, PUBLIC_NETWORK)

    def _plug(self, namespace: Namespace, switch: Namespace, address: str, network: ipaddress.IPv4Network) -> Wire:
        self._wires += 1
        wire = Wire(host=namespace, device="eth0", switch=switch, port=f"port{self._wires}")
        namespace.ip(
            f"link add eth0 type veth peer name {wire.port} netns {switch.name}",
            f"addr add {address}/{network.prefixlen} dev eth0 noprefixroute",
            "link set eth0 up",
            f"route add {network} dev eth0 src {address} {self._route_options}",
        )
        switch.ip(f"link set {wire.port} master br0 up")
        if self._shaper == "netem":
            # netem would delay and lose the kernel's large segments, up to 64 KB, as if each were one packet.
            namespace.ip("link set eth0 gso_max_segs 1")
        return wire

    def _shaped_link(self, wire: Wire) -> ShapedLink:
        return NetemLink(wire) if self._shaper == "netem" else UserspaceLink(wire, self._children)
