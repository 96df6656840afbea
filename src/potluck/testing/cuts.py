"""Paths that are blocked while in use: the packet filter of one host of the lab.

A cut stands before everything else that the filter says, so it also stops connections that are open. It acts on both
directions and never on the host's own loopback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from potluck.testing.namespaces import LabError, Namespace

How = Literal["drop", "reject"]
"""`drop`: packets vanish, as on a dead line (but a UDP socket of the host itself hears of it: PermissionError).
`reject`: the sender is told, so connections break at once."""

Protocol = Literal["tcp", "udp"]


@dataclass(frozen=True)
class Cut:
    """One cut that is in force; give it to `Host.unblock`."""

    chain: str


class Cuts:
    """The cuts of one host."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._made = 0
        self._in_force: list[Cut] = []

    def block(self, *, port: int | None, address: str | None, protocol: Protocol | None, how: How) -> Cut:
        """Cut everything to and from that port (at either end), that address, or that port of that address."""
        if port is None and address is None and protocol is not None:
            raise LabError(f"name a port or an address to block, not only {protocol!r}")
        protocols: list[Protocol] = [protocol] if protocol else ["tcp", "udp"]
        rules = [
            f"{words} {verdict}"
            for chosen in protocols
            for words in _matches(f"-p {chosen}", port, address)
            for verdict in [_verdict(how, chosen)]
        ]
        if port is None and protocol is None:  # whatever else there is, ICMP for one
            rules += [f"{words} {_verdict(how, None)}" for words in _matches("", None, address)]
        return self._enforce(incoming=rules, outgoing=rules)

    def allow_only_tcp(self, port: int, how: How) -> Cut:
        """Cut all but connections that the host makes to that TCP port, as a strict company network does."""
        return self._enforce(
            incoming=[f"-p tcp --sport {port} -j RETURN", _verdict("drop", None)],
            outgoing=[f"-p tcp --dport {port} -j RETURN", f"-p tcp {_verdict(how, 'tcp')}", _verdict(how, None)],
        )

    def undo(self, cut: Cut) -> None:
        """Take one cut back."""
        if cut not in self._in_force:
            raise LabError(f"{cut} is not in force on this host; cuts in force: {self._in_force}")
        incoming, outgoing = f"{cut.chain}-in", f"{cut.chain}-out"
        self._namespace.filter_packets(
            f"*filter\n-D INPUT ! -i lo -j {incoming}\n-D OUTPUT ! -o lo -j {outgoing}\n"
            f"-F {incoming}\n-F {outgoing}\n-X {incoming}\n-X {outgoing}\nCOMMIT\n"
        )
        self._in_force.remove(cut)

    def undo_all(self) -> None:
        """Take every cut back."""
        for cut in list(self._in_force):
            self.undo(cut)

    def _enforce(self, *, incoming: Sequence[str], outgoing: Sequence[str]) -> Cut:
        self._made += 1
        cut = Cut(f"cut{self._made}")
        lines = ["*filter", f":{cut.chain}-in - [0:0]", f":{cut.chain}-out - [0:0]"]
        lines += [f"-A {cut.chain}-in {rule}" for rule in incoming]
        lines += [f"-A {cut.chain}-out {rule}" for rule in outgoing]
        lines += [f"-I INPUT 1 ! -i lo -j {cut.chain}-in", f"-I OUTPUT 1 ! -o lo -j {cut.chain}-out", "COMMIT", ""]
        self._namespace.filter_packets("\n".join(lines))
        self._in_force.append(cut)
        return cut


def _matches(protocol: str, port: int | None, address: str | None) -> list[str]:
    """Name the packets with that port and that address at either end; one list serves both directions."""
    if port is None:
        ends = [f"-s {address}", f"-d {address}"] if address else [""]
    elif address is None:
        ends = [f"--sport {port}", f"--dport {port}"]
    else:
        ends = [f"{who} {address} {which} {port}" for who in ("-s", "-d") for which in ("--sport", "--dport")]
    return [f"{protocol} {end}".strip() for end in ends]


def _verdict(how: How, protocol: Protocol | None) -> str:
    if how == "drop":
        return "-j DROP"
    return "-j REJECT --reject-with tcp-reset" if protocol == "tcp" else "-j REJECT"
